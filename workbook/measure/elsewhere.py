"""The same training by labkit and by other frameworks: the table of a record.

tools/elsewhere.py makes the record; its scripts are in notebooks/scripts/elsewhere.
"""

import statistics
from collections.abc import Mapping
from typing import Any

from labkit.units import format_seconds
from workbook.measure.record import Spread, Table

Row = Mapping[str, Any]
HEADS = ("contender", "processes", "messages", "largest difference")
HEADS += ("sent per step over TCP", "formula", "step")


def elsewhere_table(record: Row) -> Table:
    """One row per contender that has trained; below, why others have not, and the versions.

    The largest difference is that of a loss from one device's; bytes are per process and step.
    """
    rows = []
    notes = []
    users_by_versions: dict[str, list[str]] = {}
    for contender in record["contenders"]:
        name = contender["contender"]
        if contender["problem"]:
            notes.append(f"{name}: {contender['problem']}.")
        if "losses" not in contender:
            continue
        difference = "not a number"
        if contender["difference"] is not None:
            difference = f"{contender['difference']:.1e}"
            if not contender["agrees"]:
                difference += f": wrong, more than {contender['tolerance']:.0e}"
        rows.append(
            (
                name,
                ", ".join(contender["sent_bytes"]),
                contender["messages"],
                difference,
                _by_role(contender["sent_bytes"]),
                _by_role(contender["formula_bytes"]),
                Spread(**contender["step_s"]).text(format_seconds),
            )
        )
        versions = ", ".join(map(" ".join, contender["versions"].items()))
        users_by_versions.setdefault(versions, []).append(name)
    for versions, names in users_by_versions.items():
        notes.append(f"{versions}: {', '.join(names)}.")
    return Table(HEADS, tuple(rows), tuple(notes))


def _by_role(num_bytes: Mapping[str, float]) -> str:
    """The mean by the role of a process: ``worker 0`` and ``worker 1`` are workers."""
    bytes_by_role: dict[str, list[float]] = {}
    for process, sent in num_bytes.items():
        bytes_by_role.setdefault(process.rstrip("0123456789 "), []).append(sent)
    parts = []
    for role, sent in bytes_by_role.items():
        parts.append(f"{role} {statistics.fmean(sent):,.0f} B")
    return ", ".join(parts)
