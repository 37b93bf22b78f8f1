"""The checkpoints of a run: what they hold, when they are written, and where a run goes on.

A run that goes on with the same **arrangement** (technique, ranks, micro-batches) ends equal to
the bit to one that was never interrupted. With another one it ends where one device ends, or is
refused. ``checkpoint_files`` writes and reads the files.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from labkit.strategies.base import Strategy
from labkit.strategies.saved_state import State, named
from labkit.training.checkpoint_files import (
    Facts,
    Stored,
    newest,
    read,
    remove_unfinished,
    save,
    step_path,
    steps,
)
from labkit.training.config import RunConfig
from labkit.training.kept import Kept, common, random_states, set_random_states
from labkit.training.optimizers import schedule_of
from labkit.training.work import PARTS, Own, Work
from labkit.workload.losses import CountedLoss

# The settings that decide which rank computes what, in which order.
_ARRANGEMENT = (
    *("strategy", "builtin", "world_size", "servers", "split_points", "devices", "bucket_mb"),
    *("backend", "accumulate", "micro_batches", "schedule", "hierarchical", "stage"),
    *("stages_per_rank", "recompute", "sequence_parallel", "dp", "pp", "tp"),
)
# The settings that may be others in a run that goes on; all the rest must be as they were.
_FREE = (
    *("epochs", "device", "link", "hosts", "weights", "straggler", "max_staleness"),
    *("checkpoint_dir", "checkpoint_every", "resume", "log_dir", "record"),
)
# The numbers of an epoch by name; NaN where there is nothing to measure.
Row = dict[str, float]
# The settings, shapes and number of samples by which a run is known again, as JSON has them.
Identity = dict[str, Any]


def identity(config: RunConfig, own_parts: Own, work: Work, model: nn.Module) -> Identity:
    """Return all that must be as it was for another run to go on, by name."""
    values = {name: value for name, value in asdict(config).items() if name not in _FREE}
    # Which devices they are does not matter.
    values["devices"] = len((config.devices or "").split(","))
    for name in PARTS:
        if getattr(own_parts, name) is not None:
            # The same part may have been given as an object or by its path.
            values[name] = "own"
    if config.lr_schedule == "cosine":
        values["epochs"] = config.epochs
    for name, parameter in model.named_parameters():
        values[f"model: {name}"] = list(parameter.shape)
    values["samples"] = len(work.train)
    return values


# The checkpoint from which a run goes on, if any, and this in words if it was asked for.
Start = tuple[Path | None, str]


def find_start(config: RunConfig, own_parts: Own, strategy: Strategy, work: Work) -> Start:
    """Find where the run begins: with ``resume``, at the newest whole checkpoint. Only reads.

    ValueError if nobody has asked to resume what is there, none of it is whole, or this run
    differs from the one that has written it.
    """
    folder = config.checkpoint_dir
    if folder is None:
        return None, ""
    if strategy.traits.no_checkpoint:
        raise ValueError(f"leave checkpoint_dir out: {strategy.traits.no_checkpoint}")
    names = [path.name for _, path in steps(folder)]
    if names and not config.resume:
        raise ValueError(
            f"{folder} has checkpoints already, the newest {names[0]}: choose resume to continue "
            "their run, or another checkpoint_dir for a new one"
        )
    stored, skipped = newest(folder)
    if stored is None:
        if names:
            raise ValueError(
                f"no checkpoint in {folder} is whole: {'; '.join(skipped)}. They are as they "
                "were: choose another checkpoint_dir to begin again"
            )
        if config.resume:
            return None, f"no checkpoint in {folder} yet: the run begins"
        return None, ""
    facts = stored.facts
    current = identity(config, own_parts, work, work.make_model())
    differing, rearranged = _differences(facts.identity, current)
    if facts.epoch + bool(facts.step) > config.epochs:
        done = f"{facts.epoch} epochs and {facts.step} steps done"
        differing.append(f"{done}, {config.epochs} here")
    if rearranged and not differing:
        reason = _bound_to_ranks(stored)
        if reason:
            differing.append(f"{', '.join(rearranged)}: {reason}")
    if differing:
        raise ValueError(
            f"cannot continue from {stored.path}: {'; '.join(differing)}. Next step: resume with "
            "the settings there, or choose another checkpoint_dir for a new run"
        )
    notes = [f"skipped {reason}" for reason in skipped]
    notes.append(
        f"continues from {stored.path.name} in {folder}, after {facts.epoch} of {config.epochs} "
        f"epochs and {facts.step} steps; seconds of the epoch and bytes are those since then"
    )
    return stored.path, "; ".join(notes)


def _differences(saved: Identity, current: Identity) -> tuple[list[str], list[str]]:
    """Return the differing settings in words: up to five that must agree; the arrangement's."""
    words = {}
    for name in saved | current:
        if saved.get(name) != current.get(name):
            saved_value = saved.get(name, "missing")
            words[name] = f"{name} {saved_value} there, {current.get(name, 'missing')} here"
    rearranged = [words.pop(name) for name in _ARRANGEMENT if name in words]
    return list(words.values())[:5], rearranged


