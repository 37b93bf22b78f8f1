"""The checks of page 03: buckets, gradients of uneven shares, a sampler, accumulation.

Symbols: P ranks, B samples in the global batch.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DistributedSampler

from labkit.buckets import assign_buckets
from labkit.checks.compare import same
from labkit.checks.core import WORLD_SIZES, grade
from labkit.checks.exercise import Case, Exercise, Target
from labkit.checks.plain import from_a_stub
from labkit.checks.report import NOT_ATTEMPTED, NOT_YET, PASSED, Verdict, no_function, told
from labkit.comm import Comm
from labkit.costs import ring_all_reduce_cost

# Sizes of parameters, cap, cap of the first bucket. No parameter fills a bucket by itself.
_BUCKETINGS = (
    ((1, 1, 1, 1, 1, 1), 3, 2),
    ((4, 2, 3, 1, 2), 5, 5),
    ((1, 6, 2, 5, 3, 3), 7, 4),
    ((2, 2), 9, 9),
)
# (samples, epoch) of the sampler's calls: 10 and 7 do not divide by every P, 1 is fewer than P.
_EPOCHS = ((10, 0), (10, 1), (12, 0), (7, 2), (1, 0))
_SEED = 5
_FEATURES, _CLASSES = 4, 3


def buckets(fn: Callable) -> Verdict:
    """Grade ``fn(sizes_bytes, cap_bytes, first_cap_bytes)``: PyTorch's rule, as lists of indices.

    Runs in this process: no ranks are needed.
    """
    return told("ddp.buckets", lambda: _judge_buckets(fn, "ddp.buckets"))


def average(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, model, inputs, targets, batch_size)``: a naive DDP's backward.

    At the end each parameter's ``grad`` is the gradient of the mean loss over the B samples of
    all ranks. Shares have 5, 3 and 2 samples, the last rank's none. Target: one
    ``ring_all_reduce`` a parameter.
    """
    exercise = Exercise(
        "ddp.average",
        signature="comm, model, inputs, targets, batch_size",
        inputs=lambda rank, case: (*_share(rank, case), _batch_size(case)),
        written=None,
        call=_gradients_of,
        judge=partial(_judge_gradients, mistakes=_AVERAGE_MISTAKES),
        target=_one_ring_a_parameter,
        sizes=(),
    )
    return grade(fn, exercise, world_sizes)


def accumulate(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, model, micro_batches, batch_size)``: one synchronisation an update.

    ``micro_batches`` are three pairs of inputs and targets, of 3, 2 and 1 samples. At the end each
    ``grad`` is the gradient of the mean over all B samples. Target: one ``ring_all_reduce`` a
    parameter, however many micro-batches there are.
    """
    exercise = Exercise(
        "ddp.accumulate",
        signature="comm, model, micro_batches, batch_size",
        inputs=lambda rank, case: (_micro_batches(rank), 6 * case.world_size),
        written=None,
        call=_gradients_of,
        judge=partial(_judge_gradients, mistakes=_ACCUMULATE_MISTAKES),
        target=_one_ring_a_parameter,
        sizes=(),
    )
    return grade(fn, exercise, world_sizes)


def sampler(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, num_samples, epoch, seed)``: this rank's samples, as DistributedSampler's.

    A list of indices: shuffled by ``seed + epoch``, padded by its beginning until P divides it,
    every P-th from this rank's number on. No message is sent.
    """
    exercise = Exercise(
        "ddp.sampler",
        signature="comm, num_samples, epoch, seed",
        inputs=lambda rank, case: (0, 0, _SEED),
        written=None,
        call=_all_epochs,
        judge=_judge_sampler,
        target=lambda rank, case: Target(messages=0),
        sizes=(),
    )
    return grade(fn, exercise, world_sizes)


# Buckets


def _judge_buckets(fn: Callable, name: str) -> Verdict:
    if not callable(fn):
        return Verdict(name, NOT_YET, notes=[no_function(fn)])
    found = []
    for sizes, cap, first_cap in _BUCKETINGS:
        call = f"{getattr(fn, '__name__', 'yours')}({list(sizes)}, {cap}, {first_cap})"
        try:
            found.append([list(bucket) for bucket in fn(list(sizes), cap, first_cap)])
        except Exception as error:
            if from_a_stub(error):
                return Verdict(name, NOT_ATTEMPTED)
            note = f"{call} raised {type(error).__name__}: {error}"
            return Verdict(name, NOT_YET, notes=[note])
        due = assign_buckets(sizes, cap, first_cap)
        if found[-1] != due:
            story = _bucket_mistake(sizes, found[-1], cap, first_cap)
            note = f"{call} is {due}, and yours says {found[-1]}: {story}"
            return Verdict(name, NOT_YET, notes=[note])
    return Verdict(name, PASSED, notes=[f"all {len(found)} assignments are right"])


