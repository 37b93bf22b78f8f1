"""Hierarchical all-reduce: which blocks each rank sends and receives at each step, over hosts.

1. Inside each host, share_reduce: each of its m ranks then has one part of the host's sum.
2. Between hosts, ring all-reduce of each part: its ring has one rank of every host, the one that
   has this part, and all rings run at the same time.
3. Inside each host, share_only of the complete parts.

The tensor is cut into L x H blocks, and each message carries some blocks that lie side by side.
Where all hosts have m ranks, these are P blocks, as in the flat ring: m of them make a part in
step 1, H of them are divided anew in step 2. Where hosts differ in size, so do their parts, and a
rank may be in several rings of step 2, one after another, in the order of the blocks. With one
host, or one rank per host, it is the flat ring.

Symbols: P ranks, H hosts, m ranks of one host, L the least common multiple of all m.
Source: Cho et al., "BlueConnect: decomposing all-reduce for deep learning on heterogeneous network
hierarchy" (2019), section 3, for equal hosts.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from labkit.schedules.ring import (
    RingStep,
    owned_chunk,
    ring_all_reduce,
    ring_share_only,
    ring_share_reduce,
)

# The ranks of each host. In a ring they stand in this order.
Hosts = tuple[tuple[int, ...], ...]
# The first block, and the one behind the last.
Blocks = tuple[int, int]


class HostStep(NamedTuple):
    """What one rank does in one step: it sends and receives some blocks at the same time.

    ``phase`` is ``share_reduce`` or ``share_only``; ``is_between``: the two messages travel
    between hosts.
    """

    phase: str
    is_between: bool
    dst: int
    send: Blocks
    src: int
    recv: Blocks


# What the ranks of some rings do at the same time, by rank.
Round = Mapping[int, HostStep]


def hierarchical_all_reduce(rank: int, hosts: Hosts) -> Iterator[HostStep]:
    """All three parts: 2 (m - 1) steps inside the host, 2 (H - 1) between hosts in each ring."""
    yield from _inside(ring_share_reduce, rank, hosts)
    for members, (first, end) in rings_between(rank, hosts):
        size = (end - first) // len(hosts)
        for step in ring_all_reduce(members.index(rank), len(hosts)):
            begins = (first + chunk * size for chunk in (step.send_chunk, step.recv_chunk))
            sent, received = ((begin, begin + size) for begin in begins)
            yield HostStep(step.phase, True, members[step.dst], sent, members[step.src], received)
    yield from _inside(ring_share_only, rank, hosts)


def rings_between(rank: int, hosts: Hosts) -> Iterator[tuple[list[int], Blocks]]:
    """The rings between hosts that ``rank`` is in: their ranks, one per host, and their blocks."""
    first, end = own_blocks(rank, hosts)
    # Wherever a part of some host begins, another ring begins.
    begins = {start for ranks in hosts for start, _ in parts_inside(len(ranks), hosts)}
    begins = sorted(begin for begin in begins if first <= begin < end)
    for start, stop in zip(begins, [*begins[1:], end]):
        members = []
        for ranks in hosts:
            part = start * len(ranks) // num_blocks(hosts)
            members += [r for n, r in enumerate(ranks) if owned_chunk(n, len(ranks)) == part]
        yield members, (start, stop)


def own_blocks(rank: int, hosts: Hosts) -> Blocks:
    """The blocks of which ``rank`` has its host's sum after the first part."""
    ranks = hosts[host_of(rank, hosts)]
    return parts_inside(len(ranks), hosts)[owned_chunk(ranks.index(rank), len(ranks))]


def parts_inside(num_ranks: int, hosts: Hosts) -> list[Blocks]:
    """The blocks of each part on a host of ``num_ranks`` ranks."""
    size = num_blocks(hosts) // num_ranks
    return [(size * part, size * (part + 1)) for part in range(num_ranks)]


def host_of(rank: int, hosts: Hosts) -> int:
    """The number of the host that ``rank`` is on.

    Raises:
        ValueError: on none of them.
    """
    for host, ranks in enumerate(hosts):
        if rank in ranks:
            return host
    raise ValueError(f"rank {rank} is on none of the hosts {[list(ranks) for ranks in hosts]}")


def num_blocks(hosts: Hosts) -> int:
    """L x H: into how many blocks the tensor is cut."""
    return len(hosts) * math.lcm(*(len(ranks) for ranks in hosts))


def flat_ring(rank: int, hosts: Hosts) -> Iterator[HostStep]:
    """The flat ring, in the order of the ranks, on the same hosts; a chunk is one of P blocks."""
    world_size = sum(len(ranks) for ranks in hosts)
    for step in ring_all_reduce(rank, world_size):
        between = host_of(rank, hosts) != host_of(step.dst, hosts)
        sent, received = ((c, c + 1) for c in (step.send_chunk, step.recv_chunk))
        yield HostStep(step.phase, between, step.dst, sent, step.src, received)


def rounds(schedule: Callable[[int, Hosts], Iterable[HostStep]], hosts: Hosts) -> list[Round]:
    """The steps of all ranks by round: a rank does its next step when both neighbours are at it.

    Hosts of different sizes have rounds in which some ranks wait.
    """
    todo = {rank: list(schedule(rank, hosts))[::-1] for ranks in hosts for rank in ranks}
    found: list[Round] = []
    while any(todo.values()):
        ready = {rank: steps[-1] for rank, steps in todo.items() if steps}
        met: Round = {}
        while len(met) != len(ready):
            met, ready = ready, {r: step for r, step in ready.items() if _meets(r, step, ready)}
        assert ready, "in some round nobody can do anything"
        found.append(ready)
        for rank in ready:
            todo[rank].pop()
    return found


def _meets(rank: int, step: HostStep, others: Round) -> bool:
    left, right = others.get(step.src), others.get(step.dst)
    return (
        left is not None
        and right is not None
        and (left.dst, left.send) == (rank, step.recv)
        and (right.src, right.recv) == (rank, step.send)
    )


def _inside(
    half: Callable[[int, int], Iterator[RingStep]], rank: int, hosts: Hosts
) -> Iterator[HostStep]:
    ranks = hosts[host_of(rank, hosts)]
    parts = parts_inside(len(ranks), hosts)
    for step in half(ranks.index(rank), len(ranks)):
        sent, received = parts[step.send_chunk], parts[step.recv_chunk]
        yield HostStep(step.phase, False, ranks[step.dst], sent, ranks[step.src], received)
