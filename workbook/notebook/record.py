"""What a learner has passed and predicted, kept in one file outside the repository.

``LABKIT_PROGRESS`` names the file, or is ``off``; otherwise it is ``labkit/progress.json`` in
``XDG_DATA_HOME`` or ``~/.local/share``. Nothing is recorded by ranks, by tests, in CI, or with
``LABKIT_LIVE=0``, as the stored pages are run: then it lasts as long as the process.

Recording never raises: a file that cannot be read or written is reported once, and the lesson
goes on.
"""

import math
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from labkit.runtime.preload import under_torchrun
from workbook.notebook.pages import current_page
from workbook.notebook.progress_file import (
    DamagedError,
    locked,
    read_or_set_aside,
    read_record,
    set_aside,
    write_record,
)
from workbook.notebook.record_format import Predicted, Record, Tried
from workbook.notebook.typed import scale_between

Change = Callable[[Record], None]
_HOW = "LABKIT_PROGRESS=FILE names another file, LABKIT_PROGRESS=off none"


class Store:
    """The record in one file, with the changes of this process that are not in it yet.

    Without a file, everything is such a change.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self._pending: list[Change] = []
        # JupyterLab may run the handlers of a widget in another thread than the cells.
        self._lock = threading.RLock()

    def read(self) -> Record:
        """The present record."""
        with self._lock:
            record = self._stored()
            for change in self._pending:
                change(record)
            return record

    def _stored(self) -> Record:
        if self.path is None:
            return Record()
        try:
            try:
                return read_record(self.path)
            except DamagedError:
                with locked(self.path):
                    return read_or_set_aside(self.path, say)
        except OSError as error:
            say_once(self.path, f"progress cannot be read from {self.path}: {error}; {_HOW}")
            return Record()

    def change(self, change: Change) -> None:
        """Make a change in the file, after those that could not be written before."""
        with self._lock:
            self._pending.append(change)
            if self.path is None:
                return
            try:
                with locked(self.path):
                    record = read_or_set_aside(self.path, say)
                    for one in self._pending:
                        one(record)
                    write_record(self.path, record)
                self._pending.clear()
            except (OSError, ValueError) as error:
                say_once(self.path, f"progress is not kept in {self.path}: {error}; {_HOW}")

    def reset(self) -> Path | None:
        """Begin a new record; the path to which the old file was moved, if there was one.

        Raises:
            OSError: it cannot be moved.
        """
        with self._lock:
            self._pending.clear()
            if self.path is None or not self.path.is_file():
                return None
            with locked(self.path):
                return set_aside(self.path, "reset")


_stores: dict[Path | None, Store] = {}
_said: set[Path | str] = set()


def say(text: str) -> None:
    """Print a message on stderr: a command's own output may be JSON."""
    print(f"labkit: {text}", file=sys.stderr)


def say_once(about: Path | str, text: str) -> None:
    """Print a message on stderr, the first one about this file only."""
    if about not in _said:
        _said.add(about)
        say(text)


def store() -> Store:
    """The store of this process: its file may change with the environment."""
    path, _ = progress_file()
    return _stores.setdefault(path, Store(path))


def progress_file() -> tuple[Path | None, str]:
    """Where progress is kept; or None, and why it is not kept."""
    named = os.environ.get("LABKIT_PROGRESS", "")
    if reason := _why_not(named):
        return None, reason
    home, folder = os.environ.get("HOME", ""), os.environ.get("XDG_DATA_HOME", "")
    if not os.path.isabs(folder):  # the XDG specification ignores relative ones
        folder = os.path.join(home, ".local", "share")
    path = Path(folder, "labkit", "progress.json")
    if named:
        path = Path(home, named[2:]) if named.startswith("~/") else Path(named).absolute()
    if path.is_absolute():
        return path, ""
    say_once("home", f"progress is not kept: HOME names no folder; {_HOW}")
    return None, "HOME names no folder"


def _why_not(named: str) -> str:
    """Why nothing is recorded, whatever file is named; empty if it is."""
    if os.environ.get("LABKIT_LIVE") == "0":
        return "LABKIT_LIVE=0 is set"
    if under_torchrun():
        return "this is a rank"
    if named.lower() == "off":
        return "LABKIT_PROGRESS=off is set"
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return "this is a test" if not named and (in_ci or "PYTEST_CURRENT_TEST" in os.environ) else ""


def now() -> str:
    """The time as it is recorded: ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def note_verdict(name: str, status: str, passed: bool) -> None:
    """Record one attempt at an exercise. An exercise once passed stays passed."""
    # A check never raises, whatever name a cell has given.
    at, page, name = now(), current_page(), str(name)

    def change(record: Record) -> None:
        of_page = record.exercises.setdefault(page, {})
        old = of_page.get(name) or Tried(status, 0, at, at, None)
        keeps = old.passed_at is not None and not passed
        of_page[name] = Tried(
            old.status if keeps else status,
            old.attempts + 1,
            old.first_at,
            at,
            old.passed_at or (at if passed else None),
        )

    store().change(change)


def predictions(page: str, key: str) -> list[Predicted]:
    """All predictions of one quantity, the oldest first."""
    return store().read().predictions.get(page, {}).get(key, [])


def note_prediction(page: str, key: str, made: Predicted | None, again: bool) -> None:
    """Record a prediction; it replaces one that has not been measured yet, None removes that one.

    One that has been measured is kept: with ``again`` the new one is added after it, and otherwise
    nothing changes.
    """

    def change(record: Record) -> None:
        _put(record, page, key, made, again)

    store().change(change)


def note_row(
    page: str, key: str, made: Predicted, measured: float, model: float | None
) -> Predicted:
    """Record a prediction with its measurement, and return what is recorded.

    The first measurement locks a prediction: if there is a locked one, ``made`` does not replace
    it, and it is measured again.
    """
    at = now()

    def change(record: Record) -> None:
        _put(record, page, key, made, False)
        all_of_it = record.predictions[page][key]
        last = all_of_it[-1]
        try:
            scale = scale_between(made.unit, last.unit)
        except ValueError:  # the page asks for something else since
            all_of_it.append(made)
            last, scale = made, 1.0
        if (found := _finite(measured, scale)) is not None:
            since, by_model = last.measured_at or at, _finite(model, scale)
            all_of_it[-1] = replace(last, measured=found, model=by_model, measured_at=since)

    store().change(change)
    return (predictions(page, key) or [made])[-1]


def _put(record: Record, page: str, key: str, made: Predicted | None, again: bool) -> None:
    all_of_it = record.predictions.setdefault(page, {}).setdefault(key, [])
    if all_of_it and all_of_it[-1].measured_at is None:
        all_of_it.pop()
        again = True
    if made and (again or not all_of_it):
        all_of_it.append(made)


def _finite(value: float | None, scale: float) -> float | None:
    """``value`` times ``scale``; None if there is none, or a number that JSON does not have."""
    return value * scale if value is not None and math.isfinite(value * scale) else None
