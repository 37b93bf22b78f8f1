"""The objects that ranks display, as the calling process shows them."""

import secrets
import sys
from collections.abc import Iterable
from typing import Any

from labkit.runtime.messages import Shown


class Objects:
    """The objects that ranks display.

    One that a rank changes later (by its ``display_id``) is shown as it is when its turn comes,
    and changed in the cell after that.
    """

    def __init__(self) -> None:
        self._shown: dict[tuple[int, int], Shown] = {}
        self._number: dict[tuple[int, str], int] = {}
        self._done: set[tuple[int, int]] = set()
        # Names of one run must not meet those of another.
        self._run = secrets.token_hex(4)

    def add(self, shown: Shown) -> None:
        key = shown.rank, shown.number
        if shown.is_update:
            place = self._number.get((shown.rank, shown.display_id))
            if place is None:
                return
            key = shown.rank, place
        elif shown.display_id:
            self._number[shown.rank, shown.display_id] = shown.number
        self._shown[key] = shown
        if key in self._done:
            self._publish(shown, update=True)

    def has(self, rank: int, number: int) -> bool:
        return (rank, number) in self._shown

    def placed(self, rank: int, due: Iterable[str | int]) -> list[str | int]:
        """What is left to show of a rank: ``due`` with all its objects, and without lost ones.

        A rank that has closed its stdout cannot mark the places of its objects: they come last.
        """
        found = [item for item in due if isinstance(item, str) or self.has(rank, item)]
        mine = [number for owner, number in self._shown if owner == rank]
        return [*found, *(n for n in mine if n not in found and (rank, n) not in self._done)]

    def text(self, rank: int, number: int) -> str | None:
        """The text of an object that is printed now; None for one to ``publish``."""
        shown = self._shown[rank, number]
        self._done.add((rank, number))
        if kernel() is not None and (shown.data.keys() > {"text/plain"} or shown.display_id):
            return None
        return str(shown.data.get("text/plain", "(an object without text)"))

    def publish(self, rank: int, number: int) -> None:
        """Show an object in the notebook's cell."""
        self._publish(self._shown[rank, number], update=False)

    def _publish(self, shown: Shown, update: bool) -> None:
        name = f"labkit-{self._run}-{shown.rank}-{shown.display_id}"
        transient = {"display_id": name} if shown.display_id else {}
        if (shell := kernel()) is not None:
            publish = shell.display_pub.publish
            publish(shown.data, shown.metadata, transient=transient, update=update)


def kernel() -> Any:
    """The IPython shell of a notebook's kernel, or None."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return shell if hasattr(shell, "kernel") else None
