"""Contenders in turns: the rules by which the benches time what several ranks do together.

On a small machine, other programs can change a time by a factor of two. Therefore all contenders
are timed in one run: in each repeat every contender has one turn, the next repeat starts with
another contender, and they are compared by their ratios within a repeat. A turn lasts until the
*last* rank ends, since an all-reduce that only some ranks have finished is of no use.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from labkit.collectives import broadcast, tree_all_reduce
from labkit.comm.comm import Comm
from labkit.devices import check_world_size, plan
from labkit.gpus import synchronize
from labkit.runtime.launch import run
from labkit.units import check_integer

FEWEST_REPEATS = 5
# Timeout of a bench's run.
_TIMEOUT_S = 1800

# Where ranks run: ``device`` and ``devices`` as in ``labkit.run``.
Where = Mapping[str, Any]
ANYWHERE: Where = {}
# What one contender does when its turn comes; returns this rank's seconds.
Turn = Callable[[], float]
Name = TypeVar("Name")


def check_settings(
    what: str, world_sizes: tuple[int, ...], repeats: int, where: Where, least: int = 2
) -> None:
    """Refuse settings with which ``what`` ("a pipeline") cannot be timed.

    Raises:
        ValueError: a world size below ``least`` or beyond the limits, no repeats, or a device
            that this machine lacks.
    """
    check_integer("repeats", repeats)
    for world_size in world_sizes:
        check_world_size(world_size)
        if world_size < least:
            raise ValueError(f"{what} takes {least} ranks or more, got world size {world_size}")
        plan(world_size, **where)


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


def take_turns(
    comm: Comm, turns: dict[Name, Turn], most_repeats: int, budget_s: float
) -> dict[Name, list[float]]:
    """Time every contender once per repeat; each repeat begins with another contender.

    Args:
        comm: this rank's Comm; every rank passes the same names in the same order.
        turns: what each contender does, by name.
        most_repeats: repeats at most.
        budget_s: seconds for all repeats; as many are made as fit, at least ``FEWEST_REPEATS``
            (or ``most_repeats``, where that is less).

    Returns:
        This rank's seconds of each repeat, by name. Two earlier rounds are not counted: the first
        opens connections, the second shows how long a round takes.
    """
    repeat_turns(turns, 1)
    started_s = time.perf_counter()
    repeat_turns(turns, 1)
    fitting = int(budget_s / (time.perf_counter() - started_s))
    return repeat_turns(turns, agree(comm, min(most_repeats, max(fitting, FEWEST_REPEATS))))


def repeat_turns(turns: dict[Name, Turn], repeats: int) -> dict[Name, list[float]]:
    """Take turns for a given number of repeats, without the uncounted rounds of ``take_turns``."""
    names = list(turns)
    seconds: dict[Name, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(turns[name]())
    return seconds


def agree(comm: Comm, number: int) -> int:
    """Return rank 0's ``number`` on every rank."""
    return int(broadcast(comm, torch.tensor([number], device=comm.device), root=0).item())


@contextlib.contextmanager
def process_groups(comm: Comm) -> Iterator[dict[str, Any]]:
    """PyTorch's process groups of these ranks, by the backend's name, gloo first.

    Their threads and connections end with the block, whatever it raises.
    """
    groups: dict[str, Any] = {}
    try:
        groups["gloo"] = dist.new_group(backend="gloo")
        if comm.device.type == "cpu":
            groups["labkit"] = dist.new_group(backend="labkit")
        elif dist.get_backend() == "nccl":
            groups["NCCL"] = dist.new_group(backend="nccl")
        yield groups
    finally:
        for group in groups.values():
            group.shutdown()


def slowest(by_rank: list[Any]) -> Any:
    """The seconds of the slowest rank in each turn.

    ``by_rank`` has what the ranks returned: lists of seconds, or nested dicts of such lists.
    """
    first = by_rank[0]
    if isinstance(first, dict):
        return {key: slowest([mine[key] for mine in by_rank]) for key in first}
    return [max(each) for each in zip(*by_rank)]
