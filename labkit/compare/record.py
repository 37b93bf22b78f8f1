"""Reading a record of ``labkit compare``, and saying what is wrong with a file that is none.

What the tables and figures use is looked at before anything is printed; what else is in a record
is left alone.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

_NUMBER = (int, float)
# A list has one shape for all its rows; a dict with the key ``str`` one for all its values.
_SHAPE = {
    "command": str,
    "config": {"model": str, "dataset": str, "target": _NUMBER, "gpus_used": int},
    "contenders": [
        {
            "name": str,
            "builtin": bool,
            "backend": str,
            "counterpart": (str, NoneType),
            "own_pace": bool,
        }
    ],
    "settings": [{"world_size": int, "train_size": int, "batch_size": int, "epochs": int}],
    "runs": [
        {
            "contender": str,
            "setting": int,
            "repeat": int,
            "epochs": [{"loss": _NUMBER, "test_accuracy": _NUMBER, "seconds": _NUMBER}],
            "phases_s": {str: {str: _NUMBER}},
            "replicas_agree": bool,
            "note": (str, NoneType),
            "difference_from_single": _NUMBER,
        }
    ],
    "skipped": [{"contender": str, "world_size": int, "reason": str, "failed": bool}],
    "hardware": {"cpu": str, "cores": int, "gpus": [str]},
    "versions": {},
}
# Runs have it where one device takes part.
_OPTIONAL = {"difference_from_single"}


def load(path: str | Path) -> dict[str, Any]:
    """Read a record.

    Raises:
        ValueError: not one; the message names the file, and the first place that is wrong.
        OSError: the file cannot be read.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        _check_shape(record, _SHAPE, "")
        _check_numbers(record)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{path} is no record of labkit compare: {reason}; give a file that its --json wrote"
        ) from None
    return record


def _check_shape(value: Any, shape: Any, where: str) -> None:
    """Raise ValueError unless ``value``, which is found at ``where``, is of this shape."""
    kind = shape if isinstance(shape, type | tuple) else type(shape)
    # To Python, True is a whole number.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where or 'it'} is {_short(value)}, where {_named(kind)} is due")
    if isinstance(shape, list):
        for index, row in enumerate(value):
            _check_shape(row, shape[0], f"{where}[{index}]")
    if isinstance(shape, dict):
        _check_keys(value, shape, where)


def _check_keys(value: Mapping, shape: Mapping, where: str) -> None:
    shapes = dict.fromkeys(value, shape[str]) if str in shape else shape
    missing = sorted(shapes.keys() - value.keys() - _OPTIONAL)
    if missing:
        raise ValueError(f"{where or 'it'} has no {', '.join(missing)}")
    for key, inner in shapes.items():
        if key in value:
            _check_shape(value[key], inner, f"{where}.{key}".lstrip("."))


def _check_numbers(record: dict[str, Any]) -> None:
    """Raise ValueError where what is there cannot be: runs of nobody, nothing or no time."""
    settings, runs = record["settings"], record["runs"]
    names = {contender["name"] for contender in record["contenders"]}
    if not settings or any(row[key] < 1 for row in settings for key in _SHAPE["settings"][0]):
        raise ValueError("settings are numbers from 1, of one setting or more")
    for index, run in enumerate(runs):
        seconds = [epoch["seconds"] for epoch in run["epochs"]]
        if run["contender"] not in names:
            raise ValueError(f"runs[{index}] is of {run['contender']}, who is no contender")
        if not 0 <= run["setting"] < len(settings):
            raise ValueError(f"runs[{index}] is in setting {run['setting']} of {len(settings)}")
        if not seconds or not all(0 < s < math.inf for s in seconds):
            raise ValueError(f"runs[{index}] has an epoch that took no time, or no epochs")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _named(kind: type | tuple[type, ...]) -> str:
    names = {str: "a text", bool: "true or false", int: "a whole number", dict: "an object"}
    names |= {list: "a list", _NUMBER: "a number", (str, NoneType): "a text or null"}
    return names[kind]
