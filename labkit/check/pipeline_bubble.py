"""The bubble of a timetable, as page 09 asks for it. Symbols: P stages, M micro-batches."""

import math
from collections.abc import Callable, Iterable, Sequence

from labkit import schedules
from labkit.check.grading.plain import from_a_stub
from labkit.check.grading.report import NOT_ATTEMPTED, NOT_YET, PASSED, Verdict, no_function, told
from labkit.costs.pipeline_timeline import Slot, predicted_slots
from labkit.costs.pipeline_timeline import bubble as idle_share

# A backward costs about two forwards.
_BACKWARD_FORWARDS = 2.0


def bubble(fn: Callable) -> Verdict:
    """Grade ``fn(slots)``: the idle share, 0 to 1, of a timetable's stages. Runs in this process.

    ``slots`` is a list of ``labkit.costs.pipeline_timeline.Slot``, from any second on, in any
    order.
    """
    return told("pipeline.bubble", lambda: _judge("pipeline.bubble", fn))


def _judge(name: str, fn: Callable) -> Verdict:
    if not callable(fn):
        return Verdict(name, NOT_YET, notes=[no_function(fn)])
    tables, answers = _tables(), {}
    for case, slots in tables.items():
        try:
            answer = fn(list(slots))
            if answer is None:
                return Verdict(name, NOT_YET, notes=["it returned nothing: return the share"])
            answers[case] = float(answer)
        except Exception as error:
            if from_a_stub(error):
                return Verdict(name, NOT_ATTEMPTED)
            note = f"for {case} it raised {type(error).__name__}: {error}"
            return Verdict(name, NOT_YET, notes=[note])
    wrong = [case for case, slots in tables.items() if not _same(answers[case], idle_share(slots))]
    if not wrong:
        return Verdict(name, PASSED, notes=[f"all {len(tables)} answers are right"])
    due = idle_share(tables[wrong[0]])
    note = f"for {wrong[0]} the bubble is {due:.4g}, and yours says {answers[wrong[0]]:.4g}"
    for sentence, mistake in _MISTAKES.items():
        if all(_same(answers[case], mistake(slots)) for case, slots in tables.items()):
            note += f": {sentence}"
            break
    return Verdict(name, NOT_YET, notes=[note])


def _same(answer: float, due: float) -> bool:
    return math.isclose(answer, due, rel_tol=1e-6, abs_tol=1e-9)


def _tables() -> dict[str, list[Slot]]:
    """The last three tell mistakes apart that the textbook's table lets pass."""
    late = [
        slot._replace(start_s=slot.start_s + 10, end_s=slot.end_s + 10)
        for slot in _table(schedules.gpipe, (1.0, 1.0), 2)
    ]
    return {
        "GPipe, 3 stages, 4 micro-batches": _table(schedules.gpipe, (1.0,) * 3, 4),
        "1F1B, 4 stages, 2 micro-batches": _table(schedules.one_f_one_b, (1.0,) * 4, 2),
        "a single stage, 3 micro-batches": _table(schedules.gpipe, (1.0,), 3),
        "GPipe, 3 micro-batches, stages of 1, 3 and 2 s": _table(
            schedules.gpipe, (1.0, 3.0, 2.0), 3
        ),
        "GPipe, 2 stages, 2 micro-batches, from second 10 on": late,
    }


def _table(schedule: Callable, forward_s: Sequence[float], micro_batches: int) -> list[Slot]:
    P = len(forward_s)
    streams = [list(schedule(stage, P, micro_batches)) for stage in range(P)]
    return predicted_slots(streams, forward_s, [_BACKWARD_FORWARDS * s for s in forward_s])


def _stages(slots: Iterable[Slot]) -> set[int]:
    return {slot.stage for slot in slots}


def _busy_s(slots: Iterable[Slot]) -> float:
    return sum(slot.end_s - slot.start_s for slot in slots)


def _start_s(slots: Iterable[Slot]) -> float:
    return min(slot.start_s for slot in slots)


def _end_s(slots: Iterable[Slot]) -> float:
    return max(slot.end_s for slot in slots)


def _idle_over(seconds: float, slots: Sequence[Slot]) -> float:
    return 1 - _busy_s(slots) / (len(_stages(slots)) * seconds)


def _between_actions(slots: Sequence[Slot]) -> float:
    rows = [[slot for slot in slots if slot.stage == stage] for stage in _stages(slots)]
    gaps_s = sum(_end_s(row) - _start_s(row) - _busy_s(row) for row in rows)
    return gaps_s / (len(rows) * (_end_s(slots) - _start_s(slots)))


def _by_formula(slots: Sequence[Slot]) -> float:
    stages = len(_stages(slots))
    micro_batches = len({slot.micro_batch for slot in slots})
    return (stages - 1) / (micro_batches + stages - 1)


_MISTAKES: dict[str, Callable[[list[Slot]], float]] = {
    "that is the share of work: the bubble is what is left of 1": lambda s: 1 - idle_share(s),
    "it divides the idle time by the working time (Megatron-LM's paper counts so); here the "
    "bubble is a share of all time, idle and working": (
        lambda s: idle_share(s) / (1 - idle_share(s))
    ),
    "it divides by the length of the step: all stages together have P times as much": (
        lambda s: len(_stages(s)) * idle_share(s)
    ),
    "that is the formula for equal stages; these are unequal, and only the slots know": (
        _by_formula
    ),
    "a table begins with its first slot, which need not be at second 0": (
        lambda s: _idle_over(_end_s(s), s)
    ),
    "the step ends with whichever slot ends last; the last one of the list is only the last "
    "stage's": lambda s: _idle_over(s[-1].end_s - _start_s(s), s),
    "a stage is idle before its first slot and after its last one, too": _between_actions,
    "a share is a number from 0 to 1, and this is in percent": lambda s: 100 * idle_share(s),
}
