"""Page 03: gradients of uneven shares, hooks, buckets. ``overlap`` has the others.

Symbols: P ranks, B samples in the global batch.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.costs.traffic import ring_all_reduce_cost
from labkit.engine.comm.comm import Comm
from labkit.schedules.bucket_assignment import assign_buckets
from workbook.exercises.grader import Case, Check, Target, Wrong, judged, solved
from workbook.exercises.grader.compare import plain, short
from workbook.exercises.grader.exercise import random_tensor, with_parameters

# Every parameter's size is divisible by every P, so that one ring for all of them sends the same
# number of bytes as one for each.
_FEATURES = 4
_HIDDEN = 12
_CLASSES = 12
_SAMPLES = 5, 3, 2


def gradients_left(parameters: Sequence[nn.Parameter], before: Sequence[Tensor]) -> Tensor | Wrong:
    """All gradients in one row, where each parameter has one and is as ``before``."""
    if not all(map(torch.equal, parameters, before)):
        return Wrong("the parameters have changed; this function only sets their gradients")
    if missing := [i for i, parameter in enumerate(parameters) if parameter.grad is None]:
        return Wrong(f"parameters {missing} have no gradient")
    for i, parameter in enumerate(parameters):
        shape = list(torch.as_tensor(parameter.grad).shape)
        if shape != list(parameter.shape):
            return Wrong(
                f"the gradient of parameter {i} has the shape {shape}, and the parameter "
                f"{list(parameter.shape)}"
            )
    return flat_gradients(parameters)


def flat_gradients(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The gradients of all parameters, in one row."""
    return torch.cat([torch.as_tensor(parameter.grad).flatten() for parameter in parameters])


def small_model() -> nn.Sequential:
    layers = nn.Linear(_FEATURES, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, _CLASSES)
    return with_parameters(nn.Sequential(*layers), 7)


def _batch_size(case: Case) -> int:
    return sum(_SAMPLES[: case.world_size - 1])


def _share(rank: int, case: Case) -> tuple[Tensor, Tensor]:
    count = _SAMPLES[rank] if rank < case.world_size - 1 else 0
    targets = torch.tensor([case.integer(i, 0, _CLASSES - 1) for i in range(count)])
    return case.random(31 + rank, count, _FEATURES), targets.long()


@lru_cache(maxsize=64)
def _gradients(rank: int, case: Case) -> Tensor:
    """Gradients of the sum over a rank's samples, in one row."""
    model = small_model()
    inputs, targets = _share(rank, case)
    functional.cross_entropy(model(inputs), targets, reduction="sum").backward()
    return flat_gradients(model.parameters())


def _call(fn: Callable, comm: Comm, *args: Any) -> Tensor | Wrong:
    model = small_model()
    fn(comm, model, *args)
    return gradients_left(list(model.parameters()), list(small_model().parameters()))


def _one_ring_each(rank: int, case: Case) -> Target:
    numels = [parameter.numel() for parameter in small_model().parameters()]
    costs = [ring_all_reduce_cost(numel, 4, case.world_size, rank) for numel in numels]
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
    mistakes={
        "that is the mean of the ranks' means": lambda rank, case: (
            case.over_ranks(lambda r: _gradients(r, case) / max(1, len(_share(r, case)[1])))
            / case.world_size
        )
    },
    target=_one_ring_each,
    sizes=(),
)


