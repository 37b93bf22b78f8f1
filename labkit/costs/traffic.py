"""What each collective and each technique sends: steps, messages and bytes.

The counts are exact: tests compare them with real runs, byte for byte. ``rank`` is the rank that
the cost is for, ``element_bytes`` the size of an element. ``partial_bytes`` is the size of an
element of a partial sum, where it differs: float16 and bfloat16 are summed as float32
(``Reduction.wide``). Where only partial sums are sent (reduce, share_reduce, reduce_scatter),
``element_bytes`` is the size of their elements.

Symbols: P ranks, N elements of one rank's tensor, S its bytes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from labkit.schedules import tree
from labkit.schedules.pipeline import Hop, pipeline_schedule, with_hops
from labkit.schedules.ring import RingStep, chunk_bounds, ring_share_only, ring_share_reduce
from labkit.schedules.top_k import kept_elements
from labkit.units import check_integer, format_count


@dataclass(frozen=True)
class Cost:
    """What one rank does for one collective, or one step of a technique.

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


NOTHING = Cost(0, 0, 0)


def naive_all_reduce_cost(
    num_elements: int, element_bytes: int, world_size: int, rank: int = 0
) -> Cost:
    """Naive all-reduce: rank 0 receives P - 1 tensors of S bytes, then sends P - 1.

    Rank 0 takes 2 (P - 1) steps and sends (P - 1) S bytes; each other rank sends S bytes, once.
    """
    gather = gather_cost(num_elements, element_bytes, world_size, rank)
    return gather + scatter_cost(num_elements, element_bytes, world_size, rank)


def ring_all_reduce_cost(
    num_elements: int,
    element_bytes: int,
    world_size: int,
    rank: int = 0,
    partial_bytes: int | None = None,
) -> Cost:
    """Ring all-reduce: 2 (P - 1) steps and messages, 2 (P - 1) / P x S bytes sent by each rank.

    The fraction is exact when P divides N; otherwise chunks differ by one element, and ranks send
    different amounts. The result is the sum over the chunks sent, so it is always exact.
    """
    partial_sums = num_elements, partial_bytes or element_bytes, world_size, rank
    whole_sums = num_elements, element_bytes, world_size, rank
    return share_reduce_cost(*partial_sums) + share_only_cost(*whole_sums)


def share_reduce_cost(
    num_elements: int, element_bytes: int, world_size: int, rank: int = 0
) -> Cost:
    """Half of the ring: P - 1 steps and messages, (P - 1) / P x S bytes of partial sums."""
    steps = ring_share_reduce(rank, world_size)
    return _chunks_cost(steps, num_elements, element_bytes, world_size)


def share_only_cost(num_elements: int, element_bytes: int, world_size: int, rank: int = 0) -> Cost:
    """The other half of the ring: P - 1 steps and messages, (P - 1) / P x S bytes."""
    steps = ring_share_only(rank, world_size)
    return _chunks_cost(steps, num_elements, element_bytes, world_size)


def tree_all_reduce_cost(
    num_elements: int,
    element_bytes: int,
    world_size: int,
    rank: int = 0,
    partial_bytes: int | None = None,
) -> Cost:
    """Recursive doubling: log2 P steps and messages of S bytes if P is a power of two.

    Otherwise two more steps: with Q the largest power of two below P, ranks Q and up only send
    once and receive once, and each of the first P - Q ranks receives one more tensor and sends
    one more.
    """
    partial = num_elements * (partial_bytes or element_bytes)
    doubling = _transfers_cost(tree.recursive_doubling(rank, world_size), partial)
    back = tree.recursive_doubling_return(rank, world_size)
    return doubling + _transfers_cost(back, num_elements * element_bytes)


def broadcast_cost(
    num_elements: int, element_bytes: int, world_size: int, rank: int = 0, root: int = 0
) -> Cost:
    """Binomial tree: the root sends ceil(log2 P) messages of S bytes, all ranks together P - 1."""
    steps = tree.binomial_broadcast(rank, world_size, root)
    return _transfers_cost(steps, num_elements * element_bytes)


def reduce_cost(
    num_elements: int, element_bytes: int, world_size: int, rank: int = 0, root: int = 0
) -> Cost:
    """Binomial tree: the root receives ceil(log2 P) messages, every other rank sends one."""
    steps = tree.binomial_reduce(rank, world_size, root)
    return _transfers_cost(steps, num_elements * element_bytes)


def gather_cost(
    num_elements: int, element_bytes: int, world_size: int, rank: int = 0, root: int = 0
) -> Cost:
    """The root receives P - 1 messages, one per step; every other rank sends S bytes, once."""
    if rank == root:
        return Cost(world_size - 1, 0, 0)
    return Cost(1, 1, num_elements * element_bytes)


def scatter_cost(
    num_elements: int, element_bytes: int, world_size: int, rank: int = 0, root: int = 0
) -> Cost:
    """The root sends P - 1 messages of S bytes (one rank's share), one per step."""
    if rank == root:
        messages = world_size - 1
        return Cost(messages, messages, messages * num_elements * element_bytes)
    return Cost(1, 0, 0)


