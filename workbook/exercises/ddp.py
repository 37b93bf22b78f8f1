"""The checks of page 03: gradients of uneven shares, hooks, buckets. ``overlap`` has the others.

Symbols: P ranks, B samples in the global batch.
"""

import operator
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import islice
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.comm.comm import Comm
from labkit.costs.traffic import ring_all_reduce_cost
from labkit.schedules.bucket_assignment import assign_buckets
from workbook.exercises.grader import WORLD_SIZES, Case, Mistake, Target, Verdict, answers, returns
from workbook.exercises.grader.compare import short
from workbook.exercises.grader.exercise import random_tensor, with_parameters
from workbook.exercises.grader.in_process import Question, Wrong, ask
from workbook.exercises.grader.report import told

# Sizes of parameters, cap, cap of the first bucket. No parameter fills a bucket by itself.
_BUCKETINGS = (
    ([1, 1, 1, 1, 1, 1, 1], 4, 2),
    ([4, 2, 3, 1, 2], 5, 5),
    ([1, 3, 2, 3, 3, 3], 7, 4),
    ([2, 2], 9, 9),
    ([3], 9, 8),
    ([500, 300, 900, 100, 700, 400, 200, 600, 100], 1100, 1000),
)
# Every parameter's size is divisible by every P, so that one ring for all of them sends the same
# number of bytes as one for each.
_FEATURES, _HIDDEN, _CLASSES = 4, 12, 12
_MOST_ENTRIES = 1000


