"""Page 03: gradients of uneven shares, hooks, buckets. ``overlap`` has the others.

Symbols: P ranks, B samples in the global batch.
"""

import operator
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.comm.comm import Comm
from labkit.costs.traffic import ring_all_reduce_cost
from labkit.schedules.bucket_assignment import assign_buckets
from workbook.exercises.grader import (
    WORLD_SIZES,
    Case,
    Target,
    Verdict,
    Wrong,
    answers,
    ask,
    returns,
)
from workbook.exercises.grader.compare import short
from workbook.exercises.grader.exercise import random_tensor, with_parameters
from workbook.exercises.grader.in_process import Question

# Every parameter's size is divisible by every P, so that one ring for all of them sends the same
# number of bytes as one for each.
_FEATURES, _HIDDEN, _CLASSES = 4, 12, 12


def average(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, model, inputs, targets, batch_size)``: the backward of a naive DDP.

    At the end each parameter's ``grad`` is the gradient of the mean loss over the B samples of
    all ranks. The shares have 5, 3 and 2 samples, that of the last rank none. Target: one
    ``ring_all_reduce`` per parameter.
    """

    def sizes(case: Case) -> list[int]:
        return [*(5, 3, 2)[: case.world_size - 1], 0]

    def share(rank: int, case: Case) -> tuple[Tensor, Tensor]:
        count = sizes(case)[rank]
        targets = torch.tensor([case.integer(i, 0, _CLASSES - 1) for i in range(count)])
        return case.random(31 + rank, count, _FEATURES), targets.long()

    def sum_gradients(rank: int, case: Case) -> list[Tensor]:
        model = _model()
        inputs, targets = share(rank, case)
        functional.cross_entropy(model(inputs), targets, reduction="sum").backward()
        return [torch.as_tensor(parameter.grad) for parameter in model.parameters()]

    def weighted(case: Case, weight: Callable[[int], float]) -> list[Tensor]:
        """The sum over the ranks of their sums over samples, each times ``weight(samples)``."""
        rows = zip(*(sum_gradients(rank, case) for rank in range(case.world_size)))
        weights = torch.tensor([weight(n) for n in sizes(case)])
        return [torch.tensordot(weights, torch.stack(row), 1) for row in rows]

    def target(rank: int, case: Case) -> Target:
        numels = [parameter.numel() for parameter in _model().parameters()]
        costs = [ring_all_reduce_cost(n, 4, case.world_size, rank) for n in numels]
        return Target(sum(cost.messages for cost in costs), sum(cost.num_bytes for cost in costs))

    return returns(
        fn,
        lambda rank, case: weighted(case, lambda n: 1 / sum(sizes(case))),
        name="ddp.average",
        signature="comm, model, inputs, targets, batch_size",
        inputs=lambda rank, case: (*share(rank, case), sum(sizes(case))),
        call=_gradients_of,
        mistakes={
            "every rank has the same weight, however many samples it has: a mean of means": (
                lambda rank, case: weighted(case, lambda n: 1 / max(n, 1) / case.world_size)
            ),
            "it is the sum over the samples: divide it by those of the global batch": (
                lambda rank, case: weighted(case, lambda n: 1.0)
            ),
        },
        parts=lambda case: {
            f"the sum over rank {r}'s samples": sum_gradients(r, case)
            for r in range(case.world_size - 1)
        },
        target=target,
        world_sizes=world_sizes,
    )


def _model() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(_FEATURES, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, _CLASSES))
    return with_parameters(layers, 7)


def _gradients_of(fn: Callable, comm: Comm, *args: Any) -> list[Tensor | None] | Wrong:
    """On the rank: the gradients that ``fn`` leaves, by parameter."""
    model, before = _model(), _model()
    fn(comm, model, *args)
    if not all(map(torch.equal, model.parameters(), before.parameters())):
        return Wrong("the parameters have changed; this function only sets their gradients")
    found = [parameter.grad for parameter in model.parameters()]
    if any(gradient is None for gradient in found):
        return Wrong("a parameter has no gradient: a rank without samples contributes zeros")
    return found


def hooks(fn: Callable) -> Verdict:
    """Grade ``fn(parameters, ready)``: ``ready(index)`` as soon as a gradient is there.

    It has to return the handles of the hooks, which remove them. Two backwards are made, and a
    third after the hooks were removed. Runs in another process.
    """
    words = {
        "layers": "with two layers",
        "branches": "with a branch that is not taken, and a parameter that is used twice",
    }
    return ask(
        "ddp.hooks",
        fn,
        [Question((kind,), text) for kind, text in words.items()],
        lambda question, found: None,
        call=_hooked,
        right=lambda _: "every gradient is reported once, when it is there",
        signature="parameters, ready",
    )


def _hooked(fn: Callable, kind: str) -> Wrong | None:
    """In the other process: what ``ready`` was called with, beside the gradients that came."""
    shapes = [(3, 2), (3,), (3, 3), (3,)]
    parameters = [nn.Parameter(random_tensor(i + 1, *shape)) for i, shape in enumerate(shapes)]
    reported, came, early = [[]], [[]], []

    def ready(*given: Any) -> None:
        if len(given) == 1 and isinstance(given[0], SupportsIndex):
            index = operator.index(given[0])
            if not 0 <= index < 4 or parameters[index].grad is None:
                early.append(index)
            reported[-1].append(index)
        else:
            reported[-1].append(f"({', '.join(type(one).__name__ for one in given)})")

    for i, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: came[-1].append(i))
    returned = fn(list(parameters), ready)
    handles = list(returned.values()) if isinstance(returned, dict) else returned
    handles = list(handles) if isinstance(handles, Iterable) else [handles]
    if not all(hasattr(handle, "remove") for handle in handles):
        return Wrong(f"the function returned {short(returned)}: return the list of the handles")
    if reported[0]:
        return Wrong("ready was called before backward began: call it inside the hook")
    for number, when in enumerate(("first", "second", "third")):
        if number == 2:
            for handle in handles:
                handle.remove()
        reported.append([])
        came.append([])
        for parameter in parameters:
            parameter.grad = None
        first, bias, second, last_bias = parameters
        hidden = torch.tanh(random_tensor(9, 5, 2) @ first.T + bias)
        if kind == "branches":
            (torch.tanh(hidden @ second.T) @ second.T).sum().backward()
        else:
            (hidden @ second.T + last_bias).sum().backward()
        text = f"in the {when} backward ready was called for {reported[-1] or 'nothing'}"
        if number == 2 and reported[-1]:
            return Wrong(f"{text}, although all returned handles were removed")
        if number < 2 and reported[-1] != came[-1]:
            same_index = len({*reported[-1]}) == 1 and len(came[-1]) > 1
            why = " (do all hooks share the loop's variable?)" if same_index else ""
            return Wrong(f"{text}, and the gradients of {came[-1]} came{why}")
        if early:
            why = "use register_post_accumulate_grad_hook"
            return Wrong(f"{text}, and gradient {early[0]} was not in .grad yet: {why}")
    return None


# Sizes of parameters, cap, cap of the first bucket. No parameter fills a bucket by itself.
_BUCKETINGS = (
    ([1, 1, 1, 1, 1, 1, 1], 4, 2),
    ([4, 2, 3, 1, 2], 5, 5),
    ([1, 3, 2, 3, 3, 3], 7, 4),
    ([2, 2], 9, 9),
    ([3], 9, 8),
    ([500, 300, 900, 100, 700, 400, 200, 600, 100], 1100, 1000),
)
_MOST_ENTRIES = 1000


def buckets(fn: Callable) -> Verdict:
    """Grade ``fn(sizes_bytes, cap_bytes, first_cap_bytes)``: PyTorch's rule, as lists of indices.

    Runs in another process.
    """

    def first_to_last(sizes: list[int], cap: int, first_cap: int) -> list[list[int]]:
        found = assign_buckets(sizes[::-1], cap, first_cap)
        return [[len(sizes) - 1 - place for place in bucket] for bucket in found]

    def closed_before(sizes: list[int], cap: int, first_cap: int) -> list[list[int]]:
        found: list[list[int]] = [[]]
        for place in reversed(range(len(sizes))):
            limit = cap if len(found) > 1 else first_cap
            if found[-1] and sum(sizes[i] for i in found[-1]) + sizes[place] > limit:
                found.append([])
            found[-1].append(place)
        return found

    return answers(
        fn,
        [(case, assign_buckets(*case)) for case in _BUCKETINGS],
        name="ddp.buckets",
        signature="sizes_bytes, cap_bytes, first_cap_bytes",
        mistakes={
            "backward computes the last parameter's gradient first": first_to_last,
            "a bucket is closed only when it holds its cap or more, not before": closed_before,
            "the first bucket has its own cap": (
                lambda sizes, cap, _: assign_buckets(sizes, cap, cap)
            ),
        },
        kind=_lists,
    )


def _lists(found: Any) -> Any:
    """Lists of integers, also of an array, a tuple or a generator; anything else as it is."""
    plain: Any = found.tolist() if isinstance(found, Tensor) else found
    if isinstance(plain, Iterable) and not isinstance(plain, str):
        # An endless generator must not hang the check.
        return [_lists(entry) for entry in islice(plain, _MOST_ENTRIES)]
    return operator.index(plain) if isinstance(plain, SupportsIndex) else plain
