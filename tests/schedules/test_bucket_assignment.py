"""Which gradients are sent together: by hand, and beside PyTorch's own assignment."""

import pytest
import torch
import torch.distributed as dist

from labkit.schedules.bucket_assignment import MIB, assign_buckets


def test_buckets_run_from_the_last_parameter_to_the_first():
    assert assign_buckets([1] * 6, cap_bytes=3, first_cap_bytes=2) == [[5, 4], [3, 2, 1], [0]]
    assert assign_buckets([4, 8, 4], cap_bytes=10**9) == [[2, 1, 0]]
    assert assign_buckets([2 * MIB, 4, MIB], cap_bytes=10**9) == [[2], [1, 0]]


@pytest.mark.parametrize("seed", range(5))
def test_parameters_below_the_cap_are_assigned_as_pytorch_does(seed):
    """Its function goes forward through a list, so it gets the reversed one."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 90, (40,), generator=generator).tolist()
    backwards = [torch.empty(size, dtype=torch.uint8) for size in reversed(sizes)]
    theirs, _ = dist._compute_bucket_assignment_by_size(backwards, [100, 300])
    theirs = [[len(sizes) - 1 - index for index in bucket] for bucket in theirs]
    assert assign_buckets(sizes, cap_bytes=300, first_cap_bytes=100) == theirs
