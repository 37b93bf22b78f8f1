"""The figure of two hosts: speed-up by contender and rate, measured beside model and published."""

from collections.abc import Mapping
from typing import Any

from labkit.bench.two_hosts import work
from labkit.plots.bars import bars
from labkit.plots.figure import CaptionedFigure

_DRAWN = (work.ONE_HOST, work.FLAT, work.HIERARCHICAL, "hierarchical, fp16")


def two_hosts_figure(record: Mapping[str, Any]) -> CaptionedFigure:
    """Bars of the speed-up over one worker: one group per contender and rate."""
    groups: dict[str, dict[str, Any]] = {}
    for row in record["steps"]:
        if row["contender"] in _DRAWN:
            group = groups.setdefault(row["rate"], {})
            group[row["contender"]] = row["speed_up"]["median"]
            group[f"{row['contender']} model"] = row["model_speed_up"]
    return bars(groups, quantity="speed-up over one worker", unit="", title="Two hosts")
