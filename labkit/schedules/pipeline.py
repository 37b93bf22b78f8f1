"""Pipeline schedules: the stream of forwards, backwards and messages that each stage executes.

Symbols: P ranks, M micro-batches, V stages per rank: stage c P + r is **chunk** c of rank r. With
V = 1, which all schedules but ``interleaved`` have, the stages are the ranks.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from labkit.schedules.ring import chunk_bounds
from labkit.units import check_choice

# The letters of the actions. A backward is one action, or two: its gradient of the stage's input,
# for which the stage before waits, and its gradient of the weights, for which nobody does.
LETTERS = {"forward": "F", "backward": "B", "backward_input": "B", "backward_weight": "W"}


class Action(NamedTuple):
    """One stage's work on one micro-batch, of a kind in ``LETTERS``.

    Prints as F3, B3 or W3; in chunk 1 of its rank as F3'.
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{LETTERS[self.kind]}{self.micro_batch}" + "'" * self.chunk


class Message(NamedTuple):
    """A tensor that crosses a cut between stages: an ``activation``, or the ``gradient`` of one.

    ``peer`` is the rank at the other end; ``chunk`` is that of the stage that receives it, on both
    ranks.
    """

    kind: str
    micro_batch: int
    peer: int
    chunk: int = 0


class Hop(NamedTuple):
    """A send, a receive, or both as a single exchange, between two actions of a stage."""

    send: Message | None
    recv: Message | None


def one_by_one(stage: int, num_stages: int, num_micro_batches: int) -> Iterator[Action]:
    """Naive placement: each micro-batch passes all stages and back before the next. P = 3, M = 2:

        stage 0   F0 .  .  .  .  B0 F1 .  .  .  .  B1
        stage 1   .  F0 .  .  B0 .  .  F1 .  .  B1 .
        stage 2   .  .  F0 B0 .  .  .  .  F1 B1 .  .

    One stage works while all others wait, so a step is no faster than on one device.
    """
    for micro_batch in range(num_micro_batches):
        yield Action("forward", micro_batch)
        yield Action("backward", micro_batch)


def gpipe(stage: int, num_stages: int, num_micro_batches: int) -> Iterator[Action]:
    """Fill and drain: all micro-batches forward, then all backward. P = 3 stages, M = 3:

        stage 0   F0 F1 F2 .  .  .  .  B0 B1 B2
        stage 1   .  F0 F1 F2 .  .  B0 B1 B2 .
        stage 2   .  .  F0 F1 F2 B0 B1 B2 .  .

    The order is the same on every stage; a dot means that the stage waits
    (``labkit.schedules.timetable``).

    Source: Huang et al., "GPipe: Efficient training of giant neural networks using pipeline
    parallelism" (2019), figure 2c; backward in the order of PyTorch's ``ScheduleGPipe``.
    """
    for kind in ("forward", "backward"):
        for micro_batch in range(num_micro_batches):
            yield Action(kind, micro_batch)


