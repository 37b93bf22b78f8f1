"""Timetables as data: who does what at which step. Pure generators, no torch and no processes.

The real run executes a schedule, the figures draw it, the tests compare it with the textbook, so
it is written once. Symbols: P ranks, s a step, chunk c one of P equal parts of a tensor. In a
pipeline P stages, M micro-batches.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from labkit.limits import check_whole


class Transfer(NamedTuple):
    """What one rank does in one step of a tree or an exchange; it may sit some steps out.

    Attributes:
        step: number of the step, counted for all ranks together.
        dst: the rank it sends to, None if it only receives.
        src: the rank it receives from, None if it only sends.
    """

    step: int
    dst: int | None
    src: int | None


class RingStep(NamedTuple):
    """What one rank does in one step of a ring: one message out, one in, at the same time."""

    step: int
    phase: str
    dst: int
    send_chunk: int
    src: int
    recv_chunk: int


def ring_share_reduce(rank: int, world_size: int) -> Iterator[RingStep]:
    """The first half of ring all-reduce (the literature's reduce-scatter): P - 1 steps.

    At step s rank r sends chunk (r - s) mod P to its right neighbour, and adds the chunk
    (r - s - 1) mod P that comes from its left one. After the last step rank r holds the complete
    sum of chunk (r + 1) mod P.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations" (2009), section 3.
    """
    yield from _ring(rank, world_size, "share_reduce", first=rank)


def ring_share_only(rank: int, world_size: int) -> Iterator[RingStep]:
    """The second half (the literature's all-gather): P - 1 steps.

    At step s rank r passes on chunk (r + 1 - s) mod P, which is complete, and receives the
    complete chunk (r - s) mod P. Source: as ``ring_share_reduce``.
    """
    yield from _ring(rank, world_size, "share_only", first=rank + 1)


def ring_all_reduce(rank: int, world_size: int) -> Iterator[RingStep]:
    """Both halves: 2 (P - 1) steps."""
    yield from ring_share_reduce(rank, world_size)
    yield from ring_share_only(rank, world_size)


def _ring(rank: int, world_size: int, phase: str, first: int) -> Iterator[RingStep]:
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(world_size - 1):
        chunk = (first - step) % world_size
        yield RingStep(step, phase, right, chunk, left, (chunk - 1) % world_size)


def owned_chunk(rank: int, world_size: int) -> int:
    """The chunk whose complete sum ``rank`` holds after ``ring_share_reduce``."""
    return (rank + 1) % world_size


def chunk_bounds(num_elements: int, world_size: int) -> list[tuple[int, int]]:
    """Cut ``num_elements`` into P chunks whose sizes differ by at most one: [(start, end)] * P.

    The first ``num_elements mod P`` chunks are one longer; some are empty when there are fewer
    elements than ranks.
    """
    size, longer = divmod(num_elements, world_size)
    bounds, start = [], 0
    for chunk in range(world_size):
        end = start + size + (chunk < longer)
        bounds.append((start, end))
        start = end
    return bounds


def top_k_elements(num_elements: int) -> int:
    """k: 1 % of the elements, rounded down, but one at least (of none, none)."""
    return min(num_elements, max(1, num_elements // 100))


def ring_contributions(world_size: int) -> list[list[list[frozenset[int]]]]:
    """Whose values each chunk holds, on paper: [state][rank][chunk] -> ranks summed in.

    State 0 is the start; one more state after each of the 2 (P - 1) steps.
    """
    ranks = range(world_size)
    held = [[frozenset({rank}) for _ in ranks] for rank in ranks]
    states = [[list(row) for row in held]]
    for steps in zip(*(ring_all_reduce(rank, world_size) for rank in ranks)):
        sent = {rank: held[rank][step.send_chunk] for rank, step in zip(ranks, steps)}
        for rank, step in zip(ranks, steps):
            mine = held[rank][step.recv_chunk] if step.phase == "share_reduce" else frozenset()
            held[rank][step.recv_chunk] = mine | sent[step.src]
        states.append([list(row) for row in held])
    return states


def binomial_broadcast(rank: int, world_size: int, root: int = 0) -> Iterator[Transfer]:
    """A binomial tree, from the root to all: ceil(log2 P) steps, each doubles who has the data.

    Count ranks from the root: v = (rank - root) mod P. At step s every v below 2^s, who has the
    data, sends to v + 2^s, if there is such a rank.

        step 0    0 -> 1
        step 1    0 -> 2, 1 -> 3
        step 2    0 -> 4, 1 -> 5, 2 -> 6, 3 -> 7

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations
    in MPICH" (2005), section 4.
    """
    place = (rank - root) % world_size
    for step in range((world_size - 1).bit_length()):
        reach = 2**step
        if reach <= place < 2 * reach:
            yield Transfer(step, None, (rank - reach) % world_size)
        elif place < reach and place + reach < world_size:
            yield Transfer(step, (rank + reach) % world_size, None)


def binomial_reduce(rank: int, world_size: int, root: int = 0) -> Iterator[Transfer]:
    """``binomial_broadcast`` backwards in time, from all to the root: ceil(log2 P) steps.

    Source: as ``binomial_broadcast``.
    """
    last = (world_size - 1).bit_length() - 1
    for step, dst, src in reversed(list(binomial_broadcast(rank, world_size, root))):
        yield Transfer(last - step, src, dst)


def recursive_doubling(rank: int, world_size: int) -> Iterator[Transfer]:
    """All-reduce by pairs: after step s, groups of 2^(s + 1) ranks hold the sum of their group.

    Q is the largest power of two up to P. At step s rank r exchanges what it has so far with the
    rank whose number differs in bit s:

        step 0    0 - 1   2 - 3   4 - 5   6 - 7
        step 1    0 - 2   1 - 3   4 - 6   5 - 7
        step 2    0 - 4   1 - 5   2 - 6   3 - 7

    If P is no power of two, a fold comes first: ranks Q and up send their values to rank - Q, and
    get the result in ``recursive_doubling_return``. Steps: log2 Q, and one more with a fold.

    Source: Thakur, Rabenseifner and Gropp (2005), section 4.
    """
    paired = _largest_power_of_two(world_size)
    fold = paired < world_size
    if rank >= paired:
        yield Transfer(0, rank - paired, None)
        return
    if rank + paired < world_size:
        yield Transfer(0, None, rank + paired)
    for bit in range(paired.bit_length() - 1):
        peer = rank ^ 2**bit
        yield Transfer(fold + bit, peer, peer)


def recursive_doubling_return(rank: int, world_size: int) -> Iterator[Transfer]:
    """The fold undone: ranks Q and up get the result. One step, none if P is a power of two."""
    paired = _largest_power_of_two(world_size)
    last = paired.bit_length()
    if rank >= paired:
        yield Transfer(last, None, rank - paired)
    elif rank + paired < world_size:
        yield Transfer(last, rank + paired, None)


def server_turns(server: int, num_servers: int, num_workers: int) -> list[int]:
    """The workers (0, 1, ...) in the order in which server number ``server`` serves them.

    M = max(servers, workers). In turn t server s meets worker (t + s) mod M, if there is one, so
    that each worker meets another server, and after M turns each has met all of them. Servers A
    and B, workers 0, 1 and 2:

        turn 0    A - 0    B - 1
        turn 1    A - 1    B - 2
        turn 2    A - 2    B - 0

    Everyone goes through the turns in this order, so no circle of ranks waits for each other.
    """
    turns = max(num_servers, num_workers)
    workers = ((turn + server) % turns for turn in range(turns))
    return [worker for worker in workers if worker < num_workers]


def worker_turns(worker: int, num_servers: int, num_workers: int) -> list[int]:
    """The other side of ``server_turns``: the servers in the order in which a worker meets them.

    In turn t worker w meets server (w - t) mod M, if there is one.
    """
    turns = max(num_servers, num_workers)
    servers = ((worker - turn) % turns for turn in range(turns))
    return [server for server in servers if server < num_servers]


def _largest_power_of_two(world_size: int) -> int:
    return 2 ** (world_size.bit_length() - 1)


def pairwise_exchange(rank: int, world_size: int) -> Iterator[Transfer]:
    """Everyone to everyone in P - 1 steps: at step s to rank + s + 1, from rank - s - 1 (mod P).

    In each step every rank sends one message and receives one, so none is flooded.
    Source: Thakur, Rabenseifner and Gropp (2005), section 4 (all-to-all).
    """
    for step in range(world_size - 1):
        yield Transfer(step, (rank + step + 1) % world_size, (rank - step - 1) % world_size)


def dissemination(rank: int, world_size: int) -> Iterator[Transfer]:
    """Word of mouth in ceil(log2 P) steps: after step s a rank has heard of 2^(s + 1) ranks.

    At step s rank r sends to r + 2^s and receives from r - 2^s (mod P). It works for any P, where
    recursive doubling needs a fold.

    Source: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization" (1988).
    """
    for step in range((world_size - 1).bit_length()):
        reach = 2**step
        yield Transfer(step, (rank + reach) % world_size, (rank - reach) % world_size)


class Action(NamedTuple):
    """One stage's work on one micro-batch: ``forward`` or ``backward``. Reads as F3 or B3."""

    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.micro_batch}"


class Message(NamedTuple):
    """What one stage has for its neighbour: an ``activation``, or the ``gradient`` of one."""

    kind: str
    micro_batch: int
    peer: int


class Hop(NamedTuple):
    """Messages between two actions. Both at once are one exchange: neither waits for the other."""

    send: Message | None
    recv: Message | None


def gpipe(stage: int, num_stages: int, num_micro_batches: int) -> Iterator[Action]:
    """Fill and drain: all micro-batches forward, then all backward. P = 3 stages, M = 3:

        stage 0   F0 F1 F2 .  .  .  .  B0 B1 B2
        stage 1   .  F0 F1 F2 .  .  B0 B1 B2 .
        stage 2   .  .  F0 F1 F2 B0 B1 B2 .  .

    Each stage holds the activations of all M micro-batches when backward begins. The order is the
    same on every stage; the gaps are waiting (``labkit.timetable``).

    Source: Huang et al., "GPipe: Efficient training of giant neural networks using pipeline
    parallelism" (2019), figure 2c; backward in the order of PyTorch's ``ScheduleGPipe``.
    """
    for kind in ("forward", "backward"):
        for micro_batch in range(num_micro_batches):
            yield Action(kind, micro_batch)


def one_f_one_b(stage: int, num_stages: int, num_micro_batches: int) -> Iterator[Action]:
    """One forward, one backward: as soon as a micro-batch is through, its backward comes first.

        stage 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3       P = 3, M = 4; backward takes as long
        stage 1   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .        as forward
        stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

    Stage s runs P - 1 - s forwards ahead, then takes turns. So it holds the activations of P - s
    micro-batches at most, however many there are; the bubble is that of ``gpipe``.

    Source: Narayanan et al., "PipeDream" (2019), section 3.2, without its weight versions: the
    update waits for all micro-batches, as in Narayanan et al., "Efficient large-scale language
    model training on GPU clusters using Megatron-LM" (2021), figure 4.
    """
    ahead = min(num_stages - 1 - stage, num_micro_batches)
    for micro_batch in range(ahead):
        yield Action("forward", micro_batch)
    for micro_batch in range(num_micro_batches):
        if micro_batch + ahead < num_micro_batches:
            yield Action("forward", micro_batch + ahead)
        yield Action("backward", micro_batch)


PIPELINES: dict[str, Callable[[int, int, int], Iterator[Action]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
}


def check_micro_batches(count: int) -> int:
    """``count``, if it is a number of micro-batches.

    Raises:
        ValueError: not a whole number from 1, or one that is too large.
    """
    check_whole("micro_batches", count)
    return count


def in_flight(actions: Iterable[Action]) -> int:
    """The most micro-batches whose activations a stage holds at once: forward, not yet back."""
    held = most = 0
    for action in actions:
        held += 1 if action.kind == "forward" else -1
        most = max(most, held)
    return most


def with_hops(
    actions: Iterable[Action], stage: int, num_stages: int, first_trained: int = 0
) -> Iterator[Action | Hop]:
    """A stage's actions, and between them the messages that they need: what a stage executes.

    After a forward its activation goes to the next stage, before one it comes from the stage
    before; gradients go the other way. A send ends only when its receive has begun, so what a
    stage sends to a neighbour and what it needs from the same one next are a single ``Hop``: if
    stage 0 sends F1 to stage 1 while that one sends B0's gradient to stage 0, no one waits.

    Args:
        actions: of this stage, in order.
        stage: 0 to P - 1.
        num_stages: P.
        first_trained: stages before it hold nothing that is trained. No gradient goes there, and
            they have no backward.
    """
    send = None
    for action in actions:
        if action.kind == "backward" and stage < first_trained:
            continue
        recv = _needed(action, stage, num_stages)
        if send and recv and send.peer != recv.peer:
            yield Hop(send, None)
            send = None
        if send or recv:
            yield Hop(send, recv)
        yield action
        send = _made(action, stage, num_stages, first_trained)
    if send:
        yield Hop(send, None)


def _needed(action: Action, stage: int, num_stages: int) -> Message | None:
    kind, micro_batch = action
    if kind == "forward":
        return Message("activation", micro_batch, stage - 1) if stage > 0 else None
    return Message("gradient", micro_batch, stage + 1) if stage + 1 < num_stages else None


def _made(action: Action, stage: int, num_stages: int, first_trained: int) -> Message | None:
    kind, micro_batch = action
    if kind == "forward":
        return Message("activation", micro_batch, stage + 1) if stage + 1 < num_stages else None
    return Message("gradient", micro_batch, stage - 1) if stage > first_trained else None
