"""Checkpoints: a folder each, with a safetensors file per rank and a JSON of facts.

    step-00000120/           after 120 steps
        rank0.safetensors    what rank 0 gave
        facts.json           written last: how far the run is, what it is, the files' sizes
    .step-00000140.part/     being written, or left by a run that was killed

When the files of all ranks are there, rank 0 adds the facts and renames the folder. After a loss
of power a file may be too short; then the checkpoint before it counts. Reading executes nothing,
and follows no links.

Each rank gives tensors: ``model/NAME``, ``optimizer/NAME/KEY`` or ``number/NAME/KEY``,
``own/NAME`` (what else its technique carries from step to step), ``random/NAME``, ``kept/NAME``
(numbers of the optimizer's groups, of a loss, ..., see ``Kept``), ``progress/NAME`` and
``scaler/NAME``. A run that goes on with the same **arrangement** (technique, ranks, micro-batches)
ends equal to the bit to one that was never interrupted. With another one it ends where one device
ends, or is refused.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import stat
import threading
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from labkit.comm.comm import Comm
from labkit.config import RunConfig
from labkit.errors import OutputError
from labkit.strategies.base import State, Strategy, named, of_kind
from labkit.training.kept import Kept, common, python_random, set_python_random
from labkit.training.optimizers import schedule_of
from labkit.training.resolve import PARTS, Own, Work

FACTS, FORMAT = "facts.json", 7
# What each rank's file has.
_EACH = {"random/cpu", "random/python", "random/numpy", "kept/numbers"}
_EACH |= {"progress/sums", "progress/draws", "progress/updates"}
# What decides who computes what, in which order.
_ARRANGEMENT = (
    *("strategy", "builtin", "world_size", "servers", "split_points", "devices", "bucket_mb"),
    *("backend", "accumulate", "micro_batches", "schedule", "hierarchical", "stage"),
    *("stages_per_rank", "recompute", "sequence_parallel", "dp", "pp", "tp"),
)
# What may be another in a run that goes on; all other settings must be as they were.
_FREE = (
    *("epochs", "device", "link", "hosts", "weights", "straggler", "max_staleness"),
    *("checkpoint_dir", "checkpoint_every", "resume", "log_dir"),
)
# What an epoch reports, by name; NaN where there is nothing to measure.
Row = dict[str, float]


@dataclass(frozen=True)
class Facts:
    """What ``facts.json`` says: how far the run is, as in ``Progress``, which run it is, and
    the sizes of the files in bytes."""

    epoch: int
    step: int
    rows: list
    identity: dict
    files: dict = field(default_factory=dict)
    format: int = FORMAT


def step_path(folder: str | Path, step: int) -> Path:
    return Path(folder, f"step-{step:08d}")


def steps(folder: str | Path) -> list[tuple[int, Path]]:
    """(step, path) of all that is named like a checkpoint, the newest first."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    found = [int(name[5:]) for name in names if re.fullmatch(r"step-\d{8,18}", name)]
    return [(step, step_path(folder, step)) for step in sorted(found, reverse=True)]


class Stored(NamedTuple):
    """What is in a whole checkpoint; ``ranks`` are the tensors that each rank gave."""

    path: Path
    facts: Facts
    ranks: list[State]

    def of(self, kind: str, rank: int | None = None) -> State:
        """Tensors named ``kind/NAME`` by NAME, of a rank, or each from the first that gave it."""
        return of_kind(kind, ChainMap(*self.ranks) if rank is None else self.ranks[rank])

    def by_rank(self, kind: str) -> list[State]:
        return [of_kind(kind, tensors) for tensors in self.ranks]


