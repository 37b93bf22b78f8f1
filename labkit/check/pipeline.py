"""The checks of page 09: the bubble of a timetable, the 1F1B stream, the hop between two stages.

Symbols: P stages and ranks, M micro-batches, s a stage.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit import schedules
from labkit.check.grading import WORLD_SIZES, Case, Mistake, Target, Verdict, returns
from labkit.check.grading.compare import agree, fit, other_kind
from labkit.check.grading.exercise import with_parameters
from labkit.check.grading.in_process import Question, Wrong, ask
from labkit.check.grading.report import announces_a_stop, told
from labkit.comm.comm import Comm
from labkit.costs.pipeline_timeline import Slot, bubble as idle_share, predicted_slots
from labkit.schedules.pipeline import Action, Hop, Message, in_flight, with_hops
from labkit.strategies.stage import Stage
from labkit.units import format_count

# A backward costs about two forwards.
_FORWARD_S, _BACKWARD_S = 1.0, 2.0
_WIDTH, _MICRO_BATCHES = 3, 5

Streams = list[list[Action]]

# (P, M) to look at, most telling first; the last two have fewer micro-batches than stages.
_SIZES = ((4, 8), (3, 5), (2, 4), (2, 1), (4, 2))


def bubble(fn: Callable) -> Verdict:
    """Grade ``fn(slots)``: the idle share, 0 to 1, of a timetable's stages. Runs in this process.

    ``slots`` is a list of ``labkit.costs.pipeline_timeline.Slot``, in any order; the first one may
    start at any second.
    """
    name = "pipeline.bubble"
    questions = [Question((slots,), case, idle_share(slots)) for case, slots in _tables().items()]
    mistakes = _BUBBLE_MISTAKES.items()
    judge = partial(ask, name, fn, questions, _wrong_bubble, mistakes=mistakes, call=_share_of)
    return told(name, judge)


def one_f_one_b(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(stage, num_stages, num_micro_batches)``: the actions of a stage by 1F1B.

    The streams are first judged on paper: they have to contain each action once, in an order that
    can finish, hold no more micro-batches and take no longer than 1F1B. If they are, each rank
    trains its stage by its stream, and has to get the gradients of one device.
    """
    name = "pipeline.one_f_one_b"
    questions = [
        Question((P, M), f"with {format_count(P, 'stage')} and {format_count(M, 'micro-batch')}")
        for P, M in _SIZES
    ]
    names = "stage, num_stages, num_micro_batches"
    with announces_a_stop(name):
        on_paper = ask(name, fn, questions, _wrong_streams, call=_streams_of, signature=names)
    if not on_paper:
        return told(name, lambda: on_paper)
    return returns(
        fn,
        _gradients_alone,
        name=name,
        signature=names,
        call=_train_by,
        world_sizes=world_sizes,
    )


def hop(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, hop, outgoing, landing)``: carry out one ``schedules.Hop``.

    ``outgoing`` is the tensor to send and ``landing`` the tensor to receive into; None if the hop
    does not send, or does not receive. All hops of a 1F1B step are carried out. Target: one
    call of comm per hop.
    """
    return returns(
        fn,
        name="pipeline.hop",
        signature="comm, hop, outgoing, landing",
        call=_play,
        judge=_judge_hops,
        target=_messages_of_hops,
        world_sizes=world_sizes,
    )


# The bubble of a timetable


def _share_of(fn: Callable, slots: list[Slot]) -> float:
    answer = fit(fn(slots), 0.0)
    if answer is None:
        raise Wrong(Mistake("answer.nothing"))
    if kind := other_kind(answer, 0.0):
        raise Wrong(kind)
    return float(answer)


def _wrong_bubble(question: Question, answer: float) -> Mistake | None:
    if agree(answer, question.due):
        return None
    return Mistake("bubble.differs", case=question.words, due=question.due, answer=answer)


def _tables() -> dict[str, list[Slot]]:
    """The last three reveal mistakes that do not show in a textbook's timetable."""
    gpipe, one_f_one_b = schedules.gpipe, schedules.one_f_one_b
    late = [
        slot._replace(start_s=slot.start_s + 10, end_s=slot.end_s + 10)
        for slot in _table(gpipe, (1.0, 1.0), 2)
    ]
    return {
        "GPipe, 3 stages, 4 micro-batches": _table(gpipe, (1.0,) * 3, 4),
        "1F1B, 4 stages, 2 micro-batches": _table(one_f_one_b, (1.0,) * 4, 2),
        "a single stage, 3 micro-batches": _table(gpipe, (1.0,), 3),
        "GPipe, 3 micro-batches, stages of 1, 3 and 2 s": _table(gpipe, (1.0, 3.0, 2.0), 3),
        "GPipe, 2 stages, 2 micro-batches, from second 10 on": late,
    }