@judged("parameters, ready", (False,), (True,))
def hooks(fn: Callable, branches: bool) -> Wrong | None:
    """Grade ``fn(parameters, ready)``: ``ready(index)`` as soon as a gradient is there.

    It returns the hooks' handles. With ``branches`` one parameter is used twice, and one never.
    """
    shapes = ((3, 2), (3,), (3, 3), (3,))
    parameters = [nn.Parameter(random_tensor(i + 1, *shape)) for i, shape in enumerate(shapes)]
    reported: list[int | str] = []  # what ``ready`` was called for
    accumulated: list[int | str] = []
    delayed: list[str] = []

    def ready(*args: Any) -> None:
        index = plain(args[0]) if len(args) == 1 else None
        if not isinstance(index, int) or not 0 <= index < len(shapes):
            reported.append(", ".join(type(arg).__name__ for arg in args))
        elif parameters[index].grad is None:
            reported.append(f"{index} before its .grad was set")
        else:
            reported.append(index)
            if accumulated[-1] != index:
                delayed.append(
                    f"ready({index}) was called after the gradient of parameter "
                    f"{accumulated[-1]} had come: call it as soon as its own is there"
                )

    for i, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: accumulated.append(i))
    returned = fn(list(parameters), ready)
    handles = list(returned) if isinstance(returned, Iterable) else [returned]
    if reported:
        return Wrong("ready was called before any backward: a hook is a function that calls it")
    if not all(hasattr(handle, "remove") for handle in handles):
        return Wrong(f"the function returned {short(returned)}: return the list of the handles")
    for backward in ("first", "second"):
        _run_backward(parameters, branches)
        if reported != accumulated:
            text = f"in the {backward} backward ready was called for {reported}, and the gradients"
            text += f" of {accumulated} came"
            if set(reported) == {len(shapes) - 1}:
                text += (
                    "\na hook reads the loop's variable when backward runs, and then it has its "
                    "last value. Bind it for each hook, as in lambda _, i=i: ready(i)"
                )
            numbers = [f"{index}".partition(" ")[0] for index in reported]
            if numbers == [*map(str, accumulated)]:
                text += "\nthe hook runs too early: .grad is set after it"
            elif numbers == [f"{len(shapes) - 1 - int(index)}" for index in accumulated]:
                text += "\nthe index is counted from the end: it is the place in the list"
            return Wrong(text)
        if delayed:
            return Wrong(delayed[0])
        reported.clear()
        accumulated.clear()
    for handle in handles:
        handle.remove()
    _run_backward(parameters, branches)
    if reported:
        text = f"in the third backward ready was called for {reported}"
        return Wrong(f"{text}, although all returned handles were removed")
    return None


def _run_backward(parameters: list[nn.Parameter], branches: bool) -> None:
    """One backward from no gradients; with ``branches`` one parameter is used twice, one never."""
    for parameter in parameters:
        parameter.grad = None
    first, bias, second, last_bias = parameters
    out = torch.tanh(random_tensor(9, 5, 2) @ first.T + bias) @ second.T
    out = torch.tanh(out) @ second.T if branches else out + last_bias
    out.sum().backward()


def _below_cap(rule: Callable, sizes: list[int], cap: int, first_cap: int) -> list[list[int]]:
    buckets: list[list[int]] = [[]]
    for index in reversed(range(len(sizes))):
        held = sum(sizes[i] for i in buckets[-1])
        if held + sizes[index] > (cap if len(buckets) > 1 else first_cap):
            buckets.append([])
        buckets[-1].append(index)
    return buckets


# Sizes of parameters, cap, first bucket's cap. No parameter fills a bucket by itself. In the first
# two the last bucket is exactly full, and none follows it.
@solved(
    ([4, 6], 12, 10),
    ([5, 7, 6, 4], 12, 10),
    more=lambda random: [
        (random.choices(range(1, 9), k=count), random.randint(12, 20), random.randint(9, 11))
        for count in range(1, 13)
    ],
    mistakes={
        "the parameter with which a bucket reaches its cap is in it, too": _below_cap,
    },
)
def buckets(sizes_bytes: list[int], cap_bytes: int, first_cap_bytes: int) -> list[list[int]]:
    """Grade ``fn(sizes_bytes, cap_bytes, first_cap_bytes)``: PyTorch's rule, lists of indices."""
    return assign_buckets(sizes_bytes, cap_bytes, first_cap_bytes)