def read(path: Path) -> Stored:
    """Read a checkpoint; ValueError says what is wrong with one: damaged, forged, ..."""
    try:
        if path.is_symlink():
            raise ValueError("it is a link, and runs make folders")
        with open(os.open(path / FACTS, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            found = json.load(file)
        if (kind := found.get("format")) != FORMAT:
            raise ValueError(f"its format is {kind}, and this version of labkit reads {FORMAT}")
        facts, names = Facts(**found), [_file(rank) for rank in range(len(found["files"]))]
        if not (
            all(isinstance(found[one.name], one.type) for one in fields(Facts))  # type: ignore
            and len(facts.rows) == facts.epoch
            and facts.step >= 0
            and all(isinstance(v, float) for row in facts.rows for v in row.values())
            and names
        ):
            raise ValueError(f"{FACTS} does not describe this checkpoint")
        for name in names:
            info, size = (path / name).lstat(), facts.files[name]
            if not stat.S_ISREG(info.st_mode) or info.st_size != size:
                raise ValueError(f"{name} has {info.st_size} bytes, {size} were written to a file")
        stored = Stored(path, facts, [load_file(path / name) for name in names])
        if not all(rank.keys() >= _EACH for rank in stored.ranks):
            raise ValueError("a rank's file lacks its progress")
        common(stored.by_rank("kept"))
        return stored
    except (
        *(OSError, SafetensorError, ValueError, TypeError),
        *(KeyError, AttributeError, RecursionError),
    ) as error:
        why = f"{type(error).__name__}: {error}".removeprefix("ValueError: ")
        raise ValueError(f"{path.name}: {why}") from None


def newest(folder: str | Path) -> tuple[Stored | None, list[str]]:
    """The newest whole checkpoint, and what is wrong with each newer one; nothing is changed."""
    skipped = []
    for _, path in steps(folder):
        try:
            return read(path), skipped
        except ValueError as error:
            skipped.append(str(error))
    return None, skipped


def save(comm: Comm, path: Path, facts: Facts, tensors: Mapping[str, Tensor]) -> None:
    """Write this rank's part of a checkpoint; a collective call. On rank 0 it returns when all is.

    OutputError on a rank that cannot write; the others then lose their peer.
    """
    part = path.with_name(f".{path.name}.part")
    # Copies: safetensors refuses two tensors in the same memory, such as tied parameters.
    copies = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    try:
        if comm.rank == 0:
            part.mkdir(parents=True)
        comm.barrier()
        save_file(copies, part / _file(comm.rank))
        comm.barrier()
        if comm.rank == 0:
            names = map(_file, range(comm.world_size))
            files = {name: (part / name).stat().st_size for name in names}
            (part / FACTS).write_text(json.dumps(asdict(facts) | {"files": files}))
            if os.path.lexists(path):
                # A damaged one, from which the run did not go on: it is not ours to remove.
                os.rename(path, f"{path}.old-{secrets.token_hex(4)}")
            os.rename(part, path)
            # The two newest stay.
            for _, old in steps(path.parent)[2:]:
                shutil.rmtree(old, ignore_errors=True)
    except ConnectionError:
        raise
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise OutputError(f"cannot write a checkpoint to {path.parent}: {why}") from None


def remove_unfinished(folder: str | None) -> None:
    """Remove what ranks that were ended have left."""
    for path in Path(folder).glob(".step-*.part") if folder else ():
        shutil.rmtree(path, ignore_errors=True)


def _file(rank: int) -> str:
    return f"rank{rank}.safetensors"


def identity(config: RunConfig, own: Own, work: Work, model: nn.Module) -> dict[str, Any]:
    """What must be as it was for another run to go on, by names, as JSON has it."""
    found = {name: value for name, value in asdict(config).items() if name not in _FREE}
    # Which devices they are does not matter.
    found["devices"] = len((config.devices or "").split(","))
    # The same part may have been given as an object or by its path.
    found |= {name: "own" for name in PARTS if getattr(own, name) is not None}
    if config.lr_schedule == "cosine":
        found["epochs"] = config.epochs
    found |= {f"model: {n}": list(p.shape) for n, p in model.named_parameters()}
    return found | {"samples": len(work.train)}


# The checkpoint from which a run goes on, if any, and this in words if it was asked for.
Start = tuple[Path | None, str]


def find_start(config: RunConfig, own: Own, strategy: Strategy, work: Work) -> Start:
    """Where the run begins: with ``resume``, from the newest whole checkpoint. Only reads.

    ValueError if nobody has asked to resume what is there, none of it is whole, or this run
    differs from the one that has written it.
    """
    if (folder := config.checkpoint_dir) is None:
        return None, ""
    if strategy.no_checkpoint:
        raise ValueError(f"leave checkpoint_dir out: {strategy.no_checkpoint}")
    names = [path.name for _, path in steps(folder)]
    if names and not config.resume:
        raise ValueError(
            f"{folder} has checkpoints already, the newest {names[0]}: choose resume to continue "
            "their run, or another checkpoint_dir for a new one"
        )
    stored, skipped = newest(folder)
    if stored is None and names:
        raise ValueError(
            f"no checkpoint in {folder} is whole: {'; '.join(skipped)}. They are as they were: "
            "choose another checkpoint_dir to begin again"
        )
    if stored is None:
        return None, f"no checkpoint in {folder} yet: the run begins" * config.resume
    path, facts, _ = stored
    here = identity(config, own, work, work.make_model())
    differ, moved = _differences(facts.identity, here)
    if facts.epoch + bool(facts.step) > config.epochs:
        differ.append(f"{facts.epoch} epochs and {facts.step} steps done, {config.epochs} here")
    for rank in range(len(stored.ranks)) if moved and not differ else ():
        if "residual" in stored.of("own", rank):
            why = "each rank has gradients that compress topk has not sent yet"
        elif stored.of("progress", rank)["draws"]:
            why = f"rank {rank} has drawn random numbers in its steps, as for dropout"
        else:
            continue
        differ = [f"{', '.join(moved)}: {why}"]
    _, differing = common(stored.by_rank("kept"))
    if moved and differing and not differ:
        why = f"each rank has its own numbers of {' and '.join(differing)}"
        differ = [f"{', '.join(moved)}: {why}"]
    if differ:
        raise ValueError(
            f"cannot continue from {path}: {'; '.join(differ)}. Next step: resume with the "
            "settings there, or choose another checkpoint_dir for a new run"
        )
    note = (
        f"continues from {path.name} in {folder}, after {facts.epoch} of {config.epochs} epochs "
        f"and {facts.step} steps; seconds of the epoch and bytes are those since then"
    )
    return path, "; ".join([*(f"skipped {one}" for one in skipped), note])


def _differences(there: dict[str, Any], here: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What differs between two identities, and what of the arrangement, in words."""
    words = {
        name: f"{name} {there.get(name, 'missing')} there, {here.get(name, 'missing')} here"
        for name in {**there, **here}
        if there.get(name) != here.get(name)
    }
    moved = [words.pop(name) for name in _ARRANGEMENT if name in words]
    return list(words.values())[:5], moved


@dataclass
class Progress:
    """How far a run is, on one rank.

    Attributes:
        sums: in the epoch under way, float64 [5]: this rank's losses, its right predictions and of
            how many, after how many steps the losses' sum was finite, and the losses' weight.
        epoch, step: complete epochs, and steps of the one under way; ``rows`` of the former.
        seconds, sent: of training in the epoch; messages and bytes by this rank while it trained.
    """

    sums: Tensor
    epoch: int = 0
    step: int = 0
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    sent: list[int] = field(default_factory=list)


class Checkpoints:
    """The checkpoints of a run on one rank: ``facts`` are its ``identity``, ``steps`` an epoch's.

    The ``strategy`` is set up.
    """

    def __init__(
        self,
        config: RunConfig,
        strategy: Strategy,
        facts: dict[str, Any],
        steps: int,
        progress: Progress,
        work: Work,
    ):
        self.config, self.strategy, self.facts = config, strategy, facts
        self.kept = Kept(strategy.optimizer, work.loss.loss, work.train.dataset)
        self.steps, self.progress = steps, progress
        self._first = self._random_states()
        if strategy.comm.rank == 0:
            remove_unfinished(config.checkpoint_dir)

    @property
    def done(self) -> int:
        """Steps so far, in all epochs."""
        return self.progress.epoch * self.steps + self.progress.step

    def is_due(self) -> bool:
        """Whether to save after this step, or this epoch."""
        every, is_last = self.config.checkpoint_every, self.progress.epoch == self.config.epochs
        if every and self.done % every == 0:
            return True
        return self.progress.step == 0 and (not every or is_last)

    def save(self) -> None:
        """Save a checkpoint; a collective call."""
        strategy, progress = self.strategy, self.progress
        with strategy.comm.span("checkpoint"):
            state, now = strategy.state(), self._random_states()
            schedule, scaler = schedule_of(strategy.optimizer), getattr(strategy, "scaler", None)
            numbers = {
                # A rank begins with the same states whenever it is started.
                "progress/draws": any(not torch.equal(now[n], self._first[n]) for n in now),
                "progress/updates": schedule.update if schedule else -1,
            }
            values = scaler.state_dict() if scaler else {}
            numbers |= {f"scaler/{name}": value for name, value in values.items()}
            state |= {name: torch.tensor(value) for name, value in numbers.items()}
            state |= named("random", now) | {"progress/sums": progress.sums}
            state |= named("kept", self.kept.state())
            facts = Facts(progress.epoch, progress.step, progress.rows, self.facts)
            path = step_path(self.config.checkpoint_dir or "", self.done)
            save(strategy.comm, path, facts, state)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint, which ``find_start`` has found to fit this run."""
        stored, strategy, progress = read(path), self.strategy, self.progress
        facts, rank = stored.facts, strategy.comm.rank
        progress.epoch, progress.step, progress.rows = facts.epoch, facts.step, facts.rows
        # What a rehearsal has counted was none of the run's samples.
        strategy.counted()
        strategy.counted_weight()
        is_same = not _differences(facts.identity, self.facts)[1]
        state: State = {}
        for kind in ("model", "optimizer", "number"):
            state |= named(kind, stored.of(kind))
        if is_same:
            state |= named("own", stored.of("own", rank))
        strategy.load_state(state)
        by_rank, kept = stored.by_rank("progress"), stored.by_rank("kept")
        self.kept.load(kept[rank] if is_same else common(kept)[0])
        if schedule := schedule_of(strategy.optimizer):
            schedule.update = max(int(numbers["updates"]) for numbers in by_rank)
        if (values := stored.of("scaler")) and getattr(strategy, "scaler", None) is not None:
            strategy.scaler.load_state_dict({name: one.item() for name, one in values.items()})
        # The sums of other ranks than there are now go to rank 0.
        for numbers in [by_rank[rank]] if is_same else by_rank * (rank == 0):
            progress.sums += numbers["sums"].to(progress.sums.device)
        progress.sums[3] = facts.step
        if is_same:
            states = stored.of("random", rank)
            torch.set_rng_state(states["cpu"])
            set_python_random(states)
            if strategy.comm.device.type == "cuda" and "cuda" in states:
                torch.cuda.set_rng_state(states["cuda"], strategy.comm.device)

    def _random_states(self) -> State:
        device = self.strategy.comm.device
        states = {"cpu": torch.get_rng_state()} | python_random()
        if device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(device)
        return states


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