def _bucket_mistake(sizes: tuple[int, ...], found: list, cap: int, first_cap: int) -> str:
    """What is wrong with an assignment, in words."""
    due, count = assign_buckets(sizes, cap, first_cap), Counter(chain(*found))
    forward = assign_buckets(sizes[::-1], cap, first_cap)
    if missing := [i for i in range(len(sizes)) if i not in count]:
        return f"parameter {missing[0]} is in no bucket; was the last one closed?"
    if twice := [i for i, times in count.items() if times > 1]:
        return f"parameter {twice[0]} is in two buckets"
    if found == due[::-1]:
        return "the right buckets, but the first to leave comes last"
    if [sorted(bucket) for bucket in found] == [sorted(bucket) for bucket in due]:
        return "the right buckets, but inside one the last parameter comes first"
    if found == [[len(sizes) - 1 - i for i in bucket] for bucket in forward]:
        return "it goes forward: backward finds the last parameter's gradient first"
    if found == assign_buckets(sizes, cap, cap):
        return "the first bucket has a cap of its own"
    if found == assign_buckets(sizes, first_cap, first_cap):
        return "the first bucket's cap is for the first bucket alone"
    if any(
        sum(sizes[i] for i in b) > (cap if n else first_cap) for n, b in enumerate(due)
    ) and all(sum(sizes[i] for i in b) <= (cap if n else first_cap) for n, b in enumerate(found)):
        return "a bucket is closed once it holds its cap or more, not before it would hold more"
    return "a bucket is closed as soon as it holds its cap or more"


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


def _num_samples(rank: int, case: Case) -> int:
    return 0 if rank == case.world_size - 1 else (5, 3, 2)[rank]


def _batch_size(case: Case) -> int:
    return sum(_num_samples(rank, case) for rank in range(case.world_size))


def _share(rank: int, case: Case) -> tuple[Tensor, Tensor]:
    return _samples(rank, _num_samples(rank, case))


def _micro_batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    return [_samples(rank, count) for count in (3, 2, 1)]


def _gradients_of(fn: Callable, comm: Comm, *args: Any) -> Tensor | None:
    """All gradients in one row [N]; None where a parameter has none."""
    model = _model()
    fn(comm, model, *args)
    found = [parameter.grad for parameter in model.parameters()]
    return None if any(g is None for g in found) else torch.cat([g.flatten() for g in found])


def _one_ring_a_parameter(rank: int, case: Case) -> Target:
    sizes = [parameter.numel() for parameter in _model().parameters()]
    costs = [ring_all_reduce_cost(size, 4, case.world_size, rank) for size in sizes]
    return Target(sum(cost.messages for cost in costs), sum(cost.num_bytes for cost in costs))


def _sum_gradient(inputs: Tensor, targets: Tensor) -> Tensor:
    """[N], of the summed loss."""
    model = _model()
    functional.cross_entropy(model(inputs), targets, reduction="sum").backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


class _Parts:
    """What a wrong gradient may be made of: the sums of each rank's parts, and their counts."""

    def __init__(self, parts: list[list[tuple[Tensor, Tensor]]]):
        self.sums = [[_sum_gradient(*part) for part in rank] for rank in parts]
        self.counts = [[len(targets) for _, targets in rank] for rank in parts]
        self.world_size = len(parts)
        self.batch_size = sum(map(sum, self.counts))
        self.total = self.over_ranks(self.own)

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


Mistakes = Mapping[str, Callable[[_Parts, int], Tensor]]

