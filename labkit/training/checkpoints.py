"""The checkpoints of a run as its loop sees them: when one is due, what it holds, how to go on.

A checkpoint holds, as nested dicts of tensors::

    model                       parameters and buffers, as in the model's state dict
    optimizer   state           of each parameter, by its name
                updates         where the schedule of the learning rate is
    scaler                      of the loss, with fp16
    ranks       R   random      states of rank R's random number generators
                    buffers     batch statistics of this moment
                    own         what else its technique carries from step to step
                    rates       the floats in its optimizer's groups
                    progress    its sums over the epoch under way

Its facts are the settings, where the run is, and the epochs so far. Everything but ``ranks`` is
the same for any number of ranks, so a run can go on with another one where ``ranks`` allows it:
see ``labkit.training.resume``.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from labkit.config import RunConfig
from labkit.errors import PreemptedError
from labkit.strategies.base import OwnPaceStrategy, Strategy
from labkit.strategies.kept import Kept, copy_into
from labkit.training.checkpoint.reading import read_tensors, stored_in
from labkit.training.checkpoint.whole import read_facts
from labkit.training.evaluation import is_best
from labkit.training.optimizer import continue_schedule, scheduler_of
from labkit.training.progress import Progress
from labkit.training.random_states import equal_states, random_states, set_random_states
from labkit.training.resume import arrangement, merged_buffers

if TYPE_CHECKING:
    from labkit.training.checkpoint.writing import CheckpointWriter

Tensors = dict[str, Any]
_SUMS = ("loss_sum", "trained")


class Checkpoints:
    """The checkpoints of a run, on one rank; without a ``checkpoint_dir`` there are none.

    Args:
        config: the settings.
        strategy: set up.
        facts: of the run, see ``resume.facts_of``.
    """

    def __init__(self, config: RunConfig, strategy: Strategy, facts: Mapping[str, Any]):
        self.config, self.strategy, self.facts = config, strategy, dict(facts)
        self.steps: int = facts.get("steps", 0)
        self.devices = [strategy.comm.device, *strategy.devices]
        self.writer: CheckpointWriter | None = None
        # Where workers do not wait for each other, only the server writes.
        self.is_alone = isinstance(strategy, OwnPaceStrategy)
        if config.checkpoint_dir is not None and not (self.is_alone and strategy.comm.rank):
            comm: Any = _Alone() if self.is_alone else strategy.comm
            self.writer = _writer(comm, config.checkpoint_dir, config.checkpoint_keep)
        self._draws = False
        self._before = random_states(self.devices) if config.checkpoint_dir else {}

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *failure: Any) -> None:
        """Wait until the last checkpoint is whole; after a failure, give it up."""
        if self.writer is not None:
            self.writer.__exit__(*failure)

    def after_step(self, progress: Progress, ends: bool = False) -> None:
        """Save if a checkpoint is due, or the run ends here.

        After the last step of an epoch, ``after_epoch`` does.
        """
        if self.writer and progress.step < self.steps and (ends or self._is_due(progress)):
            progress.stop_clock(self.strategy)
            self.save(progress)
            progress.start_clock(self.strategy)

    def after_epoch(self, progress: Progress, ends: bool = False) -> None:
        """Save if a checkpoint is due, the run ends here, or the epoch was the best so far."""
        best = is_best(progress.rows)
        is_last = ends or progress.epoch == self.config.epochs
        if best or is_last or self.config.checkpoint_every is None or self._is_due(progress):
            self.save(progress, best)

    def end(self, progress: Progress, reason: str) -> NoReturn:
        """Raise PreemptedError, for this reason, when what was saved last is whole."""
        assert self.writer is not None
        self.writer.wait()
        done = self.done(progress)
        raise PreemptedError(
            f"stopped by {reason} after {done} of {self.config.epochs * self.steps} steps, with a "
            "checkpoint: the same command goes on from there with resume"
        )

    def done(self, progress: Progress) -> int:
        """Steps so far, in all epochs."""
        return progress.epoch * self.steps + progress.step

    def save(
        self,
        progress: Progress,
        best: bool = False,
        of_others: Mapping[str, Tensors] | None = None,
    ) -> None:
        """Save a checkpoint; returns when the tensors are copied.

        ``of_others`` is what other ranks have, by rank, where this one writes alone.
        """
        if self.writer is None:
            return
        with self.strategy.comm.span("checkpoint"):
            ranks = {self._rank: self.of_this_rank(progress)} | dict(of_others or {})
            self._write(progress, self._of_model() | {"ranks": ranks}, best)

    def at_own_pace(self, progress: Progress, measure: Callable[[], object]) -> None:
        """Let a technique whose workers do not wait for each other save its checkpoints.

        Args:
            progress: how far the run is, to be kept up to date.
            measure: adds the epochs that have ended to ``progress``.
        """
        if self.config.checkpoint_dir is not None:
            assert isinstance(self.strategy, OwnPaceStrategy)
            self.strategy.saves = ServerSaves(self, progress, measure)

    def load(self, path: Path | None, rehearse: Callable[[], object]) -> Progress:
        """How far the run is; continued from a checkpoint if there is one.

        Args:
            path: of the checkpoint, which ``resume`` has found to fit this run; None to begin.
            rehearse: does ``Strategy.rehearse``.
        """
        progress = Progress.none(self.devices[0])
        if path is None:
            return progress
        facts, kept = read_facts(path), self.strategy.kept()
        progress.epoch, progress.step = facts["epoch"], facts["step"]
        if not (self.is_alone and self.strategy.comm.rank):
            progress.rows = facts["epochs"]
        rehearse()
        # What it has counted was none of the run's samples.
        self.strategy.counted()
        kept.load_state(_read(path, ("model",), kept.state))
        kept.load_optimizer_state(_read(path, ("optimizer", "state"), kept.state_of()))
        self._load_rates(path)
        if facts["arrangement"] == arrangement(self.config):
            self._load_mine(path, kept, progress)
        else:
            self._load_others(path, kept, progress)
        return progress

    def _is_due(self, progress: Progress) -> bool:
        every = self.config.checkpoint_every
        return bool(every) and self.done(progress) % every == 0

    @property
    def _rank(self) -> str:
        return str(self.strategy.comm.rank)

    def _write(self, progress: Progress, tensors: Tensors, best: bool) -> None:
        assert self.writer is not None
        place = {"epoch": progress.epoch, "step": progress.step, "epochs": progress.rows}
        self.writer.save(self.done(progress), tensors, self.facts | place, best)

    def _of_model(self) -> Tensors:
        strategy = self.strategy
        kept, optimizer = strategy.kept(), strategy.optimizer
        found: Tensors = {"model": kept.given, "optimizer": {"state": kept.optimizer_state()}}
        if optimizer is not None and (scheduler := scheduler_of(optimizer)) is not None:
            found["optimizer"]["updates"] = torch.tensor(scheduler.last_epoch)
        if strategy.scaler is not None:
            state = strategy.scaler.state_dict()
            found["scaler"] = {key: _number(value) for key, value in state.items()}
        return found

    def of_this_rank(self, progress: Progress) -> Tensors:
        """What no other rank has."""
        kept, states = self.strategy.kept(), random_states(self.devices)
        self._draws |= not equal_states(self._before, states)
        sums = {
            **{name: getattr(progress, name) for name in _SUMS},
            "seconds": _number(progress.seconds),
            "spent_s": {kind: _number(s) for kind, s in progress.spent_s.items()},
            "draws": torch.tensor(self._draws),
        }
        if progress.sent is not None:
            sums["sent"] = torch.tensor(progress.sent)
        rates = {} if kept.optimizer is None else {"rates": kept.rates()}
        mine = {"random": states, "buffers": kept.buffers, "own": kept.own, "progress": sums}
        return mine | rates

    def _load_rates(self, path: Path) -> None:
        optimizer, scaler = self.strategy.optimizer, self.strategy.scaler
        updates = _read(path, ("optimizer",), ["updates"])
        if optimizer is not None and updates:
            continue_schedule(optimizer, int(updates["updates"]))
        if scaler is not None and (state := _read(path, (), ["scaler"])):
            scaler.load_state_dict({key: v.item() for key, v in state["scaler"].items()})

    def _load_mine(self, path: Path, kept: Kept, progress: Progress) -> None:
        """Take what this rank alone had."""
        mine = _read(path, ("ranks",), [self._rank]).get(self._rank)
        whose = "0" if self.is_alone else self._rank
        own = _read(path, ("ranks", whose), ["own"]).get("own", {})
        self.strategy.continued(own)
        # A worker that was lost, and that nobody waited for, is not in the checkpoint.
        if mine is None:
            return
        copy_into(kept.buffers, mine.get("buffers", {}))
        kept.load_rates(mine.get("rates"))
        self._add(progress, mine["progress"])
        sent = mine["progress"].get("sent")
        progress.sent = None if sent is None else tuple(sent.tolist())
        set_random_states(mine["random"], self.devices)
        self._before = mine["random"]

    def _load_others(self, path: Path, kept: Kept, progress: Progress) -> None:
        """Take what other ranks than those of this run had; their sums go to rank 0."""
        ranks = read_tensors(path, ["ranks"])["ranks"]
        copy_into(kept.buffers, merged_buffers(ranks))
        self.strategy.continued({})
        for rank in ranks.values() if self.strategy.comm.rank == 0 else ():
            self._add(progress, rank["progress"])

    def _add(self, progress: Progress, part: Tensors) -> None:
        for name in _SUMS:
            getattr(progress, name).add_(part[name].to(self.devices[0]))
        progress.seconds = max(progress.seconds, part["seconds"].item())
        progress.spent_s = {kind: s.item() for kind, s in part.get("spent_s", {}).items()}
        self._draws |= bool(part["draws"])


class ServerSaves:
    """Checkpoints of a technique whose workers do not wait for each other, see ``base.Saves``.

    Args:
        checkpoints: of this rank.
        progress: how far the run is, to be kept up to date.
        measure: adds the epochs that have ended to ``progress``.
    """

    def __init__(
        self, checkpoints: Checkpoints, progress: Progress, measure: Callable[[], object]
    ):
        self.checkpoints, self.progress, self.measure = checkpoints, progress, measure
        self.strategy = checkpoints.strategy
        workers, steps = len(self.strategy.workers), checkpoints.steps
        self._of_a_step, self._of_an_epoch = workers, workers * steps
        self._every = workers * (checkpoints.config.checkpoint_every or steps)
        self._saved = progress.epoch * self._of_an_epoch + progress.step * workers

    def are_due(self, shares: int) -> bool:
        return shares // self._every > self._saved // self._every

    @contextmanager
    def of_worker(self) -> Iterator[Tensor]:
        with self._not_counted():
            data = io.BytesIO()
            torch.save(_on_host(self.checkpoints.of_this_rank(self.progress)), data)
            yield torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)

    def save(self, shares: int, of_workers: Mapping[int, Tensor]) -> None:
        with self._not_counted():
            known = len(self.progress.rows)
            self.measure()
            best = len(self.progress.rows) > known and is_best(self.progress.rows)
            epoch, rest = divmod(shares, self._of_an_epoch)
            self.progress.epoch, self.progress.step = epoch, rest // self._of_a_step
            ranks = {
                str(rank): torch.load(io.BytesIO(part.numpy().tobytes()), weights_only=True)
                for rank, part in of_workers.items()
            }
            self.checkpoints.save(self.progress, best, ranks)
            self._saved = shares

    @contextmanager
    def _not_counted(self) -> Iterator[None]:
        self.progress.stop_clock(self.strategy)
        yield
        self.progress.start_clock(self.strategy)


def _writer(comm: Any, folder: str, keep: int) -> "CheckpointWriter":
    # Not at the top: it imports what a run without checkpoints need not wait for.
    from labkit.training.checkpoint.writing import CheckpointWriter

    return CheckpointWriter(comm, folder, keep)


class _Alone:
    """As a Comm, the only rank."""

    rank, world_size = 0, 1


def _on_host(tensors: Tensors) -> Tensors:
    return {
        name: _on_host(part) if isinstance(part, dict) else part.detach().cpu()
        for name, part in tensors.items()
    }


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _read(path: Path, above: tuple[str, ...], names: Iterable[str]) -> Tensors:
    """What a checkpoint has of these names, in the dict at ``above``."""
    depth = len(above) + 1
    there = {one.path[:depth] for one in stored_in(path)}
    keys = [".".join((*above, name)) for name in names if (*above, name) in there]
    found = read_tensors(path, keys) if keys else {}
    for key in above:
        found = found.get(key, {})
    return found
