"""The figure of two hosts: speed-up by rate and contender, measured beside model and published."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workbook.measure.spread import ratios
from workbook.measure.two_hosts.work import (
    ALONE,
    FLAT,
    HIERARCHICAL,
    ONE_HOST,
    published_speed_ups,
    share,
)

if TYPE_CHECKING:
    from workbook.plots.figure import CaptionedFigure

_DRAWN = (ONE_HOST, FLAT, HIERARCHICAL, "hierarchical, fp16")
_PUBLISHED = "published, rate unknown"


def two_hosts_figure(record: Mapping[str, Any]) -> "CaptionedFigure":
    """Bars of the samples per second, in those of one worker: a group for each rate of the cable.

    Args:
        record: what ``labkit bench two-hosts --json`` writes.
    """
    # Here, since the ranks that import this package do not need matplotlib.
    from workbook.plots.bars import bars

    rows = {(row["rate"], row["contender"]): row for row in record["steps"]}
    groups: dict[str, dict[str, Any]] = {}
    for (rate, name), row in rows.items():
        if name not in _DRAWN:
            continue
        group = groups.setdefault(rate, {})
        faster = ratios(rows[rate, ALONE]["seconds"], row["seconds"])
        group[name] = [share(name) * one for one in faster]
        group[f"{name} model"] = row["model_speed_up"]
    published = {name: published_speed_ups(name) for name in _DRAWN}
    groups[_PUBLISHED] = {name: values for name, values in published.items() if values}
    title = "Two hosts: what the cable costs, and what wins it back"
    return bars(groups, quantity="speed-up over one worker", unit="times", title=title)
