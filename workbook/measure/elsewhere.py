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


@drawn
def elsewhere_figure(record: Row) -> CaptionedFigure:
    """The losses of all that have trained, by step."""
    rows = [row for row in record["contenders"] if "losses" in row]
    figure, axes = new_axes(4.0, "The same training by each framework, recorded")
    lines: dict[str, Any] = {}
    for number, row in enumerate(rows):
        framework = row["framework"]
        style, marker, linestyle = LOOKS[framework]
        look: dict[str, Any] = {"color": style.color, "linestyle": linestyle, "marker": marker}
        # The markers take turns, so that lines that coincide can be seen.
        look["markevery"] = (number, len(rows))
        (lines[framework],) = axes.plot(row["losses"], label=framework, **look)
    axes.set(xlabel="step", ylabel="loss", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid()
    add_legend(figure, list(lines.values()))
    names = [row["contender"] for row in rows]
    losses = rows[0]["losses"]
    alt = f"The losses of {len(rows)} contenders by step, from {losses[0]:.2f} to "
    alt += f"{losses[-1]:.2f}: {', '.join(names)}"
    differing = [row["contender"] for row in rows if not row["agrees"]]
    if differing:
        caption = "Not all lines coincide: these differ from one device's: "
        caption += f"{', '.join(differing)}."
    else:
        worst = max(rows, key=lambda row: row["difference"])
        caption = f"All {len(rows)} lines coincide: no loss differs from one device's by "
        caption += f"more than {worst['difference']:.1e} ({worst['contender']})."
    return CaptionedFigure(figure, alt=alt, caption=f"{caption} The markers take turns.")


def _by_role(num_bytes: Mapping[str, float]) -> str:
    """The mean by the role of a process: ``worker 0`` and ``worker 1`` are workers."""
    bytes_by_role: dict[str, list[float]] = {}
    for process, sent in num_bytes.items():
        bytes_by_role.setdefault(process.rstrip("0123456789 "), []).append(sent)
    parts = []
    for role, sent in bytes_by_role.items():
        parts.append(f"{role} {statistics.fmean(sent):,.0f} B")
    return ", ".join(parts)
