"""What the one run has found, contender by contender, and its record."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from labkit.costs.traffic import parameter_server_cost, ring_all_reduce_cost
from workbook.measure.elsewhere.contenders import ONE_DEVICE, Contender
from workbook.measure.elsewhere.digits import BATCH_SIZE, initial_model
from workbook.measure.elsewhere.turn import Turn
from workbook.measure.record import Figures, Result
from workbook.measure.spread import Spread, rounded

_MOST_WARM_UP = 5
_ELEMENT_BYTES = 4


@dataclass
class Found:
    """The turns of one contender.

    Attributes:
        problem: why there are no more turns; empty if all went well.
        absent: the problem, if it is only that its environment is not here.
    """

    contender: Contender
    turns: list[Turn] = field(default_factory=list)
    problem: str = ""
    absent: str = ""


@dataclass(frozen=True)
class ElsewhereResult(Result):
    """All contenders of one run; each has trained for ``steps`` steps, ``repeats`` times."""

    steps: int
    repeats: int
    found: dict[str, Found]

    @property
    def warm_up(self) -> int:
        """The first steps of a turn, in which frameworks compile and buffers are made."""
        return min(_MOST_WARM_UP, self.steps // 2)

    def __str__(self) -> str:
        from workbook.measure.elsewhere.table import elsewhere_table, losses_table

        record = self.record()
        return f"{elsewhere_table(record)}\n\n{losses_table(record)}\n"

    def record(self) -> dict[str, Any]:
        return {
            "batch_size": BATCH_SIZE,
            "parameters": sum(p.numel() for p in initial_model().parameters()),
            "warm_up": self.warm_up,
            "contenders": [self._row(name) for name in self.found],
        }

    def figures(self) -> Figures:
        from workbook.measure.elsewhere.figure import elsewhere_figure

        return {"elsewhere": elsewhere_figure(self.record())}

    def _row(self, name: str) -> dict[str, Any]:
        """A contender's part of the record: without its measurements where it has failed."""
        found = self.found[name]
        contender, turns = found.contender, found.turns
        row = {
            "contender": name,
            "framework": contender.framework,
            "messages": contender.messages,
            "problem": found.problem,
            "absent": bool(found.absent),
        }
        if not turns:
            return row
        seconds = [one for turn in turns for one in turn.step_s[self.warm_up :]]
        counted = [turn.counted_bytes for turn in turns if turn.counted_bytes is not None]
        return row | {
            "losses": turns[0].losses,
            "tolerance": contender.tolerance,
            **self._difference(turns, contender.tolerance),
            "sent_bytes": self._per_step([turn.sent_bytes for turn in turns]),
            "counted_bytes": self._per_step(counted),
            "formula_bytes": formula_bytes(contender.formula),
            "seconds": rounded(seconds),
            "step_s": asdict(Spread.of(seconds)),
            "versions": contender.versions() | turns[0].versions,
        }

    def _difference(self, turns: Iterable[Turn], tolerance: float) -> dict[str, Any]:
        """The largest difference from one device in any turn; None where there is no number."""
        truth = self.found[ONE_DEVICE].turns
        if not truth:
            return {"difference": None, "agrees": False}
        apart = [
            abs(loss - right)
            for turn in turns
            for loss, right in zip(turn.losses, truth[0].losses, strict=True)
        ]
        # Not max alone: it overlooks a NaN.
        known = all(map(math.isfinite, apart))
        return {
            "difference": max(apart) if known else None,
            "agrees": known and max(apart) <= tolerance,
        }

    def _per_step(self, turns: list[dict[str, list[int]]]) -> dict[str, float]:
        """Bytes of each process per step, the mean over all turns without the warm-up."""
        names = list(dict.fromkeys(name for turn in turns for name in turn))
        found = {}
        for name in names:
            each = [one for turn in turns for one in turn.get(name, [])[self.warm_up :]]
            found[name] = sum(each) / len(each)
        return found


def formula_bytes(formula: str, workers: int = 2) -> dict[str, int]:
    """What each role sends per step of the course's model, by the formula of a contender.

    ``all-reduce``: 2 (P - 1) / P S. ``server``: a worker sends its gradient, S, and the server
    the new parameters to each worker, W S.
    """
    elements = sum(p.numel() for p in initial_model().parameters())
    if formula == "all-reduce":
        return {"worker": ring_all_reduce_cost(elements, _ELEMENT_BYTES, workers).num_bytes}
    if formula == "server":
        server, worker = (
            parameter_server_cost(elements, _ELEMENT_BYTES, workers + 1, rank).num_bytes
            for rank in (0, 1)
        )
        return {"worker": worker, "server": server}
    return {}
