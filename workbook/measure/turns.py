"""Contenders in turns: the rules by which the benches time what several ranks do together.

On a small machine, other programs can change a time by a factor of two. Therefore all contenders
are timed in one run: in each repeat every contender has one turn, the next repeat starts with
another contender, and they are compared by their ratios within a repeat. A turn lasts until the
*last* rank ends, since an all-reduce that only some ranks have finished is of no use.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from labkit.collectives import tree_all_reduce
from labkit.comm.comm import Comm
from labkit.gpus import synchronize
from labkit.runtime.launch import run

# Timeout of a bench's run.
_TIMEOUT_S = 1800

# Where ranks run: ``device`` and ``devices`` as in ``labkit.run``.
Where = Mapping[str, Any]
# What one contender does when its turn comes; returns this rank's seconds.
Turn = Callable[[], float]
Name = TypeVar("Name")


def on_ranks(
    function: Callable[..., Any], *arguments: Any, world_size: int, where: Where
) -> list[Any]:
    """Run ``function(comm, *arguments)`` on all ranks by ``labkit.run``; its values by rank."""
    return run(function, *arguments, world_size=world_size, timeout_s=_TIMEOUT_S, **where).values


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
    last = torch.tensor([start_s], dtype=torch.float64, device=comm.device)
    return end_s - tree_all_reduce(comm, last, "max").item()


def repeat_turns(turns: dict[Name, Turn], repeats: int) -> dict[Name, list[float]]:
    """Time every contender once per repeat; each repeat begins with another contender.

    Args:
        turns: what each contender does, by name; every rank passes the same names in one order.
        repeats: of all contenders.

    Returns:
        This rank's seconds of each repeat, by name.
    """
    names = list(turns)
    seconds: dict[Name, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(turns[name]())
    return seconds


def take_turns(turns: dict[Name, Turn], repeats: int) -> dict[Name, list[float]]:
    """``repeat_turns`` after a round that is not counted, in which connections are opened."""
    repeat_turns(turns, 1)
    return repeat_turns(turns, repeats)


def slowest(by_rank: list[Any]) -> Any:
    """The seconds of the slowest rank in each turn.

    ``by_rank`` has what the ranks returned: lists of seconds, or nested dicts of such lists.
    """
    first = by_rank[0]
    if isinstance(first, dict):
        return {key: slowest([mine[key] for mine in by_rank]) for key in first}
    return [max(each) for each in zip(*by_rank)]
