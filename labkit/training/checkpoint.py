"""Checkpoints on the disk: one folder each, with a safetensors file per rank and a JSON of facts.

    step-00000120/           after 120 steps
        rank0.safetensors    what rank 0 gave; its numbers are JSON in the file's metadata
        facts.json           written last: how far the run is, what it is, the files' sizes
    .step-00000140.part/     being written, or left by a run that was killed
    best -> step-00000120    the checkpoint of the best epoch

When the files of all ranks are there, rank 0 adds the facts and renames the folder. Nothing is
flushed to the disk: what a machine that loses power has not written yet is too short, or no JSON,
and then the checkpoint before it counts. Reading executes nothing, and follows no links.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from labkit.comm.comm import Comm
from labkit.errors import OutputError

FACTS, BEST, PART, FORMAT = "facts.json", "best", ".part", 3
# How many of the newest checkpoints stay, beside the best.
_KEEP = 2
_NAME = re.compile(r"step-(\d{8,18})")
_NUMBERS = "labkit"
_ROW = ("loss", "seconds", "test_accuracy")


@dataclass(frozen=True)
class Facts:
    """What ``facts.json`` says; made from a file only by ``read_facts``, which checks it.

    Attributes:
        epoch, step: complete epochs, and steps of the one under way.
        steps: of an epoch.
        rows: what the complete epochs have reported.
        identity, arrangement: of the run, see ``labkit.training.resume``.
        files: by name, their sizes in bytes.
    """

    epoch: int
    step: int
    steps: int
    rows: list
    identity: dict
    arrangement: dict
    files: dict
    format: int = FORMAT

    @property
    def done(self) -> int:
        """Steps so far, in all epochs."""
        return self.epoch * self.steps + self.step


def step_path(folder: str | Path, step: int) -> Path:
    return Path(folder, f"step-{step:08d}")


def steps(folder: str | Path) -> list[tuple[int, Path]]:
    """(step, path) of all that is named like a checkpoint, the newest first."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    found = [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]
    return [(step, step_path(folder, step)) for step in sorted(found, reverse=True)]


