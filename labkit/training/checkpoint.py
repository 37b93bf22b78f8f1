"""Checkpoints on the disk: one folder each, with a safetensors file per rank and a JSON of facts.

    step-00000120/           after 120 steps
        rank0.safetensors    what rank 0 gave; its numbers are JSON in the file's metadata
        facts.json           written last: the settings, how far the run is, the files' sizes
    .step-00000140.part/     being written, or left by a run that was killed
    best -> step-00000120    the checkpoint of the best epoch

Each rank copies its tensors and writes the copies in a thread while the training goes on. When the
files of all ranks are there, rank 0 adds the facts and renames the folder. Reading executes
nothing, and follows no links.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from labkit.errors import OutputError

FACTS, BEST, PART, FORMAT = "facts.json", "best", ".part", 2
# How many of the newest checkpoints stay, beside the best.
_KEEP = 2
_NAME = re.compile(r"step-(\d{8,18})")
_NUMBERS = "labkit"
_POLL_S = 0.01
# Ranks whose launcher was killed notice it a moment later, and hold the folder until then.
_PATIENCE_S = 10.0
_ROW = ("loss", "seconds", "test_accuracy")


class NotWholeError(ValueError):
    """A checkpoint is damaged, incomplete, or not one that this version of labkit writes."""


@dataclass(frozen=True)
class Facts:
    """What ``facts.json`` says; made from a file only by ``read_facts``, which checks it.

    Attributes:
        epoch, step: complete epochs, and steps of the one under way.
        steps: of an epoch.
        rows: what the complete epochs have reported.
        config, model, data, optimizer: of the run, see ``resume.facts_of``.
        files: by name, their sizes in bytes.
    """

    epoch: int
    step: int
    steps: int
    rows: list
    config: dict
    model: dict
    data: dict
    optimizer: dict
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
        NotWholeError: they are missing, damaged, forged, or of another format.
    """
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(path / FACTS, flags)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise NotWholeError(f"{FACTS} is not a file")
            found = json.load(file)
    except FileNotFoundError:
        why = f"no {FACTS}: it is incomplete, or of another version of labkit"
        raise NotWholeError(why) from None
    except OSError as error:
        raise NotWholeError(f"{FACTS} cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise NotWholeError(f"{FACTS} is damaged: it is not JSON") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        told = found.get("format") if isinstance(found, dict) else None
        raise NotWholeError(f"its format is {told!r}, and this version of labkit reads {FORMAT}")
    for field in fields(Facts):
        if not isinstance(found.get(field.name), field.type):  # type: ignore[arg-type]
            raise NotWholeError(f"{FACTS} is damaged: no valid {field.name}")
    facts = Facts(**{field.name: found[field.name] for field in fields(Facts)})
    names = [_file(rank) for rank in range(len(facts.files))]
    fits = {
        "epoch and step": facts.epoch >= 0 and 0 <= facts.step < facts.steps,
        "step of its name": path.name == step_path("", facts.done).name,
        "rows": len(facts.rows) == facts.epoch and all(map(_is_row, facts.rows)),
        "files": bool(names) and set(names) == facts.files.keys(),
    }
    if wrong := [name for name, is_right in fits.items() if not is_right]:
        raise NotWholeError(f"{FACTS} is damaged: no valid {', '.join(wrong)}")
    return facts


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and all(isinstance(row.get(n), int | float) for n in _ROW)


def why_not_whole(path: Path) -> str:
    """What is wrong with a checkpoint, by names and sizes; empty if it is whole."""
    try:
        if path.is_symlink():
            return "it is a link, and runs make folders"
        for name, size in read_facts(path).files.items():
            found = (path / name).lstat()
            if not stat.S_ISREG(found.st_mode):
                return f"{name} is not a file"
            if found.st_size != size:
                return f"{name} has {found.st_size} bytes, and {size} were written"
    except NotWholeError as error:
        return str(error)
    except OSError as error:
        return f"{os.path.basename(error.filename or path)} cannot be read: {error.strerror}"
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


class Writer:
    """Writes one rank's part of checkpoints, one at a time; on rank 0 it also makes them whole.

    Raises:
        OutputError: the folder cannot be used, or another run writes there.
    """

    def __init__(self, folder: str | Path, rank: int, world_size: int):
        self.folder, self.rank, self.world_size = Path(folder), rank, world_size
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._is_given_up = threading.Event()
        if rank == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock = _locked(self.folder, _PATIENCE_S)
                _clean(self.folder)
            except OSError as error:
                why = error.strerror or error
                raise OutputError(f"cannot write checkpoints to {folder}: {why}") from None

    def save(
        self,
        facts: Facts,
        tensors: Mapping[str, Tensor],
        numbers: Mapping[str, Any],
        best: bool = False,
    ) -> None:
        """Copy the tensors, and write them in a thread.

        Raises:
            OutputError: the checkpoint before could not be written.
        """
        self.wait()
        copies = {
            name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, tensor in tensors.items()
        }
        work = facts, copies, json.dumps(numbers), best
        self._thread = threading.Thread(target=self._write, args=work, daemon=True)
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until this rank's part of the last checkpoint, on rank 0 all of it, is written."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise OutputError(f"cannot write a checkpoint to {self.folder}: {self._error}")

    def close(self, failed: bool) -> None:
        """Wait for the last checkpoint; after a failure of the run, give it up."""
        if failed:
            self._is_given_up.set()
        try:
            if not failed:
                self.wait()
        finally:
            if self.rank == 0:
                os.close(self._lock)

    def _write(self, facts: Facts, tensors: dict[str, Tensor], numbers: str, best: bool) -> None:
        path = step_path(self.folder, facts.done)
        part = path.with_name(f".{path.name}{PART}")
        try:
            part.mkdir(exist_ok=True)
            if part.is_symlink():
                raise OSError(f"{part} is a link")
            file = part / _file(self.rank)
            save_file(tensors, f"{file}.new", {_NUMBERS: numbers})
            _sync(f"{file}.new")
            os.rename(f"{file}.new", file)
            if self.rank == 0:
                self._complete(part, path, facts, best)
        except (OSError, SafetensorError) as error:
            self._error = error

    def _complete(self, part: Path, path: Path, facts: Facts, best: bool) -> None:
        """When all ranks have written: add the facts, rename, remove what is too old."""
        names = [_file(rank) for rank in range(self.world_size)]
        while not all((part / name).exists() for name in names):
            if self._is_given_up.wait(_POLL_S):
                return
        sizes = {name: (part / name).stat().st_size for name in names}
        with open(part / FACTS, "x") as file:
            json.dump(asdict(facts) | {"files": sizes}, file)
        _sync(part / FACTS)
        _sync(part)
        if os.path.lexists(path):
            # A damaged one, from which the run did not go on: it is not ours to remove.
            os.rename(path, f"{path}.old-{secrets.token_hex(4)}")
        os.rename(part, path)
        if best:
            link = self.folder / f".{BEST}-{secrets.token_hex(8)}{PART}"
            os.symlink(path.name, link)
            os.replace(link, self.folder / BEST)
        _sync(self.folder)
        stays = {BEST: ""}
        with contextlib.suppress(OSError):
            stays = {BEST: os.readlink(self.folder / BEST)}
        for _, old in steps(self.folder)[_KEEP:]:
            if old.name != stays[BEST]:
                _remove(old)


def remove_unfinished(folder: str | None) -> None:
    """Remove what ranks that were ended have left, unless another run writes there now."""
    if folder is not None and os.path.isdir(folder):
        with contextlib.suppress(OSError):
            lock = _locked(Path(folder), 0)
            try:
                _clean(Path(folder))
            finally:
                os.close(lock)


def _file(rank: int) -> str:
    return f"rank{rank}.safetensors"


def _locked(folder: Path, patience_s: float) -> int:
    """The open folder, which this process alone has locked; the lock ends with the process."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    until_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > until_s:
                os.close(lock)
                raise OSError("another run is writing there: give this run its own") from None
            time.sleep(10 * _POLL_S)
        except OSError:  # a file system without locks
            return lock


def _clean(folder: Path) -> None:
    for name in os.listdir(folder):
        if name.endswith(PART) and name.startswith((".step-", f".{BEST}-")):
            _remove(folder / name)


def _remove(path: Path) -> None:
    """Remove a checkpoint, but nothing else that somebody has put into its folder."""
    with contextlib.suppress(OSError):
        if path.is_symlink():
            path.unlink()
            return
        # First the facts: without them it is no checkpoint, should this be cut short.
        for file in [path / FACTS, *path.glob("rank*.safetensors*")]:
            file.unlink(missing_ok=True)
        path.rmdir()


def _sync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
