"""A step of DDP on paper: backward, and its buckets on one link beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from labkit.costs.link import Link
from labkit.costs.seconds import all_reduce_seconds
from labkit.schedules.buckets import assign_buckets


class BucketTimes(NamedTuple):
    """One bucket's way: all its gradients are there, the link takes it up, and is done with it."""

    ready_s: float
    start_s: float
    end_s: float


def bucket_times(
    buckets: Sequence[Sequence[int]], gradient_s: Sequence[float], carry_s: Sequence[float]
) -> list[BucketTimes]:
    """The timetable of a backward pass whose buckets leave in order, one after the other.

    Args:
        buckets: indices of the parameters, as ``assign_buckets`` returns them.
        gradient_s: by parameter, when its gradient is there.
        carry_s: by bucket, how long its all-reduce takes.

    Returns:
        By bucket: ready with its last gradient; started when it is ready and the one before has
        ended, since all ranks must reduce them in the same order.
    """
    times: list[BucketTimes] = []
    free_s = 0.0
    for bucket, seconds in zip(buckets, carry_s, strict=True):
        ready_s = max(gradient_s[index] for index in bucket)
        start_s = max(ready_s, free_s)
        free_s = start_s + seconds
        times.append(BucketTimes(ready_s, start_s, free_s))
    return times


@dataclass(frozen=True)
class StepModel:
    """A training step on paper: forward, backward, and buckets on one link.

    Attributes:
        backward_s: seconds of backward; it begins at second 0.
        buckets: indices of the parameters, by bucket, as they leave.
        bucket_bytes: of each bucket.
        times: the way of each bucket.
        step_s: from the start of backward until it and the last bucket are over.
    """

    backward_s: float
    buckets: list[list[int]]
    bucket_bytes: list[int]
    times: list[BucketTimes]
    step_s: float

    @property
    def exposed_s(self) -> float:
        """Communication that nothing hides: what the step takes beyond backward."""
        return self.step_s - self.backward_s


def predict_step(
    sizes_bytes: Sequence[int],
    gradient_s: Sequence[float],
    cap_bytes: float,
    world_size: int,
    link: Link,
) -> StepModel:
    """The alpha-beta model of one step of DDP: a ring all-reduce a bucket, beside backward.

    It takes for granted that communication costs the computing nothing, which holds where a
    network card or a free core does it.

    Args:
        sizes_bytes: of the parameters, as the model registers them.
        gradient_s: by parameter, when backward has its gradient.
        cap_bytes: of a bucket, see ``assign_buckets``.
        world_size: P.
        link: between two ranks, ``labkit.costs.link.Link``.
    """
    buckets = assign_buckets(sizes_bytes, cap_bytes)
    bucket_bytes = [sum(sizes_bytes[index] for index in bucket) for bucket in buckets]
    carry_s = [all_reduce_seconds("ring", size, world_size, link) for size in bucket_bytes]
    times = bucket_times(buckets, gradient_s, carry_s)
    backward_s = max(gradient_s, default=0.0)
    step_s = max([backward_s, *(time.end_s for time in times)])
    return StepModel(backward_s, buckets, bucket_bytes, times, step_s)