def average(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, model, inputs, targets, batch_size)``: the backward of a naive DDP.

    At the end each parameter's ``grad`` is the gradient of the mean loss over the B samples of
    all ranks. The shares have 5, 3 and 2 samples, that of the last rank none. Target: one
    ``ring_all_reduce`` per parameter.
    """
    shares_of = cache(_Shares)

    def leads_to(wrong: Callable[[_Shares, int], Tensor]) -> Callable[[int, Case], list[Tensor]]:
        return lambda rank, case: _by_parameter(wrong(shares_of(case), rank))

    return returns(
        fn,
        leads_to(lambda shares, rank: shares.due),
        name="ddp.average",
        signature="comm, model, inputs, targets, batch_size",
        inputs=lambda rank, case: (*_share(rank, case), sum(_counts(case))),
        call=_gradients_of,
        mistakes={id: leads_to(wrong) for id, wrong in _AVERAGE_MISTAKES.items()},
        target=_one_ring_per_parameter,
        world_sizes=world_sizes,
    )


def hooks(fn: Callable) -> Verdict:
    """Grade ``fn(parameters, ready)``: ``ready(index)`` as soon as a gradient is there.

    It has to return the handles of the hooks, which remove them. Runs in another process.
    """
    questions = [Question((kind,), f"with {words}") for kind, words in _HOOKED.items()]
    judge = partial(
        *(ask, "ddp.hooks", fn, questions, _placed),
        call=_hooked,
        right=lambda _: "every gradient is reported once, when it is there",
        signature="parameters, ready",
    )
    return told("ddp.hooks", judge)


def buckets(fn: Callable) -> Verdict:
    """Grade ``fn(sizes_bytes, cap_bytes, first_cap_bytes)``: PyTorch's rule, as lists of indices.

    Runs in another process.
    """
    expected = [(case, assign_buckets(*case)) for case in _BUCKETINGS]
    names = "sizes_bytes, cap_bytes, first_cap_bytes"
    options = {"signature": names, "mistakes": _BUCKET_MISTAKES, "kind": _lists}
    return answers(fn, expected, name="ddp.buckets", **options)


# Gradients of uneven shares


def _model() -> nn.Module:
    layers = nn.Sequential(nn.Linear(_FEATURES, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, _CLASSES))
    return with_parameters(layers, 7)


def _counts(case: Case) -> list[int]:
    return [*(5, 3, 2)[: case.world_size - 1], 0]


def _share(rank: int, case: Case) -> tuple[Tensor, Tensor]:
    count = _counts(case)[rank]
    generator = torch.Generator().manual_seed(31 * rank + count)
    inputs = torch.randn(count, _FEATURES, generator=generator)
    return inputs, torch.randint(_CLASSES, (count,), generator=generator)


def _gradients_of(fn: Callable, comm: Comm, *args: Any) -> list[Tensor] | Mistake:
    """On the rank: the gradients that ``fn`` leaves, by parameter."""
    model = _model()
    fn(comm, model, *args)
    before = zip(model.parameters(), _model().parameters())
    if not all(torch.equal(parameter, kept) for parameter, kept in before):
        return Mistake("gradient.updated")
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if len(found) < len(list(model.parameters())):
        return Mistake("gradient.none")
    if not all(gradient.isfinite().all() for gradient in found):
        return Mistake("gradient.nan")
    return found


def _one_ring_per_parameter(rank: int, case: Case) -> Target:
    sizes = [parameter.numel() for parameter in _model().parameters()]
    costs = [ring_all_reduce_cost(size, 4, case.world_size, rank) for size in sizes]
    return Target(sum(cost.messages for cost in costs), sum(cost.num_bytes for cost in costs))


def _by_parameter(row: Tensor) -> list[Tensor]:
    shapes = [parameter.shape for parameter in _model().parameters()]
    pieces = row.split([shape.numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes)]


class _Shares:
    """What a wrong gradient may be made of; all parameters in one row, [N].

    Attributes:
        own: by rank, the gradient of the summed loss of its share.
        means: by rank, the gradient of its mean loss, zeros where it has no samples.
        total: the sum over all ranks.
        due: the gradient of the mean loss over the global batch.
    """

    def __init__(self, case: Case):
        self.own = [self._sum_gradient(*_share(r, case)) for r in range(case.world_size)]
        self.means = [own / max(count, 1) for own, count in zip(self.own, _counts(case))]
        self.world_size, self.batch_size = case.world_size, sum(_counts(case))
        self.total = torch.stack(self.own).sum(0)
        self.due = self.total / self.batch_size

    @staticmethod
    def _sum_gradient(inputs: Tensor, targets: Tensor) -> Tensor:
        model = _model()
        loss = functional.cross_entropy(model(inputs), targets, reduction="sum")
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        return torch.cat([gradient.flatten() for gradient in gradients])


# s are the shares, r the rank.
_AVERAGE_MISTAKES: dict[str, Callable[[_Shares, int], Tensor]] = {
    "gradient.sum": lambda s, r: s.total,
    "gradient.twice_by_ranks": lambda s, r: s.due / s.world_size,
    "gradient.own_share": lambda s, r: s.own[r] / s.batch_size,
    "gradient.mean_of_means": lambda s, r: torch.stack(s.means).mean(0),
    "gradient.sum_of_means": lambda s, r: torch.stack(s.means).sum(0),
    "gradient.over_ranks": lambda s, r: s.total / s.world_size,
    "gradient.own_mean": lambda s, r: s.means[r],
    "gradient.own_sum": lambda s, r: s.own[r],
}


# Hooks

_HOOKED = {
    "two layers": "two layers",
    "branches": "a branch that is not taken, and a parameter that is used twice",
}


class _Reported(NamedTuple):
    """What ``ready`` was called with, and which gradients came, in their order.

    ``calls`` are pairs of an index and whether the gradient was there, of two backwards; the last
    entry is of a third one, after the hooks were removed.
    """

    calls: list[list[tuple[Any, bool]]]
    due: list[list[int]]


def _hooked(fn: Callable, kind: str) -> _Reported | Mistake:
    """In the other process: three backwards, the last one after the hooks were removed."""
    shapes = [(3, 2), (3,), (3, 3), (3,)]
    parameters = [nn.Parameter(random_tensor(i + 1, *shape)) for i, shape in enumerate(shapes)]
    calls: list[list[tuple[Any, bool]]] = [[]]
    due: list[list[int]] = [[], [], []]

    def ready(*given: Any) -> None:
        if len(given) != 1:
            raise Wrong(Mistake("hooks.arguments", count=len(given)))
        (place,) = given
        try:
            number = operator.index(place)
            is_there = parameters[number].grad is not None
        except (TypeError, IndexError):
            number, is_there = type(place).__name__, False
        calls[-1].append((number, is_there))

    for i, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: due[len(calls) - 2].append(i))
    given = fn(list(parameters), ready)
    handles = _handles(given)
    if handles is None:
        return Mistake("hooks.no_handles", kind=short(given)[:60])
    for number in range(3):
        if number == 2:
            for handle in handles:
                handle.remove()
        calls.append([])
        for parameter in parameters:
            parameter.grad = None
        _small_loss(parameters, kind).backward()
    return _Reported(calls, due)


def _handles(given: Any) -> list | None:
    """What the learner's function returned, as a list of things that can be removed."""
    if isinstance(given, Iterable):
        handles = list(given.values() if isinstance(given, dict) else given)
    else:
        handles = [given]
    return handles if all(hasattr(handle, "remove") for handle in handles) else None


