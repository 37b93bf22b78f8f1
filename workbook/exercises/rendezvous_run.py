"""The learner's rendezvous, drawn: what each process asks of the store, and when it waits.

Symbols: P processes.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from labkit.comm.comm import Comm
from labkit.errors import WorkerError
from labkit.runtime.launch import run
from labkit.runtime.watch import undrawn
from labkit.tracing import Span, Trace
from workbook.exercises.grader.own_run import OwnRun
from workbook.exercises.grader.report import NOT_ATTEMPTED, NOT_YET
from workbook.exercises.grader.shared_store import SharedStore, Use, Visit, visit

if TYPE_CHECKING:
    from workbook.plots import CaptionedFigure

# Each process comes this much after the one before, so that the figure shows who waits.
_LATER_S = 0.05
_TIMEOUT_S = 10.0
_NUMBERS = {1: "1st", 2: "2nd", 3: "3rd"}
_WAITS = ("get", "wait")


def own_run(name: str, fn: Callable, status: str, world_size: int = 4) -> OwnRun:
    """Run a learner's rendezvous once more, the processes one after another; nothing is raised."""
    if status == NOT_ATTEMPTED:
        return OwnRun(name, "not attempted yet, so there is nothing to draw.")
    try:
        with undrawn():
            more: dict[str, Any] = {"device": "cpu", "timeout_s": _TIMEOUT_S}
            visits = run(_come_later, fn, world_size=world_size, **more).values
    except (WorkerError, ValueError) as error:
        story = str(error).partition("\n\nTraceback of rank")[0]
        return OwnRun(name, f"it did not finish, so there is nothing to draw.\n{story}")
    if not any(one.uses for one in visits):
        return OwnRun(name, "the store was not used, so there is nothing to draw.")
    # Lanes in the order in which the processes came.
    order = sorted(visits, key=lambda one: [use.start_s for use in one.uses][:1])
    text = "not right yet" if status == NOT_YET else status
    count = sum(len(one.uses) for one in order)
    return OwnRun(
        name,
        f"{text}, in {count} operations on the store.",
        [_NUMBERS.get(number, f"{number}th") for number in range(1, 1 + len(order))],
        _rows(order),
        f"{world_size} processes, each {_LATER_S * 1e3:g} ms after the one before. Below, a lane "
        "is a process, in the order in which they came.",
        _drawn(order),
    )


def _come_later(comm: Comm, fn: Callable) -> Visit:
    real = dist.PrefixStore("own run", dist.distributed_c10d._get_default_store())
    comm.barrier()
    time.sleep(_LATER_S * comm.rank)
    return visit(fn, SharedStore(real), f"10.0.0.{comm.rank + 1}:29400", comm.world_size, 0)


def _rows(visits: list[Visit]) -> dict[str, list[str]]:
    rows = {"rank": [_rank(one.result) for one in visits]}
    ops = dict.fromkeys(use.op for one in visits for use in one.uses)
    rows |= {op: [str(sum(use.op == op for use in one.uses)) for one in visits] for op in ops}
    waited = [sum(map(_seconds, filter(_is_wait, one.uses))) for one in visits]
    return rows | {"waited": [f"{seconds * 1e3:.0f} ms" for seconds in waited]}


def _rank(result: Any) -> str:
    return str(result[0]) if isinstance(result, list) and result else "none"


def _is_wait(use: Use) -> bool:
    return use.op in _WAITS


def _seconds(use: Use) -> float:
    return use.end_s - use.start_s


def _drawn(visits: list[Visit]) -> "CaptionedFigure | None":
    # Imported here: ranks load the checks, but draw nothing.
    from workbook.plots.timeline import timeline

    start_s = min(use.start_s for one in visits for use in one.uses)
    spans = [
        Span(
            lane,
            "wait" if _is_wait(use) else use.op,
            use.start_s - start_s,
            # A number that is drawn needs a width.
            max(use.end_s - start_s, use.start_s - start_s + 1e-3),
        )
        for lane, one in enumerate(visits)
        for use in one.uses
    ]
    trace = Trace.merge([spans])
    return timeline(trace, title="Your rendezvous: who asks the store, and who waits")
