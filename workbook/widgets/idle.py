"""Work that waits until no cell of the notebook is running."""

from collections.abc import Callable
from typing import Any

from IPython.core.getipython import get_ipython

_QUIET_S = 1.0


def when_idle(call: Callable[[], None]) -> None:
    """Call this once no cell has run for a second, so that it disturbs no cell that measures.

    The kernel's loop stands still while a cell runs. Outside of a notebook, it is never called.
    """
    shell: Any = get_ipython()
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return

    def look(before: int | None) -> None:
        if shell.execution_count == before:
            call()
        else:
            kernel.io_loop.call_later(_QUIET_S, look, shell.execution_count)

    kernel.io_loop.add_callback(look, None)
