"""An error in a notebook cell without the frames of libraries.

IPython shows every frame between the cell and the place of the error. When labkit is among them,
only the learner's own frames are shown. Elsewhere (a script, another package's error) nothing
changes. In a cell, too, ``%xmode Verbose`` and ``%tb`` show all frames.
"""

import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from labkit.comm.source_lines import is_internal, is_ours


def show_errors_on_one_screen() -> None:
    """Show errors of this process's notebook or prompt so, if it is one; harmless if repeated."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    formatter: Any = getattr(shell, "InteractiveTB", None)
    if formatter is None or hasattr(formatter, "_labkit_shows"):
        return
    shown_by_ipython = formatter.structured_traceback

    def structured_traceback(
        etype: type, error: BaseException, tb: Any = None, *more: Any, **options: Any
    ) -> list[str]:
        # (IPython itself also passes other things than a traceback.)
        parts = list(_parts(tb)) if isinstance(tb, TracebackType) else []
        about_labkit = any(is_ours(part.tb_frame.f_code.co_filename) for part in parts)
        if formatter.mode != "Context" or not about_labkit:
            return shown_by_ipython(etype, error, tb, *more, **options)
        own = None
        for part in reversed(parts):
            if not is_internal(part.tb_frame.f_code.co_filename):
                own = TracebackType(own, part.tb_frame, part.tb_lasti, part.tb_lineno)
        # With its second argument IPython would skip a frame of its own.
        return shown_by_ipython(etype, error, own, 0)

    formatter._labkit_shows = True
    formatter.structured_traceback = structured_traceback


def _parts(tb: TracebackType | None) -> Iterator[TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next