_AVERAGE_MISTAKES: Mistakes = {
    "it is the sum over the samples: divide by the samples of the global batch": (
        lambda parts, rank: parts.total
    ),
    "every rank counts alike, however many samples it has: a mean of means is not the mean": (
        lambda parts, rank: parts.over_ranks(parts.own_mean) / parts.world_size
    ),
    "it is a sum of the ranks' means": lambda parts, rank: parts.over_ranks(parts.own_mean),
    "it is divided by the number of ranks, where the samples count": (
        lambda parts, rank: parts.total / parts.world_size
    ),
    "it is divided twice: by the samples and by the ranks": (
        lambda parts, rank: parts.total / parts.batch_size / parts.world_size
    ),
    "it holds this rank's own samples alone: nothing was summed over the ranks": (
        lambda parts, rank: parts.own(rank) / parts.batch_size
    ),
    "it is the mean over this rank's own samples: nothing was summed over the ranks": (
        lambda parts, rank: parts.own_mean(rank)
    ),
    "it is the sum over this rank's own samples: nothing was summed over the ranks": (
        lambda parts, rank: parts.own(rank)
    ),
}
_ACCUMULATE_MISTAKES: Mistakes = {
    "it is the sum over the samples: divide by the samples of the global batch": (
        lambda parts, rank: parts.total
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
    "it holds this rank's own samples alone: nothing was summed over the ranks": (
        lambda parts, rank: parts.own(rank) / parts.batch_size
    ),
    "it is divided twice: by the samples and by the ranks": (
        lambda parts, rank: parts.total / parts.batch_size / parts.world_size
    ),
}


@cache
def _parts_of(world_size: int, accumulated: bool) -> _Parts:
    ranks, case = range(world_size), Case(world_size, 0)
    if accumulated:
        return _Parts([_micro_batches(rank) for rank in ranks])
    return _Parts([[_share(rank, case)] for rank in ranks])


def _judge_gradients(case: Case, values: list[Any], mistakes: Mistakes) -> str | None:
    """What is wrong with the ranks' gradients, in a sentence."""
    parts = _parts_of(case.world_size, mistakes is _ACCUMULATE_MISTAKES)
    due = parts.total / parts.batch_size
    for rank, value in enumerate(values):
        if value is None:
            return (
                f"on rank {rank} a parameter has no gradient: a rank without samples brings zeros"
            )
    bad = [rank for rank, value in enumerate(values) if not same(value, due)]
    if not bad:
        return None
    for sentence, wrong in mistakes.items():
        if all(same(value, wrong(parts, rank)) for rank, value in enumerate(values)):
            return sentence
    first = values[bad[0]]
    if not torch.isfinite(first).all():
        return f"rank {bad[0]} has NaN: was something divided by its own number of samples, 0"
    if len(bad) < case.world_size:
        return (
            f"rank {bad[0]} is the first that is wrong, and {case.world_size - len(bad)} are right"
        )
    ratio = (first.norm() / due.norm()).item()
    return f"rank {bad[0]}'s gradient is {ratio:.3g} times as long as it should be"


# The sampler


def _all_epochs(fn: Callable, comm: Comm, _num_samples: int, _epoch: int, seed: int) -> list:
    return [fn(comm, count, epoch, seed) for count, epoch in _EPOCHS]


def _judge_sampler(case: Case, values: list[Any]) -> str | None:
    """What is wrong with the ranks' samples, in a sentence: the first call that is wrong."""
    for call, (count, epoch) in enumerate(_EPOCHS):
        mine = [value[call] for value in values]
        start = f"{count} samples, epoch {epoch}"
        for rank, indices in enumerate(mine):
            if isinstance(indices, Tensor):
                mine[rank] = indices = indices.tolist()
            if not isinstance(indices, list) or not all(isinstance(i, int) for i in indices):
                return f"rank {rank} returns {indices!r:.40}, where a list of indices is due"
        due = [_torch_samples(rank, case.world_size, count, epoch) for rank in range(len(mine))]
        if mine != due:
            return f"{start}: {_sampler_mistake(mine, due, count, epoch, case.world_size)}"
    return None


def _torch_samples(rank: int, world_size: int, count: int, epoch: int) -> list[int]:
    found = DistributedSampler(range(count), world_size, rank, shuffle=True, seed=_SEED)
    found.set_epoch(epoch)
    return list(found)


def _sampler_mistake(
    mine: list[list[int]], due: list[list[int]], count: int, epoch: int, world_size: int
) -> str:
    lengths = [len(indices) for indices in mine]
    everything = Counter(index for indices in mine for index in indices)
    if len(set(lengths)) > 1:
        return (
            f"the ranks have {lengths} samples. One would make a step more than another, and wait "
            "for ever: pad until all have equally many"
        )
    if wrong := [index for index in everything if not 0 <= index < count]:
        return f"there is no sample {wrong[0]}"
    if mine == [_torch_samples(rank, world_size, count, 0) for rank in range(world_size)]:
        return f"the order is that of epoch 0: the seed of epoch {epoch} is seed + epoch"
    if mine == _unshuffled(count, world_size):
        return "the samples come in their own order: shuffle them"
    if missing := [index for index in range(count) if index not in everything]:
        dropped = len(missing) < world_size and sum(lengths) < count
        reason = "the rest was dropped" if dropped else "do all ranks shuffle with the same seed"
        return f"sample {missing[0]} is on no rank: {reason}"
    if sorted(chain(*mine)) == sorted(chain(*due)):
        if [sorted(indices) for indices in mine] == [sorted(indices) for indices in due]:
            return "every rank has the right samples in another order"
        return "the right samples, but rank r takes every P-th from number r on, and no block"
    if sum(lengths) == sum(map(len, due)):
        return "the padding is other samples: it repeats the beginning of the shuffled order"
    return f"rank 0 has {mine[0]}, where {due[0]} is due"


def _unshuffled(count: int, world_size: int) -> list[list[int]]:
    ranks = range(world_size)
    return [list(DistributedSampler(range(count), world_size, r, shuffle=False)) for r in ranks]
