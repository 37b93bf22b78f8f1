"""The timetable of a pipeline: when each rank runs which action, and in which order messages move.

Symbols: P ranks, V stages per rank; stage c P + r is chunk c of rank r.
"""

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from labkit.schedules.pipeline import Action, Hop, Message, pipeline_streams, with_hops


class Slot(NamedTuple):
    """One action of one rank, ``stage``, with its start and end; ``chunk`` as in ``Action``."""

    stage: int
    kind: str
    micro_batch: int
    start_s: float
    end_s: float
    chunk: int = 0


def predicted_slots(
    streams: Sequence[Sequence[Action]],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    hop_s: Sequence[float] | None = None,
    weight_s: Sequence[float] | None = None,
) -> list[Slot]:
    """Run every action as early as possible: in its rank's order, once its inputs have arrived.

    A forward needs the same micro-batch's forward on the stage before. A backward, or its
    gradient of the input, needs its own forward, and the same of the stage after; a gradient of
    the weights needs that of the input. A transfer takes time and occupies no rank.

    Args:
        streams: by rank, its actions in order (``schedules.pipeline_streams``); frozen first
            stages have no backwards. ValueError for one that can never finish.
        forward_s, backward_s: by stage, seconds for one micro-batch.
        hop_s: by cut, seconds of one transfer, the same in both directions; 0 by default.
        weight_s: by stage, the part of ``backward_s`` for the weights; by default one half.
    """
    ranks, num_stages = len(streams), len(forward_s)
    hop_s = hop_s or [0.0] * (num_stages - 1)
    weight_s = weight_s or [seconds / 2 for seconds in backward_s]
    seconds = {"forward": forward_s, "backward": backward_s, "backward_weight": weight_s}
    seconds["backward_input"] = [both - half for both, half in zip(backward_s, weight_s)]
    slots: list[list[Slot]] = [[] for _ in streams]
    # By kind, stage and micro-batch; the gradient of a stage's input is always a "backward".
    ends_s: dict[tuple[str, int, int], float] = {}
    todo = [deque(stream) for stream in streams]

    def arrival_s(stage: int, kind: str, micro_batch: int) -> float | None:
        """When the inputs of an action have arrived; None before that is known."""
        beside = stage - 1 if kind == "forward" else stage + 1
        needs = {} if kind == "forward" else {("forward", stage): 0.0}
        if kind == "backward_weight":
            needs = {("backward", stage): 0.0}
        elif 0 <= beside < num_stages:
            needs[kind.removesuffix("_input"), beside] = hop_s[min(stage, beside)]
        found = [(ends_s.get((*need, micro_batch)), hop) for need, hop in needs.items()]
        known = [end_s + hop for end_s, hop in found if end_s is not None]
        return max(known, default=0.0) if len(known) == len(found) else None

    while any(todo):
        before = len(ends_s)
        for rank, actions in enumerate(todo):
            while actions:
                kind, micro_batch, chunk = actions[0]
                stage = chunk * ranks + rank
                if (start_s := arrival_s(stage, kind, micro_batch)) is None:
                    break
                actions.popleft()
                if slots[rank]:
                    start_s = max(start_s, slots[rank][-1].end_s)
                end_s = start_s + seconds[kind][stage]
                ends_s[kind.removesuffix("_input"), stage, micro_batch] = end_s
                slots[rank].append(Slot(rank, kind, micro_batch, start_s, end_s, chunk))
        if len(ends_s) == before:
            stuck = [f"stage {rank} at {rest[0]}" for rank, rest in enumerate(todo) if rest]
            raise ValueError(f"these streams can never finish: {', '.join(stuck)}")
    return [slot for row in slots for slot in row]


def with_messages(streams: Sequence[Sequence[Action]]) -> list[list[Action | Hop]]:
    """What each rank executes if its messages move beside its work: each ``Hop`` has one end.

    All messages have one order, in which a timetable of equal forwards makes them, and each rank
    sends and receives in it. So of the messages that have not moved the first one can: all before
    it have ended on both ranks. A receive comes before the action during which its message is
    made; an action waits for what it needs.
    """
    ranks, chunks = len(streams), 1 + max((a.chunk for row in streams for a in row), default=0)
    equal = [1.0] * ranks * chunks
    slots = predicted_slots(streams, equal, [2 * seconds for seconds in equal])
    runs = {(s.kind.removesuffix("_input"), s.chunk * ranks + s.stage) for s in slots}
    # By rank: what it does, each with the time of its end, messages after the action that ends.
    found = [list[tuple[tuple[Any, ...], Action | Hop]]() for _ in streams]
    for rank, kind, micro_batch, _, end_s, chunk in slots:
        found[rank].append(((end_s, False), Action(kind, micro_batch, chunk)))
        forward, stage = kind == "forward", chunk * ranks + rank
        beside = stage + 1 if forward else stage - 1
        peer, place = beside % ranks, (end_s, True, stage)
        # Nobody needs a gradient of weights, or any gradient where nothing before it is trained.
        is_needed = (kind.removesuffix("_input"), beside) in runs and kind != "backward_weight"
        if not is_needed or peer == rank:
            continue
        what = "activation" if forward else "gradient", micro_batch
        found[rank].append((place, Hop(Message(*what, peer, chunk), None)))
        found[peer].append((place, Hop(None, Message(*what, rank, beside // ranks))))
    return [[step for _, step in sorted(row, key=lambda each: each[0])] for row in found]


@functools.cache
def instructions(
    schedule: str,
    rank: int,
    num_ranks: int,
    num_micro_batches: int,
    first_trained: int = 0,
    stages_per_rank: int = 1,
) -> list[Action | Hop]:
    """A rank's actions and messages: by ``with_hops`` (GPipe, 1F1B) or ``with_messages``."""
    sizes = num_ranks, num_micro_batches, first_trained, stages_per_rank
    streams = pipeline_streams(schedule, *sizes)
    if schedule in ("gpipe", "1f1b"):
        return list(with_hops(streams[rank], rank, num_ranks, first_trained))
    return with_messages(streams)[rank]
