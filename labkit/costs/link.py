"""Predicted seconds: the alpha-beta model of a link, and of all-reduces and servers over it.

Symbols: alpha seconds per message of any size, beta seconds per byte sent, gamma seconds per byte
added; P ranks, H hosts of m ranks, S bytes of one rank's tensor.
Sources: Hockney, "The communication challenge for MPP" (1994), for alpha and beta; Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005),
sections 3 and 4; for the ring, Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations" (2009), section 3; for the parameter server's slices, Li et al., "Scaling
distributed machine learning with the parameter server" (2014).
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from labkit.schedules.ring import Hosts
from labkit.units import check_choice, format_number, format_seconds


@dataclass(frozen=True)
class Link:
    """Seconds of a message between two ranks, alpha + beta x bytes; adding it, gamma x bytes.

    Alpha is the latency, 1 / beta the bandwidth. The model leaves out that messages share a memory
    bus, a network card or a core: with more ranks than cores a collective takes longer.
    """

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        costs = (self.alpha_s, self.beta_s_per_byte, self.gamma_s_per_byte)
        if not all(0 <= cost < math.inf for cost in costs):
            raise ValueError(f"the costs of a link are finite and 0 or more, got {costs}")

    def message_seconds(self, num_bytes: float) -> float:
        """Seconds that one message of ``num_bytes`` takes."""
        return self.alpha_s + self.beta_s_per_byte * num_bytes

    def __str__(self) -> str:
        """``52 µs per message, 3.1 GB/s``; with a gamma, also how fast additions are."""
        text = f"{format_seconds(self.alpha_s)} per message, {_rate(self.beta_s_per_byte)}"
        if self.gamma_s_per_byte:
            text += f", {_rate(self.gamma_s_per_byte)} added"
        return text


def _rate(seconds_per_byte: float) -> str:
    if not seconds_per_byte:
        return "bytes at no cost"
    per_s = 1 / seconds_per_byte
    if per_s >= 0.9995e9:
        return f"{format_number(per_s / 1e9)} GB/s"
    return f"{format_number(per_s / 1e6)} MB/s"


def fit_link(
    sizes_bytes: Sequence[float], seconds: Sequence[float], gamma_s_per_byte: float = 0.0
) -> Link:
    """The alpha and beta that best explain measured messages: seconds = alpha + beta x bytes.

    Least squares of the *relative* errors: otherwise the largest sizes would decide alone. Several
    measurements of one size are replaced by their median. If the best line has a negative alpha
    (or beta), it is set to 0 and the other is fitted alone.
    """
    by_size: dict[float, list[float]] = defaultdict(list)
    for size, time_s in zip(sizes_bytes, seconds, strict=True):
        by_size[size].append(time_s)
    sizes = np.array(list(by_size))
    medians = np.array([statistics.median(times) for times in by_size.values()])
    beta, alpha = np.polyfit(sizes, medians, 1, w=1 / medians)
    if beta < 0:
        alpha = np.average(medians, weights=medians**-2)
        beta = 0.0
    elif alpha < 0:
        alpha = 0.0
        beta = np.sum(sizes / medians) / np.sum((sizes / medians) ** 2)
    return Link(float(alpha), float(beta), gamma_s_per_byte)


def all_reduce_seconds(algorithm: str, num_bytes: float, world_size: int, link: Link) -> float:
    """Predicted seconds of an all-reduce of S = ``num_bytes``, along its longest path.

    naive: 2 (P - 1) alpha + 2 (P - 1) S beta + (P - 1) S gamma.
    tree: L alpha + L S beta + L S gamma with L = log2 P. If P is not a power of two, L is
    rounded down, and the fold adds 2 alpha + 2 S beta + S gamma.
    ring: 2 (P - 1) alpha + 2 (P - 1) / P S beta + (P - 1) / P S gamma.
    halving_doubling: 2 L alpha, and bytes as the ring's; rounding and fold as of the tree.

    The formulas hold if P divides S and partial sums have the tensor's dtype (those of float16
    and bfloat16 are wider).
    """
    fixed_s, per_byte_s = _line(algorithm, world_size, link)
    return fixed_s + per_byte_s * num_bytes


def _line(algorithm: str, world_size: int, link: Link) -> tuple[float, float]:
    """(seconds at S = 0, seconds per byte of S) of an all-reduce."""
    check_choice("algorithm", algorithm, ("naive", "tree", "ring", "halving_doubling"))
    peers = world_size - 1
    doublings = world_size.bit_length() - 1
    paired = 2**doublings
    fold = int(paired < world_size)
    halves = (paired - 1) / paired
    # Along the longest path: messages, bytes sent in units of S, bytes added in units of S.
    messages, sent, added = {
        "naive": (2 * peers, 2 * peers, peers),
        "tree": (doublings + 2 * fold, doublings + 2 * fold, doublings + fold),
        "ring": (2 * peers, 2 * peers / world_size, peers / world_size),
        "halving_doubling": (2 * (doublings + fold), 2 * (halves + fold), halves + fold),
    }[algorithm]
    return messages * link.alpha_s, sent * link.beta_s_per_byte + added * link.gamma_s_per_byte


def crossover_bytes(world_size: int, link: Link) -> float:
    """The tensor size in bytes at which tree and ring all-reduce take the same time.

    Below it the tree is faster, since it has fewer steps; above it the ring, since it sends less.
    Both times are straight lines in S, so they cross once. 0 where the ring is never slower (alpha
    is 0, or P is 1), ``math.inf`` where it never catches up (P = 2 without gamma).
    """
    tree_fixed_s, tree_per_byte_s = _line("tree", world_size, link)
    ring_fixed_s, ring_per_byte_s = _line("ring", world_size, link)
    head_start_s = ring_fixed_s - tree_fixed_s
    gain_s_per_byte = tree_per_byte_s - ring_per_byte_s
    if head_start_s == 0:
        return 0.0
    return head_start_s / gain_s_per_byte if gain_s_per_byte > 0 else math.inf


def hosts_all_reduce_seconds(
    algorithm: str, num_bytes: float, hosts: Hosts, inside: Link, between: Link
) -> float:
    """Predicted seconds of an all-reduce of S = ``num_bytes`` over H hosts of m ranks each.

    A step takes as long as its longest message, or as a card needs for all messages of the step
    that leave its host: their latencies overlap, their bytes do not. Without the additions (alpha,
    beta: inside a host; A, B: of a host's card):

    ring: 2 (P - 1) x max(alpha + S / P beta, A + k S / P B), if k ranks of a host have their right
    neighbor on another one; ranks that are numbered host by host have k = 1.
    hierarchical: 2 (m - 1) (alpha + S / m beta) + 2 (H - 1) (A + S / H B).
    """
    check_choice("algorithm", algorithm, ("ring", "hierarchical"))
    size = len(hosts[0])
    world_size = sum(len(ranks) for ranks in hosts)
    if any(len(ranks) != size for ranks in hosts):
        raise ValueError(f"the formulas hold for hosts with equally many ranks, got {hosts}")
    if algorithm == "hierarchical":
        # The m ranks of a host share its card, and each adds its own part.
        card = replace(between, gamma_s_per_byte=between.gamma_s_per_byte / size)
        inside_s = all_reduce_seconds("ring", num_bytes, size, inside)
        return inside_s + all_reduce_seconds("ring", num_bytes, len(hosts), card)
    leaving = 0
    for ranks in hosts:
        right_neighbors = {(rank + 1) % world_size for rank in ranks}
        leaving = max(leaving, len(right_neighbors - set(ranks)))
    card = replace(between, beta_s_per_byte=leaving * between.beta_s_per_byte)
    links = [inside, card] if leaving else [inside]
    return max(all_reduce_seconds("ring", num_bytes, world_size, link) for link in links)


def parameter_server_seconds(
    num_bytes: float, num_workers: int, servers: int, link: Link
) -> float:
    """Predicted seconds of a push of S = ``num_bytes`` by each of W workers, then a pull.

    2 M alpha + 2 M S / K beta + (W - 1) S / K gamma, with K = ``servers`` and M = max(W, K): in
    each of M turns the servers meet different workers (``schedules.servers``). With one server it
    is the naive all-reduce. With as many servers as workers, each worker's link is the limit.
    """
    turns = max(num_workers, servers)
    slice_bytes = num_bytes / servers
    added_bytes = (num_workers - 1) * slice_bytes
    return 2 * turns * link.message_seconds(slice_bytes) + link.gamma_s_per_byte * added_bytes
