"""The state of a widget, kept when its cell is run again."""

from collections.abc import Hashable
from typing import Any

from IPython.core.getipython import get_ipython

_STATES: dict[tuple[Hashable, ...], dict[str, Any]] = {}


def kept_state(*start: Hashable) -> dict[str, Any]:
    """What the widget of this cell has put here in earlier runs; at first, and elsewhere, empty.

    Args:
        start: with what the widget starts: a cell that was changed to start otherwise does so.
    """
    cell = _cell()
    return _STATES.setdefault((cell, *start), {}) if cell else {}


def _cell() -> str | None:
    """The identity that the notebook gives the cell that is running, if it does."""
    parent = getattr(get_ipython(), "get_parent", dict)()
    return parent.get("metadata", {}).get("cellId")
