"""The streams of a pipeline that a learner's function yields: read, judged on paper, and drawn.

``check.pipeline`` uses this for GPipe and for 1F1B. Symbols: P stages, M micro-batches.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from labkit import schedules
from labkit.comm.comm import Comm
from labkit.costs.pipeline_timeline import Slot, predicted_slots
from labkit.schedules.pipeline import Action, in_flight
from labkit.units import format_count
from workbook.exercises.grader import Verdict, Wrong
from workbook.exercises.grader.compare import short
from workbook.exercises.grader.exercise import Found
from workbook.exercises.grader.in_process import Question, verdict_of
from workbook.exercises.grader.on_ranks import TIMEOUT_S, in_one_process
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


class NoStream(Exception):
    """What a function yields is no list of actions."""


def judged_on_paper(name: str, fn: Callable, problem: Callable[[Streams, int], Found]) -> Verdict:
    """The verdict on the streams of several sizes, not yet shown.

    Args:
        name: of the exercise.
        fn: the learner's function of ``STREAM_NAMES``.
        problem: (streams, M) -> what is wrong with them.
    """

    def wrong(question: Question, streams: Streams) -> Found:
        found = problem(streams, question.args[1])
        return f"{question.words}, {found}" if found else None

    def call(fn: Callable, P: int, M: int) -> Streams | Wrong:
        try:
            return _streams_of(fn, P, M)
        except NoStream as error:
            return Wrong(error)

    questions = [
        Question((P, M), f"with {format_count(P, 'stage')} and {format_count(M, 'micro-batch')}")
        for P, M in _SIZES
    ]
    return verdict_of(name, fn, questions, wrong, call=call, signature=STREAM_NAMES)


def stream_of(fn: Callable, stage: int, P: int, M: int) -> list[Action]:
    """What ``fn`` yields for a stage; an action may also be a pair, or "F3".

    Raises:
        NoStream: ``fn`` returns nothing, or something that is not an action.
    """
    yielded, kinds, found = fn(stage, P, M), {"F": "forward", "B": "backward"}, []
    if yielded is None:
        raise NoStream("the function returned nothing (None): yield the actions, or return a list")
    # An endless generator must not hang the check.
    for thing in itertools.islice(yielded, 4 * M + 4):
        if isinstance(thing, str) and thing[:1] in kinds and thing[1:].isdecimal():
            found.append(Action(kinds[thing[0]], int(thing[1:])))
        elif isinstance(thing, tuple | list) and len(thing) == 2 and thing[0] in kinds.values():
            found.append(Action(thing[0], int(thing[1])))
        else:
            raise NoStream(f'{short(thing)} is no action: use Action("forward", 0), or "F0"')
    return found


def _streams_of(fn: Callable, P: int, M: int) -> Streams:
    return [stream_of(fn, stage, P, M) for stage in range(P)]


def wrong_gpipe(streams: Streams, M: int) -> Found:
    """Return why these are not GPipe's streams; the order of the micro-batches is free."""
    for stage, stream in enumerate(streams):
        early = [action for action in stream[:M] if action.kind == "backward"]
        if early and not _incomplete(stream, M):
            why = "in GPipe, all forwards come before the first backward"
            return f"stage {stage} runs {early[0]} among the first {M} actions: {why}"
    return _wrong_streams(streams, M)


def wrong_one_f_one_b(streams: Streams, M: int) -> Found:
    """Return why these streams are not as good as those of 1F1B."""
    if found := _wrong_streams(streams, M):
        return found
    P = len(streams)
    try:
        step_s = _length_s(timetable(streams))
    except ValueError as error:
        return f"{error}"
    for stage, stream in enumerate(streams):
        expected = list(schedules.one_f_one_b(stage, P, M))
        if in_flight(stream) > min(M, P - stage):
            held, enough = format_count(in_flight(stream), "micro-batch"), min(M, P - stage)
            text = f"stage {stage} holds {held} at once, where {enough} would be enough: it runs "
            return (
                f"{text}{_listed(stream[: P + 2])} ..., and 1F1B {_listed(expected[: P + 2])} ..."
            )
    shortest_s = (M + P - 1) * (FORWARD_S + BACKWARD_S)
    if step_s > shortest_s:
        text = f"a step takes {step_s:g} s, where {shortest_s:g} s would be enough (a forward "
        late = [s for s, row in enumerate(streams) if row != list(schedules.one_f_one_b(s, P, M))]
        runs = f"stage {late[0]} runs {_listed(streams[late[0]][: P + 2])} ..." if late else ""
        return f"{text}takes 1 s, a backward 2 s): {runs}"
    return None


