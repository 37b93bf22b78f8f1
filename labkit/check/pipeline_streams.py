"""A pipeline's instruction streams, judged on paper: is it 1F1B, and what is wrong if not.

Symbols: P stages, M micro-batches, s a stage.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from labkit import schedules
from labkit.check.grading.plain import from_a_stub
from labkit.check.grading.report import NOT_ATTEMPTED, NOT_YET, Verdict, no_function
from labkit.costs.pipeline_timeline import predicted_slots
from labkit.schedules.pipeline import Action, in_flight
from labkit.units import format_count

Streams = list[list[Action]]

# (P, M) to look at, most telling first; the last two have fewer micro-batches than stages.
_SIZES = ((4, 8), (3, 5), (2, 4), (2, 1), (4, 2))
# A backward costs about two forwards.
_FORWARD_S, _BACKWARD_S = 1.0, 2.0


class NoStreamError(ValueError):
    """Something that is no list of actions."""


def on_paper(name: str, fn: Callable) -> Verdict | None:
    """What is wrong with the streams of ``fn(stage, P, M)``; None where nothing is."""
    if not callable(fn):
        return Verdict(name, NOT_YET, notes=[no_function(fn)])
    for P, M in _SIZES:
        place = f"with {format_count(P, 'stage')} and {format_count(M, 'micro-batch')}"
        try:
            streams = [stream_of(fn, stage, P, M) for stage in range(P)]
        except NoStreamError as error:
            return Verdict(name, NOT_YET, notes=[f"{place}, {error}"])
        except Exception as error:
            if from_a_stub(error):
                return Verdict(name, NOT_ATTEMPTED)
            note = f"{place}, it raised {type(error).__name__}: {error}"
            return Verdict(name, NOT_YET, notes=[note])
        if problem := _named(streams, M) or _problem(streams, M):
            return Verdict(name, NOT_YET, notes=[f"{place}, {problem}"])
    return None


def stream_of(fn: Callable, stage: int, P: int, M: int) -> list[Action]:
    """What ``fn`` yields for a stage; an action may also be a pair, or "F3".

    Raises:
        NoStreamError: it is something else.
    """
    yielded = fn(stage, P, M)
    if yielded is None:
        raise NoStreamError("it returned nothing: yield the actions, or return a list of them")
    # A loop without an end must not become one here.
    return [_action(thing) for thing in itertools.islice(yielded, 4 * M + 4)]


def _action(thing: Any) -> Action:
    kinds = {"F": "forward", "B": "backward"}
    if isinstance(thing, str) and thing[:1] in kinds and thing[1:].isdecimal():
        return Action(kinds[thing[0]], int(thing[1:]))
    if isinstance(thing, tuple) and len(thing) == 2 and thing[0] in kinds.values():
        return Action(thing[0], int(thing[1]))
    raise NoStreamError(f'{thing!r} is no action: Action("forward", 0) is one, "F0" will do too')


# Sentence -> how many forwards stage s of P runs ahead.
_WARM_UPS: dict[str, Callable[[int, int, int], int]] = {
    "all forwards come first on every stage: that is fill and drain, which holds all "
    "micro-batches at once; 1F1B begins with backwards as soon as it can": lambda s, P, M: M,
    "every stage has the stream of the last one, so it is right there alone: the others wait for "
    "each micro-batch to go to the end and back, unless they run some forwards ahead": (
        lambda s, P, M: 0
    ),
    "every stage has the stream of stage 0, so it is right there alone: the nearer to the loss, "
    "the sooner a gradient comes back, and the fewer forwards have to run ahead": (
        lambda s, P, M: P - 1
    ),
    "the warm-up is counted from the wrong end: stage 0 is farthest from the loss, and runs most "
    "forwards ahead": lambda s, P, M: s,
    "the warm-up is one forward too long: stage s holds P - s + 1 micro-batches, where P - s "
    "suffice (the last stage runs none ahead)": lambda s, P, M: P - s,
    "the warm-up is one forward too short: a stage has nothing to do when it waits for the first "
    "gradient to come back": lambda s, P, M: max(P - 2 - s, 0),
}


def _named(streams: Streams, M: int) -> str | None:
    """The sentence of a well-known mistake, with what it leads to."""
    P = len(streams)
    if streams == [list(schedules.one_f_one_b(stage, P, M)) for stage in range(P)]:
        return None
    for sentence, ahead in _WARM_UPS.items():
        # ``one_f_one_b`` runs num_stages - 1 - stage forwards ahead.
        rows = [list(schedules.one_f_one_b(0, ahead(s, P, M) + 1, M)) for s in range(P)]
        if streams == rows:
            consequence = _problem(streams, M)
            return sentence + (f". So {consequence}" if consequence else "")
    return None


def _problem(streams: Streams, M: int) -> str | None:
    """What is wrong with streams that may be anything; None for those as good as 1F1B's."""
    alone = (_of_one_stage(stream, M) for stream in streams)
    by_itself = next((f"stage {s} {found}" for s, found in enumerate(alone) if found), None)
    found = by_itself or _of_orders(streams) or _of_timetable(streams, M)
    return found and found + _right_stages(streams, M)


