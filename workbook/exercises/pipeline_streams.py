"""The streams of a pipeline that a learner's function yields: read, judged on paper, and drawn.

``check.pipeline`` uses this for GPipe and for 1F1B. Symbols: P stages, M micro-batches.
"""

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from labkit import schedules
from labkit.comm.comm import Comm
from labkit.costs.pipeline_timeline import Slot, predicted_slots
from labkit.schedules.pipeline import Action, in_flight
from labkit.units import format_count
from workbook.exercises.grader import Mistake, Verdict
from workbook.exercises.grader.in_process import TIMEOUT_S, Question, Wrong, ask
from workbook.exercises.grader.on_ranks import in_one_process
from workbook.exercises.grader.own_run import OwnRun
from workbook.exercises.grader.report import NOT_ATTEMPTED

Streams = list[list[Action]]
Schedule = Callable[[int, int, int], Iterable[Action]]

STREAM_NAMES = "stage, num_stages, num_micro_batches"
# A backward costs about two forwards.
FORWARD_S, BACKWARD_S = 1.0, 2.0
# (P, M) to look at, most telling first; the last two have fewer micro-batches than stages.
_SIZES = ((4, 8), (3, 5), (2, 4), (2, 1), (4, 2))
_DRAWN_MICRO_BATCHES = 8


def judged_on_paper(
    name: str, fn: Callable, problem: Callable[[Streams, int], Mistake | None]
) -> Verdict:
    """The verdict on the streams of several sizes, not yet printed.

    Args:
        name: of the exercise.
        fn: the learner's function of ``STREAM_NAMES``.
        problem: (streams, M) -> what is wrong with them.
    """

    def wrong(question: Question, streams: Streams) -> Mistake | None:
        found = problem(streams, question.args[1])
        return Mistake("told.place", place=question.words, what=found) if found else None

    questions = [
        Question((P, M), f"with {format_count(P, 'stage')} and {format_count(M, 'micro-batch')}")
        for P, M in _SIZES
    ]
    return ask(name, fn, questions, wrong, call=_streams_of, signature=STREAM_NAMES)


def with_timetable(verdict: Verdict, fn: Callable, schedule: Schedule) -> Verdict:
    """Let the verdict's own run be the timetable of ``fn``'s streams, beside ``schedule``'s."""
    verdict.run_again = partial(_own_timetable, fn, schedule, verdict.name)
    return verdict


def stream_of(fn: Callable, stage: int, P: int, M: int) -> list[Action]:
    """What ``fn`` yields for a stage; an action may also be a pair, or "F3".

    Raises:
        Wrong: ``fn`` returns nothing, or something that is not an action.
    """
    yielded = fn(stage, P, M)
    if yielded is None:
        raise Wrong(Mistake("stream.nothing"))
    # An endless generator must not hang the check.
    return [_action(thing) for thing in itertools.islice(yielded, 4 * M + 4)]


def _streams_of(fn: Callable, P: int, M: int) -> Streams:
    return [stream_of(fn, stage, P, M) for stage in range(P)]


def _action(thing: Any) -> Action:
    kinds = {"F": "forward", "B": "backward"}
    if isinstance(thing, str) and thing[:1] in kinds and thing[1:].isdecimal():
        return Action(kinds[thing[0]], int(thing[1:]))
    if isinstance(thing, (tuple, list)) and len(thing) == 2 and thing[0] in kinds.values():
        return Action(thing[0], int(thing[1]))
    raise Wrong(Mistake("stream.no_action", thing=repr(thing)))


# GPipe


def wrong_gpipe(streams: Streams, M: int) -> Mistake | None:
    """Return why these are not GPipe's streams; the order of the micro-batches is free."""
    right = _right_stages(streams, M, schedules.gpipe)
    for stage, stream in enumerate(streams):
        if found := _of_one_stage(stream, M) or _too_early(stream, M):
            return Mistake("stream.stage", stage=stage, found=found, right=right)
    return _of_orders(streams, right)


def _too_early(stream: list[Action], M: int) -> Mistake | None:
    """A backward among the first M actions."""
    early = next((action for action in stream[:M] if action.kind == "backward"), None)
    if early is None:
        return None
    late = next(a for a in stream[stream.index(early) :] if a.kind == "forward")
    return Mistake("stream.too_early", early=early, late=late)


# 1F1B

