"""The same training by labkit and by other frameworks: run, and the table and figure of a record.

tools/elsewhere.py trains with each in turns; its scripts are in notebooks/scripts/elsewhere.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator

from labkit.units import format_seconds
from workbook.measure.environments import REPOSITORY
from workbook.measure.record import Spread, Table
from workbook.plots.figure import CaptionedFigure, add_legend, drawn, new_axes
from workbook.plots.palette import SERIES

Row = Mapping[str, Any]
RECORD = REPOSITORY / "data" / "results" / "elsewhere.json"
LOOKS = dict(zip(("labkit", "PyTorch", "Horovod", "TensorFlow"), SERIES, strict=False))


def run_elsewhere(contenders: Sequence[str], steps: int) -> dict[str, Any]:
    """Train once with one device and each of these, as ``make elsewhere`` does; the record."""
    with tempfile.TemporaryDirectory(prefix="labkit-elsewhere-") as folder:
        words = [sys.executable, str(REPOSITORY / "tools" / "elsewhere.py"), "--repeats", "1"]
        words += ["--contenders", ",".join(contenders), "--steps", str(steps)]
        words += ["--out", f"{folder}/record"]
        env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        # Not subprocess.run, which would kill it at Ctrl-C: it ends what it has started.
        with subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL) as process:
            if process.wait():
                raise RuntimeError("tools/elsewhere.py has failed, and says why above")
        return json.loads(Path(folder, "record.json").read_text(encoding="utf-8"))


def side_by_side(now: Sequence[str], steps: int) -> dict[str, Any]:
    """The stored record, marked, in which those of ``now`` that are here have run anew."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    rows = {row["contender"]: row | {"recorded": True} for row in record["contenders"]}
    if now:
        live = run_elsewhere(now, steps)["contenders"]
        rows |= {row["contender"]: row for row in live if not row["absent"]}
    return {**record, "contenders": [*rows.values()]}


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
        cells.append((_name(row), ", ".join(row["sent_bytes"]), row["messages"], apart))
        cells[-1] += (*bytes_of, step)
        told = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        users.setdefault(told, []).append(_name(row))
    notes = [f"{r['contender']}: {r['problem']}." for r in record["contenders"] if r["problem"]]
    notes += [f"{told}: {', '.join(names)}." for told, names in users.items()]
    heads = ("contender", "processes", "messages", "largest difference")
    heads += ("sent per step over TCP", "formula", "step")
    return Table(heads, tuple(cells), tuple(notes))


@drawn
def elsewhere_figure(record: Row) -> CaptionedFigure:
    """The losses of all that have trained, by step."""
    rows = _trained(record)
    figure, axes = new_axes(4.0, "The same training, by each framework")
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
    longest = max(rows, key=lambda row: len(row["losses"]))["losses"]
    alt = f"The losses of {len(rows)} contenders by step, "
    alt += f"from {longest[0]:.2f} to {longest[-1]:.2f}: "
    apart = [_name(row) for row in rows if not row["agrees"]]
    caption = f"Not all lines coincide: these differ from one device's: {', '.join(apart)}."
    if not apart:
        worst = max(rows, key=lambda row: row["difference"])
        caption = f"All {len(rows)} lines coincide: no loss differs from one device's by "
        caption += f"more than {worst['difference']:.1e} ({worst['contender']})."
    caption += " The markers take turns."
    return CaptionedFigure(figure, alt=alt + ", ".join(map(_name, rows)), caption=caption)


def _trained(record: Row) -> list[Row]:
    return [row for row in record["contenders"] if "losses" in row]


def _name(row: Row) -> str:
    return f"{row['contender']} (recorded)" if row.get("recorded") else row["contender"]


def _by_role(num_bytes: Mapping[str, float]) -> str:
    """The mean by the role of a process: ``worker 0`` and ``worker 1`` are workers."""
    roles: dict[str, list[float]] = {}
    for name, each in num_bytes.items():
        roles.setdefault(name.rstrip("0123456789 "), []).append(each)
    return ", ".join(f"{role} {statistics.fmean(each):,.0f} B" for role, each in roles.items())