def _table(schedule: Callable, forward_s: Sequence[float], micro_batches: int) -> list[Slot]:
    P = len(forward_s)
    streams = [list(schedule(stage, P, micro_batches)) for stage in range(P)]
    return predicted_slots(streams, forward_s, [_BACKWARD_S * s for s in forward_s])


def _stages(slots: Iterable[Slot]) -> set[int]:
    return {slot.stage for slot in slots}


def _start_s(slots: Iterable[Slot]) -> float:
    return min(slot.start_s for slot in slots)


def _end_s(slots: Iterable[Slot]) -> float:
    return max(slot.end_s for slot in slots)


def _busy_s(slots: Iterable[Slot]) -> float:
    return sum(slot.end_s - slot.start_s for slot in slots)


def _idle_over(seconds: float, slots: Sequence[Slot]) -> float:
    return 1 - _busy_s(slots) / (len(_stages(slots)) * seconds)


def _between_actions(slots: Sequence[Slot]) -> float:
    rows = [[slot for slot in slots if slot.stage == stage] for stage in _stages(slots)]
    gaps_s = sum(_end_s(row) - _start_s(row) - _busy_s(row) for row in rows)
    return gaps_s / (len(rows) * (_end_s(slots) - _start_s(slots)))


def _by_formula(slots: Sequence[Slot]) -> float:
    waiting = len(_stages(slots)) - 1
    return waiting / (len({slot.micro_batch for slot in slots}) + waiting)


_BUBBLE_MISTAKES: dict[str, Callable[[list[Slot]], float]] = {
    "bubble.work": lambda s: 1 - idle_share(s),
    "bubble.of_working": lambda s: idle_share(s) / (1 - idle_share(s)),
    "bubble.of_step": lambda s: len(_stages(s)) * idle_share(s),
    "bubble.formula": _by_formula,
    "bubble.from_zero": lambda s: _idle_over(_end_s(s), s),
    "bubble.last_in_list": lambda s: _idle_over(s[-1].end_s - _start_s(s), s),
    "bubble.inner_gaps": _between_actions,
    "bubble.percent": lambda s: 100 * idle_share(s),
}


# The 1F1B stream, on paper


def _streams_of(fn: Callable, P: int, M: int) -> Streams:
    return [_stream_of(fn, stage, P, M) for stage in range(P)]


def _stream_of(fn: Callable, stage: int, P: int, M: int) -> list[Action]:
    """What ``fn`` yields for a stage; an action may also be a pair, or "F3".

    Raises:
        Wrong: ``fn`` returns nothing, or something that is not an action.
    """
    yielded = fn(stage, P, M)
    if yielded is None:
        raise Wrong(Mistake("stream.nothing"))
    # An endless generator must not hang the check.
    return [_action(thing) for thing in itertools.islice(yielded, 4 * M + 4)]


def _action(thing: Any) -> Action:
    kinds = {"F": "forward", "B": "backward"}
    if isinstance(thing, str) and thing[:1] in kinds and thing[1:].isdecimal():
        return Action(kinds[thing[0]], int(thing[1:]))
    if isinstance(thing, (tuple, list)) and len(thing) == 2 and thing[0] in kinds.values():
        return Action(thing[0], int(thing[1]))
    raise Wrong(Mistake("stream.no_action", thing=repr(thing)))


