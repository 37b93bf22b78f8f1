"""The checks of page 03: buckets, gradients of uneven shares, a sampler, accumulation.

Symbols: P ranks, B samples in the global batch.
"""

from collections.abc import Callable, Mapping
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DistributedSampler

from labkit.check.grading.core import WORLD_SIZES, grade
from labkit.check.grading.exercise import Case, Exercise, Target
from labkit.check.grading.plain import answers
from labkit.check.grading.report import Verdict
from labkit.comm.comm import Comm
from labkit.costs.traffic import ring_all_reduce_cost
from labkit.schedules.buckets import assign_buckets

# Sizes of parameters, cap, cap of the first bucket. No parameter fills a bucket by itself.
_BUCKETINGS = (
    ((1, 1, 1, 1, 1, 1, 1), 4, 2),
    ((4, 2, 3, 1, 2), 5, 5),
    ((1, 3, 2, 3, 3, 3), 7, 4),
    ((2, 2), 9, 9),
)
# The sampler's epoch by number of samples: 10 and 7 do not divide by every P, 1 is fewer than P.
_EPOCHS = {10: 1, 12: 0, 7: 2, 1: 0}
_SEED = 5
_FEATURES, _CLASSES = 4, 3


def buckets(fn: Callable) -> Verdict:
    """Grade ``fn(sizes_bytes, cap_bytes, first_cap_bytes)``: PyTorch's rule, as lists of indices.

    Runs in this process: no ranks are needed.
    """
    expected = {case: assign_buckets(*case) for case in _BUCKETINGS}
    return answers(fn, expected, name="ddp.buckets", mistakes=_BUCKET_MISTAKES)


def average(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, model, inputs, targets, batch_size)``: a naive DDP's backward.

    At the end each parameter's ``grad`` is the gradient of the mean loss over the B samples of
    all ranks. Shares have 5, 3 and 2 samples, the last rank's none. Target: one
    ``ring_all_reduce`` a parameter.
    """
    exercise = _gradients_exercise(
        "ddp.average",
        "comm, model, inputs, targets, batch_size",
        lambda rank, case: (*_share(rank, case), sum(_counts(case))),
        _AVERAGE_MISTAKES,
        lambda case: _Parts([[_share(rank, case)] for rank in range(case.world_size)]),
    )
    return grade(fn, exercise, world_sizes)


def accumulate(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, model, micro_batches, batch_size)``: one synchronisation an update.

    ``micro_batches`` are three pairs of inputs and targets, of 3, 2 and 1 samples. At the end each
    ``grad`` is the gradient of the mean over all B samples. Target: one ``ring_all_reduce`` a
    parameter, however many micro-batches there are.
    """
    exercise = _gradients_exercise(
        "ddp.accumulate",
        "comm, model, micro_batches, batch_size",
        lambda rank, case: (_micro_batches(rank), 6 * case.world_size),
        _ACCUMULATE_MISTAKES,
        lambda case: _Parts([_micro_batches(rank) for rank in range(case.world_size)]),
    )
    return grade(fn, exercise, world_sizes)