def one_f_one_b(stage: int, num_stages: int, num_micro_batches: int) -> Iterator[Action]:
    """One forward, one backward (1F1B): a backward that can run comes before the next forward.

        stage 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3       P = 3, M = 4; backward takes as long
        stage 1   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .        as forward
        stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

    Stage s runs P - 1 - s forwards ahead, then alternates forward and backward. So it holds the
    activations of at most P - s micro-batches, where ``gpipe`` holds all M; the bubble is equal.

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


def zero_bubble(stage: int, num_stages: int, num_micro_batches: int) -> Iterator[Action]:
    """ZB-H1: 1F1B with each backward cut in two, B and W. P = 3, M = 4:

        stage 0   F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3   F, B and W take equally long
        stage 1   .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        stage 2   .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    No stage waits for a W, so W fills what was bubble: on stage s it comes s micro-batches after
    its B. Each stage holds the activations of at most P micro-batches, as stage 0 with 1F1B, and
    idles for (P - 1) (F + B - W) seconds; with 1F1B for (P - 1) (F + B + W).

    Source: Qi et al., "Zero bubble pipeline parallelism" (2023), section 2.1 and figure 3.
    """
    for kind, micro_batch, _ in one_f_one_b(stage, num_stages, num_micro_batches):
        yield Action("backward_input" if kind == "backward" else kind, micro_batch)
        if kind == "backward" and micro_batch >= stage:
            yield Action("backward_weight", micro_batch - stage)
    for micro_batch in range(max(0, num_micro_batches - stage), num_micro_batches):
        yield Action("backward_weight", micro_batch)


def interleaved(
    rank: int, num_ranks: int, num_micro_batches: int, stages_per_rank: int = 2
) -> Iterator[Action]:
    """1F1B with V short stages on each rank: r, r + P, and so on. P = 2, M = 4, V = 2:

        rank 0   F0 F1 F0'F1'F2 B0'F3 B1'F2'B0 F3'B1 .  B2'.  B3'B2 B3
        rank 1   .  F0 F1 F0'B0'F1'B1'F2 B0 F3 B1 F2'B2'F3'B3'B2 B3 .

    Groups of P micro-batches (or a few more, if P does not divide M) take turns: first in a rank's
    first stage, then in its second. Before its first backward, rank r runs the first group's
    forwards in all stages but its last, and 2 (P - 1 - r) + 1 more. The bubble is that of 1F1B
    divided by V, because the pipeline fills and drains in short stages; V times as many messages
    are sent.

    Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM" (2021), section 2.2 and figure 4.
    """
    bounds = chunk_bounds(num_micro_batches, max(1, num_micro_batches // num_ranks))
    order: list[tuple[int, int]] = []
    for start, end in bounds:
        for chunk in range(stages_per_rank):
            order += [(micro_batch, chunk) for micro_batch in range(start, end)]
    ahead = (stages_per_rank - 1) * bounds[0][1] + 2 * (num_ranks - 1 - rank)
    ahead = min(ahead, len(order))
    for micro_batch, chunk in order[:ahead]:
        yield Action("forward", micro_batch, chunk)
    for turn, (micro_batch, chunk) in enumerate(order):
        if turn + ahead < len(order):
            yield Action("forward", *order[turn + ahead])
        yield Action("backward", micro_batch, stages_per_rank - 1 - chunk)


@dataclass(frozen=True)
class Pipelining:
    """A pipeline's schedule, as everything that runs or draws it needs to know it.

    Attributes:
        actions: (rank, P, M) -> the rank's actions; if it interleaves, (rank, P, M, V).
        interleaves: whether a rank has several stages.
        cuts_backward: whether backwards may be two actions: gradients of inputs, and of weights.
        hops_beside: whether messages move beside a rank's work, not between its actions.
        exchanges: whether a message to a neighbor and one from it may be one ``Hop``.

    Raises:
        ValueError: it interleaves, and its messages are not beside the work.
    """

    actions: Callable[..., Iterator[Action]]
    interleaves: bool = False
    cuts_backward: bool = False
    hops_beside: bool = False
    exchanges: bool = True

    def __post_init__(self) -> None:
        if self.interleaves and not self.hops_beside:
            raise ValueError(
                "a schedule that interleaves needs hops_beside: between its actions, messages of "
                "several stages on a rank would not find each other"
            )

    def streams(
        self,
        num_ranks: int,
        num_micro_batches: int,
        first_trained: int = 0,
        stages_per_rank: int = 1,
    ) -> list[list[Action]]:
        """The actions of each rank, checked; see ``pipeline_streams``."""
        counts = [num_ranks, num_micro_batches]
        if self.interleaves:
            counts.append(stages_per_rank)
        streams = [list(self.actions(rank, *counts)) for rank in range(num_ranks)]
        self.check(streams, num_micro_batches, stages_per_rank)
        trained_streams: list[list[Action]] = [[] for _ in streams]
        for rank, stream in enumerate(streams):
            for action in stream:
                if action.kind == "forward" or action.chunk * num_ranks + rank >= first_trained:
                    trained_streams[rank].append(action)
        return trained_streams

    def check(
        self, streams: Sequence[Sequence[Action]], num_micro_batches: int, chunks: int
    ) -> None:
        """Raise ValueError unless the actions of all ranks are those of one training step.

        Each stage runs each micro-batch forward and backward, once. If messages move between the
        actions, they are taken in the order in which they come: it is the same on all ranks.
        """
        allowed = [["forward", "backward"]]
        if self.cuts_backward:
            allowed.append(["forward", "backward_input", "backward_weight"])
        needed = set(itertools.product(range(num_micro_batches), range(chunks)))
        orders = []
        for rank, stream in enumerate(streams):
            kinds: dict[tuple[int, int], list[str]] = {}
            for action in stream:
                kinds.setdefault((action.micro_batch, action.chunk), []).append(action.kind)
            for part in sorted(needed.union(kinds)):
                own_kinds = kinds.get(part, [])
                if part not in needed or own_kinds not in allowed:
                    micro_batch, chunk = part
                    sequences = " or ".join(", ".join(sequence) for sequence in allowed)
                    raise ValueError(
                        f"rank {rank} of this schedule has "
                        f"{', '.join(own_kinds) or 'no action'} for "
                        f"micro-batch {micro_batch} in chunk {chunk}. Micro-batches 0 to "
                        f"{num_micro_batches - 1} in chunks 0 to {chunks - 1} each need "
                        f"{sequences}, once and in this order: mend the actions. (A backward in "
                        "two parts needs cuts_backward=True.)"
                    )
            forwards = [action.micro_batch for action in stream if action.kind == "forward"]
            backwards = [a.micro_batch for a in stream if a.kind in ("backward", "backward_input")]
            orders.append((forwards, backwards))
            if orders[rank] != orders[0] and not self.hops_beside:
                raise ValueError(
                    f"rank {rank} of this schedule runs micro-batches forward in the order "
                    f"{forwards} and backward in the order {backwards}, rank 0 in the orders "
                    f"{orders[0][0]} and {orders[0][1]}: make them equal, or set hops_beside=True"
                )


# A new schedule is entered here: runs, ``--schedule`` and the explorers read this table. (They
# leave out what they cannot draw: several stages per rank; the split explorer also cut backwards.)
# Each process has its own table. But a technique takes its row along to the ranks, so a notebook
# may enter a row, and then make the technique.
PIPELINES = {
    "gpipe": Pipelining(gpipe),
    "1f1b": Pipelining(one_f_one_b),
    "zero_bubble": Pipelining(zero_bubble, cuts_backward=True, hops_beside=True),
    "interleaved": Pipelining(interleaved, interleaves=True, hops_beside=True),
}

# The placement without a pipeline, of ``ModelParallel``.
NAIVE = Pipelining(one_by_one, exchanges=False)


def stages_on_each(schedule: str, stages_per_rank: int | None = None) -> int:
    """Return V, the stages per rank: as given, or else 2 for ``interleaved`` and 1 for others."""
    try:
        check_choice("schedule", schedule, PIPELINES)
    except ValueError as error:
        raise ValueError(
            f"{error}. (One of your own is a row of labkit.schedules.pipeline.PIPELINES, and each "
            "process has its own table: enter it and make the technique in one process, then pass "
            "the technique to the run.)"
        ) from None
    is_interleaved = PIPELINES[schedule].interleaves
    if stages_per_rank is None:
        return 2 if is_interleaved else 1
    if is_interleaved != (stages_per_rank > 1):
        allowed = "1: leave it out, or interleave"
        if is_interleaved:
            allowed = "2 or more: 1 is schedule 1f1b"
        raise ValueError(
            f"stages_per_rank {stages_per_rank} with schedule {schedule}, which has {allowed}"
        )
    return stages_per_rank


def pipeline_streams(
    schedule: str,
    num_ranks: int,
    num_micro_batches: int,
    first_trained: int = 0,
    stages_per_rank: int | None = None,
) -> list[list[Action]]:
    """The actions of each rank; the stages before ``first_trained`` have no backward.

    ``stages_per_rank`` is V, see ``stages_on_each``.
    """
    chunks = stages_on_each(schedule, stages_per_rank)
    return PIPELINES[schedule].streams(num_ranks, num_micro_batches, first_trained, chunks)


def in_flight(actions: Iterable[Action]) -> int:
    """The largest number of micro-batches whose activations a rank holds at the same time.

    They are counted once in each of its stages.
    """
    # After the gradient of a stage's input, those of its weights still need activations.
    change = {"forward": 1, "backward_input": 0}
    counts = itertools.accumulate(change.get(action.kind, -1) for action in actions)
    return max([0, *counts])


def with_hops(
    actions: Iterable[Action],
    stage: int,
    num_stages: int,
    first_trained: int = 0,
    *,
    exchange: bool = True,
) -> Iterator[Action | Hop]:
    """The instructions of a stage: its actions, and between them the messages that they need.

    A send ends only when its receive has begun. So what a stage sends to a neighbor and what it
    next needs from the same neighbor make a single ``Hop``: if stage 0 sends F1's activation
    while stage 1 sends B0's gradient, neither waits for the other. Without ``exchange`` each hop
    is one message. The stages before ``first_trained`` train nothing: they have no backward, and
    no gradient is sent to them.
    """
    send = None
    for action in actions:
        if action.kind != "forward" and stage < first_trained:
            continue
        recv, made = messages_of(action, stage, num_stages, num_stages, first_trained)
        if send and recv and not (exchange and send.peer == recv.peer):
            yield Hop(send, None)
            send = None
        if send or recv:
            yield Hop(send, recv)
        yield action
        send = made
    if send:
        yield Hop(send, None)


def messages_of(
    action: Action, rank: int, num_ranks: int, num_stages: int, first_trained: int
) -> tuple[Message | None, Message | None]:
    """Return the message that ``action`` of ``rank`` needs, and the one that it makes, or None.

    The peer is the rank itself if it has the next stage, too: nothing is sent.
    """
    if action.kind == "backward_weight":
        return None, None
    stage = action.chunk * num_ranks + rank
    if action.kind == "forward":
        kind = "activation"
        source, target = stage - 1, stage + 1
        is_sent = target < num_stages
    else:
        kind = "gradient"
        source, target = stage + 1, stage - 1
        is_sent = target >= first_trained
    needed = made = None
    if 0 <= source < num_stages:
        needed = Message(kind, action.micro_batch, source % num_ranks, action.chunk)
    if is_sent:
        made = Message(kind, action.micro_batch, target % num_ranks, target // num_ranks)
    return needed, made
