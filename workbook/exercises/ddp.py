"""Page 03: gradients of uneven shares, hooks, buckets. ``overlap`` has the others.

Symbols: P ranks, B samples in the global batch.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.comm.comm import Comm
from labkit.costs.traffic import ring_all_reduce_cost
from labkit.schedules.bucket_assignment import assign_buckets
from workbook.exercises.grader import Case, Check, Target, Wrong, judged, solved
from workbook.exercises.grader.compare import plain, short
from workbook.exercises.grader.exercise import random_tensor, with_parameters

# Every parameter's size is divisible by every P, so that one ring for all of them sends the same
# number of bytes as one for each.
_FEATURES, _HIDDEN, _CLASSES = 4, 12, 12
_SAMPLES = 5, 3, 2


def gradients_left(parameters: Sequence[nn.Parameter], before: Sequence[Tensor]) -> Tensor | Wrong:
    """All gradients in one row, where each parameter has one and is as ``before``."""
    if not all(map(torch.equal, parameters, before)):
        return Wrong("the parameters have changed; this function only sets their gradients")
    found = [p.grad.flatten() for p in parameters if p.grad is not None]
    if missing := [i for i, p in enumerate(parameters) if p.grad is None]:
        return Wrong(f"parameters {missing} have no gradient")
    return torch.cat(found)


def _model() -> nn.Sequential:
    layers = nn.Linear(_FEATURES, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, _CLASSES)
    return with_parameters(nn.Sequential(*layers), 7)


def _batch_size(case: Case) -> int:
    return sum(_SAMPLES[: case.world_size - 1])


def _share(rank: int, case: Case) -> tuple[Tensor, Tensor]:
    count = _SAMPLES[rank] if rank < case.world_size - 1 else 0
    targets = torch.tensor([case.integer(i, 0, _CLASSES - 1) for i in range(count)])
    return case.random(31 + rank, count, _FEATURES), targets.long()


def _gradients(rank: int, case: Case) -> Tensor:
    """Of the sum over a rank's samples."""
    model, (inputs, targets) = _model(), _share(rank, case)
    functional.cross_entropy(model(inputs), targets, reduction="sum").backward()
    return torch.cat([torch.as_tensor(p.grad).flatten() for p in model.parameters()])


def _call(fn: Callable, comm: Comm, *args: Any) -> Tensor | Wrong:
    model = _model()
    fn(comm, model, *args)
    return gradients_left(list(model.parameters()), list(_model().parameters()))


def _one_ring_each(rank: int, case: Case) -> Target:
    numels = [parameter.numel() for parameter in _model().parameters()]
    costs = [ring_all_reduce_cost(n, 4, case.world_size, rank) for n in numels]
    return Target(sum(cost.messages for cost in costs), sum(cost.num_bytes for cost in costs))


# Each ``grad`` becomes that of the mean loss over all B samples. The last rank has none.
average = Check(
    "ddp.average",
    lambda rank, case: case.over_ranks(lambda r: _gradients(r, case)) / _batch_size(case),
    signature="comm, model, inputs, targets, batch_size",
    inputs=lambda rank, case: (*_share(rank, case), _batch_size(case)),
    written=None,
    call=_call,
    parts=lambda case: {
        f"the sum over rank {r}'s samples": _gradients(r, case) for r in range(case.world_size - 1)
    },
    target=_one_ring_each,
    sizes=(),
)


@judged("parameters, ready", (False,), (True,))
def hooks(fn: Callable, branches: bool) -> Wrong | None:
    """Grade ``fn(parameters, ready)``: ``ready(index)`` as soon as a gradient is there.

    It has to return the handles of the hooks, which remove them. With ``branches`` one parameter
    is used twice, and one not at all.
    """
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
    handles = list(returned) if isinstance(returned, Iterable) else [returned]
    if not all(hasattr(handle, "remove") for handle in handles):
        return Wrong(f"the function returned {short(returned)}: return the list of the handles")
    first, bias, second, last_bias = parameters
    for when in ("first", "second", "third"):
        for handle in handles if when == "third" else ():
            handle.remove()
        for parameter in parameters:
            parameter.grad = None
        out = torch.tanh(random_tensor(9, 5, 2) @ first.T + bias) @ second.T
        (torch.tanh(out) @ second.T if branches else out + last_bias).sum().backward()
        expected, why = came, f", and the gradients of {came} came"
        if when == "third":
            expected, why = [], ", although all returned handles were removed"
        if reported != expected:
            return Wrong(f"in the {when} backward ready was called for {reported}{why}")
        reported.clear()
        came.clear()
    return None


# Sizes of parameters, cap, first bucket's cap. No parameter fills a bucket by itself.
@solved(
    more=lambda random: [
        (random.choices(range(1, 9), k=count), random.randint(12, 20), random.randint(9, 11))
        for count in range(1, 13)
    ],
    mistakes={
        "the first bucket has its own cap": lambda rule, sizes, cap, _: rule(sizes, cap, cap),
    },
)
def buckets(sizes_bytes: list[int], cap_bytes: int, first_cap_bytes: int) -> list[list[int]]:
    """Grade ``fn(sizes_bytes, cap_bytes, first_cap_bytes)``: PyTorch's rule, lists of indices."""
    return assign_buckets(sizes_bytes, cap_bytes, first_cap_bytes)
