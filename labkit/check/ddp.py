"""The checks of page 03: buckets, gradients of uneven shares, a sampler, accumulation.

Symbols: P ranks, B samples in the global batch.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import chain, islice
from operator import index
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DistributedSampler, TensorDataset

from labkit.check.grading import WORLD_SIZES, Case, Mistake, Target, Verdict, answers, returns
from labkit.check.grading.exercise import with_parameters
from labkit.comm.comm import Comm
from labkit.costs.traffic import ring_all_reduce_cost
from labkit.schedules.bucket_assignment import assign_buckets

# Sizes of parameters, cap, cap of the first bucket. No parameter fills a bucket by itself.
_BUCKETINGS = (
    ([1, 1, 1, 1, 1, 1, 1], 4, 2),
    ([4, 2, 3, 1, 2], 5, 5),
    ([1, 3, 2, 3, 3, 3], 7, 4),
    ([2, 2], 9, 9),
    ([3], 9, 8),
    ([500, 300, 900, 100, 700, 400, 200, 600, 100], 1100, 1000),
)
# The sampler's epoch and seed by number of samples: not every P divides 10 and 7, and 1 is fewer
# than P.
_EPOCHS = {10: (1, 5), 12: (0, 8), 7: (2, 3), 1: (0, 5)}
# Every parameter's size is divisible by every P, so that one ring for all of them sends the same
# number of bytes as one for each.
_FEATURES, _HIDDEN, _CLASSES = 4, 12, 12
_MOST_ENTRIES = 1000


def buckets(fn: Callable) -> Verdict:
    """Grade ``fn(sizes_bytes, cap_bytes, first_cap_bytes)``: PyTorch's rule, as lists of indices.

    Runs in this process.
    """
    expected = [(case, assign_buckets(*case)) for case in _BUCKETINGS]
    names = "sizes_bytes, cap_bytes, first_cap_bytes"
    options = {"signature": names, "mistakes": _BUCKET_MISTAKES, "kind": _lists}
    return answers(fn, expected, name="ddp.buckets", **options)


def average(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, model, inputs, targets, batch_size)``: the backward of a naive DDP.

    At the end each parameter's ``grad`` is the gradient of the mean loss over the B samples of
    all ranks. The shares have 5, 3 and 2 samples, that of the last rank none. Target: one
    ``ring_all_reduce`` per parameter.
    """
    return _gradients_right(
        fn,
        _AVERAGE_MISTAKES,
        lambda rank, case: [_share(rank, case)],
        name="ddp.average",
        signature="comm, model, inputs, targets, batch_size",
        inputs=lambda rank, case: (*_share(rank, case), sum(_counts(case))),
        world_sizes=world_sizes,
    )


def accumulate(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, model, micro_batches, batch_size)``: one synchronisation per update.

    ``micro_batches`` are three pairs of inputs and targets, of 3, 2 and 1 samples. At the end each
    ``grad`` is the gradient of the mean over all B samples. Target: one ``ring_all_reduce`` per
    parameter, however many micro-batches there are.
    """
    return _gradients_right(
        fn,
        _ACCUMULATE_MISTAKES,
        lambda rank, case: _micro_batches(rank),
        name="ddp.accumulate",
        signature="comm, model, micro_batches, batch_size",
        inputs=lambda rank, case: (_micro_batches(rank), 6 * case.world_size),
        world_sizes=world_sizes,
    )


def sampler(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, num_samples, epoch, seed)``: the rank's samples, as in DistributedSampler.

    All indices are shuffled by ``seed + epoch`` and padded with their beginning until P divides
    their number; rank r takes every P-th, from position r on. Target: no messages.
    """
    return returns(
        fn,
        _torch_samples,
        name="ddp.sampler",
        signature="comm, num_samples, epoch, seed",
        inputs=lambda rank, case: (case.size, *_EPOCHS[case.size]),
        call=_indices_of,
        mistakes=_SAMPLER_MISTAKES,
        target=lambda rank, case: Target(messages=0),
        sizes=tuple(_EPOCHS),
        nouns=("rank", "sample"),
        world_sizes=world_sizes,
    )


# Buckets


