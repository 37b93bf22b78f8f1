"""Page 03: communication that goes on beside backward.

``in_order`` and ``finish`` are pieces, ``backward`` (``overlap_step``) puts them together on real
ranks. No check looks at a clock: an all-reduce overlaps if it was started before the last gradient
was there, and waited for after it.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from workbook.exercises.grader import Case, Verdict, Wrong, ask, returns
from workbook.exercises.grader.compare import plain, short
from workbook.exercises.grader.exercise import random_tensor
from workbook.exercises.grader.in_process import Question, differs
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

    ``start(b)`` has to be called as soon as buckets 0 to b have all their gradients.
    """
    questions = []
    for buckets, orders in _ORDERS:
        for order in orders:
            words = f"with buckets {buckets}, where gradients come in the order {order}, the "
            words += "starts, each with the number of gradients that are there,"
            starts = [list(one) for one in enumerate(start_moments(buckets, order))]
            questions.append(Question((buckets, order), words, starts))
    return ask(
        "overlap.in_order",
        fn,
        questions,
        differs,
        call=_starts,
        right=lambda _: "every bucket starts as early as it may, in the same order on all ranks",
        signature="buckets, start",
    )


def _starts(fn: Callable, buckets: list[list[int]], order: list[int]) -> list | Wrong:
    """(bucket, how many gradients were ready), of each call of ``start``."""
    starts, came, own = [], [], [list(bucket) for bucket in buckets]
    ready = fn(own, lambda b: starts.append([plain(b), len(came)]))
    if not callable(ready):
        return Wrong(f"the function returned {short(ready)}: return a function ready(index)")
    for index in order:
        came.append(index)
        ready(index)
    if own != buckets:
        return Wrong("the lists in buckets were changed: the next backward needs them as well")
    return starts


# B -> the shapes of the parameters by bucket. Parameter 0 got no gradient on this rank.
_FINISHES = {7: [[(3,), (2, 3)], [(3, 2)]], 12: [[(4,), (2, 2)], [(1,)], [(3, 1), (3,)]]}


class _Handle:
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
    parameter's ``grad`` is its piece of that, over B.
    """

    def total(case: Case, divisor: int) -> list[Tensor]:
        shapes = list(chain(*_FINISHES[case.size]))[::-1]
        return [case.random(90 + i, *shape) * 3 / divisor for i, shape in enumerate(shapes)]

    def call(fn: Callable, comm: Any, case: Case) -> list | Wrong:
        sums, shapes = total(case, 1), _FINISHES[case.size]
        numbers = iter(reversed(range(len(sums))))
        buckets = [[next(numbers) for _ in bucket] for bucket in shapes]
        parameters = [nn.Parameter(random_tensor(50 + i, *s.shape)) for i, s in enumerate(sums)]
        for index, parameter in enumerate(parameters):
            parameter.grad = random_tensor(70 + index, *parameter.shape) if index else None
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flats = [torch.cat([own[i].flatten() for i in bucket]) for bucket in buckets]
        all_sums = [torch.cat([sums[i].flatten() for i in bucket]) for bucket in buckets]
        handles = [_Handle(*pair) for pair in zip(flats, all_sums)]
        before = [parameter.detach().clone() for parameter in parameters]
        fn(parameters, buckets, flats, handles, case.size)
        for b, handle in enumerate(handles):
            if not handle.waited:
                why = f"flats[{b}] may still be this rank's"
                return Wrong(f"handles[{b}].wait() was not called: {why}")
        if not all(map(torch.equal, parameters, before)):
            return Wrong("the parameters have changed; this function only sets their gradients")
        if any(parameter.grad is None for parameter in parameters):
            return Wrong("a parameter has no gradient, although another rank may have used it")
        return [parameter.grad for parameter in parameters]

    return returns(
        fn,
        lambda rank, case: total(case, case.size),
        name="overlap.finish",
        inputs=lambda rank, case: (case,),
        signature="parameters, buckets, flats, handles, batch_size",
        call=call,
        mistakes={"it is the sum, not divided by batch_size": lambda rank, case: total(case, 1)},
        sizes=tuple(_FINISHES),
        nouns=("", "sample"),
        world_sizes=(1,),
    )
