"""Steps of which ``check.elsewhere.semantics`` asks what they do, and ways to confuse them.

Each is one update of a model with one weight, and of a BatchNorm layer with one channel that sees
the same samples. The conventions are those of Horovod and PyTorch's DDP (the mean of the
replicas' mean gradients, or with ``op=Sum`` their sum; statistics of the rank's own or, in DDP, of
rank 0), of TensorFlow's strategies (a sum, which is a mean over the batch if losses are divided
by the size of the batch; the mean of the replicas' statistics), and of SyncBatchNorm.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from random import Random
from statistics import fmean

GRADIENTS = ("mean of means", "mean over the batch", "sum of means")
STATISTICS = ("own", "rank 0", "mean of replicas", "whole batch")
# P shares -> how far the weight has moved, and the running mean on each replica.
Step = Callable[[Sequence[Sequence[float]]], tuple[float, list[float]]]
Confusion = Callable[..., tuple[str, ...]]


def new_steps(random: Random) -> dict[Step, tuple[str, str]]:
    """A step -> (gradients, statistics), for all pairs; the order and the rates are random."""
    pairs = list(itertools.product(GRADIENTS, STATISTICS))
    random.shuffle(pairs)
    rates = [(random.uniform(0.1, 0.9), random.uniform(0.1, 0.9)) for _ in pairs]
    return {step_of(*pair, *both): pair for pair, both in zip(pairs, rates)}


def step_of(gradients: str, statistics: str, lr: float = 1.0, momentum: float = 1.0) -> Step:
    """One update, always from the same start: a weight and a running mean of 0."""

    def step(shares: Sequence[Sequence[float]]) -> tuple[float, list[float]]:
        numbers = [[float(sample) for sample in share] for share in shares]
        if not numbers or not all(numbers):
            raise ValueError(f"step({shares!r}): a replica needs a share of one sample or more")
        means = [fmean(share) for share in numbers]
        of_batch = fmean(itertools.chain(*numbers))
        moved = dict(zip(GRADIENTS, (fmean(means), of_batch, sum(means))))
        kept = dict(zip(STATISTICS, (means, means[:1], [fmean(means)], [of_batch])))
        by_replica = kept[statistics] * (1 if statistics == "own" else len(means))
        return lr * moved[gradients], [momentum * mean for mean in by_replica]

    return step


def _confusions() -> Iterator[tuple[str, Confusion]]:
    yield "semantics.swapped", lambda gradients, statistics: (statistics, gradients)
    for pair in itertools.product(GRADIENTS, STATISTICS):
        yield "semantics.constant", lambda *_, pair=pair: pair
    for one, other in (STATISTICS[:2], STATISTICS[1::-1]):
        yield "semantics.first_replica", _taken(("", ""), (one, other))
    of_gradients = [("", ""), GRADIENTS[:2], GRADIENTS[1::-1]]
    of_statistics = [("", ""), STATISTICS[2:], STATISTICS[:1:-1]]
    for pairs in itertools.product(of_gradients, of_statistics):
        if any(map(any, pairs)):
            yield "semantics.equal_shares", _taken(*pairs)


def _taken(*pairs: Sequence[str]) -> Confusion:
    """As if the first of a pair were the second, of gradients and of statistics."""
    return lambda *right: tuple(b if x == a else x for x, (a, b) in zip(right, pairs))


# A mistake's id, and what it answers where (gradients, statistics) is right.
CONFUSIONS = tuple(_confusions())