def _lists(found: Any) -> Any:
    """Lists of integers, also of an array, a tuple or a generator; anything else as it is."""
    plain: Any = found.tolist() if isinstance(found, Tensor) else found
    if isinstance(plain, Iterable) and not isinstance(plain, str):
        # An endless generator must not hang the check.
        return [_lists(entry) for entry in islice(plain, _MOST_ENTRIES)]
    return index(plain) if isinstance(plain, SupportsIndex) else plain


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


_BUCKET_MISTAKES: dict[str, Callable[..., list]] = {
    "buckets.forward": _first_to_last,
    "buckets.order": lambda *case: assign_buckets(*case)[::-1],
    "buckets.order_inside": lambda *case: [sorted(bucket) for bucket in assign_buckets(*case)],
    "buckets.first_cap": lambda sizes, cap, _: assign_buckets(sizes, cap, cap),
    "buckets.first_cap_for_all": lambda sizes, _, first: assign_buckets(sizes, first, first),
    "buckets.closed_before": _closed_before,
    "buckets.closed_late": lambda sizes, cap, first: assign_buckets(sizes, cap + 1, first + 1),
    "buckets.rest_lost": lambda *case: assign_buckets(*case)[:-1],
    "buckets.empty": lambda *case: [*assign_buckets(*case), []],
}


# Gradients


def _model() -> nn.Module:
    layers = nn.Sequential(nn.Linear(_FEATURES, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, _CLASSES))
    return with_parameters(layers, 7)


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


def _sum_gradient(inputs: Tensor, targets: Tensor) -> Tensor:
    """The gradient of the summed loss, [N]: all parameters in one row."""
    model = _model()
    loss = functional.cross_entropy(model(inputs), targets, reduction="sum")
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def _by_parameter(row: Tensor) -> list[Tensor]:
    shapes = [parameter.shape for parameter in _model().parameters()]
    pieces = row.split([shape.numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes)]


# (rank, case) -> the inputs and targets of each part of the rank's share.
PartsOfRank = Callable[[int, Case], list[tuple[Tensor, Tensor]]]


class _Parts:
    """What a wrong gradient may be made of.

    Attributes:
        sums: by rank [parts, N], the gradient of the summed loss of each part.
        counts: by rank and part, the number of samples.
        total: [N], the sum over all ranks.
        due: [N], the gradient of the mean loss.
    """

    def __init__(self, case: Case, of_rank: PartsOfRank):
        parts = [of_rank(rank, case) for rank in range(case.world_size)]
        self.sums = [torch.stack([_sum_gradient(*part) for part in rank]) for rank in parts]
        self.counts = [[len(targets) for _, targets in rank] for rank in parts]
        self.world_size, self.over_ranks = case.world_size, case.over_ranks
        self.batch_size = sum(map(sum, self.counts))
        self.total = self.over_ranks(self.own)
        self.due = self.total / self.batch_size

    def own(self, rank: int) -> Tensor:
        return self.sums[rank].sum(0)

    def own_last(self, rank: int) -> Tensor:
        return self.sums[rank][-1]

    def own_mean(self, rank: int) -> Tensor:
        """The mean over the rank's samples, zeros where it has none."""
        return self.own(rank) / max(sum(self.counts[rank]), 1)

    def own_part_means(self, rank: int) -> Tensor:
        counts = torch.tensor(self.counts[rank]).clamp(min=1)
        return (self.sums[rank] / counts.unsqueeze(1)).sum(0)

    def summed_each_time(self) -> Tensor:
        """The gradient after an all-reduce per micro-batch that includes the sums before it."""
        held = torch.zeros_like(self.total)
        for each in torch.stack(self.sums, dim=1):
            held = self.world_size * held + each.sum(0)
        return held


Mistakes = dict[str, Callable[[_Parts, int], Tensor]]


def _gradients_right(
    fn: Callable, mistakes: Mistakes, of_rank: PartsOfRank, **more: Any
) -> Verdict:
    parts_of = cache(lambda case: _Parts(case, of_rank))

    def leads_to(wrong: Callable[[_Parts, int], Tensor]) -> Callable[[int, Case], list[Tensor]]:
        return lambda rank, case: _by_parameter(wrong(parts_of(case), rank))

    return returns(
        fn,
        leads_to(lambda parts, rank: parts.due),
        call=_gradients_of,
        mistakes={id: leads_to(wrong) for id, wrong in mistakes.items()},
        target=_one_ring_per_parameter,
        **more,
    )


