"""A learner's passed exercises and predictions, in one file outside the repository.

``LABKIT_PROGRESS`` names the file, or is ``off``; otherwise it is ``labkit/progress.json`` in
``XDG_DATA_HOME`` or ``~/.local/share``. Nothing is recorded by ranks, or with ``LABKIT_LIVE=0``
(the stored pages are run with it): then it lasts as long as the process.

Recording never raises: a file that cannot be read or written is reported once, and the lesson
goes on. Pages are names such as ``06_ring_all_reduce``; times are ISO 8601 strings, UTC.
"""

import json
import math
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock

from labkit.engine.files import user_folder, write_atomically
from workbook.notebook.pages import current_page, present_name

VERSION = 1
# A writer holds the lock for milliseconds; one that was stopped must not stop the lesson.
LOCK_S = 3.0
_HOW = "LABKIT_PROGRESS=FILE names another file, LABKIT_PROGRESS=off none"


@dataclass(frozen=True)
class Tried:
    """The attempts at one exercise. ``passed_at`` is None as long as none has passed."""

    status: str
    attempts: int
    first_at: str
    last_at: str
    passed_at: str | None


@dataclass(frozen=True)
class Predicted:
    """One prediction, and what was measured after it, first at ``measured_at``; in ``unit``."""

    quantity: str
    unit: str
    value: float
    predicted_at: str
    measured: float | None = None
    model: float | None = None
    measured_at: str | None = None

    @property
    def factor(self) -> float | None:
        """The factor by which it was off, in either direction; None where no factor can say it."""
        if self.measured is None or not 0 < self.value * self.measured < math.inf:
            return None
        return max(self.measured / self.value, self.value / self.measured)


@dataclass
class Record:
    """Exercises by page and name; predictions by page and key, the oldest of a key first."""

    exercises: dict[str, dict[str, Tried]] = field(default_factory=dict)
    predictions: dict[str, dict[str, list[Predicted]]] = field(default_factory=dict)


Change = Callable[[Record], None]
_reported_files: set[Path] = set()
# By file: the changes of this process that are not in it. Without a file, that is all of them.
_pending: dict[Path | None, list[Change]] = {}
# JupyterLab may run the handlers of a widget in another thread than the cells.
_lock = threading.RLock()


def progress_file() -> tuple[Path | None, str]:
    """Return the file in which progress is kept; or None, and why it is not kept."""
    named = os.environ.get("LABKIT_PROGRESS", "")
    if os.environ.get("LABKIT_LIVE") == "0" or os.environ.get("RANK"):
        return None, "it stores or tests pages (LABKIT_LIVE=0), or is a rank"
    if named.lower() == "off":
        return None, "LABKIT_PROGRESS=off is set"
    if named:
        return Path(named).expanduser().absolute(), ""
    return user_folder() / "progress.json", ""


def read() -> Record:
    """The present record: that of the file, with what could not be written to it."""
    path, _ = progress_file()
    with _lock:
        record = Record()
        if path is not None:
            try:
                record = _stored(path)
            except OSError as error:
                _say_once(path, f"progress cannot be read from {path}: {error}; {_HOW}")
        for change in _pending.get(path, ()):
            change(record)
        return record


def change(change: Change) -> None:
    """Make a change in the file, after those that could not be written before."""
    path, _ = progress_file()
    with _lock:
        pending = _pending.setdefault(path, [])
        pending.append(change)
        if path is None:
            return
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_S):
                record = _stored(path)
                for pending_change in pending:
                    pending_change(record)
                stored = {"version": VERSION, **asdict(record)}
                write_atomically(path, json.dumps(stored, indent=1) + "\n")
            pending.clear()
        except (OSError, ValueError) as error:
            _say_once(path, f"progress is not kept in {path}: {error}; {_HOW}")


def _say_once(about: Path, text: str) -> None:
    """Print a message on stderr, the first one about this file only."""
    if about not in _reported_files:
        _reported_files.add(about)
        print(f"labkit: {text}", file=sys.stderr)


def _stored(path: Path) -> Record:
    """The record in the file; a damaged file is renamed, and a new record is begun."""
    text = path.read_bytes().strip() if path.exists() else b""
    if not text:
        return Record()
    try:
        raw = json.loads(text)
        if raw["version"] != VERSION:
            raise ValueError(f"its version is {raw['version']!r}, and this labkit reads {VERSION}")
        record = Record()
        for page, attempts in raw["exercises"].items():
            of_page = record.exercises.setdefault(present_name(page), {})
            for name, tried in attempts.items():
                of_page[name] = Tried(**tried)
        for page, predictions_by_key in raw["predictions"].items():
            by_key = record.predictions.setdefault(present_name(page), {})
            for key, predictions in predictions_by_key.items():
                by_key[key] = [Predicted(**made) for made in predictions]
        return record
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        name = f"{path.stem}.damaged-{datetime.now():%Y%m%d-%H%M%S-%f}{path.suffix}"
        moved = path.rename(path.with_name(name))
        _say_once(moved, f"{path} is damaged ({error}): it is now {name}, a new one is begun")
        return Record()


def now() -> str:
    """The time as it is recorded: ISO 8601, UTC."""
    return datetime.now(UTC).isoformat()


def note_verdict(name: str, status: str, passed: bool) -> None:
    """Record one attempt at an exercise. An exercise once passed stays passed."""
    at = now()
    page = current_page()

    def add_attempt(record: Record) -> None:
        attempts = record.exercises.setdefault(page, {})
        old = attempts.get(name) or Tried(status, 0, at, at, None)
        new_status = status
        passed_at = old.passed_at
        if passed:
            passed_at = passed_at or at
        elif passed_at:
            new_status = old.status
        attempts[name] = Tried(new_status, old.attempts + 1, old.first_at, at, passed_at)

    change(add_attempt)


def note_prediction(page: str, key: str, predicted: Predicted | None) -> None:
    """Record a prediction in place of one not yet measured, or of the same; None removes one."""

    def put(record: Record) -> None:
        predictions = record.predictions.setdefault(page, {}).setdefault(key, [])
        if predictions:
            last = predictions[-1]
            is_same = predicted is not None and predicted.predicted_at == last.predicted_at
            if last.measured_at is None or is_same:
                predictions.pop()
        if predicted is not None:
            predictions.append(predicted)

    change(put)
