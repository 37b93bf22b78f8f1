"""The timetable of a pipeline: the seconds of each action, and the order of the messages.

Symbols: P ranks, V stages per rank; stage c P + r is chunk c of rank r.
"""

import functools
import itertools
import math
from collections import deque
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from labkit.schedules.pipeline import (
    Action,
    Hop,
    Pipelining,
    messages_of,
    with_hops,
)


class Slot(NamedTuple):
    """One action of one rank, with its start and end; ``chunk`` as in ``Action``."""

    rank: int
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
) -> list[Slot]:
    """Run every action as early as possible: in its rank's order, once its inputs have arrived.

    A forward needs the same micro-batch's forward on the stage before. A backward, or its
    gradient of the input, needs its own forward, and the same of the stage after; a gradient of
    the weights needs that of the input. Each of the two takes half of a backward. A transfer
    takes time and occupies no rank.

    Args:
        streams: by rank, its actions in order (``pipeline.pipeline_streams``); frozen first
            stages have no backwards. ValueError for one that can never finish.
        forward_s, backward_s: by stage, seconds for one micro-batch.
        hop_s: by cut, seconds of one transfer, the same in both directions; 0 by default.
    """
    num_ranks = len(streams)
    num_stages = len(forward_s)
    hop_s = hop_s or [0.0] * (num_stages - 1)
    if len(hop_s) != num_stages - 1:
        raise ValueError(
            f"hop_s has {len(hop_s)} transfers for {num_stages} stages: give one per cut"
        )
    half_s = [seconds / 2 for seconds in backward_s]
    seconds = {"forward": forward_s, "backward": backward_s}
    seconds |= {"backward_input": half_s, "backward_weight": half_s}
    slots: list[list[Slot]] = [[] for _ in streams]
    # By kind, stage and micro-batch; the gradient of a stage's input is always a "backward".
    ends_s: dict[tuple[str, int, int], float] = {}
    todo = [deque(stream) for stream in streams]
    while any(todo):
        num_done = len(ends_s)
        for rank, actions in enumerate(todo):
            while actions:
                kind, micro_batch, chunk = actions[0]
                stage = chunk * num_ranks + rank
                start_s = 0.0
                if slots[rank]:
                    start_s = slots[rank][-1].end_s
                for needed, transfer_s in _inputs(kind, stage, hop_s).items():
                    arrival_s = ends_s.get((*needed, micro_batch), math.inf) + transfer_s
                    start_s = max(start_s, arrival_s)
                if start_s == math.inf:  # an input has not been made yet
                    break
                actions.popleft()
                end_s = start_s + seconds[kind][stage]
                ends_s[kind.removesuffix("_input"), stage, micro_batch] = end_s
                slots[rank].append(Slot(rank, kind, micro_batch, start_s, end_s, chunk))
        if len(ends_s) == num_done:
            stuck = [f"rank {rank} at {rest[0]}" for rank, rest in enumerate(todo) if rest]
            raise ValueError(f"these streams can never finish: {', '.join(stuck)}")
    return list(itertools.chain.from_iterable(slots))


def _inputs(kind: str, stage: int, hop_s: Sequence[float]) -> dict[tuple[str, int], float]:
    """The (kind, stage) of the actions that an action needs, and the seconds of their transfer."""
    if kind == "backward_weight":
        return {("backward", stage): 0.0}
    neighbor = stage - 1 if kind == "forward" else stage + 1
    inputs = {}
    if kind != "forward":
        inputs["forward", stage] = 0.0
    if 0 <= neighbor <= len(hop_s):
        inputs[kind.removesuffix("_input"), neighbor] = hop_s[min(stage, neighbor)]
    return inputs


def with_hops_beside(
    streams: Sequence[Sequence[Action]], first_trained: int = 0
) -> list[list[Action | Hop]]:
    """The instructions of each rank if messages move beside its work: each ``Hop`` has one end.

    All messages have one order, in which a timetable of equal forwards makes them, and each rank
    sends and receives in it. So of the messages that have not moved the first one can: all before
    it have ended on both ranks. A receive comes before the action during which its message is
    made; an action waits for what it needs.
    """
    num_ranks = len(streams)
    num_chunks = 1
    for actions in streams:
        for action in actions:
            num_chunks = max(num_chunks, action.chunk + 1)
    num_stages = num_ranks * num_chunks
    slots = predicted_slots(streams, [1.0] * num_stages, [2.0] * num_stages)
    # By rank: its instructions, each with the time of its end. What an action makes is sent after
    # it, and of several messages made at one time that of the lowest stage is the first.
    rows: list[list[tuple[tuple[Any, ...], Action | Hop]]] = [[] for _ in streams]
    for rank, kind, micro_batch, _, end_s, chunk in slots:
        action = Action(kind, micro_batch, chunk)
        rows[rank].append(((end_s, False), action))
        _, sent = messages_of(action, rank, num_ranks, num_stages, first_trained)
        if sent and sent.peer != rank:
            stage = chunk * num_ranks + rank
            received = sent._replace(peer=rank)
            rows[rank].append(((end_s, True, stage), Hop(sent, None)))
            rows[sent.peer].append(((end_s, True, stage), Hop(None, received)))
    programs = []
    for row in rows:
        row.sort(key=itemgetter(0))
        programs.append([instruction for _, instruction in row])
    return programs


@functools.cache
def instructions(
    pipelining: Pipelining,
    rank: int,
    num_ranks: int,
    num_micro_batches: int,
    first_trained: int = 0,
    stages_per_rank: int = 1,
) -> tuple[Action | Hop, ...]:
    """A rank's actions and messages; ``pipelining`` is ``NAIVE`` or a row of ``PIPELINES``."""
    streams = pipelining.streams(num_ranks, num_micro_batches, first_trained, stages_per_rank)
    if pipelining.hops_beside:
        return tuple(with_hops_beside(streams, first_trained)[rank])
    programs = []
    for owner, stream in enumerate(streams):
        steps = with_hops(stream, owner, num_ranks, first_trained, exchange=pipelining.exchanges)
        programs.append(tuple(steps))
    _check_hops(programs)
    return programs[rank]


def _check_hops(programs: Sequence[Sequence[Action | Hop]]) -> None:
    """Raise ValueError if hops between the actions wait for each other.

    A hop ends when what it sends has been received, and what it receives has been sent.
    """
    todo = []
    for program in programs:
        todo.append(deque(step for step in program if isinstance(step, Hop)))
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, hops in enumerate(todo):
            if hops and hops[0].send:
                peer_hops = todo[hops[0].send.peer]
                if peer_hops and peer_hops[0].recv and peer_hops[0].recv.peer == rank:
                    hops[0] = hops[0]._replace(send=None)
                    peer_hops[0] = peer_hops[0]._replace(recv=None)
                    has_moved = True
        for hops in todo:
            if hops and hops[0] == Hop(None, None):
                hops.popleft()
    waits = []
    for rank, hops in enumerate(todo):
        if hops and hops[0].send:
            kind, micro_batch, peer, _ = hops[0].send
            message = f"the {kind} of micro-batch {micro_batch}"
            waits.append(f"rank {rank} would send {message} to rank {peer}")
    if waits:
        raise ValueError(
            f"the messages of this schedule wait for each other: {', '.join(waits)}, and none of "
            "them receives first. Set hops_beside=True, so that messages move beside the actions, "
            "or change the order of the actions"
        )
