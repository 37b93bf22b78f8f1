"""Repeats in numbers and words, tables, and how records are written."""

import html
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tabulate import tabulate

from labkit.engine.devices import hardware, versions
from labkit.engine.files import write_atomically
from labkit.engine.gpus import num_gpus, nvidia_smi


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


def write(record: dict[str, Any], path: str) -> None:
    """Write a record as JSON text, one line for each row of its lists."""
    parts = []
    for name, part in record.items():
        text = json.dumps(part)
        if part and isinstance(part, list):
            text = "[\n    " + ",\n    ".join(map(json.dumps, part)) + "\n  ]"
        parts.append(f'  "{name}": {text}')
    write_atomically(path, "{\n" + ",\n".join(parts) + "\n}\n")
