"""The checks of page 03 that make communication go on beside backward.

``in_order`` and ``finish`` are pieces, graded without ranks: what is started, and when, is
counted in gradients. ``backward`` puts them together on real ranks. No check looks at a clock: an
all-reduce overlaps if it was started before the last gradient was there, and waited for after it.

Symbols: P ranks, B samples in the global batch.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn

from workbook.exercises.grader import WORLD_SIZES, Case, Mistake, Verdict, returns
from workbook.exercises.grader.compare import same, short
from workbook.exercises.grader.exercise import random_tensor
from workbook.exercises.grader.in_process import Question, ask
from workbook.exercises.grader.report import told
from workbook.exercises.overlap_run import own_run
from workbook.exercises.overlap_step import (
    ALL_USED,
    BUCKET_OF_SIZE,
    BUCKETS,
    SHAPES,
    SOME_UNUSED,
    Step,
    own_gradients,
    two_steps,
)

# Buckets, and by rank the order in which the gradients get ready; -1 stands for one that never is.
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
    questions = [Question(case, f"with buckets {case[0]}") for case in _ORDERS]
    right = "every bucket starts as early as it may, and in the same order on every rank"
    judge = partial(
        *(ask, "overlap.in_order", fn, questions, _wrong_starts),
        call=_starts_of_ranks,
        right=lambda _: right,
        signature="buckets, start",
    )
    return told("overlap.in_order", judge)


def finish(fn: Callable) -> Verdict:
    """Grade ``fn(parameters, buckets, flats, handles, batch_size)``: wait, divide, copy back.

    ``handles[b].wait()`` brings the sum over the ranks into ``flats[b]``. At the end each
    parameter's ``grad`` is its piece of that, over B. Runs in another process.
    """
    questions = [Question((sizes, B), f"with B = {B}") for sizes, B in _FINISHES]
    judge = partial(
        *(ask, "overlap.finish", fn, questions, lambda question, found: found),
        call=_finished,
        right=lambda _: "every parameter has the mean gradient of the global batch",
        signature="parameters, buckets, flats, handles, batch_size",
    )
    return told("overlap.finish", judge)


def backward(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(loss, parameters, buckets, start, batch_size)``: a backward with overlap.

    ``start(flat)`` begins the all-reduce of a tensor and returns a handle. At the end each
    parameter's ``grad`` is the gradient of the mean loss over the B samples of all ranks. Two
    steps are made with one model. Ranks get their gradients in different orders, and in one case
    some parameters get none.
    """
    name = "overlap.backward"
    verdict = returns(
        fn,
        name=name,
        signature="loss, parameters, buckets, start, batch_size",
        call=two_steps,
        inputs=lambda rank, case: (case,),
        judge=_judge,
        sizes=(ALL_USED, SOME_UNUSED),
        nouns=("rank", "sample"),
        case_words={SOME_UNUSED: "where not every rank uses every parameter"},
        world_sizes=world_sizes,
    )
    verdict.run_again = partial(own_run, name, fn)
    return verdict


# Launches in order


def _starts_of_ranks(
    fn: Callable, buckets: list[list[int]], orders: list[list[int]]
) -> list | Mistake:
    """By rank: (bucket, how many gradients were ready), of each call of ``start``."""
    found = []
    for order in orders:
        starts: list[tuple[Any, int]] = []
        so_far = [0]
        own_copy = [list(bucket) for bucket in buckets]
        ready = fn(own_copy, lambda b, s=starts, n=so_far: s.append((_as_number(b), n[0])))
        if not callable(ready):
            return Mistake("in_order.not_callable", kind=type(ready).__name__)
        for index in order:
            so_far[0] += 1
            ready(index)
        if own_copy != [list(bucket) for bucket in buckets]:
            return Mistake("in_order.changed")
        found.append(starts)
    return found


def _as_number(bucket: Any) -> Any:
    try:
        return operator.index(bucket)
    except TypeError:
        return short(bucket)


def due_starts(buckets: Sequence[Sequence[int]], order: Sequence[int]) -> list[int]:
    """By bucket: how many gradients are there when it may start; of the first buckets only.

    A bucket may start with its last gradient, and not before the buckets before it. One whose
    gradients are never all there has no entry, nor have those after it.
    """
    place = {index: number for number, index in enumerate(order, start=1)}
    full = []
    for bucket in buckets:
        if any(index not in place for index in bucket):
            break
        full.append(max(place[index] for index in bucket))
    return list(accumulate(full, max))


