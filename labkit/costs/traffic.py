"""The traffic of each collective and each technique: steps, messages and bytes.

The counts are exact: tests compare them with real runs, byte for byte. ``rank`` is the rank that
the cost is for, ``element_bytes`` the size of an element. (Partial sums of float16 and bfloat16
travel as float32: ``Reduction.accumulate_dtype``.)

Symbols: P ranks, N elements of one rank's tensor, S its bytes; H hosts of m ranks.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from labkit.schedules.halving_doubling import recursive_halving
from labkit.schedules.pipeline import NAIVE, PIPELINES, Hop, stages_on_each
from labkit.schedules.ring import (
    Hosts,
    RingStep,
    chunk_bounds,
    num_blocks,
    ring_share_only,
    ring_share_reduce,
    rings_between,
)
from labkit.schedules.sharding import Instruction, Uses, sharded_pass
from labkit.schedules.timetable import instructions
from labkit.schedules.tree import fold, largest_power_of_two, recursive_doubling_return


@dataclass(frozen=True)
class Cost:
    """The traffic of one rank in one collective, or in one step of a technique.

    Attributes:
        steps: rounds in which the rank sends, receives, or both at once.
        messages: that this rank sends.
        num_bytes: payload that this rank sends.
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


def naive_all_reduce_cost(
    num_elements: int, element_bytes: int, world_size: int, rank: int = 0
) -> Cost:
    """Naive all-reduce: rank 0 receives P - 1 tensors of S bytes, then sends P - 1.

    Rank 0 takes 2 (P - 1) steps and sends (P - 1) S bytes; each other rank sends S bytes, once.
    """
    size_bytes = num_elements * element_bytes
    if rank == 0:
        peers = world_size - 1
        return Cost(2 * peers, peers, peers * size_bytes)
    return Cost(2, 1, size_bytes)


def gather_cost(
    num_elements: int, element_bytes: int, world_size: int, rank: int = 0, root: int = 0
) -> Cost:
    """The root receives P - 1 messages, one per step; every other rank sends S bytes, once."""
    if rank == root:
        return Cost(world_size - 1, 0, 0)
    return Cost(1, 1, num_elements * element_bytes)


def ring_all_reduce_cost(
    num_elements: int, element_bytes: int, world_size: int, rank: int = 0
) -> Cost:
    """Ring all-reduce: 2 (P - 1) steps and messages, 2 (P - 1) / P x S bytes sent by each rank.

    The fraction is exact when P divides N; the result, the sum over the chunks sent, always is.
    """
    first = share_reduce_cost(num_elements, element_bytes, world_size, rank)
    return first + share_only_cost(num_elements, element_bytes, world_size, rank)


def halving_doubling_cost(
    num_elements: int,
    element_bytes: int,
    world_size: int,
    rank: int = 0,
    partial_bytes: int | None = None,
) -> Cost:
    """Halving and doubling: 2 log2 P steps and messages, 2 (P - 1) / P x S bytes sent.

    If P is not a power of two, ranks beyond the largest one, Q, send S bytes, once; their partners
    send S bytes more than Q ranks would. ``partial_bytes``: of an element of a partial sum.
    """
    partial_bytes = partial_bytes or element_bytes
    bounds = chunk_bounds(num_elements, largest_power_of_two(world_size))
    halvings = list(recursive_halving(rank, world_size))
    handed_over = list(fold(rank, world_size))
    handed_back = list(recursive_doubling_return(rank, world_size))
    partial_elements = num_elements * sum(step.dst is not None for step in handed_over)
    elements = num_elements * sum(step.dst is not None for step in handed_back)
    messages = 2 * len(halvings) + (1 if handed_over else 0)
    for _, (sent_first, sent_end), (kept_first, kept_end) in halvings:
        partial_elements += bounds[sent_end - 1][1] - bounds[sent_first][0]
        elements += bounds[kept_end - 1][1] - bounds[kept_first][0]
    steps = 2 * len(halvings) + len(handed_over) + len(handed_back)
    return Cost(steps, messages, partial_elements * partial_bytes + elements * element_bytes)


def direct_all_reduce_cost(num_elements: int, element_bytes: int, world_size: int) -> Cost:
    """Direct all-reduce: one step, in which each rank sends S bytes to each of the others."""
    peers = world_size - 1
    return Cost(min(1, peers), peers, peers * num_elements * element_bytes)


def share_reduce_cost(
    num_elements: int, element_bytes: int, world_size: int, rank: int = 0
) -> Cost:
    """Half of the ring: P - 1 steps and messages, (P - 1) / P x S bytes of partial sums."""
    return _chunks_cost(ring_share_reduce(rank, world_size), num_elements, element_bytes)


