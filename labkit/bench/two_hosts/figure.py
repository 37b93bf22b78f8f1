"""The figure of two hosts: speed-up by contender and rate, measured beside model and published."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from labkit.bench.two_hosts import work

if TYPE_CHECKING:
    from labkit.plots.figure import CaptionedFigure

_DRAWN = (work.ONE_HOST, work.FLAT, work.HIERARCHICAL, "hierarchical, fp16")


def two_hosts_figure(record: Mapping[str, Any]) -> "CaptionedFigure":
    """Bars of the speed-up over one worker: one group per contender and rate."""
    # Here, since the ranks that import this package do not need matplotlib.
    from labkit.plots.bars import bars

    groups: dict[str, dict[str, Any]] = {}
    for row in record["steps"]:
        if row["contender"] in _DRAWN:
            group = groups.setdefault(row["rate"], {})
            group[row["contender"]] = row["speed_up"]["median"]
            group[f"{row['contender']} model"] = row["model_speed_up"]
    return bars(groups, quantity="speed-up over one worker", unit="", title="Two hosts")