def _wrong_starts(question: Question, by_rank: Any) -> Mistake | None:
    if isinstance(by_rank, Mistake):
        return by_rank
    buckets, orders = question.args
    found = _wrong_for_any(_strange_start, buckets, orders, by_rank)
    found = found or other_orders([[b for b, _ in starts] for starts in by_rank])
    found = found or _wrong_for_any(_wrong_moment, buckets, orders, by_rank)
    return found and Mistake("told.place", place=question.words, what=found)


def _wrong_for_any(wrong: Callable, buckets: list, orders: list, by_rank: list) -> Mistake | None:
    found = (wrong(buckets, *both, rank) for rank, both in enumerate(zip(orders, by_rank)))
    return next(filter(None, found), None)


def _strange_start(buckets: list, order: list, starts: list, rank: int) -> Mistake | None:
    """A start of something that is no bucket, or of one that is not full, or a second start."""
    for number, (b, so_far) in enumerate(starts):
        if b not in range(len(buckets)):
            return Mistake("in_order.number", found=b, last=len(buckets) - 1)
        if missing := [index for index in buckets[b] if index not in order[:so_far]]:
            return Mistake("in_order.too_early", rank=rank, bucket=b, index=missing[0])
        if b in [before for before, _ in starts[:number]]:
            return Mistake("in_order.twice", rank=rank, bucket=b)
    return None


def other_orders(by_rank: list[list[int]]) -> Mistake | None:
    """Ranks that start the same buckets in different orders; who starts what."""
    for rank, mine in enumerate(by_rank):
        both = [b for b in mine if b in by_rank[0]]
        if both != [b for b in by_rank[0] if b in mine]:
            first, other = (", ".join(map(str, starts)) for starts in (by_rank[0], mine))
            return Mistake("in_order.orders", first=first, rank=rank, other=other)
    return None


def _wrong_moment(buckets: list, order: list, starts: list, rank: int) -> Mistake | None:
    due, moments = due_starts(buckets, order), dict(starts)
    for b, moment in enumerate(due):
        if b not in moments:
            return Mistake("in_order.never", rank=rank, bucket=b, order=order)
        if moments[b] > moment:
            numbers = {"due": moment, "found": moments[b]}
            return Mistake("in_order.late", rank=rank, bucket=b, **numbers)
    if strays := [b for b in moments if b >= len(due)]:
        return Mistake("in_order.overtakes", rank=rank, bucket=strays[0], before=len(due))
    return None


# Finishing

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


def _finished(fn: Callable, shapes: list[list[tuple]], batch_size: int) -> Mistake | None:
    count = sum(map(len, shapes))
    buckets, numbers = [], iter(reversed(range(count)))
    for bucket in shapes:
        buckets.append([next(numbers) for _ in bucket])
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
    unwaited = [b for b, handle in enumerate(handles) if not handle.waited]
    if unwaited:
        return Mistake("finish.never_waited", bucket=unwaited[0])
    if not all(torch.equal(p, kept) for p, kept in zip(parameters, before)):
        return Mistake("gradient.updated")
    return _wrong_gradient([p.grad for p in parameters], own, total, batch_size)


def _wrong_gradient(
    found: list[Tensor | None], own: list[Tensor], total: list[Tensor], batch_size: int
) -> Mistake | None:
    for index, gradient in enumerate(found):
        if gradient is None:
            return Mistake("finish.none", index=index)
    if same(found, [one / batch_size for one in total]):
        return None
    looks = {
        "finish.not_divided": [total],
        "finish.added": [[mine + one / batch_size for mine, one in zip(own, total)]],
        "finish.divided_twice": [[one / batch_size**2 for one in total]],
        "finish.before_wait": [own, [one / batch_size for one in own]],
    }
    for id, ways in looks.items():
        if any(same(found, wrong) for wrong in ways):
            return Mistake(id)
    pairs = enumerate(zip(found, total))
    index = next(i for i, (mine, due) in pairs if not same(mine, due / batch_size))
    due = total[index] / batch_size
    return Mistake("finish.differs", index=index, found=short(found[index]), due=short(due))


