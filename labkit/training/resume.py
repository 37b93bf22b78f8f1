"""Interrupted runs: what a run gives to a checkpoint, and whether another can go on from it.

Each rank gives tensors: ``model/NAME``, ``optimizer/NAME/KEY``, ``own/NAME`` (what else its
technique carries from step to step), and ``random/NAME`` (the states of torch's generators).

A run that goes on with the same **arrangement** (technique, ranks, micro-batches) ends equal to
the bit to one that was never interrupted. With another one it ends where one device ends, unless
the ranks had something that cannot be divided anew: then it is refused.
"""

import contextlib
import hashlib
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from labkit.config import RunConfig
from labkit.strategies.async_parameter_server import AsyncParameterServer
from labkit.strategies.base import State, Strategy, named
from labkit.training import checkpoint
from labkit.training.checkpoint import Facts, Stored
from labkit.training.evaluation import Progress, is_best
from labkit.training.optimizer import continue_schedule, scheduler_of
from labkit.training.own import PARTS, Own, name_of
from labkit.training.resolve import Resolved, Work

# What decides who computes what, in which order.
_ARRANGEMENT = (
    *("strategy", "builtin", "world_size", "servers", "split_points", "devices", "bucket_mb"),
    *("backend", "accumulate", "micro_batches", "schedule", "hierarchical"),
)
# What must be as it was, whoever computes it.
_IDENTITY = (
    *(*PARTS, "lr", "weight_decay", "lr_schedule", "warmup_epochs", "clip_norm", "dtype", "amp"),
    *("batch_size", "seed", "train_size", "augment", "resize", "freeze", "sync_batch_norm"),
    "compress",
)
# What a rank gives beside its tensors.
_NUMBERS = {"sums", "seconds", "spent_s", "sent", "draws"}
_NAMED = 5
_HASHED = 64


def arrangement(config: RunConfig) -> dict[str, Any]:
    """What decides which rank computes what; which devices they are does not matter."""
    found = {name: getattr(config, name) for name in _ARRANGEMENT}
    return found | {"devices": len((config.devices or "").split(","))}


def identity(config: RunConfig, own: Own, work: Work, model: nn.Module) -> dict[str, Any]:
    """What must be as it was for another run to go on, by names, as JSON has it."""
    found: dict[str, Any] = {name: getattr(config, name) for name in _IDENTITY}
    if config.lr_schedule == "cosine":
        found["epochs of lr_schedule cosine"] = config.epochs
    for name in PARTS:
        # The same part may have been given as an object or by its path.
        if (part := getattr(own, name)) is not None:
            found[name] = name_of(part) if name == "loss" else "own"
    if own.optimizer is not None:
        made = own.optimizer([nn.Parameter(torch.zeros(1))])
        found["optimizer class"] = type(made).__name__
        for name, value in made.defaults.items():
            if isinstance(value, int | float | tuple):
                found[f"optimizer {name}"] = list(value) if isinstance(value, tuple) else value
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor):
            found[f"model: {name}"] = list(tensor.shape)
    found["samples"] = len(work.train)
    found["held-out samples"] = 0 if work.test is None else len(work.test)
    if work.train.tensors is not None:
        inputs, targets = work.train.tensors
        digest = hashlib.sha256()
        for tensor in (targets, inputs[:_HASHED]):
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        found["SHA-256 of targets and first inputs"] = digest.hexdigest()[:12]
    return found


class Start(NamedTuple):
    """The checkpoint from which a run goes on, if any, and this in words if it was asked for."""

    path: Path | None = None
    note: str = ""


def find_start(config: RunConfig, own: Own, ready: Resolved) -> Start:
    """Where the run begins: with ``resume``, from the newest whole checkpoint. Only reads.

    Raises:
        ValueError: there are checkpoints that nobody has asked to resume, or none that is whole;
            or this run differs from the one that has written them.
    """
    if config.checkpoint_dir is None:
        return Start()
    folder = Path(config.checkpoint_dir)
    if isinstance(ready.strategy, AsyncParameterServer):
        raise ValueError(
            f"{config.strategy} takes no checkpoint_dir, because its workers never stop together: "
            "leave it out, or use parameter_server"
        )
    names = [path.name for _, path in checkpoint.steps(folder)]
    if names and not config.resume:
        raise ValueError(
            f"{folder} has checkpoints already, the newest {names[0]}: choose resume to continue "
            "their run, or another checkpoint_dir for a new one"
        )
    path, skipped = checkpoint.newest(folder)
    if path is None and names:
        raise ValueError(
            f"no checkpoint in {folder} is whole: {'; '.join(skipped)}. They are as they were: "
            "choose another checkpoint_dir to begin again"
        )
    if path is None:
        return Start(None, f"no checkpoint in {folder} yet: the run begins" * config.resume)
    stored = Stored(path)
    if any(not numbers.keys() >= _NUMBERS for numbers in stored.numbers):
        raise ValueError(f"checkpoint {path} is damaged: a rank's numbers are missing")
    facts, begun = stored.facts, stored.facts.epoch + bool(stored.facts.step)
    here = identity(config, own, ready.work, ready.work.make_model())
    differ = _differences(facts.identity, here)
    if begun > config.epochs:
        differ.append(f"epochs {begun} begun there, {config.epochs} in all here")
    moved = _differences(facts.arrangement, arrangement(config))
    if moved and not differ and (why := _why_not_divided(stored)):
        differ = [f"{', '.join(moved)}: {why}"]
    if differ:
        raise ValueError(
            f"cannot continue from {path}: {'; '.join(differ)}. Next step: resume with the "
            "settings there, or choose another checkpoint_dir for a new run"
        )
    done = f"{facts.epoch} of {config.epochs} epochs"
    done += f" and {facts.step} steps" * bool(facts.step)
    note = f"continues from {path.name} in {folder}, after {done}; seconds and bytes are sums"
    if facts.epoch >= config.epochs:
        note = f"the run in {folder} is finished ({path.name}, {done}). More epochs continue it"
    return Start(path.absolute(), "; ".join([*(f"skipped {one}" for one in skipped), note]))


