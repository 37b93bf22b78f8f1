"""The tables of a recorded measurement of two hosts: measured, model, published.

``make two-hosts`` (tools/two_hosts.py) makes ``data/results/two_hosts.json``. A reference project
saw four workers on two hosts train no faster than one worker (speed-ups 1.84, 1.71 and 1.01); this
shows why, and what a hierarchical all-reduce and compression win back.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from labkit.units import format_seconds
from workbook.measure.record import Spread, Table

HEADS = ("cable, workers", "step", "predicted", "speed-up", "predicted", "efficiency", "published")
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
        contender = f"{row['rate']}, {row['workers']} on 1 host"
        if row["hosts"] > 1:
            contender = f"{contender.removesuffix('1 host')}{row['hosts']} hosts: "
            contender += row["contender"]
        kind = "recorded, ResNet-18"
        model_step = ""
        model_speed_up = ""
        if "model_s" in row:
            # Workers that sleep in place of computing.
            kind = "recorded"
            model_step = format_seconds(row["model_s"])
            model_speed_up = f"{row['model_speed_up']:.2f}"
        published = map("{:.2f}".format, sorted(row.get("published_speed_up") or []))
        rows.append(
            (
                f"{contender} ({kind})",
                Spread(**row["step_s"]).text(format_seconds),
                model_step,
                Spread(**row["speed_up"]).text("{:.2f}".format),
                model_speed_up,
                f"{row['efficiency']:.0%}",
                " to ".join(published),
            )
        )
    return Table(HEADS, tuple(rows))
