"""Predicted seconds of an all-reduce and of a parameter server, over a ``Link``.

Symbols: P ranks, S bytes of one rank's tensor; alpha, beta and gamma as in ``Link``.
Sources: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH" (2005), section 4; for the ring, Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations" (2009), section 3; for the parameter server's slices, Li
et al., "Scaling distributed machine learning with the parameter server" (2014).
"""

import math

from labkit.costs.link import Link
from labkit.units import check_choice, format_count


def all_reduce_seconds(algorithm: str, num_bytes: float, world_size: int, link: Link) -> float:
    """Predicted seconds of an all-reduce of S = ``num_bytes``, along its longest path.

    naive: 2 (P - 1) alpha + 2 (P - 1) S beta + (P - 1) S gamma.
    tree: L alpha + L S beta + L S gamma with L = log2 P. If P is not a power of two, L is
    rounded down, and the fold adds 2 alpha + 2 S beta + S gamma.
    ring: 2 (P - 1) alpha + 2 (P - 1) / P S beta + (P - 1) / P S gamma.

    The formulas hold if P divides S and partial sums have the tensor's dtype (those of float16
    and bfloat16 are wider).

    Raises:
        ValueError: an unknown algorithm, a world size below 1, a negative size.
    """
    check_choice("algorithm", algorithm, ("naive", "tree", "ring"))
    if num_bytes < 0:
        raise ValueError(f"a tensor of {num_bytes} bytes does not exist: give 0 or more")
    fixed_s, per_byte_s = _line(algorithm, world_size, link)
    return fixed_s + per_byte_s * num_bytes


def parameter_server_seconds(
    num_bytes: float, num_workers: int, servers: int, link: Link
) -> float:
    """Predicted seconds of a push of S = ``num_bytes`` by each of W workers, then a pull.

    2 M alpha + 2 M S / K beta + (W - 1) S / K gamma, with K = ``servers`` and M = max(W, K).

    A server handles one message after another; in each of M turns the servers meet different
    workers (``schedules.server_turns``). With one server it is the naive all-reduce: its time
    grows with the number of workers. With as many servers as workers, each worker's link is the
    limit, and more servers gain nothing.

    Raises:
        ValueError: no worker, no server, a negative size.
    """
    if num_workers < 1 or servers < 1:
        both = f"{format_count(num_workers, 'worker')}, {format_count(servers, 'server')}"
        raise ValueError(f"{both}: give 1 or more of each")
    if num_bytes < 0:
        raise ValueError(f"a tensor of {num_bytes} bytes does not exist: give 0 or more")
    turns, slice_bytes = max(num_workers, servers), num_bytes / servers
    added_bytes = (num_workers - 1) * slice_bytes
    return 2 * turns * link.message_seconds(slice_bytes) + link.gamma_s_per_byte * added_bytes


def crossover_bytes(world_size: int, link: Link) -> float:
    """The tensor size in bytes at which tree and ring all-reduce take the same time.

    Below it the tree is faster, since it has fewer steps; above it the ring, since it sends less.
    Both times are straight lines in S, so they cross once, at (difference of the fixed parts) /
    (difference of the parts per byte).

    Returns:
        0 where the ring is never slower: alpha is 0, or P is 1 and nothing is sent. ``math.inf``
        where it never catches up: for P = 2 both send S bytes, so only gamma (the ring adds half
        as many bytes) can make up for the ring's second message.
    """
    tree_fixed_s, tree_per_byte_s = _line("tree", world_size, link)
    ring_fixed_s, ring_per_byte_s = _line("ring", world_size, link)
    head_start_s = ring_fixed_s - tree_fixed_s
    gain_s_per_byte = tree_per_byte_s - ring_per_byte_s
    if head_start_s == 0:
        return 0.0
    return head_start_s / gain_s_per_byte if gain_s_per_byte > 0 else math.inf


def _line(algorithm: str, world_size: int, link: Link) -> tuple[float, float]:
    """(seconds at S = 0, seconds per byte of S) of an all-reduce."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world size {world_size!r} is not a number of ranks: give 1 or more")
    others, doublings = world_size - 1, world_size.bit_length() - 1
    fold = 2**doublings < world_size
    # Along the longest path: messages, bytes sent in units of S, bytes added in units of S.
    messages, sent, added = {
        "naive": (2 * others, 2 * others, others),
        "tree": (doublings + 2 * fold, doublings + 2 * fold, doublings + fold),
        "ring": (2 * others, 2 * others / world_size, others / world_size),
    }[algorithm]
    return messages * link.alpha_s, sent * link.beta_s_per_byte + added * link.gamma_s_per_byte