def _bound_to_ranks(stored: Stored) -> str:
    """Return why no other arrangement can continue from a checkpoint; "" where one can."""
    reason = ""
    for rank in range(len(stored.ranks)):
        own_names = sorted(stored.of("own", rank))
        if "residual" in own_names:
            reason = "each rank has gradients that compress topk has not sent yet"
        elif own_names:
            reason = f"each rank has its own {' and '.join(own_names)}"
        elif stored.of("progress", rank)["draws"]:
            reason = f"rank {rank} has drawn random numbers in its steps, as for dropout"
    _, differing = common(stored.by_rank("kept"))
    if differing and not reason:
        reason = f"each rank has its own numbers of {' and '.join(differing)}"
    return reason


@dataclass
class Progress:
    """The progress of a run on one rank.

    Attributes:
        sums: in the epoch under way, float64 [5]: this rank's losses, its right predictions and of
            how many, after how many steps the losses' sum was finite, and the losses' weight.
        epoch_steps: the steps of an epoch.
        epoch, step: complete epochs, and steps of the one under way; ``rows`` of the former.
        seconds, sent: of training in the epoch; messages and bytes by this rank while it trained.
    """

    LOSS, RIGHT, JUDGED, FINITE_STEPS, WEIGHT = range(5)

    sums: Tensor
    epoch_steps: int
    epoch: int = 0
    step: int = 0
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    sent: list[int] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Steps so far, in all epochs."""
        return self.epoch * self.epoch_steps + self.step


@dataclass
class Checkpoints:
    """The checkpoints of a run on one rank, whose strategy is set up."""

    config: RunConfig
    strategy: Strategy
    identity: Identity
    progress: Progress
    work: Work

    def __post_init__(self) -> None:
        work = self.work
        self.saved_state = self.strategy.saved_state_class(self.strategy)
        self.kept = Kept(self.strategy.optimizer, work.loss.loss, work.train.dataset)
        self._first_random = random_states(self.strategy.comm.device)
        if self.strategy.comm.rank == 0:
            remove_unfinished(self.config.checkpoint_dir)

    def is_due(self) -> bool:
        """True if it is time to save, after this step or this epoch."""
        interval = self.config.checkpoint_every
        if interval and self.progress.done % interval == 0:
            return True
        is_last = self.progress.epoch == self.config.epochs
        return self.progress.step == 0 and (not interval or is_last)

    def save(self) -> None:
        """Save a checkpoint; a collective call."""
        strategy = self.strategy
        progress = self.progress
        with strategy.comm.span("checkpoint"):
            state = self.saved_state.collect()
            drawn = random_states(strategy.comm.device)
            state |= named("random", drawn)
            state |= named("kept", self.kept.state())
            state["progress/sums"] = progress.sums
            # A rank begins with the same states whenever it is started.
            first = self._first_random
            has_drawn = any(not torch.equal(drawn[name], first[name]) for name in drawn)
            state["progress/draws"] = torch.tensor(has_drawn)
            schedule = schedule_of(strategy.optimizer)
            update = -1 if schedule is None else schedule.update
            state["progress/updates"] = torch.tensor(update)
            for name, value in strategy.precision.scaler.state_dict().items():
                state[f"scaler/{name}"] = torch.tensor(value)
            facts = Facts(progress.epoch, progress.step, progress.rows, self.identity)
            path = step_path(self.config.checkpoint_dir or "", self.progress.done)
            save(strategy.comm, path, facts, state)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint, which ``find_start`` has found to fit this run."""
        stored = read(path)
        facts = stored.facts
        strategy = self.strategy
        rank = strategy.comm.rank
        progress = self.progress
        progress.epoch = facts.epoch
        progress.step = facts.step
        progress.rows = facts.rows
        # What a rehearsal has counted was none of the run's samples.
        if isinstance(strategy.loss, CountedLoss):
            strategy.loss.take()
            strategy.loss.take_weight()
        _, rearranged = _differences(facts.identity, self.identity)
        state: State = {}
        for kind in ("model", "optimizer", "number"):
            state |= named(kind, stored.of(kind))
        if not rearranged:
            state |= named("own", stored.of("own", rank))
        self.saved_state.restore(state)
        by_rank = stored.by_rank("progress")
        kept_by_rank = stored.by_rank("kept")
        schedule = schedule_of(strategy.optimizer)
        if schedule is not None:
            schedule.update = max(int(numbers["updates"]) for numbers in by_rank)
        scale = stored.of("scaler")
        if scale:
            numbers = {name: tensor.item() for name, tensor in scale.items()}
            strategy.precision.scaler.load_state_dict(numbers)
        if rearranged:
            self.kept.load(common(kept_by_rank)[0])
            # The sums of other ranks than there are now go to rank 0.
            if rank == 0:
                for numbers in by_rank:
                    progress.sums += numbers["sums"].to(progress.sums.device)
        else:
            self.kept.load(kept_by_rank[rank])
            progress.sums += by_rank[rank]["sums"].to(progress.sums.device)
            set_random_states(stored.of("random", rank), strategy.comm.device)
        progress.sums[progress.FINITE_STEPS] = facts.step


@contextlib.contextmanager
def on_sigterm(action: Callable[[], object] | None) -> Iterator[None]:
    """Within the block SIGTERM calls ``action``; without one it ends this process, as ever."""
    if action is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