# A mistake's id -> how many forwards stage s of P runs ahead.
_WARM_UPS: dict[str, Callable[[int, int, int], int]] = {
    "stream.fill_and_drain": lambda s, P, M: M,
    "stream.all_last": lambda s, P, M: 0,
    "stream.all_first": lambda s, P, M: P - 1,
    "stream.wrong_end": lambda s, P, M: s,
    "stream.too_long": lambda s, P, M: P - s,
    "stream.too_short": lambda s, P, M: max(P - 2 - s, 0),
}


def _right_streams(P: int, M: int) -> Streams:
    return [list(schedules.one_f_one_b(stage, P, M)) for stage in range(P)]


def _wrong_streams(question: Question, streams: Streams) -> Mistake | None:
    found = _well_known(streams, question.args[1]) or _problem(streams, question.args[1])
    return Mistake("told.place", place=question.words, what=found) if found else None


def _well_known(streams: Streams, M: int) -> Mistake | None:
    """A well-known mistake with its consequence, or None."""
    P = len(streams)
    if streams == _right_streams(P, M):
        return None
    for id, ahead in _WARM_UPS.items():
        # ``one_f_one_b`` runs num_stages - 1 - stage forwards ahead.
        rows = [list(schedules.one_f_one_b(0, ahead(s, P, M) + 1, M)) for s in range(P)]
        if streams == rows:
            consequence = _problem(streams, M)
            so = consequence and Mistake("stream.so", consequence=consequence)
            return Mistake(id, also=[so])
    return None


def _problem(streams: Streams, M: int) -> Mistake | None:
    """Return what is wrong with the streams; None if they are as good as those of 1F1B."""
    right = _right_stages(streams, M)
    for stage, stream in enumerate(streams):
        if found := _of_one_stage(stream, M):
            return Mistake("stream.stage", stage=stage, found=found, right=right)
    return _of_orders(streams, right) or _of_timetable(streams, M, right)


def _of_orders(streams: Streams, right: str) -> Mistake | None:
    for kind in ("forward", "backward"):
        first, *others = [[a.micro_batch for a in row if a.kind == kind] for row in streams]
        for stage, order in enumerate(others, start=1):
            if order != first:
                named = {"stage": stage, "kind": kind, "first": first, "other": order}
                return Mistake("stream.orders", **named, right=right)
    return None


def _of_timetable(streams: Streams, M: int, right: str) -> Mistake | None:
    P = len(streams)
    try:
        slots = predicted_slots(streams, [_FORWARD_S] * P, [_BACKWARD_S] * P)
    except ValueError as error:
        return Mistake("stream.never_ends", error=error, right=right)
    for stage, stream in enumerate(streams):
        held, due = in_flight(stream), min(M, P - stage)
        if held > due:
            count = format_count(held, "micro-batch")
            return Mistake("stream.holds", stage=stage, held=count, due=due, right=right)
    step_s, due_s = max(slot.end_s for slot in slots), (M + P - 1) * (_FORWARD_S + _BACKWARD_S)
    if step_s > due_s:
        return Mistake("stream.slow", step=step_s, due=due_s, right=right)
    return None


def _of_one_stage(stream: list[Action], M: int) -> Mistake | None:
    """What is wrong with a single stream."""
    wanted = [Action(kind, m) for kind in ("forward", "backward") for m in range(M)]
    if strange := [a for a in stream if a not in wanted]:
        id = "stream.strange_forward" if strange[0].kind == "forward" else "stream.strange"
        return Mistake(id, actions=_listed(strange), last=M - 1)
    if repeated := sorted({a for a in stream if stream.count(a) > 1}, key=stream.index):
        return Mistake("stream.repeated", actions=_listed(repeated))
    if missing := [a for a in wanted if a not in stream]:
        drain = all(a.kind == "backward" for a in missing)
        return Mistake("stream.no_drain" if drain else "stream.missing", actions=_listed(missing))
    for m in range(M):
        if stream.index(Action("backward", m)) < stream.index(Action("forward", m)):
            return Mistake("stream.backward_first", m=m)
    return None


