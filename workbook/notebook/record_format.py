"""The record of a learner's progress, and the JSON that it is stored as.

Pages are names such as ``06_ring_all_reduce``; times are ISO 8601 texts, UTC.
"""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from reprlib import repr as shortened
from typing import Any

VERSION = 1


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
    """One prediction of a quantity, and what was measured after it; all numbers are in ``unit``.

    ``measured_at`` is the time of the first measurement, which locks the prediction.
    """

    quantity: str
    unit: str
    value: float | int
    predicted_at: str
    measured: float | int | None = None
    model: float | int | None = None
    measured_at: str | None = None

    @property
    def factor(self) -> float | None:
        """By how much it was off, in either direction: 2 for half and for twice the measurement.

        None without a measurement, or if only one of the two is 0 or negative.
        """
        if self.measured is None:
            return None
        if self.measured == self.value:
            return 1.0
        ratio = self.measured / self.value if self.value else 0.0
        return max(ratio, 1 / ratio) if ratio > 0 and math.isfinite(ratio) else None


def entry(quantity: str, unit: str, value: float | None, at: str) -> Predicted | None:
    """What is recorded of a prediction; None if there is no number, or one that JSON lacks."""
    if value is None or not math.isfinite(value):
        return None
    return Predicted(str(quantity), str(unit), value, at)


@dataclass
class Record:
    """Exercises by page and name; predictions by page and key, the oldest of a key first."""

    exercises: dict[str, dict[str, Tried]] = field(default_factory=dict)
    predictions: dict[str, dict[str, list[Predicted]]] = field(default_factory=dict)


def to_json(record: Record) -> str:
    """The text of the file."""
    return json.dumps({"version": VERSION, **asdict(record)}, indent=1, allow_nan=False) + "\n"


def from_json(data: bytes) -> Record:
    """Read the file's content; nothing at all is an empty record.

    Raises:
        ValueError: it is not a record of this version.
    """
    if not data.strip():
        return Record()
    try:
        raw = json.loads(data.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    version = _need(dict, raw).get("version")
    if version != VERSION:
        raise ValueError(f"its version is {version!r}, and this labkit reads {VERSION}")
    exercises = {
        page: {name: _build(Tried, one) for name, one in _need(dict, of_page).items()}
        for page, of_page in _need(dict, raw.get("exercises")).items()
    }
    predictions = {
        page: {
            key: [_build(Predicted, one) for one in _need(list, all_of_it)]
            for key, all_of_it in _need(dict, of_page).items()
        }
        for page, of_page in _need(dict, raw.get("predictions")).items()
    }
    return Record(exercises, predictions)


def _need(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"a {kind.__name__} is needed where it has a {type(value).__name__}")
    return value


def _build(kind: type, raw: Any) -> Any:
    if set(_need(dict, raw)) != {one.name for one in fields(kind)}:
        raise ValueError(f"an entry has the fields {', '.join(map(str, raw))}")
    for one in fields(kind):
        if not _fits(raw[one.name], one.name, one.type):
            raise ValueError(f"{one.name} is {shortened(raw[one.name])}")
    return kind(**raw)


def _fits(value: Any, name: str, kinds: Any) -> bool:
    if not isinstance(value, kinds) or isinstance(value, bool):
        return False
    try:
        if name.endswith("_at") and value is not None:
            datetime.fromisoformat(value).astimezone()
        return not isinstance(value, float | int) or math.isfinite(value)
    except (OverflowError, ValueError):  # outside the calendar, or too large for a float
        return False
