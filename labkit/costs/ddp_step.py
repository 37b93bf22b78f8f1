"""A predicted step of DDP: backward, and at the same time the all-reduces of its buckets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from labkit.costs.link import Link, all_reduce_seconds
from labkit.schedules.bucket_assignment import assign_buckets


class BucketTimes(NamedTuple):
    """The seconds at which a bucket has all its gradients, and its all-reduce starts and ends."""

    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StepModel:
    """A predicted training step.

    Attributes:
        backward_s: seconds of backward; it begins at second 0.
        buckets: parameter indices by bucket, in the order in which they are sent.
        times: when each bucket is ready, starts and ends.
    """

    backward_s: float
    buckets: list[list[int]]
    times: list[BucketTimes]

    @property
    def step_s(self) -> float:
        """Seconds from the start of backward until it and the last bucket have ended."""
        return max([self.backward_s, *(time.end_s for time in self.times)])

    @property
    def exposed_s(self) -> float:
        """Seconds of communication that no computation hides: those after the end of backward."""
        return self.step_s - self.backward_s


def predict_step(
    sizes_bytes: Sequence[int],
    gradient_s: Sequence[float],
    cap_bytes: float,
    world_size: int,
    link: Link,
) -> StepModel:
    """The alpha-beta model of a step of DDP: one ring all-reduce per bucket, during backward.

    It assumes that communication does not slow down computation. ``gradient_s`` is, by parameter,
    the second of backward at which its gradient is computed; ``sizes_bytes`` and ``cap_bytes`` are
    as for ``assign_buckets``.
    """
    buckets = assign_buckets(sizes_bytes, cap_bytes)
    reduce_s = []
    for bucket in buckets:
        bucket_bytes = sum(sizes_bytes[index] for index in bucket)
        reduce_s.append(all_reduce_seconds("ring", bucket_bytes, world_size, link))
    times = bucket_times(buckets, gradient_s, reduce_s)
    return StepModel(max(gradient_s, default=0.0), buckets, times)


def samples_that_hide(num_bytes: float, world_size: int, link: Link, sample_s: float) -> float:
    """Samples per rank from which backward is as long as the ring all-reduce of S bytes beside it.

    T(S, P) <= 2/3 c b, solved for b. ``sample_s`` is c, seconds of forward and backward for a
    sample; backward takes two thirds of them, having two products where forward has one.
    """
    return all_reduce_seconds("ring", num_bytes, world_size, link) / (2 / 3 * sample_s)


def bucket_times(
    buckets: Sequence[Sequence[int]], gradient_s: Sequence[float], reduce_s: Sequence[float]
) -> list[BucketTimes]:
    """The times of each bucket, whose all-reduce takes ``reduce_s``.

    A bucket is ready with its last gradient. It starts once the bucket before it has ended too,
    because all ranks must reduce the buckets in the same order.
    """
    times: list[BucketTimes] = []
    free_s = 0.0
    for bucket, seconds in zip(buckets, reduce_s, strict=True):
        ready_s = max(gradient_s[index] for index in bucket)
        start_s = max(ready_s, free_s)
        free_s = start_s + seconds
        times.append(BucketTimes(ready_s, start_s, free_s))
    return times
