"""Repeats in numbers and words, what a bench has measured, and how records are written."""

import html
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from tabulate import tabulate

from labkit.engine.devices import hardware, versions
from labkit.engine.files import write_atomically
from labkit.engine.gpus import num_gpus, nvidia_smi
from labkit.units import format_bytes, format_number, format_seconds

if TYPE_CHECKING:
    from workbook.plots.figure import CaptionedFigure

# By case (such as a size) and contender.
Cells = Mapping[Any, Mapping[str, Any]]


@dataclass(frozen=True)
class Spread:
    """A measurement: the median of its repeats, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, repeats: Iterable[float]) -> "Spread":
        """The spread of these repeats, of which there is at least one."""
        low, median, high = np.quantile(list(repeats), (0.25, 0.5, 0.75)).tolist()
        return cls(median, low, high)

    def text(self, format_value: Callable[[float], str]) -> str:
        quartiles = f"{format_value(self.low)} to {format_value(self.high)}"
        return f"{format_value(self.median)} ({quartiles})"


def ratios(others_s: Iterable[float], ours_s: Iterable[float]) -> list[float]:
    """others / ours within each repeat: above 1, ours is faster."""
    return [other_s / our_s for other_s, our_s in zip(others_s, ours_s)]


def rounded(seconds: Iterable[float]) -> list[float]:
    """Round seconds to the nanosecond, for a record."""
    return [round(value, 9) for value in seconds]


@dataclass(frozen=True, repr=False)
class Table:
    """A table as text, and as HTML in a notebook; ``notes`` are sentences below it."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = tabulate(self.rows, self.heads, tablefmt="plain", disable_numparse=True)
        lines = map(str.rstrip, text.splitlines())
        return "\n".join([*lines, *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        text = tabulate(self.rows, self.heads, tablefmt="html", disable_numparse=True)
        # Lines break before a spread, not between a number and its unit.
        text = re.sub(r" (\(.*?\))", lambda match: "<br>" + match[1].replace(" ", "&nbsp;"), text)
        text = re.sub(r"(?<=\d) (?=[A-Za-zµ]+\s*<)", "&nbsp;", text)
        for note in self.notes:
            text += f"<p>{html.escape(note)}</p>"
        return text


@dataclass(frozen=True)
class Result:
    """The seconds of contenders that took turns, and what stands beside them.

    Attributes:
        title: above the table: what was timed, where, and in which order.
        facts: what all rows of the record share: the model, the number of ranks.
        seconds: ``{case: {contender: [seconds of each repeat]}}``.
        against: contenders with which the others of a case are compared.
        case: the name of what differs between cases (``size_bytes``); empty where there is one.
        columns: further numbers by name, shown by the unit in it (``_s``, ``_bytes``).
        notes: sentences below the table.
        figures: name -> what draws it.
    """

    title: str
    facts: dict[str, Any]
    seconds: Cells
    against: tuple[str, ...] = ()
    case: str = ""
    columns: Mapping[str, Cells] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    figures: Mapping[str, Callable[[], "CaptionedFigure"]] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """A row of the record for each case and contender.

        ``ratio_to``: the other's time / this one's, repeat by repeat; above 1 this one is faster.
        """
        rows = []
        for case, seconds_by_name in self.seconds.items():
            for name, seconds in seconds_by_name.items():
                row = dict(self.facts)
                if self.case:
                    row[self.case] = case
                row["contender"] = name
                row["seconds"] = rounded(seconds)
                row["time_s"] = asdict(Spread.of(seconds))
                row["ratio_to"] = {}
                for other in self.against:
                    if other in seconds_by_name:
                        ratio = Spread.of(ratios(seconds_by_name[other], seconds))
                        row["ratio_to"][other] = asdict(ratio)
                for column, cells in self.columns.items():
                    row[column] = cells[case].get(name)
                rows.append(row)
        return rows

    def __str__(self) -> str:
        heads = ["contender", "time"]
        if self.case:
            heads.insert(0, self.case.partition("_")[0])
        heads += [f"against {name}" for name in self.against]
        heads += [column.removesuffix("_s").removesuffix("_bytes") for column in self.columns]
        lines = []
        num_repeats = set()
        for row in self.rows():
            num_repeats.add(len(row["seconds"]))
            cells = [row["contender"], Spread(**row["time_s"]).text(format_seconds)]
            if self.case:
                cells.insert(0, _format_cell(self.case, row[self.case]))
            for name in self.against:
                cells.append("")
                if name in row["ratio_to"]:
                    cells[-1] = Spread(**row["ratio_to"][name]).text(format_number)
            cells += [_format_cell(column, row[column]) for column in self.columns]
            lines.append(tuple(cells))
        repeats = " to ".join(map(str, sorted(num_repeats)))
        text = f"{self.title}\nmedian of {repeats} repeats (quartiles)"
        if self.against:
            text += "; against: the other's time / this one's, above 1 this one is faster"
        return f"{text}\n\n{Table(tuple(heads), tuple(lines), self.notes)}\n"


def _format_cell(name: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if name.endswith("_s"):
        return format_seconds(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    return format_number(value)


def machine() -> dict[str, Any]:
    """The hardware and the versions, on which the numbers of a record depend.

    Where there are GPUs also the versions of their driver, of CUDA and of NCCL.
    """
    installed: dict[str, Any] = dict(versions())
    if num_gpus():
        import torch

        drivers = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").splitlines()
        installed["cuda"] = torch.version.cuda
        installed["driver"] = drivers[0] if drivers else "unknown"
        if torch.distributed.is_nccl_available():
            installed["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {"hardware": hardware(), "versions": installed}


def write(
    record: dict[str, Any], json_path: str | None, figures: Mapping[str, "CaptionedFigure"]
) -> None:
    """Write the record, if it has a path, and each figure by its path."""
    if json_path is not None:
        write_atomically(json_path, dumped(record))
    for path, figure in figures.items():
        print(f"figure: {figure.save(path)}")


def dumped(record: dict[str, Any]) -> str:
    """A record as JSON text, one line for each row of its lists."""
    parts = []
    for name, part in record.items():
        text = json.dumps(part)
        if part and isinstance(part, list):
            text = "[\n    " + ",\n    ".join(map(json.dumps, part)) + "\n  ]"
        parts.append(f'  "{name}": {text}')
    return "{\n" + ",\n".join(parts) + "\n}\n"
