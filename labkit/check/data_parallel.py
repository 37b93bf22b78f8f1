"""Checks of page 02: the parts of data parallelism in one process, on one real rank.

Symbols: P devices, n samples.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.check.grading import Case, Exercise, Mistake, Verdict, grade
from labkit.check.grading.compare import same, short
from labkit.check.grading.exercise import no_arguments

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
        judge=_judge_parts,
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
        "scatter_fairly.empty_device": list(inputs.tensor_split(DEVICES)),
        "scatter_fairly.chunk": list(inputs.chunk(DEVICES)),
        "scatter_fairly.in_turn": [inputs[i::DEVICES] for i in range(min(DEVICES, len(inputs)))],
        "scatter_fairly.dropped": head,
        "scatter_fairly.rest_to_last": [*head[:-1], inputs[(DEVICES - 1) * fair :]],
        "scatter_fairly.whole_batch": [inputs] * DEVICES,
        "scatter_fairly.one_each": whole,
    }


def _judge_parts(case: Case, values: list[Any]) -> Mistake | None:
    parts, samples = values[0], _samples(case)
    parts = list(parts) if isinstance(parts, tuple) else parts
    due = list(samples.tensor_split(min(DEVICES, case.size)))
    if same(parts, due):
        return None
    wrong = _wrong_parts(samples).items()
    found = next((Mistake(id) for id, result in wrong if same(parts, result)), None)
    found = found or Mistake("value.differs", value=short(parts), due=short(due))
    return Mistake("scatter_fairly.devices", found, devices=DEVICES)


def parallel_apply(fn: Callable) -> Verdict:
    """Grade ``fn(functions, inputs)``: ``functions[i](inputs[i])`` all at once, in threads.

    Expected are the results in the order of the functions, the exception of a thread raised in the
    caller, and the caller's autograd mode in every thread.
    """
    exercise = Exercise(
        "data_parallel.parallel_apply",
        inputs=no_arguments,
        signature="functions, inputs",
        written=None,
        judge=lambda case, values: values[0],
        call=_observe,
        sizes=(),
    )
    return grade(fn, exercise, (1,))


def _observe(fn: Callable, comm: Any) -> Mistake | None:
    """On the rank: what is wrong when ``fn`` is tried."""
    return _look_at_threads(fn) or _look_at_errors(fn) or _look_at_autograd(fn)


def _look_at_threads(fn: Callable) -> Mistake | None:
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
        return Mistake("threads.order")
    return Mistake("threads.results", results=repr(results))


def _one_by_one(seen: set[int]) -> Mistake:
    if seen == {threading.get_ident()}:
        return Mistake("threads.none")
    return Mistake("threads.one_by_one")


def _look_at_errors(fn: Callable) -> Mistake | None:
    return next(filter(None, (_look_at_error_in(fn, failing) for failing in (1, 0, 2))), None)


def _look_at_error_in(fn: Callable, failing: int) -> Mistake | None:
    def part(number: int) -> int:
        if number == failing:
            raise KeyError(f"part {failing} has failed")
        return number

    kept, threading.excepthook = threading.excepthook, lambda args: None
    try:
        results = fn([part] * 3, [0, 1, 2])
    except KeyError:
        return None
    except Exception as error:
        return Mistake("threads.other_error", part=failing, kind=type(error).__name__)
    finally:
        threading.excepthook = kept
    return Mistake("threads.lost_error", part=failing, results=repr(results))


def _look_at_autograd(fn: Callable) -> Mistake | None:
    def part(_: int) -> bool:
        return torch.is_grad_enabled()

    with torch.no_grad():
        modes = list(fn([part] * 2, [0, 1]))
    if any(modes):
        return Mistake("threads.record")
    if not all(fn([part] * 2, [0, 1])) or not torch.is_grad_enabled():
        return Mistake("threads.do_not_record")
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


def _judge_sums(result: Any, others_kept: bool) -> Mistake | None:
    columns = list(zip(*_gradients()))
    due = [_sum(column) for column in columns]
    firsts = [column[0] for column in columns]
    wrong = {
        "sum_devices.mean": [d if d is None else d / 3 for d in due],
        "sum_devices.first_alone": firsts,
        "sum_devices.first_missing": [_sum(column[1:]) for column in columns],
        "sum_devices.follows_first": [
            None if first is None else d for first, d in zip(firsts, due)
        ],
        "sum_devices.wants_all": [
            None if any(g is None for g in column) else _sum(column) for column in columns
        ],
        "sum_devices.two_alone": [_sum(column[:2]) for column in columns],
        "sum_devices.zeros": [torch.zeros(4) if d is None else d for d in due],
        "sum_devices.mean_of_some": [
            d if d is None else d / sum(g is not None for g in c) for c, d in zip(columns, due)
        ],
    }
    if not isinstance(result, (list, tuple)) or len(result) != len(due):
        return Mistake("sum_devices.kind", count=len(due), result=f"{result!r:.60}")
    for id, sums in wrong.items():
        if _alike(result, sums) and not _alike(sums, due):
            return Mistake(id)
    if not _alike(result, due):
        return Mistake("value.differs", value=short(list(result)), due=short(due))
    return None if others_kept else Mistake("sum_devices.others_changed")


def _sum(column: tuple) -> Tensor | None:
    there = [gradient for gradient in column if gradient is not None]
    return sum(there[1:], there[0]) if there else None


def _alike(sums: Any, due: list) -> bool:
    return all((s is None) == (d is None) and (d is None or same(s, d)) for s, d in zip(sums, due))
