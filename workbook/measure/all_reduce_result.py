"""What ``labkit bench all-reduce`` found for one world size: rows, model, table, figure.

Symbols: P ranks, S bytes of one rank's tensor.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from labkit.costs.link import Link
from labkit.costs.seconds import all_reduce_seconds, crossover_bytes
from labkit.units import format_bytes, format_number, format_seconds
from workbook.measure.link_and_memory import Links, Memory, fit_links
from workbook.measure.record import Figures, Result
from workbook.measure.spread import Spread, ratios, step_record, table

ALGORITHMS = ("naive", "tree", "ring")
_REFERENCES = ("gloo", "MPI", "NCCL")
# More curves than these hide each other.
_DRAWN = ("fast ring", "ring", "tree", "gloo", "MPI", "NCCL")


@dataclass(frozen=True)
class AllReduceResult(Result):
    """The measurements of one world size, with the models that explain them.

    Attributes:
        transport: of our own contenders.
        seconds: ``{size in bytes: {contender: [seconds of each repeat]}}``.
        memory: the memory bandwidth, which limits an all-reduce of ranks that share it.
        links: by transport, the cost of a message when all ranks send at the same time.
        between: the links between the ranks' GPUs, which limit it instead; None without them.
    """

    world_size: int
    device: str
    transport: str
    seconds: dict[int, dict[str, list[float]]]
    memory: Memory
    links: dict[str, Link]
    between: Links | None = None

    @classmethod
    def of(
        cls, seconds: dict[str, Any], world_size: int, device: str, between: Links | None = None
    ) -> "AllReduceResult":
        """Build it from ``measure.all_reduce.measure``, as seconds of the slowest rank."""
        links = fit_links(seconds["messages"])
        memory = Memory.of(seconds["memory"], world_size)
        own = next(iter(links))
        return cls(world_size, device, own, seconds["all_reduce"], memory, links, between)

    @property
    def limit(self) -> Memory | Links:
        """What no all-reduce can beat."""
        return self.between or self.memory

    @property
    def references(self) -> list[str]:
        """The contenders that all others are compared with."""
        present = next(iter(self.seconds.values()))
        return [name for name in _REFERENCES if name in present]

    def rows(self) -> list[dict[str, Any]]:
        """One row per size and contender, for the record.

        ``algorithm_bytes_per_s`` is S / t, and ``bus_bytes_per_s`` is 2 (P - 1) / P x S / t, the
        bytes per second that each link of a ring carries, which can be compared across P and with
        the speed of the links (algbw and busbw of nccl-tests). ``limit_s`` is the least time that
        the memory or the links allow, see ``limit``.
        """
        rows = []
        for size, by_name in self.seconds.items():
            limit_s = self.limit.seconds(size)
            carried = 2 * (self.world_size - 1) / self.world_size * size
            for name, seconds in by_name.items():
                row = {"world_size": self.world_size, "size_bytes": size, "contender": name}
                against = {one: ratios(by_name[one], seconds) for one in self.references}
                timing = step_record(seconds, against, time="time_s")
                median_s = timing["time_s"]["median"]
                limit = {"limit_s": limit_s, "share_of_limit": limit_s / median_s}
                speeds = {"algorithm_bytes_per_s": size / median_s}
                speeds["bus_bytes_per_s"] = carried / median_s
                rows.append(row | timing | speeds | limit)
        return rows

    def model_seconds(self, algorithm: str, num_bytes: int, transport: str = "") -> float:
        """Predicted seconds; ``transport`` is by default that of our own contenders."""
        link = self.links[transport or self.transport]
        return all_reduce_seconds(algorithm, num_bytes, self.world_size, link)

    def model_crossover_bytes(self) -> float:
        """The size from which the ring is faster than the tree in the model; infinite if none."""
        return crossover_bytes(self.world_size, self.links[self.transport])

    def measured_crossovers_bytes(self) -> list[float]:
        """Each size at which the medians of tree and ring cross."""
        from workbook.plots import crossings

        return crossings(self._curve("tree"), self._curve("ring"))

    def _curve(self, name: str) -> dict[int, list[float]]:
        return {size: by_name[name] for size, by_name in self.seconds.items()}

    def record(self) -> dict[str, list[dict]]:
        """The rows and what explains them; ``model_bytes`` is None if the model never crosses."""
        model_bytes = self.model_crossover_bytes()
        ranks = {"world_size": self.world_size}
        crossover = ranks | {
            "transport": self.transport,
            "between": ["tree", "ring"],
            "model_bytes": model_bytes if math.isfinite(model_bytes) else None,
            "measured_bytes": self.measured_crossovers_bytes(),
        }
        between = {"between_gpus": [asdict(self.between)]} if self.between else {}
        return {
            "rows": self.rows(),
            "memory": [asdict(self.memory)],
            **between,
            "links": [ranks | {"transport": t} | asdict(link) for t, link in self.links.items()],
            "predictions": [
                ranks
                | {"transport": transport, "algorithm": algorithm, "size_bytes": size}
                | {"seconds": self.model_seconds(algorithm, size, transport)}
                for transport in self.links
                for size in self.seconds
                for algorithm in ALGORITHMS
            ],
            "crossovers": [crossover],
        }

    def __str__(self) -> str:
        parts = [self._title(), self._table(), self.limit.text(), *self._model_text()]
        return "\n\n".join(parts) + "\n"

    def _title(self) -> str:
        counts = sorted({len(row["seconds"]) for row in self.rows()})
        repeats = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
        return (
            f"All-reduce of float32 in place, {self.world_size} ranks on {self.device}, in turns."
            "\nTime: from the last rank's start to the last rank's end, median of "
            f"{repeats} (quartiles)."
            "\nAgainst: the other's time / this one's, repeat by repeat; above 1, this is faster."
        )

    def _table(self) -> str:
        header = ["size", "contender", "time", "alg GB/s", "bus GB/s"]
        header += [*(f"against {name}" for name in self.references), "of the limit"]
        body: list[list[str]] = []
        for size, rows in itertools.groupby(self.rows(), lambda row: row["size_bytes"]):
            lines = [["", *_cells(row)] for row in rows]
            lines[0][0] = format_bytes(size)
            body += [[], *lines] if body else lines
        return table(header, body)

    def _model_text(self) -> Iterable[str]:
        yield "\n".join(
            f"A message ({transport}): {format_seconds(link.alpha_s)} + "
            f"{format_number(link.beta_s_per_byte * 1e9)} ns per byte; adding one byte takes "
            f"{format_number(link.gamma_s_per_byte * 1e9)} ns."
            for transport, link in self.links.items()
        )
        yield table(
            ["size", *(f"{name}: model, measured, ratio" for name in ALGORITHMS)],
            [
                [format_bytes(size), *(self._compared(name, size) for name in ALGORITHMS)]
                for size in self.seconds
            ],
        )
        measured = ", ".join(map(format_bytes, self.measured_crossovers_bytes()))
        model_bytes = self.model_crossover_bytes()
        model = format_bytes(model_bytes) if math.isfinite(model_bytes) else "never"
        yield (
            f"The ring overtakes the tree: model {model}, "
            f"measured {measured or 'at none of these sizes'}."
        )

    def _compared(self, algorithm: str, size: int) -> str:
        model_s = self.model_seconds(algorithm, size)
        measured_s = Spread.of(self.seconds[size][algorithm]).median
        numbers = format_seconds(model_s), format_seconds(measured_s)
        return f"{', '.join(numbers)}, {format_number(measured_s / model_s)}"

    def figures(self) -> Figures:
        """Time by size, beside the models of tree and ring."""
        from workbook.plots import size_curves

        names = [name for name in _DRAWN if name in next(iter(self.seconds.values()))]
        model = {
            name: {size: self.model_seconds(name, size) for size in self.seconds}
            for name in ("ring", "tree")
        }
        figure = size_curves(
            {name: self._curve(name) for name in names},
            model,
            self.model_crossover_bytes(),
            between=("tree", "ring"),
            title=f"All-reduce on {self.world_size} ranks ({self.device})",
        )
        return {f"{self.world_size}_ranks": figure}


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["contender"],
        Spread(**row["time_s"]).text(format_seconds),
        format_number(row["algorithm_bytes_per_s"] / 1e9),
        format_number(row["bus_bytes_per_s"] / 1e9),
        *(Spread(**ratio).text(format_number) for ratio in row["ratio_to"].values()),
        f"{row['share_of_limit']:.1%}",
    ]