def _small_loss(parameters: list[nn.Parameter], kind: str) -> Tensor:
    first, bias, second, last_bias = parameters
    hidden = torch.tanh(random_tensor(9, 5, 2) @ first.T + bias)
    if kind == "branches":
        return (torch.tanh(hidden @ second.T) @ second.T).sum()
    return (hidden @ second.T + last_bias).sum()


def _placed(question: Question, found: Any) -> Mistake | None:
    wrong = found if isinstance(found, Mistake) else _wrong_reports(*found)
    return wrong and Mistake("told.place", place=question.words, what=wrong)


def _wrong_reports(calls: list[list[tuple[Any, bool]]], due: list[list[int]]) -> Mistake | None:
    at_once, first, second, last = ([place for place, _ in one] for one in calls)
    if at_once:
        return Mistake("hooks.at_once")
    if not first:
        return Mistake("hooks.nothing")
    if strange := [place for place in first if not isinstance(place, int)]:
        return Mistake("hooks.index", found=strange[0])
    if len(first) > 1 and {*first} == {3}:
        return Mistake("hooks.last_index", index=3)
    if first != due[0]:
        return _wrong_order(first, due[0])
    if early := [place for place, is_there in calls[1] if not is_there]:
        return Mistake("hooks.too_early", index=early[0])
    if second != due[1]:
        return Mistake("hooks.once", found=second or "nothing", due=due[1])
    return Mistake("hooks.stay", found=last) if last else None


def _wrong_order(found: list[int], due: list[int]) -> Mistake:
    if twice := [place for place in due if found.count(place) > 1]:
        return Mistake("hooks.twice", index=twice[0])
    missing = [place for place in due if place not in found]
    if missing and {*found} <= {*due}:
        return Mistake("hooks.missing", index=missing[0], found=found)
    return Mistake("hooks.numbers", due=due, found=found)


# Buckets


def _lists(found: Any) -> Any:
    """Lists of integers, also of an array, a tuple or a generator; anything else as it is."""
    plain: Any = found.tolist() if isinstance(found, Tensor) else found
    if isinstance(plain, Iterable) and not isinstance(plain, str):
        # An endless generator must not hang the check.
        return [_lists(entry) for entry in islice(plain, _MOST_ENTRIES)]
    return operator.index(plain) if isinstance(plain, SupportsIndex) else plain


def _first_to_last(sizes: list[int], cap: int, first_cap: int) -> list[list[int]]:
    found = assign_buckets(sizes[::-1], cap, first_cap)
    return [[len(sizes) - 1 - place for place in bucket] for bucket in found]


def _closed_before(sizes: list[int], cap: int, first_cap: int) -> list[list[int]]:
    """The rule that closes a bucket when the next parameter would exceed its cap."""
    found: list[list[int]] = [[]]
    for place in reversed(range(len(sizes))):
        limit = cap if len(found) > 1 else first_cap
        if found[-1] and sum(sizes[i] for i in found[-1]) + sizes[place] > limit:
            found.append([])
        found[-1].append(place)
    return found


def _full(sizes: list[int], cap: int, first_cap: int) -> list[list[int]]:
    """The buckets that hold their caps: all, or all but the last."""
    found = assign_buckets(sizes, cap, first_cap)
    limit = cap if len(found) > 1 else first_cap
    return found if sum(sizes[i] for i in found[-1]) >= limit else found[:-1]


def _with_an_empty_one(*case: Any) -> list[list[int]]:
    """A new bucket is begun whenever one is closed, also by the last parameter."""
    found = assign_buckets(*case)
    return [*found, []] if found == _full(*case) else found


_BUCKET_MISTAKES: dict[str, Callable[..., list]] = {
    "buckets.forward": _first_to_last,
    "buckets.order": lambda *case: assign_buckets(*case)[::-1],
    "buckets.order_inside": lambda *case: [sorted(bucket) for bucket in assign_buckets(*case)],
    "buckets.first_cap": lambda sizes, cap, _: assign_buckets(sizes, cap, cap),
    "buckets.first_cap_for_all": lambda sizes, _, first: assign_buckets(sizes, first, first),
    "buckets.closed_before": _closed_before,
    "buckets.closed_late": lambda sizes, cap, first: assign_buckets(sizes, cap + 1, first + 1),
    "buckets.numbers": lambda sizes, *caps: [
        [len(sizes) - 1 - place for place in bucket] for bucket in assign_buckets(sizes, *caps)
    ],
    "buckets.rest_lost": _full,
    "buckets.empty": _with_an_empty_one,
}