# p are the parts, r the rank.
_COMMON_MISTAKES: Mistakes = {
    "gradient.sum": lambda p, r: p.total,
    "gradient.twice_by_ranks": lambda p, r: p.due / p.world_size,
    "gradient.own_share": lambda p, r: p.own(r) / p.batch_size,
}
_AVERAGE_MISTAKES: Mistakes = _COMMON_MISTAKES | {
    "gradient.mean_of_means": lambda p, r: p.over_ranks(p.own_mean) / p.world_size,
    "gradient.sum_of_means": lambda p, r: p.over_ranks(p.own_mean),
    "gradient.over_ranks": lambda p, r: p.total / p.world_size,
    "gradient.own_mean": lambda p, r: p.own_mean(r),
    "gradient.own_sum": lambda p, r: p.own(r),
}
_ACCUMULATE_MISTAKES: Mistakes = _COMMON_MISTAKES | {
    "gradient.twice_by_micro_batches": lambda p, r: p.due / 3,
    "gradient.last_only": lambda p, r: p.over_ranks(p.own_last) / p.batch_size,
    "gradient.last_missing": (
        lambda p, r: (p.total - p.over_ranks(p.own_last) + p.own_last(r)) / p.batch_size
    ),
    "gradient.without_last": lambda p, r: (p.total - p.over_ranks(p.own_last)) / p.batch_size,
    "gradient.over_own": lambda p, r: p.total / sum(p.counts[r]),
    "gradient.summed_again": lambda p, r: p.summed_each_time() / p.batch_size,
    "gradient.micro_batches_alike": (
        lambda p, r: p.over_ranks(p.own_part_means) / 3 / p.world_size
    ),
    "gradient.sum_of_micro_means": lambda p, r: p.over_ranks(p.own_part_means),
}


# The sampler


def _indices_of(fn: Callable, comm: Comm, *args: Any) -> list | Mistake:
    """The indices as the only entry of a list: a wrong number of them is then a wrong value."""
    found = _lists(fn(comm, *args))
    for entry in found if isinstance(found, list) else []:
        if not isinstance(entry, int):
            return Mistake("sampler.kind", entry=entry)
    return [found]


def _torch_samples(rank: int, case: Case) -> list[list[int]]:
    epoch, seed = _EPOCHS[case.size]
    found = DistributedSampler(
        TensorDataset(torch.empty(case.size)), case.world_size, rank, seed=seed
    )
    found.set_epoch(epoch)
    return [list(found)]


def _order(case: Case, epoch: int | None = None, more: int = 0) -> list[int]:
    """All samples, shuffled by ``seed + epoch + more`` and not padded."""
    own_epoch, seed = _EPOCHS[case.size]
    epoch = own_epoch if epoch is None else epoch
    generator = torch.Generator().manual_seed(seed + epoch + more)
    return torch.randperm(case.size, generator=generator).tolist()


def _dealt(rank: int, case: Case, order: list[int], padding: list[int] | None = None) -> list:
    missing = -case.size % case.world_size
    padded = order + ((padding or order) * missing)[:missing]
    return [padded[rank :: case.world_size]]


def _block(rank: int, case: Case) -> list[list[int]]:
    padded = list(chain(*zip(*(_dealt(r, case, _order(case))[0] for r in range(case.world_size)))))
    size = len(padded) // case.world_size
    return [padded[rank * size :][:size]]


# r is the rank, c the case.
_SAMPLER_MISTAKES: Mapping[str, Callable[[int, Case], list]] = {
    "sampler.epoch": lambda r, c: _dealt(r, c, _order(c, epoch=0)),
    "sampler.not_shuffled": lambda r, c: _dealt(r, c, list(range(c.size))),
    "sampler.not_padded": lambda r, c: [_order(c)[r :: c.world_size]],
    "sampler.dropped": (
        lambda r, c: [_order(c)[r : c.size - c.size % c.world_size][:: c.world_size]]
    ),
    "sampler.padding": lambda r, c: _dealt(r, c, _order(c), padding=_order(c)[-1:]),
    "sampler.block": _block,
    "sampler.seed_by_rank": lambda r, c: _dealt(r, c, _order(c, more=r)),
    "sampler.other_rank": lambda r, c: _torch_samples((r + 1) % c.world_size, c),
    "sampler.order": lambda r, c: [sorted(*_torch_samples(r, c))],
}
