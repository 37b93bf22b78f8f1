"""``labkit bench checkpoint``: what a step costs while a checkpoint is written, and what it saves.

One model is trained by our DDP. A turn of some steps alone and a turn of as many steps, before
which a checkpoint was begun, follow each other in one run; what is compared is their ratio. A turn
counts as under writing only as far as the writing went on, which is recorded, too.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from labkit.comm.comm import Comm
from labkit.strategies.ddp import DDP
from labkit.training.checkpoint import Facts, Writer
from labkit.units import check_choice, format_bytes, format_seconds
from workbook.measure.model_step import ModelStep
from workbook.measure.record import Result
from workbook.measure.spread import Spread, ratios, rounded, table
from workbook.measure.turns import (
    Where,
    agree,
    check_settings,
    on_ranks,
    slowest,
    take_turns,
    timed,
)

# Samples of the global batch, by model.
BATCH_SIZES = {"resnet18": 64, "small_cnn": 64}
ALONE, WRITING = "steps alone", "steps while writing"
_BUDGET_S = 120.0
# A turn of a small model has many steps: as long as its checkpoint is written, about.
_TURN_S = 0.4
_MOST_STEPS = 200


@dataclass(frozen=True)
class CheckpointResult(Result):
    """One model: its steps with and without a checkpoint being written.

    Attributes:
        batch_size: samples of the global batch.
        steps: of each turn.
        num_bytes: of the checkpoint's tensors.
        seconds: by contender, the seconds of each turn, of the slowest rank.
        save_s: of each checkpoint, the seconds of ``save``: waiting for the ranks, and copying.
        written_s: of each checkpoint, the seconds until it was written.
        at_once_s: the same while the ranks wait for it.
        covered: by turn, how much of it the writing went on.
    """

    model: str
    world_size: int
    batch_size: int
    steps: int
    num_bytes: int
    seconds: dict[str, list[float]]
    save_s: list[float]
    written_s: list[float]
    at_once_s: list[float]
    covered: list[float]

    def slower(self) -> list[float]:
        """By how much steps take longer under a writing, turn by turn: 0.1 is 10%."""
        both = ratios(self.seconds[WRITING], self.seconds[ALONE])
        return [ratio - 1 for ratio in both]

    def __str__(self) -> str:
        rows = [
            [name, Spread.of([s / self.steps for s in seconds]).text(format_seconds)]
            for name, seconds in self.seconds.items()
        ]
        rows.append(["save", Spread.of(self.save_s).text(format_seconds)])
        rows.append(["written in", Spread.of(self.written_s).text(format_seconds)])
        rows.append(["written at once in", Spread.of(self.at_once_s).text(format_seconds)])
        return (
            f"Checkpoints of {self.model} ({format_bytes(self.num_bytes)}), {self.world_size} "
            f"ranks, global batch of {self.batch_size}:\nmedian of {len(self.save_s)} turns of "
            f"{self.steps} steps (quartiles), in turns\n\n{table(['', 'seconds'], rows)}\n\n"
            f"A step takes {Spread.of(self.slower()).text('{:+.1%}'.format)} longer while a "
            f"checkpoint is written (which went on for {Spread.of(self.covered).median:.0%} of "
            "the turn)\n"
        )

    def record(self) -> dict[str, list[dict]]:
        """``rows``, one per model and number of ranks."""
        lists = ("save_s", "written_s", "at_once_s", "covered")
        row = self.plain() | {name: rounded(getattr(self, name)) for name in lists}
        row["seconds"] = {name: rounded(seconds) for name, seconds in self.seconds.items()}
        return {"rows": [row | {"slower": asdict(Spread.of(self.slower()))}]}


def bench_checkpoint(
    world_sizes: tuple[int, ...] = (2,),
    models: tuple[str, ...] = tuple(BATCH_SIZES),
    repeats: int = 20,
    device: str = "auto",
    devices: tuple[str, ...] | None = None,
) -> Iterator[CheckpointResult]:
    """Time steps with and without a checkpoint being written, one result for each model.

    Args:
        world_sizes: of the runs.
        models: names out of ``BATCH_SIZES``.
        repeats: turns at most; slow models get fewer, at least 5.
        device, devices: see ``labkit.run``.

    Raises:
        ValueError: an unknown model or an impossible world size, before anything runs.
        WorkerError: a step or a checkpoint failed.
    """
    check_settings("a checkpoint", world_sizes, repeats, least=1)
    for model in models:
        check_choice("model", model, BATCH_SIZES)
    where = Where(device, devices)
    for ranks in world_sizes:
        where.plan(ranks)
    return (_result(ranks, model, repeats, where) for ranks in world_sizes for model in models)


def _result(world_size: int, model: str, repeats: int, where: Where) -> CheckpointResult:
    with tempfile.TemporaryDirectory(prefix="labkit-checkpoints-") as folder:
        arguments = model, repeats, folder
        by_rank = on_ranks(measure, *arguments, world_size=world_size, where=where)
    lists = slowest([rank["lists"] for rank in by_rank])
    covered = [min(each) for each in zip(*(rank["covered"] for rank in by_rank))]
    mine = by_rank[0]
    counts = {name: mine[name] for name in ("steps", "num_bytes")}
    return CheckpointResult(
        model, world_size, BATCH_SIZES[model], **counts, **lists, covered=covered
    )


def measure(comm: Comm, model: str, repeats: int, folder: str) -> dict[str, Any]:
    """Measure on this rank: seconds of turns, of saves and of writings."""

    strategy = DDP()
    step = ModelStep(model, BATCH_SIZES[model] // comm.world_size).of(strategy, comm)
    step_s = min(timed(comm, step) for _ in range(3))
    steps = agree(comm, max(1, min(_MOST_STEPS, int(_TURN_S / step_s))))
    writer = Writer(folder, comm.rank, comm.world_size)
    turns = Turns(comm, writer, partial(_repeat, step, steps), partial(_state, comm, strategy))
    chosen = {ALONE: turns.alone, WRITING: turns.while_writing}
    seconds = take_turns(comm, chosen, repeats, _BUDGET_S)
    at_once_s = [turns.at_once() for _ in range(min(repeats, 5))]
    writer.close(failed=False)
    made = len(seconds[WRITING])
    lists = {name: getattr(turns, name)[-made:] for name in ("save_s", "written_s")}
    lists |= {"seconds": seconds, "at_once_s": at_once_s}
    num_bytes = sum(tensor.nbytes for tensor in _state(comm, strategy).values())
    found = {"lists": lists, "covered": turns.covered[-made:]}
    return found | {"steps": steps, "num_bytes": num_bytes}


class Turns:
    """The two turns of this bench, and what they have shown of the writing, in turns' order."""

    def __init__(
        self,
        comm: Comm,
        writer: Any,
        steps: Callable[[], object],
        state: Callable[[], dict[str, torch.Tensor]],
    ):
        self.comm, self.writer, self.steps, self.state = comm, writer, steps, state
        self.save_s: list[float] = []
        self.written_s: list[float] = []
        self.covered: list[float] = []
        self._step = 0

    def alone(self) -> float:
        self.writer.wait()
        return timed(self.comm, self.steps)

    def while_writing(self) -> float:
        self.writer.wait()
        self.save_s.append(timed(self.comm, self._save))
        begun_s = time.perf_counter()
        seconds = timed(self.comm, self.steps)
        turn_s = time.perf_counter() - begun_s
        # How long it goes on after the turn, without waiting for it, which would hasten it.
        while self.writer.is_writing:
            time.sleep(0.005)
        self.written_s.append(time.perf_counter() - begun_s)
        self.covered.append(min(1.0, self.written_s[-1] / turn_s))
        return seconds

    def at_once(self) -> float:
        self.writer.wait()
        self._save()
        return timed(self.comm, self.writer.wait)

    def _save(self) -> None:
        self._step += 1
        facts = Facts(0, self._step, 10**8, [], {}, {}, {}, {}, {})
        self.writer.save(facts, self.state(), {})


def _repeat(step: Callable[[], object], steps: int) -> None:
    for _ in range(steps):
        step()


def _state(comm: Comm, strategy: DDP) -> dict[str, Any]:
    """What a run would save: the model, the optimizer's state, random states."""
    state = strategy.state()
    if comm.rank:
        return {"random": torch.get_rng_state()}
    return {name: tensor for name, tensor in state.items() if not name.startswith("own/")}
