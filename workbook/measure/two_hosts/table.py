"""The tables of a recorded measurement of two hosts: measured, model, published.

All of them are made from ``data/results/two_hosts.json``, or from the record of a run of your own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from labkit.units import format_number, format_seconds, html_table, text_table
from workbook.measure.spread import Spread

Row = Mapping[str, Any]


@dataclass(frozen=True, repr=False)
class Table:
    """A table as text, and as HTML in a notebook."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return text_table(self.heads, self.rows)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(self.heads, self.rows)


def two_hosts_table(record: Mapping[str, Any], rates: Iterable[str] | None = None) -> Table:
    """One row per rate and contender: step, model, speed-up, efficiency, slow-down, published.

    Args:
        record: what ``labkit bench two-hosts --json`` writes.
        rates: only these, for example ``["1 Gb/s"]``; None for all.
    """
    heads = ("cable, workers", "step", "model", "speed-up", "model", "efficiency", "published")
    return Table(heads, tuple(_step_cells(row) for row in _chosen(record["steps"], rates)))


def all_reduce_table(record: Mapping[str, Any], rates: Iterable[str] | None = None) -> Table:
    """One row per rate, hosts and way: the seconds of one large all-reduce, and who is faster."""
    heads = ("cable, ranks, way", "time", "model", "times the ring's speed", "model")
    rows = _chosen(record["all_reduces"], rates)
    return Table(heads, tuple(_all_reduce_cells(row) for row in rows))


def real_table(record: Mapping[str, Any]) -> Table:
    """The counter-case of this machine: a real ResNet-18, whose workers share its cores."""
    heads = ("cable, workers", "step", "speed-up", "efficiency")
    return Table(heads, tuple(_real_cells(row) for row in record["real_steps"]))


def cable_table(record: Mapping[str, Any]) -> Table:
    """What the cable really carried: plain TCP, and messages of labkit's ranks."""
    heads = ("cable", "plain TCP", "labkit's messages", "inside a host")
    cells = [
        (row["rate"], _rate(row["raw_bytes_per_s"]), _link(row["between"]), _link(row["inside"]))
        for row in record["links"]
    ]
    return Table(heads, tuple(cells))


def slow_downs(record: Mapping[str, Any], rate: str = "1 Gb/s") -> dict[str, tuple[float, float]]:
    """By contender on two hosts, its step against that at the unlimited cable: (measured, model).

    Measured is the median over the repeats of the ratio within a repeat.
    """
    rows = _chosen(record["steps"], [rate])
    return {
        row["contender"]: (row["slow_down"]["median"], row["model_slow_down"])
        for row in rows
        if row["hosts"] == 2
    }


def speed_ups(record: Mapping[str, Any], rate: str = "1 Gb/s") -> dict[str, float]:
    """By contender, samples per second against one worker's."""
    return {
        row["contender"]: row["speed_up"]["median"] for row in _chosen(record["steps"], [rate])
    }


def _chosen(rows: Iterable[Row], rates: Iterable[str] | None) -> list[Row]:
    kept = None if rates is None else set(rates)
    return [row for row in rows if kept is None or row["rate"] in kept]


def _name(row: Row) -> str:
    hosts = "1 host" if row["hosts"] == 1 else f"{row['hosts']} hosts"
    how = "" if row["hosts"] == 1 else f": {row['contender']}"
    return f"{row['rate']}, {row['workers']} on {hosts}{how}"


def _step_cells(row: Row) -> tuple[str, ...]:
    published = row.get("published_speed_up") or []
    return (
        _name(row),
        _spread(row["step_s"], format_seconds),
        format_seconds(row["model_s"]),
        _spread(row["speed_up"], "{:.2f}".format),
        f"{row['model_speed_up']:.2f}",
        f"{row['efficiency']:.0%}",
        " to ".join(f"{one:.2f}" for one in sorted(published)),
    )


def _all_reduce_cells(row: Row) -> tuple[str, ...]:
    per_host = row["workers"] // row["hosts"]
    return (
        f"{row['rate']}, {row['hosts']} x {per_host}, {row['contender']}",
        _spread(row["time_s"], format_seconds),
        format_seconds(row["model_s"]),
        _spread(row["times_ring"], format_number),
        format_number(row["model_times_ring"]),
    )


def _real_cells(row: Row) -> tuple[str, ...]:
    return (
        _name(row),
        _spread(row["step_s"], format_seconds),
        _spread(row["speed_up"], "{:.2f}".format),
        f"{row['efficiency']:.0%}",
    )


def _spread(spread: Mapping[str, float], form: Any) -> str:
    return Spread(**spread).text(form)


def _rate(bytes_per_s: float) -> str:
    return f"{format_number(8 * bytes_per_s / 1e9)} Gb/s"


def _link(link: Mapping[str, float]) -> str:
    alpha, beta = link["alpha_s"], link["beta_s_per_byte"]
    speed = f"{format_number(1e-6 / beta)} MB/s" if beta else "bytes at no cost"
    return f"{format_seconds(alpha)} per message, {speed}"
