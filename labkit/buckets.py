"""Buckets of gradients: which parameters travel together, and when. Pure, no torch.

Backward finds the gradients from the last layer to the first. A message has a price of its own
(alpha), so gradients are sent in buckets; but a bucket can leave only when its last gradient is
there, so one bucket for all would leave when there is nothing left to compute beside it.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
(2020), sections 3.2.2 and 3.2.3.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

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
    itself gets it for itself, and its gradient can then be reduced where it lies.

    Args:
        sizes_bytes: of the parameters, as the model registers them.
        cap_bytes: 0 makes every parameter a bucket.
        first_cap_bytes: of the first bucket, where that is less than ``cap_bytes``.
        kinds: a bucket holds one kind (dtype and device); None takes all for one.

    Returns:
        The buckets in the order in which they become ready, each the indices of its parameters.
    """
    buckets: list[list[int]] = []
    open_bucket: list[int] = []
    held_bytes, cap = 0, min(first_cap_bytes, cap_bytes)
    for index in reversed(range(len(sizes_bytes))):
        size = sizes_bytes[index]
        other_kind = open_bucket and kinds and kinds[open_bucket[-1]] != kinds[index]
        if open_bucket and (size >= cap or other_kind):
            buckets.append(open_bucket)
            open_bucket, held_bytes, cap = [], 0, cap_bytes
        open_bucket.append(index)
        held_bytes += size
        if held_bytes >= cap:
            buckets.append(open_bucket)
            open_bucket, held_bytes, cap = [], 0, cap_bytes
    return [*buckets, open_bucket] if open_bucket else buckets


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
