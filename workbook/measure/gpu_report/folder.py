"""The folder of a report: a part for each step, which appears when the step has ended."""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labkit.files import write_atomically

_UNFINISHED = ".unfinished-"
DONE, FAILED, OUT_OF_TIME = "done", "failed", "out of time"
# The status of a step without a part in the folder.
SKIPPED, NOT_REACHED = "skipped", "not reached"


@dataclass(frozen=True)
class State:
    """How a step stands.

    Attributes:
        status: ``done``, ``failed``, ``out of time``, ``skipped`` or ``not reached``.
        seconds: that it took.
        key: what its results depend on: command, hardware, versions, code.
        told: why it is not done, in one line.
        ended: date and time, UTC.
    """

    name: str
    title: str
    status: str
    seconds: float = 0.0
    key: str = ""
    told: str = ""
    ended: str = ""


class Folder:
    """The report's folder at ``path``, made if it is absent.

    Raises:
        ValueError: it cannot be written, or holds other files.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path).resolve()
        self.steps = self.path / "steps"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            known = self.steps.exists() or not any(self.path.iterdir())
        except OSError as error:
            raise ValueError(f"--out {path}: {error.strerror}") from None
        if not known:
            raise ValueError(
                f"--out {path} is not empty and holds no report: name a new folder, or that of an "
                "earlier gpu-report, which is then continued"
            )
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise ValueError(f"--out {path}: no permission to write to it")

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep other reports out of the folder; remove what an earlier one could not finish.

        Raises:
            ValueError: another report is being written to it.
        """
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ValueError(
                f"another gpu-report is writing to {self.path}: wait for it, or name another "
                "folder"
            ) from None
        try:
            self.steps.mkdir(exist_ok=True)
            for left in self.path.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(left, ignore_errors=True)
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def unfinished(self) -> Iterator[Path]:
        """A folder for the files of a step; ``keep`` makes it a part, else it disappears."""
        part = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.path))
        try:
            yield part
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def keep(self, part: Path, state: State) -> None:
        """Put a step's files in place of those of an earlier run."""
        write_atomically(part / "step.json", json.dumps(asdict(state), indent=1) + "\n")
        part.chmod(0o755)
        place = self.steps / state.name
        if place.exists():
            place.rename(part.with_name(f"{part.name}-old"))
        part.rename(place)
        shutil.rmtree(part.with_name(f"{part.name}-old"), ignore_errors=True)

    def state(self, name: str) -> State | None:
        """How a step stands; None if it has not ended yet, or its file is not readable."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return State(**json.loads((self.steps / name / "step.json").read_text()))
        return None

    def result(self, name: str) -> dict[str, Any]:
        """The JSON that a step has written; empty if there is none."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.steps / name / "result.json").read_text())
        return {}

    def log(self, name: str) -> str:
        """What a step has printed."""
        with contextlib.suppress(OSError):
            return (self.steps / name / "log.txt").read_text(errors="replace")
        return ""