def read_facts(path: Path) -> Facts:
    """The checked facts of a checkpoint.

    Raises:
        ValueError: they are missing, damaged, forged, or of another format.
    """
    try:
        with open(os.open(path / FACTS, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            found = json.load(file)
        if (kind := found.get("format")) != FORMAT:
            raise ValueError(f"its format is {kind!r}, and this version of labkit reads {FORMAT}")
        facts = Facts(**found)
        types = {field.name: field.type for field in fields(Facts)}
        names = {_file(rank) for rank in range(len(facts.files))}
        if not (
            all(isinstance(found[name], kind) for name, kind in types.items())  # type: ignore
            and facts.epoch >= 0
            and 0 <= facts.step < facts.steps
            and path.name == step_path("", facts.done).name
            and len(facts.rows) == facts.epoch
            and all(isinstance(row.get(name), int | float) for row in facts.rows for name in _ROW)
            and names == facts.files.keys() != set()
        ):
            raise ValueError("it does not describe this checkpoint")
        return facts
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}".removeprefix("ValueError: ")
        raise ValueError(f"{FACTS} is missing or damaged ({why})") from None


def why_not_whole(path: Path) -> str:
    """What is wrong with a checkpoint, by names and sizes; empty if it is whole."""
    if path.is_symlink():
        return "it is a link, and runs make folders"
    try:
        for name, size in read_facts(path).files.items():
            found = (path / name).lstat()
            if not stat.S_ISREG(found.st_mode):
                return f"{name} is not a file"
            if found.st_size != size:
                return f"{name} has {found.st_size} bytes, and {size} were written"
    except OSError as error:
        return f"{os.path.basename(error.filename or path)} cannot be read: {error.strerror}"
    except ValueError as error:
        return str(error)
    return ""


class Found(NamedTuple):
    """The newest whole checkpoint, if any, and what is wrong with each newer one."""

    path: Path | None
    skipped: list[str]


def newest(folder: str | Path) -> Found:
    """The newest whole checkpoint in a folder; nothing is changed."""
    skipped = []
    for _, path in steps(folder):
        if not (why := why_not_whole(path)):
            return Found(path, skipped)
        skipped.append(f"{path.name}: {why}")
    return Found(None, skipped)


class Stored:
    """The tensors and numbers of a whole checkpoint; a tensor is read when it is asked for.

    Raises:
        ValueError: a file is damaged inside.
    """

    def __init__(self, path: Path):
        self.path, self.facts = path, read_facts(path)
        try:
            self.ranks = [
                safe_open(path / _file(rank), framework="pt")
                for rank in range(len(self.facts.files))
            ]
            self.numbers = [json.loads(file.metadata()[_NUMBERS]) for file in self.ranks]
        except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
            raise ValueError(f"checkpoint {path} is damaged: {error}") from None

    def of_all(self, kind: str) -> dict[str, Tensor]:
        """The tensors named ``kind/NAME`` by NAME, each from the lowest rank that gave it."""
        found: dict[str, Tensor] = {}
        for rank in range(len(self.ranks)):
            found = self.of_rank(rank, kind) | found
        return found

    def of_rank(self, rank: int, kind: str) -> dict[str, Tensor]:
        """As ``of_all``, of one rank's file."""
        file, prefix = self.ranks[rank], f"{kind}/"
        names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
        return {name.removeprefix(prefix): file.get_tensor(name) for name in names}


def save(
    comm: Comm,
    folder: str | Path,
    facts: Facts,
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, Any],
    best: bool = False,
) -> None:
    """Write this rank's part of a checkpoint; a collective call. On rank 0 it returns when all is.

    Raises:
        OutputError: this rank cannot write; the others then lose their peer.
    """
    path = step_path(folder, facts.done)
    part = path.with_name(f".{path.name}{PART}")
    separate: dict[str, Tensor] = {}
    places = set()
    for name, tensor in tensors.items():
        # safetensors refuses two tensors in the same memory, such as tied parameters.
        is_shared = (place := tensor.data_ptr()) in places
        separate[name] = tensor.detach().clone() if is_shared else tensor.detach().contiguous()
        places.add(place)
    if comm.rank == 0:
        with _says_where(folder):
            part.mkdir(parents=True)
    comm.barrier()
    with _says_where(folder):
        save_file(separate, part / _file(comm.rank), {_NUMBERS: json.dumps(numbers)})
    comm.barrier()
    if comm.rank == 0:
        with _says_where(folder):
            _complete(part, path, facts, comm.world_size, best)


def _complete(part: Path, path: Path, facts: Facts, world_size: int, best: bool) -> None:
    """When all ranks have written: add the facts, rename, remove what is too old."""
    names = [_file(rank) for rank in range(world_size)]
    sizes = {name: (part / name).stat().st_size for name in names}
    (part / FACTS).write_text(json.dumps(asdict(facts) | {"files": sizes}))
    if os.path.lexists(path):
        # A damaged one, from which the run did not go on: it is not ours to remove.
        os.rename(path, f"{path}.old-{secrets.token_hex(4)}")
    os.rename(part, path)
    link = path.with_name(BEST)
    if best:
        new = path.with_name(f".{BEST}-{secrets.token_hex(8)}{PART}")
        os.symlink(path.name, new)
        os.replace(new, link)
    best_name = os.readlink(link) if link.is_symlink() else ""
    for _, old in steps(path.parent)[_KEEP:]:
        if old.name != best_name:
            # Its own files, but nothing else that somebody has put there.
            for file in [old / FACTS, *old.glob("rank*.safetensors")]:
                file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                old.rmdir()


def remove_unfinished(folder: str | None) -> None:
    """Remove what ranks that were ended have left."""
    for path in Path(folder).glob(f".*{PART}") if folder else ():
        if path.name.startswith((".step-", f".{BEST}-")):
            with contextlib.suppress(OSError):
                path.unlink() if path.is_symlink() else shutil.rmtree(path)


def prepare(comm: Comm, folder: str) -> None:
    """Make the folder, without what an earlier run has left; a collective call."""
    if comm.rank == 0:
        with _says_where(folder):
            Path(folder).mkdir(parents=True, exist_ok=True)
            remove_unfinished(folder)
    comm.barrier()


@contextlib.contextmanager
def _says_where(folder: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise OutputError(f"cannot write a checkpoint to {folder}: {why}") from None


def _file(rank: int) -> str:
    return f"rank{rank}.safetensors"
