"""The stored record of the one run, and a run of your own beside it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbook.measure.elsewhere.environments import REPOSITORY

RECORD = REPOSITORY / "data" / "results" / "elsewhere.json"


def recorded(path: Path = RECORD) -> dict[str, Any]:
    """The stored record, with its hardware, versions and command.

    Raises:
        ValueError: there is none; ``make elsewhere`` makes it.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"no record in {path}: make elsewhere makes it") from None


def side_by_side(
    live: Mapping[str, Any], stored: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A record in which contenders that have not run here are taken from the stored one, marked.

    Args:
        live: the record of a run here: of some contenders, or with some that cannot run here.
        stored: by default ``recorded()``.
    """
    kept = {row["contender"]: row for row in (stored or recorded())["contenders"]}
    kept = {name: row | {"recorded": True} for name, row in kept.items() if "losses" in row}
    rows = []
    for row in live["contenders"]:
        old = kept.pop(row["contender"], None)
        rows.append(old if row["absent"] and old else row)
    return {**live, "contenders": [*rows, *kept.values()]}