def sampler(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, num_samples, epoch, seed)``: this rank's samples, as DistributedSampler's.

    A list of indices: shuffled by ``seed + epoch``, padded by its beginning until P divides it,
    every P-th from this rank's number on. No message is sent.
    """
    exercise = Exercise(
        "ddp.sampler",
        _torch_samples,
        signature="comm, num_samples, epoch, seed",
        inputs=lambda rank, case: (case.size, _EPOCHS[case.size], _SEED),
        written=None,
        call=_indices_of,
        mistakes=_SAMPLER_MISTAKES,
        target=lambda rank, case: Target(messages=0),
        sizes=tuple(_EPOCHS),
    )
    return grade(fn, exercise, world_sizes)


# Buckets


def _backwards(sizes: tuple[int, ...], cap: int, first_cap: int) -> list[list[int]]:
    found = assign_buckets(sizes[::-1], cap, first_cap)
    return [[len(sizes) - 1 - index for index in bucket] for bucket in found]


def _closed_before(sizes: tuple[int, ...], cap: int, first_cap: int) -> list[list[int]]:
    """A bucket is closed when the next parameter would make it hold more than its cap."""
    found: list[list[int]] = [[]]
    for index in reversed(range(len(sizes))):
        limit = cap if len(found) > 1 else first_cap
        if found[-1] and sum(sizes[i] for i in found[-1]) + sizes[index] > limit:
            found.append([])
        found[-1].append(index)
    return found


_BUCKET_MISTAKES: dict[str, Callable[..., list]] = {
    "it goes forward: backward finds the last parameter's gradient first": _backwards,
    "the right buckets, but the first to leave comes last": (
        lambda *case: assign_buckets(*case)[::-1]
    ),
    "the right buckets, but inside one the last parameter comes first": (
        lambda *case: [sorted(bucket) for bucket in assign_buckets(*case)]
    ),
    "the first bucket has a cap of its own": lambda sizes, cap, _: assign_buckets(sizes, cap, cap),
    "the first bucket's cap is for the first bucket alone": (
        lambda sizes, _, first: assign_buckets(sizes, first, first)
    ),
    "a bucket is closed once it holds its cap or more, not before it would hold more": (
        _closed_before
    ),
    "a bucket that holds its cap is closed, and need not hold more": (
        lambda sizes, cap, first: assign_buckets(sizes, cap + 1, first + 1)
    ),
    "what is left at the end is a bucket, too": lambda *case: assign_buckets(*case)[:-1],
    "nothing is left at the end, and an empty bucket is none": (
        lambda *case: [*assign_buckets(*case), []]
    ),
}


# Gradients


def _model() -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    model = nn.Sequential(nn.Linear(_FEATURES, 5), nn.Tanh(), nn.Linear(5, _CLASSES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def _samples(rank: int, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(31 * rank + count)
    inputs = torch.randn(count, _FEATURES, generator=generator)
    return inputs, torch.randint(_CLASSES, (count,), generator=generator)


def _counts(case: Case) -> list[int]:
    return [*(5, 3, 2)[: case.world_size - 1], 0]


def _share(rank: int, case: Case) -> tuple[Tensor, Tensor]:
    return _samples(rank, _counts(case)[rank])


def _micro_batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    return [_samples(rank, count) for count in (3, 2, 1)]


def _gradients_of(fn: Callable, comm: Comm, *args: Any) -> list[Tensor]:
    """By parameter."""
    model = _model()
    fn(comm, model, *args)
    found = [parameter.grad for parameter in model.parameters()]
    if any(gradient is None for gradient in found):
        raise ValueError("a parameter has no gradient: a rank without samples brings zeros")
    if not all(gradient.isfinite().all() for gradient in found):
        raise ValueError("a gradient is NaN: was it divided by a share's number of samples, 0?")
    return found


def _one_ring_a_parameter(rank: int, case: Case) -> Target:
    sizes = [parameter.numel() for parameter in _model().parameters()]
    costs = [ring_all_reduce_cost(size, 4, case.world_size, rank) for size in sizes]
    return Target(sum(cost.messages for cost in costs), sum(cost.num_bytes for cost in costs))


def _sum_gradient(inputs: Tensor, targets: Tensor) -> Tensor:
    """[N], of the summed loss: all parameters in one row."""
    model = _model()
    functional.cross_entropy(model(inputs), targets, reduction="sum").backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def _by_parameter(row: Tensor) -> list[Tensor]:
    shapes = [parameter.shape for parameter in _model().parameters()]
    pieces = row.split([shape.numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes)]


class _Parts:
    """What a wrong gradient may be made of: the sums of each rank's parts, and their counts."""

    def __init__(self, parts: list[list[tuple[Tensor, Tensor]]]):
        self.sums = [[_sum_gradient(*part) for part in rank] for rank in parts]
        self.counts = [[len(targets) for _, targets in rank] for rank in parts]
        self.world_size = len(parts)
        self.batch_size = sum(map(sum, self.counts))
        self.total = self.over_ranks(self.own)
        self.due = self.total / self.batch_size

    def own(self, rank: int) -> Tensor:
        return sum(self.sums[rank])

    def own_mean(self, rank: int) -> Tensor:
        """The mean over the rank's samples, zeros where it has none."""
        return self.own(rank) / max(sum(self.counts[rank]), 1)

    def own_part_means(self, rank: int) -> Tensor:
        pairs = zip(self.sums[rank], self.counts[rank])
        return sum(total / max(count, 1) for total, count in pairs)

    def over_ranks(self, of: Callable[[int], Tensor]) -> Tensor:
        return sum(of(rank) for rank in range(self.world_size))

    def summed_each_time(self) -> Tensor:
        """Every micro-batch's gradient is added to what the ranks have summed before."""
        held = 0
        for each in zip(*self.sums):
            held = self.world_size * held + sum(each)
        return held


Mistakes = dict[str, Callable[[_Parts, int], Tensor]]


def _gradients_exercise(
    name: str,
    signature: str,
    inputs: Callable[[int, Case], tuple],
    mistakes: Mistakes,
    make_parts: Callable[[Case], _Parts],
) -> Exercise:
    parts_of = cache(make_parts)

    def leads_to(wrong: Callable[[_Parts, int], Tensor]) -> Callable[[int, Case], list[Tensor]]:
        return lambda rank, case: _by_parameter(wrong(parts_of(case), rank))

    return Exercise(
        name,
        leads_to(lambda parts, rank: parts.due),
        signature=signature,
        inputs=inputs,
        written=None,
        call=_gradients_of,
        mistakes={sentence: leads_to(wrong) for sentence, wrong in mistakes.items()},
        target=_one_ring_a_parameter,
        sizes=(),
    )


