"""Pipeline schedules: the stream of forwards, backwards and messages that each stage executes.

Symbols: P stages, M micro-batches.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from labkit.units import check_choice


class Action(NamedTuple):
    """One stage's work on one micro-batch: ``forward`` or ``backward``. Prints as F3 or B3."""

    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.micro_batch}"


class Message(NamedTuple):
    """What a stage sends to its neighbour: an ``activation``, or the ``gradient`` of one."""

    kind: str
    micro_batch: int
    peer: int


class Hop(NamedTuple):
    """What a stage sends and receives between two actions; if both, in a single exchange."""

    send: Message | None
    recv: Message | None


def gpipe(stage: int, num_stages: int, num_micro_batches: int) -> Iterator[Action]:
    """Fill and drain: all micro-batches forward, then all backward. P = 3 stages, M = 3:

        stage 0   F0 F1 F2 .  .  .  .  B0 B1 B2
        stage 1   .  F0 F1 F2 .  .  B0 B1 B2 .
        stage 2   .  .  F0 F1 F2 B0 B1 B2 .  .

    Each stage holds the activations of all M micro-batches when backward begins. The order is the
    same on every stage; a dot means that the stage waits (``labkit.costs.pipeline_timeline``).

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
    activations of at most P - s micro-batches, whatever M is; the bubble is as in ``gpipe``.

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


def pipeline_schedule(name: str) -> Callable[[int, int, int], Iterator[Action]]:
    """The schedule of this name, a function of stage, P and M."""
    check_choice("schedule", name, PIPELINES)
    return PIPELINES[name]


def pipeline_streams(
    schedule: str, num_stages: int, num_micro_batches: int, first_trained: int = 0
) -> list[list[Action]]:
    """The actions of each stage; the stages before ``first_trained`` have no backward."""
    return [
        [
            action
            for action in pipeline_schedule(schedule)(stage, num_stages, num_micro_batches)
            if action.kind == "forward" or stage >= first_trained
        ]
        for stage in range(num_stages)
    ]


def in_flight(actions: Iterable[Action]) -> int:
    """The largest number of micro-batches whose activations a stage holds at the same time."""
    held = most = 0
    for action in actions:
        held += 1 if action.kind == "forward" else -1
        most = max(most, held)
    return most


def with_hops(
    actions: Iterable[Action], stage: int, num_stages: int, first_trained: int = 0
) -> Iterator[Action | Hop]:
    """What a stage executes: its actions, and between them the messages that they need.

    A send ends only when its receive has begun. So what a stage sends to a neighbour and what it
    next needs from the same neighbour make a single ``Hop``: if stage 0 sends F1's activation
    while stage 1 sends B0's gradient, neither waits for the other. The stages before
    ``first_trained`` train nothing: they have no backward, and no gradient is sent to them.
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
    if action.kind == "forward":
        return Message("activation", action.micro_batch, stage - 1) if stage > 0 else None
    last = stage + 1 == num_stages
    return None if last else Message("gradient", action.micro_batch, stage + 1)


def _made(action: Action, stage: int, num_stages: int, first_trained: int) -> Message | None:
    if action.kind == "forward":
        last = stage + 1 == num_stages
        return None if last else Message("activation", action.micro_batch, stage + 1)
    trains_before = stage > first_trained
    return Message("gradient", action.micro_batch, stage - 1) if trains_before else None
