"""The ring: the chunks that each rank sends and receives at each step of ring all-reduce.

Over several hosts, hierarchical all-reduce is made of rings:

1. Inside each host, share_reduce: each of its m ranks then has one part of the host's sum.
2. Between hosts, ring all-reduce of each part: its ring has one rank of every host, the one that
   has this part, and all rings run at the same time.
3. Inside each host, share_only of the complete parts.

Where hosts differ in size, so do their parts, and a rank may be in several rings of step 2, one
after another: the tensor is cut into L x H blocks, and a part is some blocks side by side.

Symbols: P ranks, r a rank, s a step; H hosts, m ranks of one host, L the least common multiple of
all m. Sources: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations" (2009), section 3; Cho et al., "BlueConnect: decomposing all-reduce for deep learning
on heterogeneous network hierarchy" (2019), section 3, for equal hosts.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

# The ranks of each host. In a ring they stand in this order.
Hosts = tuple[tuple[int, ...], ...]
# The first block, and the one behind the last.
Blocks = tuple[int, int]


class RingStep(NamedTuple):
    """One step of a rank in a ring: it sends and receives a message at the same time.

    ``phase`` is ``share_reduce`` or ``share_only``.
    """

    step: int
    phase: str
    dst: int
    send_chunk: int
    src: int
    recv_chunk: int


def ring_share_reduce(rank: int, world_size: int) -> Iterator[RingStep]:
    """The first half of ring all-reduce (the literature's reduce-scatter): P - 1 steps.

    At step s rank r sends chunk (r - s) mod P to its right neighbor, receives chunk
    (r - s - 1) mod P from its left neighbor, and adds it to its own values of that chunk. After
    the last step rank r holds the complete sum of chunk (r + 1) mod P.
    """
    yield from _ring(rank, world_size, "share_reduce", first=rank)


def ring_share_only(rank: int, world_size: int) -> Iterator[RingStep]:
    """The second half of ring all-reduce (the literature's all-gather): P - 1 steps.

    At step s rank r passes on chunk (r + 1 - s) mod P, which is complete, and receives the
    complete chunk (r - s) mod P.
    """
    yield from _ring(rank, world_size, "share_only", first=rank + 1)


def ring_all_reduce(rank: int, world_size: int) -> Iterator[RingStep]:
    """Ring all-reduce: share-reduce, then share-only; 2 (P - 1) steps."""
    yield from ring_share_reduce(rank, world_size)
    yield from ring_share_only(rank, world_size)


def _ring(rank: int, world_size: int, phase: str, first: int) -> Iterator[RingStep]:
    right = (rank + 1) % world_size
    left = (rank - 1) % world_size
    for step in range(world_size - 1):
        chunk = (first - step) % world_size
        yield RingStep(step, phase, right, chunk, left, (chunk - 1) % world_size)


def owned_chunk(rank: int, world_size: int) -> int:
    """The chunk whose complete sum ``rank`` holds after ``ring_share_reduce``."""
    return (rank + 1) % world_size


def chunk_bounds(num_elements: int, world_size: int) -> list[tuple[int, int]]:
    """Cut ``num_elements`` into P chunks whose sizes differ by at most one element.

    The first ``num_elements mod P`` chunks are one element longer; some are empty when there are
    fewer elements than ranks. Returns P pairs (start, end), end excluded.
    """
    size, longer = divmod(num_elements, world_size)
    starts = [size * chunk + min(chunk, longer) for chunk in range(world_size + 1)]
    return list(itertools.pairwise(starts))


def attention_chunks(rank: int, world_size: int, length: int, zigzag: bool = False) -> list[range]:
    """The positions of a sequence that a rank has in ring attention: one chunk of P.

    With ``zigzag`` chunks r and 2 P - 1 - r of 2 P. Chunks may be empty.
    """
    if not zigzag:
        return [range(*chunk_bounds(length, world_size)[rank])]
    bounds = chunk_bounds(length, 2 * world_size)
    return [range(*bounds[rank]), range(*bounds[2 * world_size - 1 - rank])]


def ring_contributions(world_size: int) -> list[list[list[frozenset[int]]]]:
    """The ranks whose values each chunk contains: [state][rank][chunk] -> ranks already summed.

    State 0 is the start, and each of the 2 (P - 1) steps adds one state.
    """
    ranks = range(world_size)
    held = [[frozenset({rank})] * world_size for rank in ranks]
    states = [[list(row) for row in held]]
    streams = [ring_all_reduce(rank, world_size) for rank in ranks]
    for steps in zip(*streams):
        sent = [held[rank][step.send_chunk] for rank, step in enumerate(steps)]
        for rank, step in enumerate(steps):
            if step.phase == "share_reduce":
                held[rank][step.recv_chunk] |= sent[step.src]
            else:
                held[rank][step.recv_chunk] = sent[step.src]
        states.append([list(row) for row in held])
    return states


# Over several hosts (hierarchical all-reduce)


def num_blocks(hosts: Hosts) -> int:
    """L x H, the number of blocks that the tensor is cut into."""
    return len(hosts) * math.lcm(*map(len, hosts))


def parts_inside(num_ranks: int, hosts: Hosts) -> list[Blocks]:
    """The blocks of each part on a host of ``num_ranks`` ranks: chunk i of its ring is part i."""
    size = num_blocks(hosts) // num_ranks
    return [(size * part, size * (part + 1)) for part in range(num_ranks)]


def rings_between(rank: int, hosts: Hosts) -> Iterator[tuple[list[int], Blocks]]:
    """The rings between hosts that ``rank`` is in: their ranks, one per host, and their blocks."""
    ranks = hosts[host_of(rank, hosts)]
    first, end = parts_inside(len(ranks), hosts)[owned_chunk(ranks.index(rank), len(ranks))]
    # Wherever a part of any host begins, another ring begins.
    starts = set()
    for neighbors in hosts:
        starts |= {start for start, _ in parts_inside(len(neighbors), hosts)}
    edges = [*sorted(start for start in starts if first <= start < end), end]
    for start, stop in itertools.pairwise(edges):
        members = []
        for ranks in hosts:
            part = start * len(ranks) // num_blocks(hosts)
            for position, member in enumerate(ranks):
                if owned_chunk(position, len(ranks)) == part:
                    members.append(member)
        yield members, (start, stop)


def host_of(rank: int, hosts: Hosts) -> int:
    """The number of the host that ``rank`` is on."""
    (number,) = [host for host, ranks in enumerate(hosts) if rank in ranks]
    return number
