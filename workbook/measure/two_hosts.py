"""The tables and the figure of a recorded measurement of two hosts: measured, model, published.

``make two-hosts`` (tools/two_hosts.py) makes ``data/results/two_hosts.json``. A reference project
saw four workers on two hosts train no faster than one worker (speed-ups 1.84, 1.71 and 1.01); this
shows why, and what a hierarchical all-reduce and compression win back.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from labkit.units import format_number, format_seconds
from workbook.measure.spread import Spread, Table, ratios
from workbook.plots.bars import bars
from workbook.plots.figure import CaptionedFigure

Record = Mapping[str, Any]
_ALONE, _DRAWN = "one worker", ("two on one host", "ring", "hierarchical", "hierarchical, fp16")
_PUBLISHED = "published, rate unknown"


def two_hosts_table(record: Record, rates: Iterable[str] | None = None) -> Table:
    """One row per rate and contender: step, model, speed-up, efficiency, slow-down, published.

    Args:
        record: what ``make two-hosts`` writes.
        rates: only these, for example ``["1 Gb/s"]``; None for all.
    """
    rows = []
    for row in record["steps"]:
        if rates is not None and row["rate"] not in rates:
            continue
        hosts = "1 host" if row["hosts"] == 1 else f"{row['hosts']} hosts"
        how = "" if row["hosts"] == 1 else f": {row['contender']}"
        published = sorted(row.get("published_speed_up") or [])
        rows.append(
            (
                f"{row['rate']}, {row['workers']} on {hosts}{how}",
                Spread(**row["step_s"]).text(format_seconds),
                format_seconds(row["model_s"]),
                Spread(**row["speed_up"]).text("{:.2f}".format),
                f"{row['model_speed_up']:.2f}",
                f"{row['efficiency']:.0%}",
                " to ".join(f"{one:.2f}" for one in published),
            )
        )
    heads = ("cable, workers", "step", "model", "speed-up", "model", "efficiency", "published")
    return Table(heads, tuple(rows))


def cable_table(record: Record) -> Table:
    """What the cable really carried: plain TCP, and messages of labkit's ranks."""

    def link(found: Mapping[str, float]) -> str:
        beta = found["beta_s_per_byte"]
        speed = f"{format_number(1e-6 / beta)} MB/s" if beta else "bytes at no cost"
        return f"{format_seconds(found['alpha_s'])} per message, {speed}"

    rows = [
        (
            row["rate"],
            f"{format_number(8 * row['raw_bytes_per_s'] / 1e9)} Gb/s",
            link(row["between"]),
            link(row["inside"]),
        )
        for row in record["links"]
    ]
    return Table(("cable", "plain TCP", "labkit's messages", "inside a host"), tuple(rows))


def two_hosts_figure(record: Record) -> CaptionedFigure:
    """Bars of the samples per second, in those of one worker, by rate of the cable."""
    rows = {(row["rate"], row["contender"]): row for row in record["steps"]}
    groups: dict[str, dict[str, Any]] = {}
    for (rate, name), row in rows.items():
        if name in _DRAWN:
            alone = rows[rate, _ALONE]
            share = row["samples"] / alone["samples"]
            faster = [share * one for one in ratios(alone["seconds"], row["seconds"])]
            group = groups.setdefault(rate, {})
            group |= {name: faster, f"{name} model": row["model_speed_up"]}
            if published := row.get("published_speed_up"):
                groups.setdefault(_PUBLISHED, {})[name] = published
    groups[_PUBLISHED] = groups.pop(_PUBLISHED, {})
    title = "Two hosts: what the cable costs, and what wins it back"
    return bars(groups, quantity="speed-up over one worker", unit="times", title=title)