# A mistake's id -> how many forwards stage s of P runs ahead.
_WARM_UPS: dict[str, Callable[[int, int, int], int]] = {
    "stream.fill_and_drain": lambda s, P, M: M,
    "stream.all_last": lambda s, P, M: 0,
    "stream.all_first": lambda s, P, M: P - 1,
    "stream.wrong_end": lambda s, P, M: s,
    "stream.too_long": lambda s, P, M: P - s,
    "stream.too_short": lambda s, P, M: max(P - 2 - s, 0),
}


def wrong_one_f_one_b(streams: Streams, M: int) -> Mistake | None:
    """Return why these streams are not as good as those of 1F1B."""
    return _well_known(streams, M) or _problem(streams, M)


def _well_known(streams: Streams, M: int) -> Mistake | None:
    """A well-known mistake with its consequence, or None."""
    P = len(streams)
    if streams == _streams(schedules.one_f_one_b, P, M):
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
    right = _right_stages(streams, M, schedules.one_f_one_b)
    for stage, stream in enumerate(streams):
        if found := _of_one_stage(stream, M):
            return Mistake("stream.stage", stage=stage, found=found, right=right)
    return _of_orders(streams, right) or _of_timetable(streams, M, right)


def _of_timetable(streams: Streams, M: int, right: str) -> Mistake | None:
    P = len(streams)
    try:
        step_s = _length_s(timetable(streams))
    except ValueError as error:
        return Mistake("stream.never_ends", error=error, right=right)
    for stage, stream in enumerate(streams):
        held, due = in_flight(stream), min(M, P - stage)
        if held > due:
            count = format_count(held, "micro-batch")
            return Mistake("stream.holds", stage=stage, held=count, due=due, right=right)
    due_s = (M + P - 1) * (FORWARD_S + BACKWARD_S)
    if step_s > due_s:
        return Mistake("stream.slow", step=step_s, due=due_s, right=right)
    return None


# Both


def _of_orders(streams: Streams, right: str) -> Mistake | None:
    for kind in ("forward", "backward"):
        first, *others = [[a.micro_batch for a in row if a.kind == kind] for row in streams]
        for stage, order in enumerate(others, start=1):
            if order != first:
                named = {"stage": stage, "kind": kind, "first": first, "other": order}
                return Mistake("stream.orders", **named, right=right)
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


def _streams(schedule: Schedule, P: int, M: int) -> Streams:
    return [list(schedule(stage, P, M)) for stage in range(P)]


def _right_stages(streams: Streams, M: int, schedule: Schedule) -> str:
    pairs = zip(streams, _streams(schedule, len(streams), M))
    right = [str(stage) for stage, (found, due) in enumerate(pairs) if found == due]
    if len(right) == 1:
        return f" (only stage {right[0]} is right)"
    return f" (only stages {', '.join(right)} are right)" if right else ""


# Timetables


def timetable(streams: Streams) -> list[Slot]:
    """The streams on paper, on equal stages.

    Raises:
        ValueError: they can never finish.
    """
    P = len(streams)
    return predicted_slots(streams, [FORWARD_S] * P, [BACKWARD_S] * P)


def _length_s(slots: list[Slot]) -> float:
    return max(slot.end_s for slot in slots)


def _own_timetable(
    fn: Callable, schedule: Schedule, name: str, status: str, num_stages: int
) -> OwnRun:
    """The timetable of the learner's streams, beside the library's; nothing is raised."""
    if status == NOT_ATTEMPTED:
        return OwnRun(name, "not attempted yet, so there is nothing to draw.")
    M = _DRAWN_MICRO_BATCHES
    try:
        streams = in_one_process(_yielded, fn, num_stages, M, timeout_s=TIMEOUT_S)
        slots = timetable(streams)
    except Exception:
        return OwnRun(name, "these streams have no timetable, so there is nothing to draw.")
    # Imported here: ranks load the checks, but draw nothing.
    from workbook.plots.pipeline import pipeline_timetable

    both = streams, _streams(schedule, num_stages, M)
    rows = {
        "length of a step": [f"{_length_s(timetable(one)):g}" for one in both],
        "held, by stage": [", ".join(str(in_flight(row)) for row in one) for one in both],
    }
    shown = f"{format_count(num_stages, 'stage')} and {format_count(M, 'micro-batch')}, on paper."
    caption = "The length is in forwards of a micro-batch, a backward takes two of them. Held "
    caption += "is the most micro-batches whose activations a stage keeps at one time."
    figure = pipeline_timetable(slots, title=name, unit="forwards of a micro-batch")
    return OwnRun(name, shown, ["yours", "labkit"], rows, caption, figure)


def _yielded(comm: Comm, fn: Callable, P: int, M: int) -> Streams:
    return _streams_of(fn, P, M)