def _wrong_streams(streams: Streams, M: int) -> Found:
    """What is wrong with a single stream, or with their orders."""
    for stage, stream in enumerate(streams):
        if found := _incomplete(stream, M):
            return f"stage {stage} {found}"
    for kind in ("forward", "backward"):
        first, *others = [[a.micro_batch for a in row if a.kind == kind] for row in streams]
        for stage, order in enumerate(others, start=1):
            if order != first:
                text = f"stages 0 and {stage} run their {kind}s in different orders, {first} and "
                return f"{text}{order}, but messages arrive in the order in which they are sent"
    return None


def _incomplete(stream: list[Action], M: int) -> Found:
    """Whether a stream has each action once, each backward after its forward."""
    wanted = [Action(kind, m) for kind in ("forward", "backward") for m in range(M)]
    if strange := [action for action in stream if action not in wanted]:
        return f"runs {_listed(strange)}, but micro-batches are numbered 0 to {M - 1}"
    if repeated := sorted({a for a in stream if stream.count(a) > 1}, key=stream.index):
        return f"runs {_listed(repeated)} more than once"
    if missing := [action for action in wanted if action not in stream]:
        return f"never runs {_listed(missing)}"
    for m in range(M):
        if stream.index(Action("backward", m)) < stream.index(Action("forward", m)):
            return f"runs B{m} before F{m}"
    return None


def _listed(actions: Sequence[Action]) -> str:
    return ", ".join(map(str, actions))


def timetable(streams: Streams) -> list[Slot]:
    """The streams on paper, on equal stages.

    Raises:
        ValueError: they can never finish.
    """
    P = len(streams)
    return predicted_slots(streams, [FORWARD_S] * P, [BACKWARD_S] * P)


def _length_s(slots: list[Slot]) -> float:
    return max(slot.end_s for slot in slots)


def with_timetable(verdict: Verdict, fn: Callable, schedule: Schedule) -> Verdict:
    """Let the verdict's own run be the timetable of ``fn``'s streams, beside ``schedule``'s."""
    verdict.run_again = partial(_own_timetable, fn, schedule, verdict.name)
    return verdict


def _own_timetable(
    fn: Callable, schedule: Schedule, name: str, status: str, num_stages: int
) -> OwnRun:
    """The timetable of the learner's streams, beside the library's; nothing is raised."""
    M = _DRAWN_MICRO_BATCHES
    if status == NOT_ATTEMPTED:
        return OwnRun.failed(name, status)
    try:
        streams = in_one_process(_on_a_rank, fn, num_stages, M, timeout_s=TIMEOUT_S)
        slots = timetable(streams)
    except Exception:
        return OwnRun(name, "these streams have no timetable, so there is nothing to draw.")
    # Imported here: ranks load the checks, but draw nothing.
    from workbook.plots.pipeline import pipeline_timetable

    both = streams, [list(schedule(stage, num_stages, M)) for stage in range(num_stages)]
    rows = {
        "length of a step": [f"{_length_s(timetable(one)):g}" for one in both],
        "held, by stage": [", ".join(str(in_flight(row)) for row in one) for one in both],
    }
    shown = f"{format_count(num_stages, 'stage')} and {format_count(M, 'micro-batch')}, on paper."
    caption = "The length is in forwards of a micro-batch, a backward takes two of them. Held "
    caption += "is the most micro-batches whose activations a stage keeps at one time."
    figure = pipeline_timetable(slots, title=name, unit="forwards of a micro-batch")
    return OwnRun(name, shown, ["yours", "labkit"], rows, caption, figure)


def _on_a_rank(comm: Comm, fn: Callable, P: int, M: int) -> Streams:
    return _streams_of(fn, P, M)
