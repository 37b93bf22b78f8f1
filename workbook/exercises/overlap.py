"""Page 03: communication that goes on beside backward.

``in_order`` and ``finish`` are pieces, graded without ranks: what is started, and when, is
counted in gradients. ``backward`` puts them together on real ranks (``overlap_step``). No check
looks at a clock: an all-reduce overlaps if it was started before the last gradient was there, and
waited for after it.

Symbols: P ranks, B samples in the global batch.
"""

import operator
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from workbook.exercises.grader import Verdict, Wrong, ask
from workbook.exercises.grader.compare import same, short
from workbook.exercises.grader.exercise import Found, random_tensor
from workbook.exercises.grader.in_process import Question
from workbook.exercises.overlap_step import backward, start_moments

__all__ = ["backward", "finish", "in_order"]

# Buckets, and by rank the order in which the gradients get ready; one may never get ready.
_ORDERS = (
    ([[5, 4], [3], [2, 1], [0]], [[5, 4, 3, 2, 1, 0], [3, 5, 2, 4, 1, 0], [2, 1, 3, 0, 4, 5]]),
    ([[4, 3], [2, 1, 0]], [[4, 3, 2, 1, 0], [2, 1, 4, 0, 3]]),
    ([[3], [2], [1], [0]], [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]]),
    ([[2], [1], [0]], [[2, 1, 0], [2, 0], [1, 0]]),
)


def in_order(fn: Callable) -> Verdict:
    """Grade ``fn(buckets, start)``, which returns ``ready(index)``: full buckets leave in order.

    ``start(b)`` has to be called as soon as buckets 0 to b have all their gradients. Runs in
    another process, which stands in for up to three ranks, one after another.
    """

    def wrong(question: Question, by_rank: list[list]) -> Found:
        buckets, orders = question.args
        for rank, (order, starts) in enumerate(zip(orders, by_rank)):
            moments = start_moments(buckets, order)
            expected = [(b, moment) for b, moment in enumerate(moments)]
            if starts != expected:
                text = (
                    f"{question.words}: on rank {rank} the gradients come in the order {order}; "
                )
                return f"{text}{_in_words(starts)}, expected {_in_words(expected)}"
        return None

    return ask(
        "overlap.in_order",
        fn,
        [Question(case, f"with buckets {case[0]}") for case in _ORDERS],
        wrong,
        call=_starts_of_ranks,
        right=lambda _: (
            "every bucket starts as early as it may, and in the same order on every rank"
        ),
        signature="buckets, start",
    )


def _starts_of_ranks(
    fn: Callable, buckets: list[list[int]], orders: list[list[int]]
) -> list | Wrong:
    """By rank: (bucket, how many gradients were ready), of each call of ``start``."""
    found = []
    for order in orders:
        starts: list[tuple[Any, int]] = []
        ready_so_far = [0]

        def start(b: Any, starts: list = starts, so_far: list = ready_so_far) -> None:
            number = operator.index(b) if isinstance(b, SupportsIndex) else short(b)
            starts.append((number, so_far[0]))

        own = [list(bucket) for bucket in buckets]
        ready = fn(own, start)
        if not callable(ready):
            return Wrong(f"the function returned {short(ready)}: return a function ready(index)")
        for index in order:
            ready_so_far[0] += 1
            ready(index)
        if own != buckets:
            return Wrong("the lists in buckets were changed: the next backward needs them as well")
        found.append(starts)
    return found


def _in_words(starts: Sequence[tuple[Any, int]]) -> str:
    return ", ".join(f"start({b}) at gradient {so_far}" for b, so_far in starts) or "no start"


# The shapes of the parameters by bucket, as lists of shapes, and B.
_FINISHES = (
    ([[(3,), (2, 3)], [(3, 2)]], 7),
    ([[(4,), (2, 2)], [(1,)], [(3, 1), (3,)]], 12),
)


class Handle:
    """Stands for an all-reduce under way, which is done when it is waited for."""

    def __init__(self, flat: Tensor, total: Tensor):
        self._flat, self._total, self.waited = flat, total, False

    def wait(self, *_: Any) -> bool:
        if not self.waited:
            self._flat.copy_(self._total.view_as(self._flat))
        self.waited = True
        return True


def finish(fn: Callable) -> Verdict:
    """Grade ``fn(parameters, buckets, flats, handles, batch_size)``: wait, divide, copy back.

    ``handles[b].wait()`` brings the sum over the ranks into ``flats[b]``. At the end each
    parameter's ``grad`` is its piece of that, over B. Runs in another process.
    """
    return ask(
        "overlap.finish",
        fn,
        [Question((sizes, B), f"with B = {B}") for sizes, B in _FINISHES],
        lambda question, found: None,
        call=_finished,
        right=lambda _: "every parameter has the mean gradient of the global batch",
        signature="parameters, buckets, flats, handles, batch_size",
    )


def _finished(fn: Callable, shapes: list[list[tuple]], batch_size: int) -> Wrong | None:
    count = sum(map(len, shapes))
    numbers = iter(reversed(range(count)))
    buckets = [[next(numbers) for _ in bucket] for bucket in shapes]
    by_index = dict(zip(chain(*buckets), chain(*shapes)))
    parameters = [nn.Parameter(random_tensor(50 + i, *by_index[i])) for i in range(count)]
    # Parameter 0 got no gradient on this rank, but on another one.
    own = [random_tensor(70 + i, *by_index[i]) * (i > 0) for i in range(count)]
    total = [random_tensor(90 + i, *by_index[i]) * 3 for i in range(count)]
    for index, parameter in enumerate(parameters):
        parameter.grad = own[index].clone() if index else None
    flats = [torch.cat([own[i].flatten() for i in bucket]) for bucket in buckets]
    sums = [torch.cat([total[i].flatten() for i in bucket]) for bucket in buckets]
    handles = [Handle(flat, one) for flat, one in zip(flats, sums)]
    before = [parameter.detach().clone() for parameter in parameters]
    fn(parameters, buckets, flats, handles, batch_size)
    for b, handle in enumerate(handles):
        if not handle.waited:
            return Wrong(
                f"handles[{b}].wait() was not called: flats[{b}] may still be this rank's"
            )
    if not all(map(torch.equal, parameters, before)):
        return Wrong("the parameters have changed; this function only sets their gradients")
    looks: dict[str, Callable[[int], Tensor]] = {
        "the sum, not divided by batch_size": lambda i: total[i],
        "the mean plus this rank's own": lambda i: own[i] + total[i] / batch_size,
        "this rank's own, from before wait()": lambda i: own[i] / batch_size,
    }
    for index, parameter in enumerate(parameters):
        if not same(parameter.grad, expected := total[index] / batch_size):
            like = [name for name, of in looks.items() if same(parameter.grad, of(index))]
            found = like[0] if like else short(parameter.grad)
            return Wrong(f"parameters[{index}].grad is {found}, expected {short(expected)}")
    return None
