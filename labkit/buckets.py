"""Buckets of gradients: which parameters travel together, and when. Pure, no torch.

Backward finds the gradients from the last layer to the first. A message has a price of its own
(alpha), so gradients are sent in buckets; but a bucket can leave only when its last gradient is
there, so one bucket for all would leave when there is nothing left to compute beside it.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
(2020), sections 3.2.2 and 3.2.3.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from labkit.costs import Link, all_reduce_seconds

MIB = 2**20
# Small, so that communication begins early; PyTorch's figure.
FIRST_BUCKET_BYTES = MIB


def assign_buckets(
    sizes_bytes: Sequence[int],
    cap_bytes: float,
    first_cap_bytes: float = FIRST_BUCKET_BYTES,
    kinds: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Put parameters into buckets, in the reverse order of their registration.

    A bucket is closed as soon as it holds ``cap_bytes`` or more, so it may be larger by part of
    a parameter. That is PyTorch's rule, with one difference: a parameter that fills a bucket by
    itself has one to itself, while the bucket that was being filled stays open: so a large
    gradient can be reduced where it lies, and small ones still gather.

    Args:
        sizes_bytes: of the parameters, as the model registers them.
        cap_bytes: 0 makes every parameter a bucket.
        first_cap_bytes: of the first bucket, where that is less than ``cap_bytes``.
        kinds: a bucket holds one kind (dtype and device); None takes all for one.

    Returns:
        The buckets in the order in which they become ready (the last gradient of each is that of
        its smallest index), each the indices of its parameters.
    """
    buckets: list[list[int]] = []
    filling: list[int] = []
    held_bytes, cap = 0, min(first_cap_bytes, cap_bytes)
    for index in reversed(range(len(sizes_bytes))):
        size = sizes_bytes[index]
        if size >= cap:
            buckets.append([index])
            cap = cap_bytes
            continue
        if filling and kinds and kinds[filling[-1]] != kinds[index]:
            buckets.append(filling)
            filling, held_bytes, cap = [], 0, cap_bytes
        filling.append(index)
        held_bytes += size
        if held_bytes >= cap:
            buckets.append(filling)
            filling, held_bytes, cap = [], 0, cap_bytes
    # A bucket is ready with its first registered parameter, which backward comes to last.
    return sorted([*buckets, filling] if filling else buckets, key=min, reverse=True)


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
        link: between two ranks, ``labkit.costs.Link``.
    """
    buckets = assign_buckets(sizes_bytes, cap_bytes)
    bucket_bytes = [sum(sizes_bytes[index] for index in bucket) for bucket in buckets]
    carry_s = [all_reduce_seconds("ring", size, world_size, link) for size in bucket_bytes]
    times = bucket_times(buckets, gradient_s, carry_s)
    backward_s = max(gradient_s, default=0.0)
    step_s = max([backward_s, *(time.end_s for time in times)])
    return StepModel(backward_s, buckets, bucket_bytes, times, step_s)