def _listed(actions: Iterable[Action]) -> str:
    return ", ".join(map(str, actions))


def _right_stages(streams: Streams, M: int) -> str:
    pairs = zip(streams, _right_streams(len(streams), M))
    right = [str(stage) for stage, (found, due) in enumerate(pairs) if found == due]
    if len(right) == 1:
        return f" (only stage {right[0]} is right)"
    return f" (only stages {', '.join(right)} are right)" if right else ""


# The 1F1B stream, executed


def _model(P: int) -> nn.Sequential:
    layers = [nn.Linear(_WIDTH, _WIDTH, bias=False, dtype=torch.float64) for _ in range(P)]
    return with_parameters(nn.Sequential(*layers), P)


def _batch() -> tuple[Tensor, Tensor]:
    """Inputs [7, _WIDTH] and targets [7]: 5 micro-batches of 2, 2, 1, 1 and 1 samples."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(7, _WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(_WIDTH, (7,), generator=generator)


def _train_by(fn: Callable, comm: Comm) -> list[Tensor | None]:
    """Run this rank's stage by ``fn``'s stream; return its gradients, by parameter."""
    split_points = range(1, comm.world_size)
    stage = Stage(comm, _model(comm.world_size), split_points, make_optimizer=torch.optim.SGD)
    inputs, targets = _batch()
    stage.start(inputs, targets, len(targets), _MICRO_BATCHES)
    actions = _stream_of(fn, stage.index, stage.count, stage.micro_batches)
    for step in with_hops(actions, stage.index, stage.count):
        stage.do(step)
    return [parameter.grad for parameter in stage.module.parameters()]


def _gradients_alone(rank: int, case: Case) -> list[Tensor | None]:
    """The gradients of layer ``rank``, that rank's stage, in one process."""
    model, (inputs, targets) = _model(case.world_size), _batch()
    functional.cross_entropy(model(inputs), targets).backward()
    return [parameter.grad for parameter in model[rank].parameters()]


# The hop, carried out


def _hops(rank: int, P: int) -> list[Hop]:
    actions = schedules.one_f_one_b(rank, P, _MICRO_BATCHES)
    return [step for step in with_hops(actions, rank, P) if isinstance(step, Hop)]


def _payload(message: Message, source: int) -> Tensor:
    """[3]: 1 for a gradient or 0 for an activation, the micro-batch, the sending rank."""
    return torch.tensor([float(message.kind == "gradient"), message.micro_batch, source])


def _play(fn: Callable, comm: Comm) -> tuple[list[list[float]], int, int]:
    """Carry out all hops of a step: what landed, the calls of comm, the number of hops."""
    landed, hops, before = [], _hops(comm.rank, comm.world_size), comm.operations
    for one in hops:
        outgoing = _payload(one.send, comm.rank) if one.send else None
        landing = torch.full((3,), -1.0) if one.recv else None
        fn(comm, one, outgoing, landing)
        if landing is not None:
            landed.append(landing.tolist())
    return landed, comm.operations - before, len(hops)


def _messages_of_hops(rank: int, case: Case) -> Target:
    return Target(sum(one.send is not None for one in _hops(rank, case.world_size)))


def _judge_hops(case: Case, values: list[Any]) -> Mistake | None:
    for rank, (landed, _, _) in enumerate(values):
        due = [one.recv for one in _hops(rank, case.world_size) if one.recv]
        for message, found in zip(due, landed):
            if found == _payload(message, message.peer).tolist():
                continue
            kind, of, by = found
            id = "hop.never_landed" if found == [-1.0] * 3 else "hop.other_landed"
            expected = {"kind": message.kind, "micro_batch": message.micro_batch, "rank": rank}
            came = {"source": message.peer, "found": "gradient" if kind else "activation"}
            return Mistake(id, **expected, **came, of=of, by=by)
    for rank, (_, calls, hops) in enumerate(values):
        if calls != hops:
            return Mistake("hop.calls", rank=rank, calls=calls, hops=hops)
    return None
