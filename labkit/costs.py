"""Formulas: steps, messages, bytes and seconds of each collective.

The counts are exact, so tests hold them to the byte. The seconds are a model: straight lines in
the number of bytes, fitted to this machine (``fit_link``).

Symbols: P ranks, S bytes of one rank's tensor (S = N elements x the size of one), alpha seconds a
message takes however short it is, beta seconds a byte takes on the wire, gamma seconds to add one.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from labkit.schedules import (
    PIPELINES,
    Hop,
    Transfer,
    binomial_broadcast,
    binomial_reduce,
    check_micro_batches,
    chunk_bounds,
    dissemination,
    pairwise_exchange,
    recursive_doubling,
    recursive_doubling_return,
    ring_share_only,
    ring_share_reduce,
    top_k_elements,
    with_hops,
)
from labkit.units import format_count


@dataclass(frozen=True)
class Cost:
    """What one rank pays for one collective.

    Attributes:
        steps: rounds in which the rank sends, receives, or both at once.
        messages: messages this rank sends.
        num_bytes: payload bytes this rank sends.
    """

    steps: int
    messages: int
    num_bytes: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.steps + other.steps,
            self.messages + other.messages,
            self.num_bytes + other.num_bytes,
        )


NOTHING = Cost(0, 0, 0)


def ring_all_reduce_cost(
    num_elements: int,
    element_bytes: int,
    world_size: int,
    rank: int = 0,
    partial_bytes: int | None = None,
) -> Cost:
    """Ring all-reduce: 2 (P - 1) steps and messages, 2 (P - 1) / P x S bytes sent by each rank.

    The fraction is exact when P divides the number of elements; otherwise chunks differ by one
    element, and so do the ranks: the sum over the schedule's chunks is exact always.

    Args:
        num_elements: elements of the tensor.
        element_bytes: bytes of one.
        world_size: P.
        rank: whose cost.
        partial_bytes: bytes of one element of a partial sum, where it is not ``element_bytes``:
            4 for float16 and bfloat16, whose sums travel as float32 (``Reduction.wide``).
    """
    counts = num_elements, element_bytes, world_size, rank
    return share_reduce_cost(*counts, partial_bytes) + share_only_cost(*counts)


def share_reduce_cost(
    num_elements: int,
    element_bytes: int,
    world_size: int,
    rank: int = 0,
    partial_bytes: int | None = None,
) -> Cost:
    """Half a ring: P - 1 steps and messages, (P - 1) / P x S bytes (of partial sums)."""
    steps = ring_share_reduce(rank, world_size)
    return _chunks_cost(steps, num_elements, partial_bytes or element_bytes, world_size)


def share_only_cost(num_elements: int, element_bytes: int, world_size: int, rank: int = 0) -> Cost:
    """The other half: P - 1 steps and messages, (P - 1) / P x S bytes."""
    steps = ring_share_only(rank, world_size)
    return _chunks_cost(steps, num_elements, element_bytes, world_size)


def naive_all_reduce_cost(
    num_elements: int, element_bytes: int, world_size: int, rank: int = 0
) -> Cost:
    """All-to-one and back: rank 0 receives P - 1 tensors of S bytes, then sends P - 1.

    Rank 0 needs 2 (P - 1) steps and sends (P - 1) S bytes; each other rank sends S bytes, once.
    """
    size = num_elements * element_bytes
    if world_size == 1:
        return NOTHING
    if rank == 0:
        return Cost(2 * (world_size - 1), world_size - 1, (world_size - 1) * size)
    return Cost(2, 1, size)


def tree_all_reduce_cost(
    num_elements: int,
    element_bytes: int,
    world_size: int,
    rank: int = 0,
    partial_bytes: int | None = None,
) -> Cost:
    """Recursive doubling: log2 P steps and messages of S bytes if P is a power of two.

    Otherwise two steps more: Q is the largest power of two below P, ranks Q and up only send once
    and receive once, and each of the first P - Q ranks receives one tensor more and sends one
    more. ``partial_bytes`` as in ``ring_all_reduce_cost``.
    """
    partial = num_elements * (partial_bytes or element_bytes)
    doubling = _transfers_cost(recursive_doubling(rank, world_size), partial)
    back = recursive_doubling_return(rank, world_size)
    return doubling + _transfers_cost(back, num_elements * element_bytes)


def broadcast_cost(
    num_elements: int, element_bytes: int, world_size: int, rank: int = 0, root: int = 0
) -> Cost:
    """Binomial tree: the root sends ceil(log2 P) messages of S bytes, all ranks P - 1."""
    steps = binomial_broadcast(rank, world_size, root)
    return _transfers_cost(steps, num_elements * element_bytes)


def reduce_cost(
    num_elements: int,
    element_bytes: int,
    world_size: int,
    rank: int = 0,
    root: int = 0,
    partial_bytes: int | None = None,
) -> Cost:
    """Binomial tree: the root receives ceil(log2 P) messages, every other rank sends one.

    ``partial_bytes`` as in ``ring_all_reduce_cost``.
    """
    steps = binomial_reduce(rank, world_size, root)
    return _transfers_cost(steps, num_elements * (partial_bytes or element_bytes))


def gather_cost(
    num_elements: int, element_bytes: int, world_size: int, rank: int = 0, root: int = 0
) -> Cost:
    """The root receives P - 1 messages in as many steps; every other rank sends S bytes, once."""
    if world_size == 1:
        return NOTHING
    if rank == root:
        return Cost(world_size - 1, 0, 0)
    return Cost(1, 1, num_elements * element_bytes)


def scatter_cost(
    num_elements: int, element_bytes: int, world_size: int, rank: int = 0, root: int = 0
) -> Cost:
    """The root sends P - 1 messages of S bytes (one rank's share); every other receives one."""
    if world_size == 1:
        return NOTHING
    if rank == root:
        messages = world_size - 1
        return Cost(messages, messages, messages * num_elements * element_bytes)
    return Cost(1, 0, 0)


def all_gather_cost(num_elements: int, element_bytes: int, world_size: int, rank: int = 0) -> Cost:
    """Share-only of one tensor a rank: P - 1 steps and messages, (P - 1) S bytes."""
    return share_only_cost(num_elements * world_size, element_bytes, world_size, rank)


def reduce_scatter_cost(
    num_elements: int,
    element_bytes: int,
    world_size: int,
    rank: int = 0,
    partial_bytes: int | None = None,
) -> Cost:
    """Share-reduce of P tensors a rank, S bytes each: P - 1 steps and messages, (P - 1) S bytes.

    ``partial_bytes`` as in ``ring_all_reduce_cost``.
    """
    total = num_elements * world_size
    return share_reduce_cost(total, element_bytes, world_size, rank, partial_bytes)


def all_to_all_cost(num_elements: int, element_bytes: int, world_size: int, rank: int = 0) -> Cost:
    """Pairwise exchange of P tensors a rank, S bytes each: P - 1 steps, (P - 1) S bytes."""
    return _transfers_cost(pairwise_exchange(rank, world_size), num_elements * element_bytes)


def barrier_cost(world_size: int, rank: int = 0) -> Cost:
    """Dissemination: ceil(log2 P) steps and messages of one byte."""
    return _transfers_cost(dissemination(rank, world_size), 1)


def parameter_server_cost(
    num_elements: int, element_bytes: int, world_size: int, rank: int = 0, servers: int = 1
) -> Cost:
    """One step of a parameter server with K = ``servers`` and W = P - K workers.

    A worker pushes one slice to each server and pulls one back: 2 K steps, K messages, S bytes.
    A server receives W slices of S / K bytes and sends as many: 2 W steps, W messages, W / K x S
    bytes. With P = 1 the one rank is server and worker, and nothing is sent.

    Args:
        num_elements: trained parameters; slices differ by one element at most.
        element_bytes: bytes of one.
        world_size: P.
        rank: whose cost; ranks 0 to K - 1 serve.
        servers: K.
    """
    if world_size == 1:
        return NOTHING
    workers = world_size - servers
    if rank >= servers:
        return Cost(2 * servers, servers, num_elements * element_bytes)
    start, end = chunk_bounds(num_elements, servers)[rank]
    return Cost(2 * workers, workers, workers * (end - start) * element_bytes)


def async_parameter_server_cost(
    num_elements: int, num_buffers: int, element_bytes: int, pushes: int, serves: bool
) -> Cost:
    """``pushes`` times to the asynchronous parameter server and back, of one side.

    A push is a gradient, and a short message with 2 numbers and the model's buffers; the answer is
    the parameters, and a short message with 1 number and the buffers. A run of E epochs of b
    batches on W workers takes E b W pushes, and W - 1 more that are under way when it ends.

    Args:
        num_elements: trained parameters.
        num_buffers: elements of the model's buffers.
        element_bytes: bytes of one of either.
        pushes: of one worker, or of all together.
        serves: the server's side; otherwise the workers'.
    """
    short = (1 if serves else 2) + num_buffers
    return Cost(4 * pushes, 2 * pushes, pushes * (num_elements + short) * element_bytes)


def compressed_cost(
    compress: str, num_elements: int, element_bytes: int, world_size: int, rank: int = 0
) -> Cost:
    """All-reduce of gradients by ``labkit.compression``.

    ``fp16`` and ``bf16``: the ring's messages in two bytes an element, (P - 1) / P x 4 N bytes.
    ``topk``: P - 1 messages of k values and k places, 2 (P - 1) k elements. Unlike the ring's its
    bytes grow with P: from P = 100 on nothing is saved where k is 1 % of N.
    """
    if compress == "topk":
        kept = top_k_elements(num_elements)
        return all_gather_cost(2 * kept, element_bytes, world_size, rank)
    return ring_all_reduce_cost(num_elements, 2, world_size, rank)


def data_parallel_cost(
    batch_size: int,
    world_size: int,
    *,
    input_bytes: int,
    output_bytes: int,
    state_bytes: int,
    gradient_bytes: int,
) -> dict[str, int]:
    """Bytes that one step of data parallelism in one process moves between P devices, by phase.

    Device 0 keeps the first ceil(B / P) of the B samples; a batch of fewer than P samples uses B
    devices. All of it passes through device 0, whose links are the bottleneck.

    Args:
        batch_size: B, samples of the global batch.
        world_size: P, devices.
        input_bytes, output_bytes: of one sample.
        state_bytes: parameters and buffers, S.
        gradient_bytes: of the parameters that are trained.

    Returns:
        ``scatter``: inputs out. ``replicate``: (P - 1) S. ``gather``: outputs in, and their
        gradients out. ``reduce``: (P - 1) times the gradients.
    """
    used = min(batch_size, world_size)
    elsewhere = batch_size - math.ceil(batch_size / used)
    return {
        "scatter": elsewhere * input_bytes,
        "replicate": (used - 1) * state_bytes,
        "gather": 2 * elsewhere * output_bytes,
        "reduce": (used - 1) * gradient_bytes,
    }


def ddp_update_cost(
    bucket_elements: Sequence[int],
    element_bytes: int,
    world_size: int,
    rank: int = 0,
    buffer_bytes: Sequence[int] = (),
) -> Cost:
    """One update of ``BucketedDDP``: a ring a bucket, and a broadcast of rank 0's buffers.

    Args:
        bucket_elements: gradients of each bucket. In how many buckets they go changes the
            messages, 2 (P - 1) a bucket, and hardly the bytes.
        element_bytes: bytes of one gradient.
        world_size: P.
        rank: whose cost.
        buffer_bytes: of the module's buffers, a figure for each dtype.
    """
    total = NOTHING
    for elements in bucket_elements:
        total += ring_all_reduce_cost(elements, element_bytes, world_size, rank)
    for num_bytes in buffer_bytes:
        total += broadcast_cost(num_bytes, 1, world_size, rank)
    return total


def model_parallel_cost(
    cut_bytes_per_sample: Sequence[int],
    batch_size: int,
    rank: int,
    num_stages: int,
    micro_batches: int = 1,
    first_trained: int = 0,
    schedule: str | None = None,
) -> Cost:
    """One training step of a model that is cut into stages, of one rank.

    A cut of S bytes a sample carries M messages and B x S bytes forward, and as much backward,
    unless nothing before it is trained. Into how many micro-batches the batch is cut changes the
    messages, and not the bytes. What tied parameters on several stages add is left out.

    Args:
        cut_bytes_per_sample: by cut, what a layer hands on for one sample.
        batch_size: B, samples.
        rank: whose cost, 0 to P - 1.
        num_stages: P, one a rank.
        micro_batches: M; a batch of fewer samples makes as many.
        first_trained: the first stage that trains anything; P if none does.
        schedule: of ``Pipeline``, a name out of ``schedules.PIPELINES``. It decides how often a
            send and a receive are one exchange (``schedules.with_hops``), that is the steps. None
            is ``ModelParallel``: one micro-batch, and each message a step of its own.

    Raises:
        ValueError: not one figure for each of the P - 1 cuts, no such rank or schedule, no
            micro-batch, or several of them without a schedule.
    """
    if len(cut_bytes_per_sample) != num_stages - 1:
        raise ValueError(
            f"bytes for {format_count(len(cut_bytes_per_sample), 'cut')} of "
            f"{format_count(num_stages, 'stage')}: give {num_stages - 1}"
        )
    if not 0 <= rank < num_stages:
        stages = format_count(num_stages, "stage")
        raise ValueError(f"no rank {rank}: with {stages} the ranks are 0 to {num_stages - 1}")
    count = min(check_micro_batches(micro_batches), batch_size)
    known = ", ".join(PIPELINES)
    if schedule not in (None, *PIPELINES):
        raise ValueError(f"unknown schedule {schedule!r}: choose one of {known}")
    if schedule is None and micro_batches > 1:
        raise ValueError(f"{micro_batches} micro-batches need a schedule: choose one of {known}")
    actions = PIPELINES[schedule or "gpipe"](rank, num_stages, count)
    stream = with_hops(actions, rank, num_stages, first_trained)
    hops = [step for step in stream if isinstance(step, Hop)]
    sent = [hop.send for hop in hops if hop.send]
    steps = len(hops) if schedule else len(sent) + sum(hop.recv is not None for hop in hops)
    # Each micro-batch is sent once to each peer, so what a peer gets is the batch.
    cuts = [min(rank, peer) for peer in {message.peer for message in sent}]
    num_bytes = batch_size * sum(cut_bytes_per_sample[cut] for cut in cuts)
    return Cost(steps, len(sent), num_bytes)


def _chunks_cost(steps: Iterable, num_elements: int, element_bytes: int, world_size: int) -> Cost:
    """Each step of a ring sends one chunk."""
    sizes = [end - start for start, end in chunk_bounds(num_elements, world_size)]
    sent = [sizes[step.send_chunk] for step in steps]
    return Cost(len(sent), len(sent), sum(sent) * element_bytes)


def _transfers_cost(steps: Iterable[Transfer], size_bytes: int) -> Cost:
    """Each step that has somewhere to send to sends ``size_bytes``."""
    steps = list(steps)
    messages = sum(step.dst is not None for step in steps)
    return Cost(len(steps), messages, messages * size_bytes)


@dataclass(frozen=True)
class Link:
    """What a message costs between two ranks: alpha + beta x bytes, and gamma a byte to add it.

    Attributes:
        alpha_s: seconds a message takes however short it is (latency, start-up).
        beta_s_per_byte: seconds per byte on the wire; 1 / beta is the bandwidth.
        gamma_s_per_byte: seconds to combine one received byte with one's own.

    The model leaves out that messages share a memory bus, a network card or a core: with more
    ranks than cores a collective takes longer than it says. Source: Hockney, "The communication
    challenge for MPP" (1994), for alpha and beta; Thakur, Rabenseifner and Gropp, "Optimization
    of collective communication operations in MPICH" (2005), section 3, for all three.
    """

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float = 0.0

    def __post_init__(self):
        for name in ("alpha_s", "beta_s_per_byte", "gamma_s_per_byte"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}: a cost is a finite number, 0 or more")

    def message_seconds(self, num_bytes: float) -> float:
        """Seconds that one message of ``num_bytes`` takes."""
        return self.alpha_s + self.beta_s_per_byte * num_bytes


def fit_link(
    sizes_bytes: Sequence[float], seconds: Sequence[float], gamma_s_per_byte: float = 0.0
) -> Link:
    """The alpha and beta that explain measured messages best: seconds = alpha + beta x bytes.

    Least squares of the *relative* errors, or the largest sizes alone would decide and alpha be
    lost in their noise. Where a repeat is disturbed by another program it is always too slow, so
    of several measurements of one size the median counts. Neither can be negative: if the best
    line has a negative alpha (or beta), it is 0 and the other is fitted alone.

    Args:
        sizes_bytes: size of each measured message; at least two different ones.
        seconds: what each took, above 0.
        gamma_s_per_byte: measured apart, since no message adds; passed on to the Link.

    Raises:
        ValueError: the lists differ in length, hold fewer than two sizes, or a value that is no
            measurement.
    """
    points = _medians(sizes_bytes, seconds)
    weights = [1 / time_s**2 for _, time_s in points]
    total = sum(weights)
    mean_size = sum(w * size for w, (size, _) in zip(weights, points)) / total
    mean_s = sum(w * time_s for w, (_, time_s) in zip(weights, points)) / total
    spread = sum(w * (size - mean_size) ** 2 for w, (size, _) in zip(weights, points))
    joint = sum(w * (size - mean_size) * (t - mean_s) for w, (size, t) in zip(weights, points))
    beta = joint / spread
    alpha = mean_s - beta * mean_size
    if beta < 0:
        alpha, beta = mean_s, 0.0
    elif alpha < 0:
        through_zero = sum(w * size * size for w, (size, _) in zip(weights, points))
        alpha, beta = 0.0, sum(w * n * t for w, (n, t) in zip(weights, points)) / through_zero
    return Link(alpha, beta, gamma_s_per_byte)


def _medians(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> list[tuple[float, float]]:
    """(size, median seconds) by size; checks what ``fit_link`` was given."""
    if len(sizes_bytes) != len(seconds):
        raise ValueError(f"{len(sizes_bytes)} sizes and {len(seconds)} times do not pair up")
    by_size: dict[float, list[float]] = {}
    for size, time_s in zip(sizes_bytes, seconds):
        if not (math.isfinite(size) and size >= 0 and math.isfinite(time_s) and time_s > 0):
            raise ValueError(
                f"{size} bytes in {time_s} s is no measurement: give sizes from 0 up "
                "and seconds above 0"
            )
        by_size.setdefault(size, []).append(time_s)
    if len(by_size) < 2:
        raise ValueError(
            f"a line needs two different sizes, got {sorted(by_size)}: measure "
            "a small message and a large one"
        )
    return [(size, statistics.median(times)) for size, times in sorted(by_size.items())]


def all_reduce_seconds(algorithm: str, num_bytes: float, world_size: int, link: Link) -> float:
    """Predicted seconds of an all-reduce of S = ``num_bytes``, by the longest path through it.

    naive: 2 (P - 1) alpha + 2 (P - 1) S beta + (P - 1) S gamma.
    tree: L alpha + L S beta + L S gamma with L = log2 P. If P is no power of two, L is rounded
    down, and the fold adds 2 alpha + 2 S beta + S gamma.
    ring: 2 (P - 1) alpha + 2 (P - 1) / P S beta + (P - 1) / P S gamma.

    For tensors whose partial sums have their own dtype (not float16 and bfloat16), and an S that
    P divides. Source: Thakur, Rabenseifner and Gropp (2005), section 4; for the ring, Patarasuk
    and Yuan (2009), section 3.

    Raises:
        ValueError: no such algorithm, a world size below 1, a negative size.
    """
    if algorithm not in _PATHS:
        raise ValueError(f"unknown algorithm {algorithm!r}: choose one of {', '.join(_PATHS)}")
    if num_bytes < 0:
        raise ValueError(f"a tensor of {num_bytes} bytes does not exist: give 0 or more")
    fixed_s, per_byte_s = _line(algorithm, world_size, link)
    return fixed_s + per_byte_s * num_bytes


def parameter_server_seconds(
    num_bytes: float, num_workers: int, servers: int, link: Link
) -> float:
    """Predicted seconds of a push of S = ``num_bytes`` by W workers, and of the pull after it.

    2 M alpha + 2 M S / K beta + (W - 1) S / K gamma, with K = ``servers`` and M = max(W, K).

    A server takes one message after the other; in each of M turns the servers meet different
    workers (``schedules.server_turns``). With one server it is the naive all-reduce: its time
    grows with the number of workers. With as many servers as workers each worker's own link is
    the limit, and more servers gain nothing. Source: Li et al., "Scaling distributed machine
    learning with the parameter server" (2014), for the slices; the terms are ``Link``'s.

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
    """The size of tensor at which tree and ring all-reduce cost the same, in bytes.

    Below it the tree wins, since it has fewer steps; above it the ring, since it sends less. Both
    costs are straight lines in S, so they cross once, at (difference of the fixed parts) /
    (difference of the parts per byte).

    Returns:
        0 where the ring is never the slower one: alpha is 0, or P is 1 and nothing is sent.
        ``math.inf`` where it never catches up: for P = 2 both send S bytes, so only gamma (the
        ring adds half as much) could make up for its second message.
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
    messages, sent, added = _PATHS[algorithm](world_size)
    return messages * link.alpha_s, sent * link.beta_s_per_byte + added * link.gamma_s_per_byte


def _naive_path(world_size: int) -> tuple[int, int, int]:
    others = world_size - 1
    return 2 * others, 2 * others, others


def _tree_path(world_size: int) -> tuple[int, int, int]:
    doublings = world_size.bit_length() - 1
    fold = 2**doublings < world_size
    return doublings + 2 * fold, doublings + 2 * fold, doublings + fold


def _ring_path(world_size: int) -> tuple[int, float, float]:
    others = world_size - 1
    return 2 * others, 2 * others / world_size, others / world_size


# Along the longest path, by P: messages, bytes sent in units of S, bytes added in units of S.
_PATHS = {"naive": _naive_path, "tree": _tree_path, "ring": _ring_path}