def _differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    more = [f"and {len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return [
        f"{name} {there.get(name, 'missing')} there, {here.get(name, 'missing')} here"
        for name in names[:_NAMED]
    ] + more


def _why_not_divided(stored: Stored) -> str:
    """Why the run cannot go on with other ranks, or another technique; empty if it can."""
    for rank, numbers in enumerate(stored.numbers):
        if "residual" in stored.of_rank(rank, "own"):
            return "each rank has gradients that compress topk has not sent yet"
        if numbers["draws"]:
            return (
                f"rank {rank} has drawn random numbers in its steps (dropout), and other ranks "
                "would draw others"
            )
    return ""


class Checkpoints:
    """The checkpoints of a run, on one rank, which has set up its technique.

    Args:
        config: the settings, with a ``checkpoint_dir``.
        strategy: set up.
        facts: of the run, see ``identity``.
        steps: of an epoch.
    """

    def __init__(self, config: RunConfig, strategy: Strategy, facts: dict[str, Any], steps: int):
        assert config.checkpoint_dir is not None
        self.config, self.strategy, self.folder = config, strategy, config.checkpoint_dir
        self.facts, self.steps = facts, steps
        self._draws, self._random = False, self._random_states()
        checkpoint.prepare(strategy.comm, self.folder)

    def is_due(self, progress: Progress) -> bool:
        """Whether to save after this step, or this epoch."""
        every = self.config.checkpoint_every
        if every and (progress.epoch * self.steps + progress.step) % every == 0:
            return True
        is_last = progress.epoch == self.config.epochs
        return progress.step == 0 and (not every or is_last or is_best(progress.rows))

    def save(self, progress: Progress) -> None:
        """Save a checkpoint; a collective call."""
        strategy = self.strategy
        with strategy.comm.span("checkpoint"):
            state, now = strategy.state(), self._random_states()
            self._draws |= any(not torch.equal(one, self._random[n]) for n, one in now.items())
            self._random = now
            sums = {"sums": progress.sums.tolist(), "seconds": progress.seconds}
            sums |= {"spent_s": progress.spent_s, "sent": progress.sent}
            numbers = sums | {"draws": self._draws}
            if scheduler := strategy.optimizer and scheduler_of(strategy.optimizer):
                numbers["updates"] = scheduler.last_epoch
            if scaler := getattr(strategy, "scaler", None):
                numbers["scaler"] = scaler.state_dict()
            how = self.facts, arrangement(self.config), {}
            facts = Facts(progress.epoch, progress.step, self.steps, progress.rows, *how)
            best = progress.step == 0 and is_best(progress.rows)
            tensors = state | named("random", now)
            checkpoint.save(strategy.comm, self.folder, facts, tensors, numbers, best)

    def load(self, path: Path, progress: Progress, rehearse: Callable[[], object]) -> None:
        """Continue from a checkpoint, which ``find_start`` has found to fit this run.

        Args:
            path: of the checkpoint.
            progress: of the run, so far at its beginning.
            rehearse: does ``Strategy.rehearse``.
        """
        stored, strategy = Stored(path), self.strategy
        facts, rank = stored.facts, strategy.comm.rank
        progress.epoch, progress.step, progress.rows = facts.epoch, facts.step, facts.rows
        rehearse()
        # What it has counted was none of the run's samples.
        strategy.counted()
        is_same = facts.arrangement == arrangement(self.config)
        state: State = {}
        for kind in ("model", "optimizer"):
            state |= named(kind, stored.of_all(kind))
        if is_same:
            state |= named("own", stored.of_rank(rank, "own"))
        updates = [numbers["updates"] for numbers in stored.numbers if "updates" in numbers]
        if strategy.optimizer is not None and updates:
            continue_schedule(strategy.optimizer, updates[0])
        strategy.load_state(state)
        scalers = [numbers["scaler"] for numbers in stored.numbers if numbers.get("scaler")]
        if scalers and getattr(strategy, "scaler", None) is not None:
            strategy.scaler.load_state_dict(scalers[0])
        # The sums of other ranks than there are now go to rank 0.
        mine = [stored.numbers[rank]] if is_same else stored.numbers * (rank == 0)
        for numbers in mine:
            progress.sums += progress.sums.new_tensor(numbers["sums"])
            progress.seconds = max(progress.seconds, numbers["seconds"])
            progress.spent_s = Counter(numbers["spent_s"])
        progress.sums[3] = facts.step
        if not is_same:
            return
        numbers = stored.numbers[rank]
        progress.sent = numbers["sent"] and tuple(numbers["sent"])
        self._draws, self._random = numbers["draws"], stored.of_rank(rank, "random")
        torch.set_rng_state(self._random["torch"])
        for place, device in enumerate(self._gpus()):
            torch.cuda.set_rng_state(self._random[f"torch_{place}"], device)

    def _random_states(self) -> State:
        gpus = {f"torch_{n}": torch.cuda.get_rng_state(d) for n, d in enumerate(self._gpus())}
        return gpus | {"torch": torch.get_rng_state()}

    def _gpus(self) -> list[torch.device]:
        devices = dict.fromkeys([self.strategy.comm.device, *self.strategy.devices])
        return [device for device in devices if device.type == "cuda"]


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