# All of it, on ranks


def _judge(case: Case, values: list[Any]) -> Mistake | None:
    for number, steps in enumerate(zip(*(value.steps for value in values))):
        found = _wrong_overlap(steps) or _wrong_numbers(case, steps, number)
        if found:
            return found
        if left := max(step.hooks for step in steps):
            return Mistake("overlap.hooks_left", count=left)
    return None


def _wrong_overlap(steps: Sequence[Step]) -> Mistake | None:
    """What is wrong with the moments of starts and waits; nothing here depends on a clock."""
    if not all(step.ready for step in steps):
        return Mistake("overlap.no_backward")
    if not any(step.starts for step in steps):
        return Mistake("overlap.nothing_started")
    named = [[BUCKET_OF_SIZE.get(size, -1) for size, _ in step.starts] for step in steps]
    for rank, (step, buckets) in enumerate(zip(steps, named)):
        if -1 in buckets or len(buckets) > len(BUCKETS):
            sizes = [size for size, _ in step.starts]
            return Mistake(
                "overlap.not_the_buckets", rank=rank, sizes=sizes, due=[*BUCKET_OF_SIZE]
            )
    found = other_orders(named)
    for wrong in (_wrong_start, _wrong_wait):
        for rank, (step, buckets) in enumerate(zip(steps, named)):
            found = found or wrong(step, buckets, rank)
    return found


def _wrong_start(step: Step, buckets: list[int], rank: int) -> Mistake | None:
    last, due = len(step.ready), due_starts(BUCKETS, step.ready)
    for b, (_, so_far) in zip(buckets, step.starts):
        absent = [i for i in BUCKETS[b] if i not in step.ready[:so_far]]
        if so_far < last and absent:
            return Mistake("in_order.too_early", rank=rank, bucket=b, index=absent[0])
    for b in range(len(BUCKETS)):
        if b not in buckets:
            absent = [i for i in BUCKETS[b] if i not in step.ready]
            id = "overlap.never_full" if absent else "overlap.never_started"
            return Mistake(id, rank=rank, bucket=b, index=absent[0] if absent else None)
    if due and due[0] < last and step.starts[0][1] == last:
        return Mistake("overlap.after_backward", rank=rank)
    for b, moment in enumerate(due):
        found = step.starts[buckets.index(b)][1]
        if found > moment:
            return Mistake("in_order.late", rank=rank, bucket=b, due=moment, found=found)
    return None


def _wrong_wait(step: Step, buckets: list[int], rank: int) -> Mistake | None:
    for b, so_far in zip(buckets, step.waits):
        if so_far is None:
            return Mistake("overlap.never_waited", rank=rank, bucket=b)
        if so_far < len(step.ready):
            left = len(step.ready) - so_far
            return Mistake("overlap.waited_at_once", rank=rank, bucket=b, left=left)
    return None


def _wrong_numbers(case: Case, steps: Sequence[Step], number: int) -> Mistake | None:
    P, B = case.world_size, case.size
    own = [own_gradients(rank, case, number) for rank in range(P)]
    total = [torch.stack(of_ranks).sum(0) for of_ranks in zip(*own)]
    for rank, step in enumerate(steps):
        for index, gradient in enumerate(step.gradients):
            if gradient is None and total[index].any():
                return Mistake("overlap.none", rank=rank, index=index)
        found = [torch.zeros(s) if g is None else g for s, g in zip(SHAPES, step.gradients)]
        divided = {id: [one / by for one in total] for id, by in _divisors(P, B).items()}
        looks = divided | {
            "gradient.own_share": [one / B for one in own[rank]],
            "gradient.own_sum": own[rank],
        }
        if same(found, [one / B for one in total]):
            continue
        why = next((Mistake(id) for id, wrong in looks.items() if same(found, wrong)), None)
        pairs = enumerate(zip(found, total))
        index = next(i for i, (mine, due) in pairs if not same(mine, due / B))
        return Mistake("overlap.differs", why, rank=rank, index=index)
    return None


def _divisors(P: int, B: int) -> dict[str, float]:
    return {
        "gradient.sum": 1,
        "gradient.over_ranks": P,
        "gradient.twice_by_ranks": P * B,
        "finish.divided_twice": B * B,
    }