_COMMON_MISTAKES: Mistakes = {
    "it is the sum over the samples: divide by the samples of the global batch": (
        lambda parts, rank: parts.total
    ),
    "it is divided twice: by the samples and by the ranks": (
        lambda parts, rank: parts.due / parts.world_size
    ),
    "it holds this rank's own samples alone: nothing was summed over the ranks": (
        lambda parts, rank: parts.own(rank) / parts.batch_size
    ),
}
_AVERAGE_MISTAKES: Mistakes = _COMMON_MISTAKES | {
    "every rank counts alike, however many samples it has: a mean of means is not the mean": (
        lambda parts, rank: parts.over_ranks(parts.own_mean) / parts.world_size
    ),
    "it is a sum of the ranks' means": lambda parts, rank: parts.over_ranks(parts.own_mean),
    "it is divided by the number of ranks, where the samples count": (
        lambda parts, rank: parts.total / parts.world_size
    ),
    "it is the mean over this rank's own samples: nothing was summed over the ranks": (
        lambda parts, rank: parts.own_mean(rank)
    ),
    "it is the sum over this rank's own samples: nothing was summed over the ranks": (
        lambda parts, rank: parts.own(rank)
    ),
}
_ACCUMULATE_MISTAKES: Mistakes = _COMMON_MISTAKES | {
    "it is divided twice: by the samples and by the micro-batches": (
        lambda parts, rank: parts.due / 3
    ),
    "only the last micro-batch is in it: was the gradient zeroed in between": (
        lambda parts, rank: parts.over_ranks(lambda r: parts.sums[r][-1]) / parts.batch_size
    ),
    "the last micro-batch is not in it: sum over the ranks after its backward": (
        lambda parts, rank: (
            parts.over_ranks(lambda r: sum(parts.sums[r][:-1])) / parts.batch_size
            + parts.sums[rank][-1] / parts.batch_size
        )
    ),
    "the ranks sum after every micro-batch, and what they had summed before is summed again": (
        lambda parts, rank: parts.summed_each_time() / parts.batch_size
    ),
    "micro-batches count alike, however many samples they have": (
        lambda parts, rank: parts.over_ranks(parts.own_part_means) / 3 / parts.world_size
    ),
    "it is a sum of the micro-batches' means": (
        lambda parts, rank: parts.over_ranks(parts.own_part_means)
    ),
}


# The sampler


def _indices_of(fn: Callable, comm: Comm, *args: Any) -> list:
    """In a list, so that a wrong number of indices is a wrong value, and its mistake is named."""
    found = fn(comm, *args)
    return [found.tolist() if isinstance(found, Tensor) else found]


def _torch_samples(rank: int, case: Case) -> list[list[int]]:
    found = DistributedSampler(range(case.size), case.world_size, rank, seed=_SEED)
    found.set_epoch(_EPOCHS[case.size])
    return [list(found)]


def _order(case: Case, seed: int = _SEED) -> list[int]:
    """All samples, shuffled by ``seed + epoch`` and not padded."""
    generator = torch.Generator().manual_seed(seed + _EPOCHS[case.size])
    return torch.randperm(case.size, generator=generator).tolist()


def _dealt(rank: int, case: Case, order: list[int], padding: list[int] | None = None) -> list:
    missing = -case.size % case.world_size
    padded = order + ((padding or order) * missing)[:missing]
    return [padded[rank :: case.world_size]]


def _block(rank: int, case: Case) -> list[list[int]]:
    padded = list(chain(*zip(*(_dealt(r, case, _order(case))[0] for r in range(case.world_size)))))
    size = len(padded) // case.world_size
    return [padded[rank * size :][:size]]


_SAMPLER_MISTAKES: Mapping[str, Callable[[int, Case], list]] = {
    "the order is that of epoch 0: the seed of an epoch is seed + epoch": (
        lambda rank, case: _dealt(rank, case, _order(case, _SEED - _EPOCHS[case.size]))
    ),
    "the samples come in their own order: shuffle them": (
        lambda rank, case: _dealt(rank, case, list(range(case.size)))
    ),
    "one rank has a sample more than another, makes a step more, and waits for ever: pad until "
    "all have equally many": lambda rank, case: [_order(case)[rank :: case.world_size]],
    "the rest was dropped: pad, so that no sample is left out": (
        lambda rank, case: [
            _order(case)[rank : case.size - case.size % case.world_size][:: case.world_size]
        ]
    ),
    "the padding is other samples: it repeats the beginning of the shuffled order": (
        lambda rank, case: _dealt(rank, case, _order(case), padding=_order(case)[-1:])
    ),
    "the right samples, but rank r takes every P-th from number r on, and no block": _block,
    "each rank shuffles with another seed, so a sample is on two ranks, or on none": (
        lambda rank, case: _dealt(rank, case, _order(case, _SEED + rank))
    ),
    "they are another rank's: rank r takes every P-th from number r on": (
        lambda rank, case: _torch_samples((rank + 1) % case.world_size, case)
    ),
    "the right samples in another order": (
        lambda rank, case: [sorted(*_torch_samples(rank, case))]
    ),
}