def share_only_cost(num_elements: int, element_bytes: int, world_size: int, rank: int = 0) -> Cost:
    """The other half of the ring: P - 1 steps and messages, (P - 1) / P x S bytes.

    All-gather of one tensor per rank is this with P x N elements.
    """
    return _chunks_cost(ring_share_only(rank, world_size), num_elements, element_bytes)


def _chunks_cost(steps: Iterable[RingStep], num_elements: int, element_bytes: int) -> Cost:
    """Each step of a ring sends one chunk."""
    steps = list(steps)
    bounds = chunk_bounds(num_elements, len(steps) + 1)
    elements = 0
    for step in steps:
        start, end = bounds[step.send_chunk]
        elements += end - start
    return Cost(len(steps), len(steps), elements * element_bytes)


def card_bytes(algorithm: str, num_elements: int, element_bytes: int, hosts: Hosts) -> list[int]:
    """The bytes that leave each host in one all-reduce; as many arrive.

    ``hierarchical``: 2 (H - 1) / H x S, however many ranks a host has.
    ``ring``: 2 (P - 1) / P x S if one rank of the host has its right neighbor on another host, as
    when ranks are numbered host by host; k times that if k ranks have. On two hosts of m ranks
    that are dealt out in turn, k is m.
    """
    world_size = sum(len(host) for host in hosts)
    blocks = chunk_bounds(num_elements, num_blocks(hosts))

    def sent_bytes(rank: int, host: tuple[int, ...]) -> int:
        """The bytes that ``rank`` sends to another host, in all its rings between hosts."""
        total = 0
        if algorithm == "hierarchical":
            for members, (first, end) in rings_between(rank, hosts):
                length = blocks[end - 1][1] - blocks[first][0]
                index = members.index(rank)
                cost = ring_all_reduce_cost(length, element_bytes, len(members), index)
                total += cost.num_bytes
        elif (rank + 1) % world_size not in host:
            total = ring_all_reduce_cost(num_elements, element_bytes, world_size, rank).num_bytes
        return total

    leaving = []
    for host in hosts:
        leaving.append(sum(sent_bytes(rank, host) for rank in host))
    return leaving


def parameter_server_cost(
    num_elements: int, element_bytes: int, world_size: int, rank: int = 0, servers: int = 1
) -> Cost:
    """One step of a parameter server with K = ``servers`` and W = P - K workers.

    A worker pushes one slice to each server and pulls one back: 2 K steps, K messages, S bytes.
    A server receives W slices of S / K bytes and sends as many: 2 W steps, W messages, W / K x S
    bytes. With P = 1 the only rank is server and worker, and nothing is sent. Ranks 0 to K - 1 are
    servers; their slices of the N trained parameters differ by at most one element.
    """
    workers = world_size - servers
    if rank >= servers:
        return Cost(2 * servers, servers, num_elements * element_bytes)
    start, end = chunk_bounds(num_elements, servers)[rank]
    return Cost(2 * workers, workers, workers * (end - start) * element_bytes)


