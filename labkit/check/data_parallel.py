"""Checks of page 02: the parts of data parallelism in one process, on one real rank.

Symbols: P devices, n samples.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from labkit.check.grading.compare import same
from labkit.check.grading.core import grade
from labkit.check.grading.exercise import Case, Exercise
from labkit.check.grading.report import Verdict

DEVICES = 4
_MEET_S = 1.0


def scatter(fn: Callable) -> Verdict:
    """Grade ``fn(inputs, num_devices)``: [n, ...] in parts for the devices, in order.

    As many parts as devices, or as samples if there are fewer; sizes differ by one at most.
    """
    exercise = Exercise(
        "data_parallel.scatter",
        inputs=lambda rank, case: (_samples(case), DEVICES),
        signature="inputs, num_devices",
        written=None,
        judge=lambda case, values: _named(
            list(values[0]) if isinstance(values[0], tuple) else values[0],
            list(_samples(case).tensor_split(min(DEVICES, case.size))),
            _wrong_parts(_samples(case)),
            f"for {DEVICES} devices",
        ),
        call=_without_comm,
        sizes=(6, 7, 2, 1),
    )
    return grade(fn, exercise, (1,))


def _without_comm(fn: Callable, comm: Any, *args: Any) -> Any:
    return fn(*args)


def _samples(case: Case) -> Tensor:
    return torch.arange(2.0 * case.size).view(case.size, 2)


def _wrong_parts(inputs: Tensor) -> dict[str, Any]:
    fair, whole = len(inputs) // DEVICES, list(inputs.split(1))
    head = [inputs[i * fair : (i + 1) * fair] for i in range(DEVICES)]
    return {
        "a device without a sample is there, too: its replica would run on nothing": (
            list(inputs.tensor_split(DEVICES))
        ),
        "a device gets nothing while others have two more: torch.chunk rounds sizes up": (
            list(inputs.chunk(DEVICES))
        ),
        "samples are dealt out in turn: what is gathered will not be in the batch's order": (
            [inputs[i::DEVICES] for i in range(min(DEVICES, len(inputs)))]
        ),
        "samples that do not divide are dropped": head,
        "the last device gets all that does not divide": (
            [*head[:-1], inputs[(DEVICES - 1) * fair :]]
        ),
        "every device gets the whole batch": [inputs] * DEVICES,
        "every sample is a part of its own": whole,
    }


def _named(value: Any, due: Any, wrong: Mapping[str, Any], where: str) -> str | None:
    """What is wrong with ``value``: a mistake's own sentence, or the two values."""
    if same(value, due):
        return None
    sentence = next((text for text, result in wrong.items() if same(value, result)), None)
    return f"{where}: {sentence or f'it is {_short(value)}, where {_short(due)} is due'}"


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, list):
        return "[" + ", ".join(map(_short, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else repr(value)


def parallel_apply(fn: Callable) -> Verdict:
    """Grade ``fn(functions, inputs)``: ``functions[i](inputs[i])`` all at once, in threads.

    Due are the results in the order of the functions, the exception of a thread raised in the
    caller, and the caller's autograd mode in every thread.
    """
    exercise = Exercise(
        "data_parallel.parallel_apply",
        inputs=lambda rank, case: (),
        signature="functions, inputs",
        written=None,
        judge=lambda case, values: values[0],
        call=_observe,
        sizes=(),
    )
    return grade(fn, exercise, (1,))


def _observe(fn: Callable, comm: Any) -> str | None:
    """On the rank: try ``fn`` out, and say what is wrong."""
    return _look_at_threads(fn) or _look_at_errors(fn) or _look_at_autograd(fn)


def _look_at_threads(fn: Callable) -> str | None:
    meeting, seen = threading.Barrier(3, timeout=_MEET_S), set()

    def part(number: int) -> int:
        seen.add(threading.get_ident())
        meeting.wait()
        # The first ends last.
        time.sleep(0.02 * (2 - number))
        return 10 * number

    try:
        results = fn([part] * 3, [0, 1, 2])
    except threading.BrokenBarrierError:
        return _one_by_one(seen)
    if same(list(results or []), [0, 10, 20]):
        return None
    if meeting.broken or len(seen) < 3:
        return _one_by_one(seen)
    if sorted(r for r in results or [] if r is not None) == [0, 10, 20]:
        return "the results come in the order in which the threads ended, not in that of the parts"
    return f"it returned {results!r}, where [0, 10, 20] is due: did all threads end before it did?"


def _one_by_one(seen: set[int]) -> str:
    if seen == {threading.get_ident()}:
        return "no threads: the parts run one after another in the caller's own"
    return "the parts do not run at the same time: start all threads before you wait for one"


def _look_at_errors(fn: Callable) -> str | None:
    return next(filter(None, (_look_at_error_in(fn, failing) for failing in (1, 0, 2))), None)


def _look_at_error_in(fn: Callable, failing: int) -> str | None:
    def part(number: int) -> int:
        if number == failing:
            raise KeyError(f"part {failing} has failed")
        return number

    what = f"part {failing} raised KeyError, and the caller"

    kept, threading.excepthook = threading.excepthook, lambda args: None
    try:
        results = fn([part] * 3, [0, 1, 2])
    except KeyError:
        return None
    except Exception as error:
        return f"{what} saw {type(error).__name__}: raise its own"
    finally:
        threading.excepthook = kept
    return f"{what} got {results!r}: the exception was lost"


def _look_at_autograd(fn: Callable) -> str | None:
    def part(_: int) -> bool:
        return torch.is_grad_enabled()

    with torch.no_grad():
        modes = list(fn([part] * 2, [0, 1]))
    if any(modes):
        return "under torch.no_grad() the threads still record: each begins with autograd enabled"
    if not all(fn([part] * 2, [0, 1])) or not torch.is_grad_enabled():
        return "the caller records, and the threads do not: training would get no gradients"
    return None


def reduce(fn: Callable) -> Verdict:
    """Grade ``fn(gradients)``: by device, by parameter -> the sums over the devices, by parameter.

    A gradient may be None on some devices and counts as zero; where all are None, so is the sum.
    The gradients of devices 1 and up stay as they are.
    """
    exercise = Exercise(
        "data_parallel.reduce",
        inputs=lambda rank, case: (_gradients(),),
        signature="gradients",
        written=None,
        judge=lambda case, values: _judge_sums(*values[0]),
        call=_reduce_and_look,
        sizes=(),
    )
    return grade(fn, exercise, (1,))


def _gradients() -> list[list[Tensor | None]]:
    """Three devices, four parameters: everywhere, not on device 0, not on device 2, nowhere."""
    generator = torch.Generator().manual_seed(3)
    table = [[torch.randn(4, generator=generator) for _ in range(3)] + [None] for _ in range(3)]
    table[0][1] = table[2][2] = None
    return table


def _reduce_and_look(fn: Callable, comm: Any, gradients: list) -> tuple:
    result = fn(gradients)
    return result, all(map(_equal, gradients[1:], _gradients()[1:]))


def _equal(row: list, other: list) -> bool:
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(row, other))


def _judge_sums(result: Any, others_kept: bool) -> str | None:
    columns = list(zip(*_gradients()))
    due = [_sum(column) for column in columns]
    firsts = [column[0] for column in columns]
    wrong = {
        "the mean over the devices: the parts of a sum over samples are to be added": (
            [d if d is None else d / 3 for d in due]
        ),
        "device 0's own gradients alone": firsts,
        "device 0's own gradients are not in it": [_sum(column[1:]) for column in columns],
        "a parameter without a gradient on device 0 is left out": (
            [None if first is None else d for first, d in zip(firsts, due)]
        ),
        "a parameter without a gradient on any one device is left out": (
            [None if any(g is None for g in column) else _sum(column) for column in columns]
        ),
        "only devices 0 and 1 are in it": [_sum(column[:2]) for column in columns],
        "zeros for a parameter that no device used, where None is due": (
            [torch.zeros(4) if d is None else d for d in due]
        ),
        "the mean over those devices that have a gradient: the sum is due": (
            [d if d is None else d / sum(g is not None for g in c) for c, d in zip(columns, due)]
        ),
    }
    if not isinstance(result, (list, tuple)) or len(result) != len(due):
        return f"a list of {len(due)} sums is due, one a parameter, and it returned {result!r:.60}"
    for sentence, sums in wrong.items():
        if _alike(result, sums) and not _alike(sums, due):
            return sentence
    if not _alike(result, due):
        return f"it is {_short(list(result))}, where {_short(due)} is due"
    if not others_kept:
        return "the gradients of other devices were changed: add into a copy of device 0's"
    return None


def _sum(column: tuple) -> Tensor | None:
    there = [gradient for gradient in column if gradient is not None]
    return sum(there[1:], there[0]) if there else None


def _alike(sums: Any, due: list) -> bool:
    return all((s is None) == (d is None) and (d is None or same(s, d)) for s, d in zip(sums, due))