def _of_orders(streams: Streams) -> str | None:
    for kind in ("forward", "backward"):
        first, *others = [[a.micro_batch for a in row if a.kind == kind] for row in streams]
        for stage, order in enumerate(others, start=1):
            if order != first:
                return (
                    f"stages 0 and {stage} run their {kind}s in different orders, {first} and "
                    f"{order}: messages come in the order in which they are sent"
                )
    return None


def _of_timetable(streams: Streams, M: int) -> str | None:
    P = len(streams)
    try:
        slots = predicted_slots(streams, [_FORWARD_S] * P, [_BACKWARD_S] * P)
    except ValueError as error:
        return str(error)
    for stage, stream in enumerate(streams):
        held, due = in_flight(stream), min(M, P - stage)
        if held > due:
            micro_batches = format_count(held, "micro-batch")
            return f"stage {stage} holds {micro_batches} at once, where {due} suffice"
    step_s, due_s = max(slot.end_s for slot in slots), (M + P - 1) * (_FORWARD_S + _BACKWARD_S)
    if step_s > due_s:
        return (
            f"a step takes {step_s:g} where {due_s:g} suffice (a forward takes 1, a backward 2): "
            "stages wait that could work"
        )
    return None


def _of_one_stage(stream: list[Action], M: int) -> str | None:
    """What is wrong with a stream by itself."""
    wanted = [Action(kind, m) for kind in ("forward", "backward") for m in range(M)]
    repeated = sorted({a for a in stream if stream.count(a) > 1}, key=stream.index)
    strange = [a for a in stream if a not in wanted]
    missing = [a for a in wanted if a not in stream]
    if strange:
        ahead = " (is the warm-up too long for so few?)" if strange[0].kind == "forward" else ""
        return f"runs {_listed(strange)}, but micro-batches are numbered 0 to {M - 1}{ahead}"
    if repeated:
        return f"runs {_listed(repeated)} more than once"
    if missing:
        drain = all(a.kind == "backward" for a in missing)
        why = ": after the last forward, the backwards that the warm-up owes are still to come"
        return f"never runs {_listed(missing)}" + (why if drain else "")
    for m in range(M):
        if stream.index(Action("backward", m)) < stream.index(Action("forward", m)):
            return f"runs B{m} before F{m}: a backward needs what its forward has kept"
    return None


def _listed(actions: Iterable[Action]) -> str:
    return ", ".join(map(str, actions))


def _right_stages(streams: Streams, M: int) -> str:
    P = len(streams)
    right = [s for s in range(P) if streams[s] == list(schedules.one_f_one_b(s, P, M))]
    if not right:
        return ""
    stages = f"stages {', '.join(map(str, right))} alone are"
    return f" ({f'stage {right[0]} alone is' if len(right) == 1 else stages} right)"
