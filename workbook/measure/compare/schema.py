"""Read a record of ``labkit compare``, and explain what is wrong with a file that is not one.

The schema lists what the tables and figures use; a record may contain more.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from labkit.units import MOST


def _object(optional: tuple[str, ...] = (), **properties: dict) -> dict:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "required": required, "properties": properties}


def _list(items: dict, least: int = 0) -> dict:
    return {"type": "array", "items": items, "minItems": least}


_DEEPEST = 20
_TEXT, _TRUTH = {"type": "string"}, {"type": "boolean"}
# Beyond these nothing can be drawn, and an integer may not even fit a float.
_NUMBER = {"type": "number", "minimum": -1e30, "maximum": 1e30}
# JSON has no NaN: in a run whose parameters diverged, null is stored instead.
_NUMBER_OR_NULL = {**_NUMBER, "type": ["number", "null"]}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_INDEX = {"type": "integer", "minimum": 0, "maximum": MOST}
_COUNT = {"type": "integer", "minimum": 1, "maximum": MOST}
_SECONDS = {"type": "number", "exclusiveMinimum": 0, "maximum": 1e9}

_SIZE_OR_NULL = {**_INDEX, "type": ["integer", "null"]}
# A lost rank has none.
_MEMORY = {
    **_object(
        process_bytes=_SIZE_OR_NULL,
        devices={"type": "object", "additionalProperties": _INDEX},
    ),
    "type": ["object", "null"],
}

_KINDS = {"type": "object", "additionalProperties": _NUMBER}
_MORE = ("train_accuracy", "test_loss", "test_top5")
_EPOCH = _object(
    # Not in older records.
    optional=_MORE,
    loss=_NUMBER_OR_NULL,
    test_accuracy=_NUMBER,
    seconds=_SECONDS,
    **dict.fromkeys(_MORE, _NUMBER_OR_NULL),
)

_SCHEMA = _object(
    # Not in older records.
    optional=("loading",),
    command=_TEXT,
    config=_object(model=_TEXT, dataset=_TEXT, target=_NUMBER, gpus_used=_INDEX),
    contenders=_list(
        _object(
            name=_TEXT, builtin=_TRUTH, backend=_TEXT, counterpart=_TEXT_OR_NULL, own_pace=_TRUTH
        )
    ),
    settings=_list(
        _object(world_size=_COUNT, train_size=_COUNT, batch_size=_COUNT, epochs=_COUNT), least=1
    ),
    runs=_list(
        _object(
            # Only if one device took part; if bytes are counted; not in older records.
            optional=("difference_from_single", "bytes_sent", "peak_memory", "epoch_phases_s"),
            contender=_TEXT,
            setting=_INDEX,
            repeat=_INDEX,
            epochs=_list(_EPOCH, least=1),
            phases_s={
                "type": "object",
                "additionalProperties": _KINDS,
            },
            epoch_phases_s={"type": "object", "additionalProperties": _list(_KINDS)},
            bytes_sent={"type": ["array", "null"], "items": _INDEX},
            peak_memory=_list(_MEMORY),
            replicas_agree=_TRUTH,
            note=_TEXT_OR_NULL,
            difference_from_single=_NUMBER_OR_NULL,
        )
    ),
    skipped=_list(_object(contender=_TEXT, world_size=_COUNT, reason=_TEXT, failed=_TRUTH)),
    loading=_list(_object(train_size=_COUNT, seconds=_list(_SECONDS, least=1))),
    hardware=_object(cpu=_TEXT, cores=_COUNT, gpus=_list(_TEXT)),
    versions=_object(),
)


def load(path: str | Path) -> dict[str, Any]:
    """Read a record and check it.

    Raises:
        ValueError: the file is not a record; the message names the file and one fault in it.
        OSError: the file cannot be read.
    """
    try:
        record = json.loads(_read(Path(path)), parse_float=_finite, parse_constant=_finite)
        _check(record)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{path} is not a record of labkit compare: {reason}; give a file that its "
            "--json wrote"
        ) from None
    return record


def _read(path: Path) -> str:
    # Reading from a pipe that nobody writes to would wait forever.
    if path.exists() and not path.is_dir() and not path.is_file():
        raise ValueError("it is a pipe or a device")
    return path.read_text(encoding="utf-8")


def _finite(text: str) -> float:
    """Parse a number, but not NaN or Infinity, which Python accepts and JSON does not have."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def _check_depth(record: Any) -> None:
    level = [record]
    for _ in range(_DEEPEST):
        level = [part for thing in level for part in _parts(thing)]
    if level:
        raise ValueError(f"it is nested more than {_DEEPEST} deep")


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, dict):
        return thing.values()
    return thing if isinstance(thing, list) else ()


def _check(record: Any) -> None:
    # The whole record is written again by recursion, including what the schema does not know.
    _check_depth(record)
    # Not at the top, since it takes seconds to import.
    import jsonschema

    error = jsonschema.exceptions.best_match(
        jsonschema.Draft202012Validator(_SCHEMA).iter_errors(record)
    )
    if error is not None:
        raise ValueError(f"{error.json_path}: {error.message[:200]}")
    names = {contender["name"] for contender in record["contenders"]}
    for index, run in enumerate(record["runs"]):
        if run["contender"] not in names:
            raise ValueError(f"$.runs[{index}]: {run['contender']} is not a contender")
        if run["setting"] >= len(record["settings"]):
            known = f"settings 0 to {len(record['settings']) - 1}"
            raise ValueError(f"$.runs[{index}].setting: {run['setting']} is not among {known}")
