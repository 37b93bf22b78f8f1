"""Checks of page 02: the parts of single-process data parallelism, on one real rank.

Symbols: P devices, n samples.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.check.grading import Case, Mistake, Verdict, returns
from labkit.check.grading.compare import same, short

DEVICES = 4
_MEET_S = 1.0


def scatter(fn: Callable) -> Verdict:
    """Grade ``fn(inputs, num_devices)``: a list of parts of ``inputs`` [n, ...], in order.

    There are as many parts as devices, or as samples if there are fewer; their sizes differ by one
    at most.
    """
    return returns(
        fn,
        name="data_parallel.scatter",
        inputs=lambda rank, case: (_samples(case), DEVICES),
        signature="inputs, num_devices",
        judge=_judge_parts,
        call=lambda fn, comm, *args: fn(*args),
        sizes=(6, 7, 2, 1),
        nouns=("", "sample"),
        world_sizes=(1,),
    )


def _samples(case: Case) -> Tensor:
    return torch.arange(2.0 * case.size).view(case.size, 2)


def _wrong_parts(inputs: Tensor) -> dict[str, Any]:
    fair = len(inputs) // DEVICES
    head = [inputs[i * fair : (i + 1) * fair] for i in range(DEVICES)]
    return {
        "scatter_fairly.empty_device": list(inputs.tensor_split(DEVICES)),
        "scatter_fairly.chunk": list(inputs.chunk(DEVICES)),
        "scatter_fairly.in_turn": [inputs[i::DEVICES] for i in range(min(DEVICES, len(inputs)))],
        "scatter_fairly.dropped": head,
        "scatter_fairly.rest_to_last": [*head[:-1], inputs[(DEVICES - 1) * fair :]],
        "scatter_fairly.whole_batch": [inputs] * DEVICES,
        "scatter_fairly.one_each": list(inputs.split(1)),
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
    """Grade ``fn(functions, inputs)``: ``functions[i](inputs[i])`` for all i, in threads.

    The threads have to run at the same time, with the caller's autograd mode. Expected are the
    results in the order of the functions, and the exception of a thread raised in the caller.
    """
    return returns(
        fn,
        name="data_parallel.parallel_apply",
        signature="functions, inputs",
        judge=lambda case, values: values[0],
        call=_observe,
        nouns=("", ""),
        world_sizes=(1,),
    )


def _observe(fn: Callable, comm: Any) -> Mistake | None:
    """On the rank: try ``fn``, and return what is wrong with it."""
    wrong = _look_at_threads(fn)
    for failing in (1, 0, 2):
        wrong = wrong or _look_at_error_in(fn, failing)
    return wrong or _look_at_autograd(fn)


def _look_at_threads(fn: Callable) -> Mistake | None:
    meeting, seen = threading.Barrier(3, timeout=_MEET_S), set()

    def part(number: int) -> int:
        seen.add(threading.get_ident())
        meeting.wait()
        # The first thread ends last, so that results in the order of the ends are noticed.
        time.sleep(0.02 * (2 - number))
        return 10 * number

    try:
        results = fn([part] * 3, [0, 1, 2])
    except threading.BrokenBarrierError:
        results = None
    if same(list(results or []), [0, 10, 20]):
        return None
    if meeting.broken or len(seen) < 3:
        in_caller = seen == {threading.get_ident()}
        return Mistake("threads.none" if in_caller else "threads.one_by_one")
    if sorted(r for r in results or [] if r is not None) == [0, 10, 20]:
        return Mistake("threads.order")
    return Mistake("threads.results", results=repr(results))


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

    A gradient of None counts as zero; if it is None on all devices, the sum is None. The gradients
    of devices 1 and up must not change.
    """
    return returns(
        fn,
        name="data_parallel.reduce",
        inputs=lambda rank, case: (_gradients(),),
        signature="gradients",
        judge=lambda case, values: _judge_sums(*values[0]),
        call=_reduce_and_look,
        nouns=("", ""),
        world_sizes=(1,),
    )


def _gradients() -> list[list[Tensor | None]]:
    """Three devices, four parameters: used by all, not by device 0, not by device 2, by none."""
    generator = torch.Generator().manual_seed(3)
    table = [[torch.randn(4, generator=generator) for _ in range(3)] + [None] for _ in range(3)]
    table[0][1] = table[2][2] = None
    return table


def _reduce_and_look(fn: Callable, comm: Any, gradients: list) -> tuple:
    result = fn(gradients)
    return result, all(map(_alike, gradients[1:], _gradients()[1:]))


def _there(column: Sequence[Tensor | None]) -> list[Tensor]:
    return [gradient for gradient in column if gradient is not None]


def _sum(column: Sequence[Tensor | None]) -> Tensor | None:
    there = _there(column)
    return sum(there[1:], there[0]) if there else None


# A mistake's id -> the "sum" of one parameter's gradients by device, c.
_WRONG_SUMS: dict[str, Callable[[tuple], Tensor | None]] = {
    "sum_devices.mean": lambda c: _sum([g / len(c) for g in _there(c)]),
    "sum_devices.first_alone": lambda c: c[0],
    "sum_devices.first_missing": lambda c: _sum(c[1:]),
    "sum_devices.follows_first": lambda c: None if c[0] is None else _sum(c),
    "sum_devices.wants_all": lambda c: _sum(c) if len(_there(c)) == len(c) else None,
    "sum_devices.two_alone": lambda c: _sum(c[:2]),
    "sum_devices.zeros": lambda c: _sum([torch.zeros(4), *c]),
    "sum_devices.mean_of_some": lambda c: _sum([g / len(_there(c)) for g in _there(c)]),
}


def _judge_sums(result: Any, others_kept: bool) -> Mistake | None:
    columns = list(zip(*_gradients()))
    due = list(map(_sum, columns))
    if not isinstance(result, (list, tuple)) or len(result) != len(due):
        return Mistake("sum_devices.kind", count=len(due), result=f"{result!r:.60}")
    if _alike(result, due):
        return None if others_kept else Mistake("sum_devices.others_changed")
    for id, wrong in _WRONG_SUMS.items():
        if _alike(result, list(map(wrong, columns))):
            return Mistake(id)
    return Mistake("value.differs", value=short(list(result)), due=short(due))


def _alike(sums: Sequence, due: Sequence) -> bool:
    return all((s is None) == (d is None) and (d is None or same(s, d)) for s, d in zip(sums, due))