def sharded_cost(
    sizes: Sequence[int],
    stage: int,
    world_size: int,
    rank: int = 0,
    *,
    uses: Uses,
    trained: Sequence[int],
    element_bytes: int = 4,
    micro_batches: int = 1,
) -> Cost:
    """One step of ``sharded``: 2, 2 and 3 (P - 1) / P x S bytes in stages 1, 2 and 3.

    That is if all is trained and no parameter tied. M micro-batches reduce M times in stage 2, and
    gather as often in stage 3. The arguments are those of ``sharded_memory``. Left out: clipping,
    and the weight of a loss that is no mean over samples.
    """
    instructions = list(sharded_pass(stage, uses, trained))
    if stage > 1:
        instructions *= micro_batches
    if stage < 3:
        instructions += [Instruction("gather", flat) for flat in trained]
    total = Cost(0, 0, 0)
    for kind, flat in instructions:
        if kind == "gather":
            total += share_only_cost(sizes[flat], element_bytes, world_size, rank)
        elif kind == "reduce":
            total += share_reduce_cost(sizes[flat], element_bytes, world_size, rank)
    return total


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

    Device 0 keeps the first ceil(B / P) of the B samples; fewer than P samples use B devices.
    ``input_bytes`` and ``output_bytes`` are of one sample, ``state_bytes`` S of parameters and
    buffers, ``gradient_bytes`` of the trained parameters: ``replicate`` moves (P - 1) S.
    """
    used = min(batch_size, world_size)
    elsewhere = batch_size - math.ceil(batch_size / used)
    return {
        "scatter": elsewhere * input_bytes,
        "replicate": (used - 1) * state_bytes,
        "gather": 2 * elsewhere * output_bytes,
        "reduce": (used - 1) * gradient_bytes,
    }


def model_parallel_cost(
    cut_bytes_per_sample: Sequence[int],
    batch_size: int,
    rank: int,
    num_ranks: int,
    micro_batches: int = 1,
    first_trained: int = 0,
    schedule: str = "one_by_one",
    stages_per_rank: int = 1,
) -> Cost:
    """One training step of a model that is cut into stages, on one rank.

    A cut of S bytes per sample carries M messages and B x S bytes forward, and the same backward
    unless nothing before it is trained. Left out: clipping, fp16, and the weight of a loss that is
    no mean over samples.

    Args:
        cut_bytes_per_sample: by cut, the output of the layer before it for one sample.
        micro_batches: M, at most one per sample.
        first_trained: the first stage that trains anything; their number if none does.
        schedule: of ``Pipeline``; sends and receives may be one step (``with_hops``). With that of
            ``ModelParallel``, ``one_by_one``, each message is a step.
        stages_per_rank: V, with schedule ``interleaved``.
    """
    count = min(micro_batches, batch_size)
    pipelining = NAIVE
    if schedule != "one_by_one":
        stages_per_rank = stages_on_each(schedule, stages_per_rank)
        pipelining = PIPELINES[schedule]
    steps = instructions(pipelining, rank, num_ranks, count, first_trained, stages_per_rank)
    hops = [step for step in steps if isinstance(step, Hop)]
    sent = [hop.send for hop in hops if hop.send]
    # Each micro-batch is sent once over each cut, so each cut carries the whole batch.
    cuts = set()
    for message in sent:
        receiver = message.chunk * num_ranks + message.peer
        cut = receiver - 1 if message.kind == "activation" else receiver
        cuts.add((message.kind, cut))
    num_bytes = batch_size * sum(cut_bytes_per_sample[cut] for _, cut in cuts)
    return Cost(len(hops), len(sent), num_bytes)


def tensor_parallel_cost(
    shape: tuple[int, int, int],
    num_blocks: int,
    replicated: int,
    element_bytes: int,
    world_size: int,
    rank: int = 0,
    *,
    sequence_parallel: bool = False,
) -> Cost:
    """One step of a transformer whose layers are cut over P ranks; ``shape`` is (n, T, D).

    Each block has two all-reduces of [n, T, D] forward and two backward: 8 (P - 1) / P x n T D
    elements. The embedding has one, the head one, the loss three of [n, T], and one is of the
    gradients of the ``replicated`` elements: norms, positions, biases of sums. With
    ``sequence_parallel`` those of [n, T, D] are done as their two halves, in two places. Left
    out: clipping, fp16, and the weight of a loss that is no mean over samples.
    """
    samples, length, width = shape
    activation = ring_all_reduce_cost(samples * length * width, element_bytes, world_size, rank)
    if sequence_parallel:
        # A chunk is some positions, and those of rank r are ``schedules.ring.owned_chunk``.
        position_bytes = samples * width * element_bytes
        left = (rank - 1) % world_size
        activation = ring_all_reduce_cost(length, position_bytes, world_size, left)
    loss = ring_all_reduce_cost(samples * length, element_bytes, world_size, rank)
    gradients = ring_all_reduce_cost(replicated, element_bytes, world_size, rank)
    costs = [activation] * (4 * num_blocks + 2) + [loss] * 3 + [gradients]
    return sum(costs, start=Cost(0, 0, 0))


def expert_parallel_cost(
    rows: Sequence[Sequence[int]],
    num_layers: int,
    num_experts: int,
    width: int,
    replicated: int,
    element_bytes: int,
    rank: int = 0,
) -> Cost:
    """One step of layers whose experts are divided over P ranks.

    ``rows[r][q]``, added up over the ``num_layers`` layers of experts: the choices that fell, on
    rank r, on experts of rank q. A layer sends its counts, two numbers of 8 bytes for each of
    ``num_experts``, to all ranks, and four times rows of ``width`` elements: choices there and
    outputs back, then their gradients there and back again. In the end the gradients of the
    ``replicated`` elements, those of no expert, are summed by a ring. Left out: what
    ``tensor_parallel_cost`` leaves out.
    """
    world_size = len(rows)
    peers = [peer for peer in range(world_size) if peer != rank]
    sent_rows = sum(rows[rank][peer] + rows[peer][rank] for peer in peers)
    all_to_alls = 4 * num_layers * (world_size - 1)
    travel = Cost(all_to_alls, all_to_alls, 2 * sent_rows * width * element_bytes)
    counts = share_only_cost(world_size, 2 * num_experts * 8, world_size, rank)
    gradients = ring_all_reduce_cost(replicated, element_bytes, world_size, rank)
    return sum([counts] * num_layers, start=travel + gradients)
