"""``labkit bench all-reduce``: our algorithms against gloo and NCCL, in turns in one run.

Beside the seconds stands the alpha-beta model, fitted to single messages of the same ranks.

Symbols: P ranks, S bytes of one rank's tensor.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit import collectives
from labkit.comm.comm import Comm
from labkit.comm.torch_transport import TorchTransport
from labkit.costs.link import Link, all_reduce_seconds, crossover_bytes, fit_link
from labkit.units import MOST_BYTES, check_integer, format_bytes, format_number, format_seconds
from workbook.measure.record import Figures, Result
from workbook.measure.spread import Spread, ratios, step_record, table
from workbook.measure.turns import (
    Where,
    check_settings,
    on_ranks,
    process_groups,
    slowest,
    take_turns,
    timed,
)

SIZES_BYTES = tuple(2**power for power in (10, 12, 16, 20, 22, 24, 26))
# Seconds for the repeats of one size; of one size of message, in a row as in a collective.
_BUDGET_S, _MESSAGE_BUDGET_S, _IN_A_ROW = 5.0, 1.5, 4
MESSAGE_BYTES = tuple(2**power for power in (10, 12, 14, 16, 18, 20, 22, 24))
_MOST_MESSAGES = 10
_KEPT_SPANS = 1000
ALGORITHMS = ("naive", "tree", "ring")
_REFERENCES = ("gloo", "MPI", "NCCL")
# More curves than these hide each other.
_DRAWN = ("fast ring", "ring", "tree", "gloo", "MPI", "NCCL")

AllReduce = Callable[[Tensor], object]
# A contender from outside the package: a context manager that each rank enters once. It yields a
# function that takes S, runs one all-reduce of float32, and returns this rank's seconds (0 on a
# rank that does not measure the time).
Guest = Callable[[Comm], contextlib.AbstractContextManager[Callable[[int], float]]]


def bench_all_reduce(
    world_sizes: tuple[int, ...] = (2, 4),
    sizes_bytes: tuple[int, ...] = SIZES_BYTES,
    repeats: int = 50,
    device: str = "auto",
    devices: tuple[str, ...] | None = None,
    *,
    guests: Mapping[str, Guest] | None = None,
) -> Iterator["AllReduceResult"]:
    """Time all available all-reduces on float32 tensors; yield one result per world size.

    The tensors are in ordinary memory, not placed in shared memory beforehand. Every turn starts
    from the same values, and every rank checks its result.

    Args:
        world_sizes: of the runs, each at least 2.
        sizes_bytes: S, multiples of 4.
        repeats: at most; large tensors get fewer, at least 5.
        device, devices: see ``labkit.run``. On ``cuda`` NCCL takes part where each rank has a GPU.
        guests: additional contenders by name, as ``tools/bench_mpi.py`` adds MPI.

    Raises:
        ValueError: impossible sizes or world sizes, before anything runs.
        WorkerError: a contender failed, or its result was wrong.
    """
    check_settings("an all-reduce", world_sizes, repeats)
    for size in sizes_bytes:
        check_integer("a size in bytes", size, least=0, most=MOST_BYTES)
        if size < 4 or size % 4:
            raise ValueError(
                f"{size} bytes are not a whole number of float32 elements: give a multiple of 4"
            )
    where = Where(device, devices)
    kind = where.kind
    run = partial(on_ranks, measure, sizes_bytes, repeats, dict(guests or {}), where=where)
    return (AllReduceResult.of(slowest(run(world_size=n)), n, kind) for n in world_sizes)


def measure(
    comm: Comm, sizes_bytes: tuple[int, ...], repeats: int, guests: dict[str, Guest]
) -> dict[str, dict]:
    """Measure on this rank everything that one result needs; called on every rank."""
    over_gloo = _gloo_comm(comm)
    transports = {"shared" if comm.transport.shares_memory else dist.get_backend(): comm}
    if over_gloo:
        transports["gloo"] = over_gloo
    found: dict[str, dict] = {
        "messages": measure_messages(comm, transports, repeats),
        "all_reduce": {},
    }
    with process_groups(comm) as groups, contextlib.ExitStack() as stack:
        algorithms = contenders(comm, over_gloo, groups)
        entered = {name: stack.enter_context(guest(comm)) for name, guest in guests.items()}
        for number, size in enumerate(sizes_bytes):
            comm.progress(number, len(sizes_bytes), format_bytes(size))
            tensors = Tensors(comm, size)
            turns: dict[str, Callable[[], float]] = {
                name: partial(tensors.turn, name, one) for name, one in algorithms.items()
            }
            turns |= {name: partial(guest, size) for name, guest in entered.items()}
            found["all_reduce"][size] = take_turns(comm, turns, repeats, _BUDGET_S)
    return found


def measure_messages(
    comm: Comm, transports: dict[str, Comm], repeats: int
) -> dict[int, dict[str, list[float]]]:
    """Time one step of a ring at several sizes: every rank sends right and receives from the left.

    All ranks send at the same time: they share cores and memory bandwidth, so a fit holds for this
    P only.

    Returns:
        This rank's seconds, by size and transport; under ``add``, those of adding two tensors of
        that size.
    """
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size

    def turn(action: Callable[[], object]) -> float:
        return timed(comm, lambda: [action() for _ in range(_IN_A_ROW)]) / _IN_A_ROW

    found = {}
    for size in MESSAGE_BYTES:
        outgoing = torch.ones(size // 4, device=comm.device)
        incoming = torch.zeros_like(outgoing)
        turns: dict[str, Callable[[], float]] = {
            name: partial(turn, partial(transport.exchange, outgoing, right, incoming, left))
            for name, transport in transports.items()
        }
        turns["add"] = partial(turn, partial(incoming.add_, outgoing))
        found[size] = take_turns(comm, turns, min(repeats, _MOST_MESSAGES), _MESSAGE_BUDGET_S)
    return found


def _gloo_comm(comm: Comm) -> Comm | None:
    """A Comm of the same ranks over gloo; None if ``comm`` uses gloo itself, or has no gloo."""
    if not comm.transport.shares_memory or dist.get_backend() != "gloo":
        return None
    transport = TorchTransport("gloo", comm.device)
    return Comm(comm.rank, comm.world_size, comm.device, transport, keep_spans=_KEPT_SPANS)


def contenders(
    comm: Comm, over_gloo: Comm | None, groups: dict[str, dist.ProcessGroup]
) -> dict[str, AllReduce]:
    """The all-reduces that are timed, by name; each works in place."""
    found: dict[str, AllReduce] = {
        "fast ring": partial(collectives.fast_ring_all_reduce, comm),
        "ring": partial(collectives.ring_all_reduce, comm),
        "tree": partial(collectives.tree_all_reduce, comm),
        "naive": partial(collectives.naive_all_reduce, comm),
    }
    if over_gloo:
        found["ring over gloo"] = partial(collectives.ring_all_reduce, over_gloo)
    for backend, group in groups.items():
        name = "labkit backend" if backend == "labkit" else backend
        found[name] = partial(dist.all_reduce, group=group)
    return found


class Tensors:
    """This rank's addend, the sum that all ranks must get, and the tensor to work in.

    The values are small integers, whose sums float32 holds exactly: the result does not depend on
    the order of additions, in which the algorithms differ. They repeat after 1021 elements (a
    prime), so that a chunk in the wrong place gives a wrong sum.
    """

    def __init__(self, comm: Comm, num_bytes: int):
        self.comm = comm
        pattern = (torch.arange(num_bytes // 4, device=comm.device) % 1021).float()
        self.mine = pattern * (comm.rank + 1)
        self.expected = pattern * (comm.world_size * (comm.world_size + 1) // 2)
        self.work = torch.empty_like(pattern)

    def turn(self, name: str, all_reduce: AllReduce) -> float:
        """This rank's seconds of one checked all-reduce, after one that is not timed.

        The first call fills the caches (of data and of code) again after the other contenders'
        turns: in a program that calls one all-reduce after another, they are warm.

        Raises:
            AssertionError: the sum is wrong.
        """
        all_reduce(self.work.zero_())
        self.work.copy_(self.mine)
        seconds = timed(self.comm, lambda: all_reduce(self.work))
        if not torch.equal(self.work, self.expected):
            raise AssertionError(f"{name}: {self.work.nbytes} bytes have a wrong sum")
        return seconds


@dataclass(frozen=True)
class AllReduceResult(Result):
    """The measurements of one world size, with the model that explains them.

    Attributes:
        transport: of our own contenders.
        seconds: ``{size in bytes: {contender: [seconds of each repeat]}}``.
        links: by transport, the cost of a message when all ranks send at the same time.
    """

    world_size: int
    device: str
    transport: str
    seconds: dict[int, dict[str, list[float]]]
    links: dict[str, Link]

    @classmethod
    def of(cls, seconds: dict[str, Any], world_size: int, device: str) -> "AllReduceResult":
        """Build it from what ``measure`` returns, as seconds of the slowest rank."""
        messages = seconds["messages"]

        def fit(name: str, gamma: float = 0.0) -> Link:
            points = [(size, one) for size, by_name in messages.items() for one in by_name[name]]
            sizes, times = zip(*points, strict=True)
            return fit_link(sizes, times, gamma)

        gamma = fit("add").beta_s_per_byte
        names = [name for name in next(iter(messages.values())) if name != "add"]
        links = {name: fit(name, gamma) for name in names}
        return cls(world_size, device, names[0], seconds["all_reduce"], links)

    @property
    def references(self) -> list[str]:
        """The contenders that all others are compared with."""
        present = next(iter(self.seconds.values()))
        return [name for name in _REFERENCES if name in present]

    def rows(self) -> list[dict[str, Any]]:
        """One row per size and contender, for the record.

        ``algorithm_bytes_per_s`` is S / t, and ``bus_bytes_per_s`` is 2 (P - 1) / P x S / t, the
        bytes per second that each link of a ring carries (algbw and busbw of nccl-tests).
        """
        rows = []
        for size, by_name in self.seconds.items():
            carried = 2 * (self.world_size - 1) / self.world_size * size
            for name, seconds in by_name.items():
                against = {one: ratios(by_name[one], seconds) for one in self.references}
                timing = step_record(seconds, against, time="time_s")
                median_s = timing["time_s"]["median"]
                row = {"world_size": self.world_size, "size_bytes": size, "contender": name}
                speeds = {"algorithm_bytes_per_s": size / median_s}
                rows.append(row | timing | speeds | {"bus_bytes_per_s": carried / median_s})
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
        model_bytes, ranks = self.model_crossover_bytes(), {"world_size": self.world_size}
        crossover: dict[str, Any] = {"transport": self.transport, "between": ["tree", "ring"]}
        crossover["model_bytes"] = model_bytes if math.isfinite(model_bytes) else None
        crossover["measured_bytes"] = self.measured_crossovers_bytes()
        predictions = []
        for transport, size, name in itertools.product(self.links, self.seconds, ALGORITHMS):
            what = {"transport": transport, "algorithm": name, "size_bytes": size}
            seconds = self.model_seconds(name, size, transport)
            predictions.append(ranks | what | {"seconds": seconds})
        return {
            "rows": self.rows(),
            "links": [ranks | {"transport": t} | asdict(link) for t, link in self.links.items()],
            "predictions": predictions,
            "crossovers": [ranks | crossover],
        }

    def __str__(self) -> str:
        rows = self.rows()
        repeats = " to ".join(map(str, sorted({len(row["seconds"]) for row in rows})))
        header = ["size", "contender", "time", "alg GB/s", "bus GB/s"]
        header += [f"against {name}" for name in self.references]
        body: list[list[str]] = []
        for size, of_size in itertools.groupby(rows, lambda row: row["size_bytes"]):
            body += [[]] if body else []
            for number, row in enumerate(of_size):
                body.append(
                    [
                        "" if number else format_bytes(size),
                        row["contender"],
                        Spread(**row["time_s"]).text(format_seconds),
                        format_number(row["algorithm_bytes_per_s"] / 1e9),
                        format_number(row["bus_bytes_per_s"] / 1e9),
                        *(Spread(**one).text(format_number) for one in row["ratio_to"].values()),
                    ]
                )
        links = "\n".join(
            f"A message ({transport}): {format_seconds(link.alpha_s)} + "
            f"{format_number(link.beta_s_per_byte * 1e9)} ns per byte; adding one byte takes "
            f"{format_number(link.gamma_s_per_byte * 1e9)} ns."
            for transport, link in self.links.items()
        )
        compared = []
        for size, by_name in self.seconds.items():
            cells = [format_bytes(size)]
            for name in ALGORITHMS:
                pair = self.model_seconds(name, size), Spread.of(by_name[name]).median
                cells.append(", ".join([*map(format_seconds, pair), f"{pair[1] / pair[0]:.2f}"]))
            compared.append(cells)
        measured = ", ".join(map(format_bytes, self.measured_crossovers_bytes()))
        model_bytes = self.model_crossover_bytes()
        model = format_bytes(model_bytes) if math.isfinite(model_bytes) else "never"
        heads = ["size", *(f"{name}: model, measured, ratio" for name in ALGORITHMS)]
        parts = [
            f"All-reduce of float32 in place, {self.world_size} ranks on {self.device}, in turns."
            "\nTime: from the last rank's start to the last rank's end, median of "
            f"{repeats} (quartiles)."
            "\nAgainst: the other's time / this one's, repeat by repeat; above 1, this is faster.",
            table(header, body),
            links,
            table(heads, compared),
            f"The ring overtakes the tree: model {model}, measured {measured or 'nowhere'}.\n",
        ]
        return "\n\n".join(parts)

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
