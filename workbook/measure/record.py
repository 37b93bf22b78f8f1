"""Repeats in numbers and words, what a bench has measured, and how records are written."""

import html
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from tabulate import tabulate

from labkit.devices import hardware, versions
from labkit.files import write_atomically
from labkit.gpus import num_gpus, nvidia_smi
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

    def text(self, format_one: Callable[[float], str]) -> str:
        low, high = format_one(self.low), format_one(self.high)
        return f"{format_one(self.median)} ({low} to {high})"


def ratios(others_s: Iterable[float], ours_s: Iterable[float]) -> list[float]:
    """others / ours within each repeat: above 1, ours is faster."""
    return [other / ours for other, ours in zip(others_s, ours_s)]


def rounded(seconds: Iterable[float]) -> list[float]:
    """Round seconds to the nanosecond, for a record."""
    return [round(one, 9) for one in seconds]


@dataclass(frozen=True, repr=False)
class Table:
    """A table as text, and as HTML in a notebook; ``notes`` are sentences below it."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = tabulate(self.rows, self.heads, tablefmt="plain", disable_numparse=True)
        return "\n".join([*(line.rstrip() for line in shown.splitlines()), *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        shown = tabulate(self.rows, self.heads, tablefmt="html", disable_numparse=True)
        # Lines break before a spread, not between a number and its unit.
        shown = re.sub(r" (\(.*?\))", lambda m: "<br>" + m[1].replace(" ", "&nbsp;"), shown)
        shown = re.sub(r"(?<=\d) (?=[A-Za-zµ]+\s*<)", "&nbsp;", shown)
        return shown + "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)


@dataclass(frozen=True)
class Result:
    """Contenders that took turns.

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
        found = []
        for case, by_name in self.seconds.items():
            for name, seconds in by_name.items():
                row = self.facts | ({self.case: case} if self.case else {}) | {"contender": name}
                row |= {"seconds": rounded(seconds), "time_s": asdict(Spread.of(seconds))}
                row["ratio_to"] = {
                    other: asdict(Spread.of(ratios(by_name[other], seconds)))
                    for other in self.against
                    if other in by_name
                }
                found.append(row | {k: cells[case].get(name) for k, cells in self.columns.items()})
        return found

    def __str__(self) -> str:
        heads = [*([self.case.partition("_")[0]] if self.case else []), "contender", "time"]
        heads += [f"against {name}" for name in self.against]
        heads += [key.removesuffix("_s").removesuffix("_bytes") for key in self.columns]
        lines = []
        for row in self.rows():
            cells = [_shown(self.case, row[self.case])] if self.case else []
            cells += [row["contender"], Spread(**row["time_s"]).text(format_seconds)]
            compared = [row["ratio_to"].get(name) for name in self.against]
            cells += [Spread(**one).text(format_number) if one else "" for one in compared]
            lines.append((*cells, *(_shown(key, row[key]) for key in self.columns)))
        counts = sorted({len(s) for by_name in self.seconds.values() for s in by_name.values()})
        told = f"{self.title}\nmedian of {' to '.join(map(str, counts))} repeats (quartiles)"
        if self.against:
            told += "; against: the other's time / this one's, above 1 this one is faster"
        return f"{told}\n\n{Table(tuple(heads), tuple(lines), self.notes)}\n"


def _shown(name: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if name.endswith("_s"):
        return format_seconds(value)
    return format_bytes(value) if name.endswith("_bytes") else format_number(value)


def machine() -> dict[str, Any]:
    """The hardware and the versions, on which the numbers of a record depend.

    Where there are GPUs also the versions of their driver, of CUDA and of NCCL.
    """
    found: dict[str, Any] = {"hardware": hardware(), "versions": versions()}
    if num_gpus():
        import torch

        drivers = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").splitlines()
        found["versions"] |= {"cuda": torch.version.cuda, "driver": (drivers or ["unknown"])[0]}
        if torch.distributed.is_nccl_available():
            found["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


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
