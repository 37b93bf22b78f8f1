"""Contenders in turns: the rules by which the benches time what several ranks do together.

On a small machine, other programs can change a time by a factor of two. Therefore all contenders
are timed in one run: in each repeat every contender has one turn, the next repeat starts with
another contender, and they are compared by their ratios within a repeat. A turn lasts until the
*last* rank ends, since an all-reduce that only some ranks have finished is of no use.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from labkit.collectives import tree_all_reduce
from labkit.engine.comm.comm import Comm
from labkit.engine.gpus import synchronize

# What one contender does when its turn comes; returns this rank's seconds.
Turn = Callable[[], float]
Name = TypeVar("Name")


def slowest(by_rank: list[Any]) -> Any:
    """The largest of the ranks' seconds, turn by turn: of lists, or of nested dicts of them."""
    if not isinstance(by_rank[0], dict):
        return list(map(max, zip(*by_rank)))
    largest = {}
    for key in by_rank[0]:
        largest[key] = slowest([seconds[key] for seconds in by_rank])
    return largest


def timed(comm: Comm, action: Callable[[], object]) -> float:
    """Seconds from the latest start of ``action`` on any rank to its end on this rank.

    GPU work is included. Ranks start at different times, because a rank that sleeps in the barrier
    leaves it later; this difference is left out. All ranks of a machine read the same clock.
    """
    synchronize(comm.device)
    # The first barrier wakes all sleeping ranks, so that they leave the second almost together.
    comm.barrier()
    comm.barrier()
    # On NCCL a barrier is queued like any other message, and its call may return before it ends.
    synchronize(comm.device)
    start_s = time.perf_counter()
    action()
    synchronize(comm.device)
    end_s = time.perf_counter()
    last_start_s = torch.tensor([start_s], dtype=torch.float64, device=comm.device)
    tree_all_reduce(comm, last_start_s, "max")
    return end_s - last_start_s.item()


def in_turn(names: Iterable[Name], repeat: int) -> list[Name]:
    """The order of this repeat: each begins with another name."""
    names = list(names)
    first = repeat % max(1, len(names))
    return names[first:] + names[:first]


def repeat_turns(turns: Mapping[Name, Turn], repeats: int) -> dict[Name, list[float]]:
    """Time every contender once per repeat; every rank passes the same names in one order.

    Returns:
        This rank's seconds of each repeat, by name.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in turns}
    for repeat in range(repeats):
        for name in in_turn(turns, repeat):
            seconds[name].append(turns[name]())
    return seconds


def take_turns(turns: Mapping[Name, Turn], repeats: int) -> dict[Name, list[float]]:
    """``repeat_turns`` after a round that is not counted, in which connections are opened."""
    repeat_turns(turns, 1)
    return repeat_turns(turns, repeats)
