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
``scaler/NAME``.
"""

import json
import os
import re
import secrets
import shutil
import stat
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from labkit.engine.comm.comm import Comm
from labkit.engine.errors import OutputError
from labkit.strategies.saved_state import State, of_kind
from labkit.training.kept import common

FACTS = "facts.json"
FORMAT = 7
# In the file of every rank.
_IN_EVERY_FILE = {"random/cpu", "random/python", "random/numpy", "kept/numbers"}
_IN_EVERY_FILE |= {"progress/sums", "progress/draws", "progress/updates"}
# Raised by values that are not those of a checkpoint.
_WRONG_VALUES = (TypeError, KeyError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Facts:
    """The content of ``facts.json``: how far the run is, as in ``Progress``, which run it is, and
    the sizes of the files in bytes."""

    epoch: int
    step: int
    rows: list
    identity: dict
    files: dict = field(default_factory=dict)
    format: int = FORMAT


class Stored(NamedTuple):
    """The content of a whole checkpoint; ``ranks`` are the tensors that each rank gave."""

    path: Path
    facts: Facts
    ranks: list[State]

    def of(self, kind: str, rank: int | None = None) -> State:
        """Tensors named ``kind/NAME`` by NAME, of a rank, or each from the first that gave it."""
        if rank is None:
            return of_kind(kind, ChainMap(*self.ranks))
        return of_kind(kind, self.ranks[rank])

    def by_rank(self, kind: str) -> list[State]:
        return [of_kind(kind, tensors) for tensors in self.ranks]


def step_path(folder: str | Path, step: int) -> Path:
    return Path(folder, f"step-{step:08d}")


def steps(folder: str | Path) -> list[tuple[int, Path]]:
    """(step, path) of all that is named like a checkpoint, the newest first."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    names = [name for name in names if re.fullmatch(r"step-\d{8,18}", name)]
    numbers = sorted((int(name.removeprefix("step-")) for name in names), reverse=True)
    return [(step, step_path(folder, step)) for step in numbers]


def newest(folder: str | Path) -> tuple[Stored | None, list[str]]:
    """The newest whole checkpoint, and what is wrong with each newer one; nothing is changed."""
    skipped = []
    for _, path in steps(folder):
        try:
            return read(path), skipped
        except ValueError as error:
            skipped.append(str(error))
    return None, skipped


def read(path: Path) -> Stored:
    """Read a checkpoint; ValueError says what is wrong with one: damaged, forged, ..."""
    try:
        facts = _read_facts(path)
        names = [_file(rank) for rank in range(len(facts.files))]
        for name in names:
            size = facts.files[name]
            info = (path / name).lstat()
            if not stat.S_ISREG(info.st_mode) or info.st_size != size:
                raise ValueError(f"{name} has {info.st_size} bytes, {size} were written to a file")
        ranks = []
        for name in names:
            tensors = load_file(path / name)
            if not tensors.keys() >= _IN_EVERY_FILE:
                raise ValueError("a rank's file lacks its progress")
            ranks.append(tensors)
        stored = Stored(path, facts, ranks)
        # Numbers that cannot be read are refused here, not in the middle of a start.
        common(stored.by_rank("kept"))
        return stored
    except (OSError, SafetensorError, ValueError, *_WRONG_VALUES) as error:
        reason = f"{type(error).__name__}: {error}".removeprefix("ValueError: ")
        raise ValueError(f"{path.name}: {reason}") from None


def _read_facts(path: Path) -> Facts:
    """Read the facts of a checkpoint, and check their form."""
    if path.is_symlink():
        raise ValueError("it is a link, and runs make folders")
    # A pipe of this name is not waited for.
    descriptor = os.open(path / FACTS, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor) as file:
        values = json.load(file)
    number = values.get("format")
    if number != FORMAT:
        raise ValueError(f"its format is {number}, and this version of labkit reads {FORMAT}")
    facts = Facts(**values)
    has_types = all(isinstance(values[f.name], f.type) for f in fields(Facts))  # type: ignore
    numbers: list[object] = []
    for row in facts.rows:
        numbers += row.values()
    if not (
        has_types
        and facts.files
        and facts.step >= 0
        and len(facts.rows) == facts.epoch
        and all(isinstance(number, float) for number in numbers)
    ):
        raise ValueError(f"{FACTS} does not describe this checkpoint")
    return facts


def save(comm: Comm, path: Path, facts: Facts, tensors: Mapping[str, Tensor]) -> None:
    """Write this rank's part of a checkpoint; a collective call. On rank 0 it returns when all is.

    OutputError on a rank that cannot write; the others then lose their peer.
    """
    part = path.with_name(f".{path.name}.part")
    # Copies: safetensors refuses two tensors in the same memory, such as tied parameters.
    copies = {}
    for name, tensor in tensors.items():
        copies[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    try:
        if comm.rank == 0:
            part.mkdir(parents=True)
        comm.barrier()
        save_file(copies, part / _file(comm.rank))
        comm.barrier()
        if comm.rank == 0:
            files = {}
            for rank in range(comm.world_size):
                files[_file(rank)] = (part / _file(rank)).stat().st_size
            (part / FACTS).write_text(json.dumps(asdict(facts) | {"files": files}))
            if os.path.lexists(path):
                # A damaged one, from which the run did not go on: it is not ours to remove.
                os.rename(path, f"{path}.old-{secrets.token_hex(4)}")
            os.rename(part, path)
            # The two newest stay.
            for _, old_path in steps(path.parent)[2:]:
                shutil.rmtree(old_path, ignore_errors=True)
    except ConnectionError:
        raise
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"cannot write a checkpoint to {path.parent}: {reason}") from None


def remove_unfinished(folder: str | None) -> None:
    """Remove what ranks that were ended have left."""
    if folder:
        for path in Path(folder).glob(".step-*.part"):
            shutil.rmtree(path, ignore_errors=True)


def _file(rank: int) -> str:
    return f"rank{rank}.safetensors"
