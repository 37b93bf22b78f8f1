"""All-reduce over several hosts: bytes over each host's network card, and seconds with two links.

Between hosts, all ranks of a host share its network card; inside a host their messages go through
shared memory. ``hosts`` lists the ranks of each host. The other arguments are those of
``labkit.costs.traffic``.

Symbols: P ranks on H hosts, m ranks per host, N elements of one rank's tensor, S its bytes.
"""

from collections.abc import Callable, Iterable

from labkit.costs.link import Link
from labkit.costs.traffic import NOTHING, Cost, all_gather_cost
from labkit.schedules import hierarchical
from labkit.schedules.hierarchical import Hosts, HostStep
from labkit.schedules.ring import chunk_bounds
from labkit.schedules.top_k import kept_elements
from labkit.units import check_choice

_SCHEDULES: dict[str, Callable[[int, Hosts], Iterable[HostStep]]] = {
    "ring": hierarchical.flat_ring,
    "hierarchical": hierarchical.hierarchical_all_reduce,
}


def hierarchical_all_reduce_cost(
    num_elements: int,
    element_bytes: int,
    hosts: Hosts,
    rank: int = 0,
    partial_bytes: int | None = None,
    compress: str | None = None,
) -> Cost:
    """What one rank sends, inside its host and to others.

    With m ranks on each of H hosts: 2 (m - 1) + 2 (H - 1) steps and messages; 2 (m - 1) / m x S
    bytes inside the host, 2 (H - 1) / P x S bytes between hosts.

    Args:
        compress: of the messages between hosts, ``fp16``, ``bf16`` or ``topk``.
    """
    counts = "hierarchical", num_elements, element_bytes, hosts, rank, partial_bytes
    return _sent(*counts, False) + _sent(*counts, True, compress)


def card_bytes(
    algorithm: str,
    num_elements: int,
    element_bytes: int,
    hosts: Hosts,
    partial_bytes: int | None = None,
    compress: str | None = None,
) -> list[int]:
    """The bytes that leave each host in one all-reduce; as many arrive.

    ``hierarchical``: 2 (H - 1) / H x S, however many ranks a host has.
    ``ring``: 2 (P - 1) / P x S if one rank of the host has its right neighbour on another host, as
    when ranks are numbered host by host; k times that if k ranks have. On two hosts of m ranks
    that are dealt out in turn, k is m.

    Args:
        algorithm: ``ring`` or ``hierarchical``.
        compress: see ``hierarchical_all_reduce_cost``, for ``hierarchical`` only.
    """
    check_choice("algorithm", algorithm, _SCHEDULES)
    assert algorithm != "ring" or compress is None, "the flat ring compresses all messages"
    counts = algorithm, num_elements, element_bytes, hosts
    return [
        sum(_sent(*counts, rank, partial_bytes, True, compress).num_bytes for rank in ranks)
        for ranks in hosts
    ]


def hosts_all_reduce_seconds(
    algorithm: str, num_bytes: float, hosts: Hosts, inside: Link, between: Link
) -> float:
    """Predicted seconds of an all-reduce of S = ``num_bytes`` over two kinds of link.

    A round takes as long as its longest message, or as a card needs for all messages of the round
    that leave its host together: their latencies overlap, their bytes do not. With equal hosts,
    without the additions (alpha, beta: inside a host; A, B: between hosts):

    ring: 2 (P - 1) x max(alpha + S / P beta, A + k S / P B), with k as in ``card_bytes``.
    hierarchical: 2 (m - 1) (alpha + S / m beta) + 2 (H - 1) (A + S / H B).

    Args:
        algorithm: ``ring`` or ``hierarchical``.
        inside: between two ranks of one host.
        between: of one host's card. Adding a received byte takes the gamma of the link it came by.
    """
    check_choice("algorithm", algorithm, _SCHEDULES)
    if num_bytes < 0:
        raise ValueError(f"a tensor of {num_bytes} bytes does not exist: give 0 or more")
    block_bytes = num_bytes / _num_blocks(algorithm, hosts)
    return sum(
        _round_seconds(steps, block_bytes, hosts, inside, between)
        for steps in hierarchical.rounds(_SCHEDULES[algorithm], hosts)
    )


def _round_seconds(
    steps: hierarchical.Round, block_bytes: float, hosts: Hosts, inside: Link, between: Link
) -> float:
    longest_s, leaving = 0.0, [0.0] * len(hosts)
    added = {False: 0.0, True: 0.0}
    for rank, step in steps.items():
        num_bytes = (step.send[1] - step.send[0]) * block_bytes
        if step.is_between:
            leaving[hierarchical.host_of(rank, hosts)] += num_bytes
            longest_s = max(longest_s, between.message_seconds(max(leaving)))
        else:
            longest_s = max(longest_s, inside.message_seconds(num_bytes))
        if step.phase == "share_reduce":
            # A ring's chunks have one size: what is received is as long as what is sent.
            added[step.is_between] = max(added[step.is_between], num_bytes)
    return longest_s + max(
        added[False] * inside.gamma_s_per_byte, added[True] * between.gamma_s_per_byte
    )


def _num_blocks(algorithm: str, hosts: Hosts) -> int:
    if algorithm == "ring":
        return sum(len(ranks) for ranks in hosts)
    return hierarchical.num_blocks(hosts)


def _sent(
    algorithm: str,
    num_elements: int,
    element_bytes: int,
    hosts: Hosts,
    rank: int,
    partial_bytes: int | None,
    is_between: bool,
    compress: str | None = None,
) -> Cost:
    """What a rank sends between hosts, or inside its own."""
    bounds = chunk_bounds(num_elements, _num_blocks(algorithm, hosts))
    found = NOTHING
    if is_between and compress == "topk":
        for members, (first, end) in hierarchical.rings_between(rank, hosts):
            kept = kept_elements(bounds[end - 1][1] - bounds[first][0])
            found += all_gather_cost(2 * kept, element_bytes, len(hosts), members.index(rank))
        return found
    partial_bytes = partial_bytes or element_bytes
    if is_between and compress:
        element_bytes = partial_bytes = 2
    for step in _SCHEDULES[algorithm](rank, hosts):
        if step.is_between == is_between:
            each = partial_bytes if step.phase == "share_reduce" else element_bytes
            found += Cost(1, 1, (bounds[step.send[1] - 1][1] - bounds[step.send[0]][0]) * each)
    return found
