"""Buckets of gradients: the parameters that are sent together.

Backward computes the gradients from the last layer to the first. Every message has a fixed cost
(alpha), so gradients are sent in buckets. A bucket can be sent only when all its gradients are
computed: a single bucket for all gradients would be sent when no computation is left to hide it.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
(2020), sections 3.2.2 and 3.2.3.
"""

from collections.abc import Hashable, Sequence

MIB = 2**20
# PyTorch's value: a small first bucket lets communication begin early.
FIRST_BUCKET_BYTES = MIB


def assign_buckets(
    sizes_bytes: Sequence[int],
    cap_bytes: float,
    first_cap_bytes: float = FIRST_BUCKET_BYTES,
    kinds: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Put parameters into buckets, in the reverse order of their registration.

    A bucket is closed as soon as it holds ``cap_bytes`` or more. This is PyTorch's rule, with one
    difference: a parameter that fills a bucket alone gets its own, while the bucket being filled
    stays open. So a large gradient can be reduced in place, and small ones still share a bucket.

    Args:
        sizes_bytes: of the parameters, in the order of their registration.
        cap_bytes: 0 gives every parameter its own bucket.
        first_cap_bytes: cap of the first bucket, where that is less than ``cap_bytes``.
        kinds: of the parameters (dtype and device); a bucket holds one kind.

    Returns the buckets, lists of parameter indices, in the order in which they become ready.
    """
    buckets: list[list[int]] = []
    filling: list[int] = []
    cap = min(first_cap_bytes, cap_bytes)
    for index in reversed(range(len(sizes_bytes))):
        if sizes_bytes[index] >= cap:
            buckets.append([index])
            cap = cap_bytes
            continue
        if filling and kinds and kinds[filling[-1]] != kinds[index]:
            buckets.append(filling)
            filling = []
            cap = cap_bytes
        filling.append(index)
        if sum(sizes_bytes[held] for held in filling) >= cap:
            buckets.append(filling)
            filling = []
            cap = cap_bytes
    if filling:
        buckets.append(filling)
    # A bucket becomes ready with the gradient of its first registered parameter.
    return sorted(buckets, key=min, reverse=True)