def all_gather_cost(num_elements: int, element_bytes: int, world_size: int, rank: int = 0) -> Cost:
    """Share-only of one tensor per rank: P - 1 steps and messages, (P - 1) S bytes."""
    return share_only_cost(num_elements * world_size, element_bytes, world_size, rank)


def reduce_scatter_cost(
    num_elements: int, element_bytes: int, world_size: int, rank: int = 0
) -> Cost:
    """Share-reduce of P tensors per rank, S bytes each: P - 1 steps, (P - 1) S bytes."""
    return share_reduce_cost(num_elements * world_size, element_bytes, world_size, rank)


def all_to_all_cost(num_elements: int, element_bytes: int, world_size: int, rank: int = 0) -> Cost:
    """Pairwise exchange of P tensors per rank, S bytes each: P - 1 steps, (P - 1) S bytes."""
    return _transfers_cost(tree.pairwise_exchange(rank, world_size), num_elements * element_bytes)


def barrier_cost(world_size: int, rank: int = 0) -> Cost:
    """Dissemination: ceil(log2 P) steps and messages of one byte."""
    return _transfers_cost(tree.dissemination(rank, world_size), 1)


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


def compressed_cost(
    compress: str, num_elements: int, element_bytes: int, world_size: int, rank: int = 0
) -> Cost:
    """All-reduce of gradients by ``labkit.collectives.compressed``.

    ``fp16`` and ``bf16``: the ring's messages with 2 bytes per element, (P - 1) / P x 4 N bytes.
    ``topk``: P - 1 messages of k values and k indices, 2 (P - 1) k elements. Unlike the ring's,
    its bytes grow with P: with k = 1 % of N, nothing is saved from P = 100 on.
    """
    if compress == "topk":
        kept = kept_elements(num_elements)
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

    Device 0 keeps the first ceil(B / P) of the B samples; fewer than P samples use B devices.

    Args:
        batch_size: B, samples of the global batch.
        world_size: P, devices.
        input_bytes, output_bytes: of one sample; with amp, outputs may have 2 bytes per number.
        state_bytes: S, parameters and buffers.
        gradient_bytes: of the trained parameters.

    Returns:
        ``scatter``: the inputs. ``replicate``: (P - 1) S. ``gather``: the outputs to device 0,
        and their gradients back. ``reduce``: (P - 1) times the gradients.
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
    num_stages: int,
    micro_batches: int = 1,
    first_trained: int = 0,
    schedule: str | None = None,
) -> Cost:
    """One training step of a model that is cut into stages, on one rank.

    A cut of S bytes per sample carries M messages and B x S bytes forward, and the same backward
    unless nothing before it is trained. Left out: parameters tied across stages, clipping, fp16.

    Args:
        cut_bytes_per_sample: by cut, the output of the layer before it for one sample.
        batch_size: B, samples.
        num_stages: P, one per rank.
        micro_batches: M, at most one per sample.
        first_trained: the first stage that trains anything; P if none does.
        schedule: of ``Pipeline``, a name in ``schedules.PIPELINES``; sends and receives may be one
            step (``schedules.with_hops``). None is ``ModelParallel``: one step per message.

    Raises:
        ValueError: not one number for each of the P - 1 cuts, an unknown rank or schedule, or no
            micro-batch.
    """
    if len(cut_bytes_per_sample) != num_stages - 1 or not 0 <= rank < num_stages:
        cuts = format_count(len(cut_bytes_per_sample), "cut")
        raise ValueError(
            f"rank {rank} and bytes for {cuts} of {format_count(num_stages, 'stage')}: give "
            f"{num_stages - 1}, and a rank from 0 to {num_stages - 1}"
        )
    check_integer("micro_batches", micro_batches)
    count = min(micro_batches, batch_size)
    actions = pipeline_schedule(schedule or "gpipe")(rank, num_stages, count)
    stream = with_hops(actions, rank, num_stages, first_trained)
    hops = [step for step in stream if isinstance(step, Hop)]
    sent = [hop.send for hop in hops if hop.send]
    steps = len(hops) if schedule else len(sent) + sum(hop.recv is not None for hop in hops)
    # Each micro-batch is sent once to each peer, so each peer gets the whole batch.
    cuts = [min(rank, peer) for peer in {message.peer for message in sent}]
    num_bytes = batch_size * sum(cut_bytes_per_sample[cut] for cut in cuts)
    return Cost(steps, len(sent), num_bytes)


def _chunks_cost(
    steps: Iterable[RingStep], num_elements: int, element_bytes: int, world_size: int
) -> Cost:
    """Each step of a ring sends one chunk."""
    sizes = [end - start for start, end in chunk_bounds(num_elements, world_size)]
    sent = [sizes[step.send_chunk] for step in steps]
    return Cost(len(sent), len(sent), sum(sent) * element_bytes)


def _transfers_cost(steps: Iterable[tree.Transfer], size_bytes: int) -> Cost:
    """Each step with a destination sends ``size_bytes``."""
    steps = list(steps)
    messages = sum(step.dst is not None for step in steps)
    return Cost(len(steps), messages, messages * size_bytes)
