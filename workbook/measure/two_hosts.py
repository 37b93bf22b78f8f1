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


def two_hosts_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """A row for each of the record's ``steps`` and ``real_steps``.

    In ``steps`` workers sleep in place of computing; in ``real_steps``, which have no model, they
    compute ResNet-18 on the cores that they share.
    """
    lines = []
    for row in rows:
        contender = f"{row['rate']}, {row['workers']} on "
        contender += f"{row['hosts']} hosts: {row['contender']}" if row["hosts"] > 1 else "1 host"
        kind = "recorded, ResNet-18"
        model_step = ""
        model_speed_up = ""
        if "model_s" in row:
            kind = "recorded"
            model_step = format_seconds(row["model_s"])
            model_speed_up = f"{row['model_speed_up']:.2f}"
        published = map("{:.2f}".format, sorted(row.get("published_speed_up") or []))
        lines.append(
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
    return Table(HEADS, tuple(lines))
