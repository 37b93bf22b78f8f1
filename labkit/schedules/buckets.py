"""Buckets of gradients: which parameters travel together, and when. Pure, no torch.

Backward finds the gradients from the last layer to the first. A message has a price of its own
(alpha), so gradients are sent in buckets; but a bucket can leave only when its last gradient is
there, so one bucket for all would leave when there is nothing left to compute beside it.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
(2020), sections 3.2.2 and 3.2.3.
"""

from collections.abc import Hashable, Sequence

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
