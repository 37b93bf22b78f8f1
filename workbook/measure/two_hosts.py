"""The tables of a recorded measurement of two hosts: measured, model, published.

``make two-hosts`` (tools/two_hosts.py) makes ``data/results/two_hosts.json``. A reference project
saw four workers on two hosts train no faster than one worker (speed-ups 1.84, 1.71 and 1.01); this
shows why, and what a hierarchical all-reduce and compression win back.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from labkit.units import format_seconds
from workbook.measure.record import Spread, Table

Record = Mapping[str, Any]


def two_hosts_table(record: Record, rates: Iterable[str] | None = None) -> Table:
    """One row per rate and contender: step, model, speed-up, efficiency, published.

    The last rows are those of workers that compute ResNet-18, on the cores that they share.

    Args:
        record: what ``make two-hosts`` writes.
        rates: only these, for example ``["1 Gb/s"]``; None for all.
    """
    rows = []
    for row in record["steps"] + record["real_steps"]:
        if rates is not None and row["rate"] not in rates:
            continue
        hosts = "1 host" if row["hosts"] == 1 else f"{row['hosts']} hosts"
        how = "" if row["hosts"] == 1 else f": {row['contender']}"
        is_asleep = "model_s" in row
        kind = "recorded" if is_asleep else "recorded, ResNet-18"
        published = sorted(row.get("published_speed_up") or [])
        rows.append(
            (
                f"{row['rate']}, {row['workers']} on {hosts}{how} ({kind})",
                Spread(**row["step_s"]).text(format_seconds),
                format_seconds(row["model_s"]) if is_asleep else "",
                Spread(**row["speed_up"]).text("{:.2f}".format),
                f"{row['model_speed_up']:.2f}" if is_asleep else "",
                f"{row['efficiency']:.0%}",
                " to ".join(f"{one:.2f}" for one in published),
            )
        )
    heads = ("cable, workers", "step", "model", "speed-up", "model", "efficiency", "published")
    return Table(heads, tuple(rows))
