"""Contenders in turns: the rules by which the benches time what several ranks do together.

Other programs move every time on a small machine by a factor of two. So all contenders run in one
run: a repeat is one turn of each, the next repeat starts with another one, and the ratio within a
repeat is what counts. A turn lasts until the *last* rank's end, since nobody can use an all-reduce
that only some ranks have finished.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from labkit.collectives import broadcast, tree_all_reduce
from labkit.comm.comm import Comm

FEWEST_REPEATS = 5

# What one contender does when its turn comes: this rank's seconds.
Turn = Callable[[], float]
Name = TypeVar("Name")


def timed(comm: Comm, action: Callable[[], object]) -> float:
    """Seconds from the last rank's start to this rank's own end of ``action``, GPU work included.

    A rank that sleeps in the barrier comes out of it later than one that does not; that is no part
    of what is timed. All ranks of a machine read one clock.
    """
    synchronize(comm.device)
    # The first wakes up whoever sleeps: the second then lets all go at about the same moment.
    comm.barrier()
    comm.barrier()
    start_s = time.perf_counter()
    action()
    synchronize(comm.device)
    end_s = time.perf_counter()
    last = torch.tensor([start_s], dtype=torch.float64, device=comm.device)
    return end_s - tree_all_reduce(comm, last, "max").item()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take_turns(
    comm: Comm, turns: dict[Name, Turn], most_repeats: int, budget_s: float
) -> dict[Name, list[float]]:
    """Run every contender once a repeat, first to last, each repeat beginning with another one.

    Args:
        comm: this rank's Comm; every rank passes the same names in the same order.
        turns: by name, what a contender does.
        most_repeats: repeats at most.
        budget_s: as many repeats as fit into it, at least ``FEWEST_REPEATS`` (or
            ``most_repeats``, where that is less).

    Returns:
        By name, this rank's seconds of each repeat. Two rounds before them are not counted: the
        first meets cold connections, the second says how long a round takes.
    """
    repeat_turns(turns, 1)
    started_s = time.perf_counter()
    repeat_turns(turns, 1)
    fitting = int(budget_s / (time.perf_counter() - started_s))
    return repeat_turns(turns, agree(comm, min(most_repeats, max(fitting, FEWEST_REPEATS))))


def repeat_turns(turns: dict[Name, Turn], repeats: int) -> dict[Name, list[float]]:
    """``take_turns`` for so many repeats, without the two rounds before them."""
    names = list(turns)
    seconds: dict[Name, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(turns[name]())
    return seconds


def agree(comm: Comm, number: int) -> int:
    """Rank 0's number, on every rank."""
    said = torch.tensor([number], device=comm.device)
    return int(broadcast(comm, said, root=0).item())


@contextlib.contextmanager
def process_groups(comm: Comm) -> Iterator[dict[str, dist.ProcessGroup]]:
    """PyTorch's process groups for these ranks, by the backend's name, gloo first.

    In the end their threads and connections end too, whatever was raised.
    """
    groups: dict[str, dist.ProcessGroup] = {}
    try:
        groups["gloo"] = dist.new_group(backend="gloo")
        if comm.device.type == "cpu":
            groups["labkit"] = dist.new_group(backend="labkit")
        elif dist.is_nccl_available() and comm.world_size <= torch.cuda.device_count():
            groups["NCCL"] = dist.new_group(backend="nccl")
        yield groups
    finally:
        for group in groups.values():
            group.shutdown()


def slowest(by_rank: list) -> dict | list[float]:
    """The last rank's seconds of each turn, from what the ranks returned: lists, or dicts of
    dicts of lists."""
    first = by_rank[0]
    if isinstance(first, dict):
        return {key: slowest([mine[key] for mine in by_rank]) for key in first}
    return [max(each) for each in zip(*by_rank)]


@dataclass(frozen=True)
class Spread:
    """A measurement: the median of its repeats, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, repeats: Iterable[float]) -> "Spread":
        """Raises ValueError if there are no repeats."""
        values = list(repeats)
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def text(self, format_one: Callable[[float], str]) -> str:
        low, high = format_one(self.low), format_one(self.high)
        return f"{format_one(self.median)} ({low} to {high})"


def ratios(others_s: list[float], ours_s: list[float]) -> list[float]:
    """others / ours within each repeat: above 1, ours is faster."""
    return [other / ours for other, ours in zip(others_s, ours_s)]


def rounded(seconds: Iterable[float]) -> list[float]:
    """As a record keeps them: to the nanosecond."""
    return [round(one, 9) for one in seconds]


def table(header: list[str], rows: list[list[str]]) -> str:
    """Aligned plain text, two spaces between columns; an empty row is an empty line."""
    filled = [row for row in rows if row]
    widths = [max(map(len, column)) for column in zip(header, *filled)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
        for row in [header, *rows]
    )
