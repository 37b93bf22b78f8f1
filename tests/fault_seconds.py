"""The seconds of the fault table's rows, shown at the end of a test run; ``make faults`` records.

The rows themselves: tests/runtime/test_fault_table.py.
"""

import json
from collections.abc import Sequence
from pathlib import Path

PROPERTY = "fault table"


def noted(reports: Sequence) -> list[dict]:
    """The rows that were tested, from pytest's reports."""
    names = ("row", "fault", "must", "cases", "slowest_case_s", "row_s")
    found = [
        dict(zip(names, value))
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == PROPERTY and report.when == "call"
    ]
    return sorted(found, key=lambda row: row["row"])


def summary(rows: list[dict], verbose: bool) -> list[str]:
    """The lines for the end of a test run: one, or one for each row."""
    slowest = max(rows, key=lambda row: row["slowest_case_s"])
    lines = [
        f"fault table: {len(rows)} rows, the slowest case {slowest['slowest_case_s']:.1f} s (row "
        f"{slowest['row']}: {slowest['fault']})"
    ]
    if verbose:
        lines += [
            f"{row['row']:>4}  {row['slowest_case_s']:6.2f} s  {row['row_s']:6.2f} s of "
            f"{row['cases']:>2} cases  {row['fault']}"
            for row in rows
        ]
    return lines


def record(path: Path, rows: list[dict]) -> None:
    """Write the rows with their seconds, and what they were measured on."""
    from labkit.devices import hardware, versions
    from labkit.files import write_atomically

    rounded = [
        {name: round(value, 3) if isinstance(value, float) else value for name, value in r.items()}
        for r in rows
    ]
    found = {"command": "make faults", "hardware": hardware(), "versions": versions()}
    write_atomically(path, json.dumps(found | {"rows": rounded}, indent=1) + "\n")
