"""The same training by labkit and by other frameworks: the table and the figure of a record.

tools/elsewhere.py makes the record; its scripts are in notebooks/scripts/elsewhere.
"""

import statistics
from collections.abc import Mapping
from typing import Any

from matplotlib.ticker import MaxNLocator

from labkit.units import format_seconds
from workbook.measure.record import Spread, Table
from workbook.plots.figure import CaptionedFigure, add_legend, drawn, new_axes
from workbook.plots.palette import SERIES

Row = Mapping[str, Any]
LOOKS = dict(zip(("labkit", "PyTorch", "Horovod", "TensorFlow"), SERIES, strict=False))


def elsewhere_table(record: Row) -> Table:
    """One row per contender that has trained; below, why others have not, and the versions.

    The largest difference is that of a loss from one device's; bytes are per process and step.
    """
    cells, users = [], dict[str, list[str]]()
    for row in _trained(record):
        wrong = "" if row["agrees"] else f": wrong, more than {row['tolerance']:.0e}"
        apart = "not a number" if row["difference"] is None else f"{row['difference']:.1e}{wrong}"
        bytes_of = [_by_role(row[f"{who}_bytes"]) for who in ("sent", "formula")]
        step = Spread(**row["step_s"]).text(format_seconds)
        cells.append((row["contender"], ", ".join(row["sent_bytes"]), row["messages"], apart))
        cells[-1] += (*bytes_of, step)
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        users.setdefault(versions, []).append(row["contender"])
    notes = [f"{r['contender']}: {r['problem']}." for r in record["contenders"] if r["problem"]]
    notes += [f"{versions}: {', '.join(names)}." for versions, names in users.items()]
    heads = ("contender", "processes", "messages", "largest difference")
    heads += ("sent per step over TCP", "formula", "step")
    return Table(heads, tuple(cells), tuple(notes))


@drawn
def elsewhere_figure(record: Row) -> CaptionedFigure:
    """The losses of all that have trained, by step."""
    rows = _trained(record)
    figure, axes = new_axes(4.0, "The same training by each framework, recorded")
    lines: dict[str, Any] = {}
    for place, row in enumerate(rows):
        style, marker, line = LOOKS[row["framework"]]
        look: dict[str, Any] = {"color": style.color, "linestyle": line, "marker": marker}
        # The markers take turns, so that lines that coincide can be seen.
        look |= {"label": row["framework"], "markevery": (place, len(rows))}
        lines[row["framework"]] = axes.plot(row["losses"], **look)[0]
    axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid()
    add_legend(figure, list(lines.values()))
    first, *_, last = rows[0]["losses"]
    alt = f"The losses of {len(rows)} contenders by step, from {first:.2f} to {last:.2f}: "
    alt += ", ".join(row["contender"] for row in rows)
    apart = [row["contender"] for row in rows if not row["agrees"]]
    caption = f"Not all lines coincide: these differ from one device's: {', '.join(apart)}."
    if not apart:
        worst = max(rows, key=lambda row: row["difference"])
        caption = f"All {len(rows)} lines coincide: no loss differs from one device's by "
        caption += f"more than {worst['difference']:.1e} ({worst['contender']})."
    caption += " The markers take turns."
    return CaptionedFigure(figure, alt=alt, caption=caption)


def _trained(record: Row) -> list[Row]:
    return [row for row in record["contenders"] if "losses" in row]


def _by_role(num_bytes: Mapping[str, float]) -> str:
    """The mean by the role of a process: ``worker 0`` and ``worker 1`` are workers."""
    roles: dict[str, list[float]] = {}
    for name, each in num_bytes.items():
        roles.setdefault(name.rstrip("0123456789 "), []).append(each)
    return ", ".join(f"{role} {statistics.fmean(each):,.0f} B" for role, each in roles.items())
