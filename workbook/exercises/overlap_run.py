"""The learner's overlapping backward, drawn on an emulated link, beside labkit's.

Symbols: P ranks.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.comm.comm import Comm
from labkit.comm.emulated_link import EmulatedLink
from labkit.errors import WorkerError
from labkit.runtime.launch import RunResult, run
from labkit.runtime.watch import undrawn
from labkit.schedules.bucket_assignment import MIB, assign_buckets
from labkit.strategies.ddp.bucketed import BucketedDDP, start_all_reduce
from labkit.units import format_number, format_seconds
from workbook.exercises.grader.own_run import OwnRun
from workbook.exercises.grader.report import NOT_ATTEMPTED, NOT_YET
from workbook.notebook import verdict

if TYPE_CHECKING:
    from workbook.plots import CaptionedFigure

# Gigabit Ethernet: a message needs about as long as the layer that it hides behind.
LINK = EmulatedLink(0.001, 125e6)
_WIDTH, _LAYERS, _SAMPLES, _STEPS = 512, 6, 256, 3
_TIMEOUT_S = 30.0


def own_run(name: str, fn: Callable, status: str, world_size: int = 2) -> OwnRun:
    """Run a learner's backward for a few steps, for its timeline; nothing is raised."""
    if status == NOT_ATTEMPTED:
        return OwnRun(name, "not attempted yet, so there is nothing to draw.")
    options = {"world_size": world_size, "device": "cpu", "timeout_s": _TIMEOUT_S, "link": LINK}
    try:
        with undrawn():
            results = [run(_steps, one, **options) for one in (fn, None)]
    except (WorkerError, ValueError) as error:
        story = str(error).partition("\n\nTraceback of rank")[0]
        return OwnRun(name, f"it did not finish, so there is nothing to draw. {story}")
    titles = "One step, your backward", "One step, labkit's BucketedDDP"
    figures = [_last_step(result, title) for result, title in zip(results, titles)]
    rows = {
        "all-reduces per step": [str(one.values[0]) for one in results],
        "hidden communication": [f"{one.explain().hidden:.0%}" for one in results],
    }
    megabytes_per_s = format_number(LINK.bandwidth_bytes_per_s / 1e6)
    link = f"a link of {format_seconds(LINK.latency_s)} and {megabytes_per_s} MB/s"
    caption = f"{world_size} ranks over {link}, {_LAYERS} layers, {_SAMPLES} samples per rank."
    text = "not right yet" if status == NOT_YET else status
    said = f"{text}. {verdict.overlap(results[0]).text}"
    return OwnRun(name, said, ["yours", "labkit"], rows, caption, *figures)


class _Started:
    """An all-reduce under way, whose ``wait`` is recorded as waiting."""

    def __init__(self, comm: Comm, flat: Tensor):
        self._comm, self._work = comm, start_all_reduce(comm, flat)

    def wait(self) -> None:
        with self._comm.span("wait"):
            self._work.wait()


def _steps(comm: Comm, fn: Callable | None) -> int:
    """On a rank: a few training steps by ``fn``, or by BucketedDDP; the all-reduces per step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [part for _ in range(_LAYERS) for part in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(_WIDTH, 10))
    labkits = None if fn else BucketedDDP(comm, model, bucket_mb=1, op="sum")
    parameters = list(model.parameters())
    buckets = assign_buckets([4 * p.numel() for p in parameters], MIB)
    batch_size, started = _SAMPLES * comm.world_size, []
    inputs, targets = torch.randn(_SAMPLES, _WIDTH), torch.randint(10, (_SAMPLES,))
    optimizer = torch.optim.SGD(parameters, lr=1e-3)

    def start(flat: Tensor) -> _Started:
        started.append(_Started(comm, flat))
        return started[-1]

    for _ in range(_STEPS):
        comm.barrier()
        optimizer.zero_grad()
        with comm.span("compute"):
            loss = functional.cross_entropy((labkits or model)(inputs), targets, reduction="sum")
            if fn:
                fn(loss, parameters, buckets, start, batch_size)
            else:
                (loss / batch_size).backward()
        with comm.span("update"):
            optimizer.step()
    return len(labkits.buckets) if labkits else len(started) // _STEPS


def _last_step(result: RunResult, title: str) -> "CaptionedFigure":
    # Imported here: ranks load the checks, but draw nothing.
    from workbook.plots.timeline import timeline

    updates = [result.trace.of(rank, "update") for rank in result.trace.ranks]
    start_s = max(own[-2].end_s for own in updates)
    end_s = max(own[-1].end_s for own in updates)
    return timeline(result, title=title, start_s=start_s, end_s=end_s)
