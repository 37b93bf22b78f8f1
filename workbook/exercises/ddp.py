"""Page 03: gradients of uneven shares, hooks, buckets. ``overlap`` has the others.

Symbols: P ranks, B samples in the global batch.
"""

from collections.abc import Callable, Iterable
from typing import Any

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
from workbook.exercises.grader.compare import plain, short
from workbook.exercises.grader.exercise import random_tensor, with_parameters
from workbook.exercises.grader.in_process import Question

# Every parameter's size is divisible by every P, so that one ring for all of them sends the same
# number of bytes as one for each.
_FEATURES, _HIDDEN, _CLASSES = 4, 12, 12
_SAMPLES = 5, 3, 2


def average(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, model, inputs, targets, batch_size)``: the backward of a naive DDP.

    At the end each parameter's ``grad`` is the gradient of the mean loss over the B samples of
    all ranks. The last rank has no sample. Target: one ``ring_all_reduce`` per parameter.
    """

    def batch_size(case: Case) -> int:
        return sum(_SAMPLES[: case.world_size - 1])

    def share(rank: int, case: Case) -> tuple[Tensor, Tensor]:
        count = _SAMPLES[rank] if rank < case.world_size - 1 else 0
        targets = torch.tensor([case.integer(i, 0, _CLASSES - 1) for i in range(count)])
        return case.random(31 + rank, count, _FEATURES), targets.long()

    def total(case: Case, weight: Callable[[int], float]) -> list[Tensor]:
        """By parameter: the sum over the ranks of ``weight(samples)`` x their samples' sum."""
        model = _model()
        for inputs, targets in (share(rank, case) for rank in range(case.world_size)):
            loss = functional.cross_entropy(model(inputs), targets, reduction="sum")
            (weight(len(targets)) * loss).backward()
        return [torch.as_tensor(parameter.grad) for parameter in model.parameters()]

    def target(rank: int, case: Case) -> Target:
        numels = [parameter.numel() for parameter in _model().parameters()]
        costs = [ring_all_reduce_cost(n, 4, case.world_size, rank) for n in numels]
        return Target(sum(cost.messages for cost in costs), sum(cost.num_bytes for cost in costs))

    return returns(
        fn,
        lambda rank, case: total(case, lambda n: 1 / batch_size(case)),
        name="ddp.average",
        signature="comm, model, inputs, targets, batch_size",
        inputs=lambda rank, case: (*share(rank, case), batch_size(case)),
        call=_gradients_of,
        mistakes={
            "every rank has the same weight, however many samples it has: a mean of means": (
                lambda rank, case: total(case, lambda n: 1 / max(n, 1) / case.world_size)
            ),
            "it is the sum over the samples: divide it by those of the global batch": (
                lambda rank, case: total(case, lambda n: 1.0)
            ),
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
    third after the hooks were removed.
    """
    words = {
        False: "with two layers",
        True: "with a branch that is not taken, and a parameter that is used twice",
    }
    return ask(
        "ddp.hooks",
        fn,
        [Question((branches,), text) for branches, text in words.items()],
        lambda question, found: None,
        call=_hooked,
        right=lambda _: "every gradient is reported once, when it is there",
        signature="parameters, ready",
    )


def _hooked(fn: Callable, branches: bool) -> Wrong | None:
    """In the other process: what ``ready`` was called with, beside the gradients that came."""
    shapes = ((3, 2), (3,), (3, 3), (3,))
    parameters = [nn.Parameter(random_tensor(i + 1, *shape)) for i, shape in enumerate(shapes)]
    reported, came = [], []

    def ready(*given: Any) -> None:
        index = plain(given[0]) if len(given) == 1 else None
        if not isinstance(index, int) or not 0 <= index < len(shapes):
            reported.append(", ".join(type(one).__name__ for one in given))
        elif parameters[index].grad is None:
            reported.append(f"{index} before its .grad was set")
        else:
            reported.append(index)

    for i, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: came.append(i))
    returned = fn(list(parameters), ready)
    handles = list(returned.values()) if isinstance(returned, dict) else returned
    handles = list(handles) if isinstance(handles, Iterable) else [handles]
    if not all(hasattr(handle, "remove") for handle in handles):
        return Wrong(f"the function returned {short(returned)}: return the list of the handles")
    first, bias, second, last_bias = parameters
    for when in ("first", "second", "third"):
        for handle in handles if when == "third" else ():
            handle.remove()
        for parameter in parameters:
            parameter.grad = None
        hidden = torch.tanh(random_tensor(9, 5, 2) @ first.T + bias)
        out = (
            torch.tanh(hidden @ second.T) @ second.T if branches else hidden @ second.T + last_bias
        )
        out.sum().backward()
        if when == "third":
            came, why = [], ", although all returned handles were removed"
        else:
            why = f", and the gradients of {came} came"
        if reported != came:
            return Wrong(f"in the {when} backward ready was called for {reported}{why}")
        reported.clear()
        came.clear()
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


def buckets(fn: Callable) -> Verdict:
    """Grade ``fn(sizes_bytes, cap_bytes, first_cap_bytes)``: PyTorch's rule, lists of indices."""

    def first_to_last(sizes: list[int], cap: int, first_cap: int) -> list[list[int]]:
        found = assign_buckets(sizes[::-1], cap, first_cap)
        return [[len(sizes) - 1 - place for place in bucket] for bucket in found]

    return answers(
        fn,
        [(case, assign_buckets(*case)) for case in _BUCKETINGS],
        name="ddp.buckets",
        signature="sizes_bytes, cap_bytes, first_cap_bytes",
        mistakes={
            "backward computes the last parameter's gradient first": first_to_last,
            "the first bucket has its own cap": (
                lambda sizes, cap, _: assign_buckets(sizes, cap, cap)
            ),
        },
    )
