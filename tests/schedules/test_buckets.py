"""Which gradients travel together, and when: by hand, and beside PyTorch's own assignment."""

import pytest
import torch
import torch.distributed as dist

from labkit.costs.ddp_step import bucket_times, predict_step
from labkit.costs.link import Link
from labkit.schedules.buckets import MIB, assign_buckets


def test_buckets_run_from_the_last_parameter_to_the_first():
    assert assign_buckets([1] * 6, cap_bytes=3, first_cap_bytes=2) == [[5, 4], [3, 2, 1], [0]]


def test_a_cap_of_0_is_a_bucket_a_parameter():
    assert assign_buckets([4, 8, 4], cap_bytes=0) == [[2], [1], [0]]


def test_a_cap_above_all_is_one_bucket_only_without_a_small_first_one():
    assert assign_buckets([4, 8, 4], cap_bytes=10**9) == [[2, 1, 0]]
    assert assign_buckets([2 * MIB, 4, MIB], cap_bytes=10**9) == [[2], [1, 0]]


def test_a_parameter_that_fills_a_bucket_has_it_to_itself():
    assert assign_buckets([1, 9, 1, 1], cap_bytes=5, first_cap_bytes=5) == [[1], [3, 2, 0]]
    assert assign_buckets([8, 1] * 3, cap_bytes=8) == [[4], [2], [5, 3, 1], [0]]


def test_what_was_gathered_beside_a_large_one_leaves_before_it_when_ready_before_it():
    assert assign_buckets([9, 1, 1], cap_bytes=5, first_cap_bytes=5) == [[2, 1], [0]]


def test_a_bucket_holds_one_kind():
    kinds = ["half", "half", "full", "half"]
    assert assign_buckets([1] * 4, cap_bytes=9, kinds=kinds) == [[3], [2], [1, 0]]


def test_no_parameters_no_buckets():
    assert assign_buckets([], cap_bytes=1) == []


@pytest.mark.parametrize("seed", range(5))
def test_parameters_below_the_cap_are_assigned_as_pytorch_does(seed):
    """Its function goes forward through a list, so it gets the reversed one."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 90, (40,), generator=generator).tolist()
    backwards = [torch.empty(size, dtype=torch.uint8) for size in reversed(sizes)]
    theirs, _ = dist._compute_bucket_assignment_by_size(backwards, [100, 300])
    theirs = [[len(sizes) - 1 - index for index in bucket] for bucket in theirs]
    assert assign_buckets(sizes, cap_bytes=300, first_cap_bytes=100) == theirs


def test_a_bucket_waits_for_its_last_gradient_and_for_the_bucket_before():
    # Gradient 3 is there after 1 s, gradient 0 after 4 s.
    gradient_s = [4.0, 3.0, 2.0, 1.0]
    times = bucket_times([[3, 2], [1], [0]], gradient_s, reduce_s=[1.5, 0.2, 2.0])
    assert times == [(2.0, 2.0, 3.5), (3.0, 3.5, 3.7), (4.0, 4.0, 6.0)]


def test_one_bucket_overlaps_with_nothing():
    assert bucket_times([[1, 0]], [2.0, 1.0], [3.0]) == [(2.0, 2.0, 5.0)]


def test_the_order_holds_even_where_a_later_bucket_is_ready_first():
    assert bucket_times([[1], [0]], [0.5, 2.0], [1.0, 1.0])[1] == (0.5, 3.0, 4.0)


def test_times_are_by_bucket():
    with pytest.raises(ValueError, match="zip"):
        bucket_times([[0], [1]], [1.0, 1.0], [1.0])


# A link on which a ring of two ranks takes 2 s and 1 s for each byte.
SLOW = Link(alpha_s=1.0, beta_s_per_byte=1.0)


def test_a_step_ends_with_its_last_bucket():
    step = predict_step([1, 1, 1, 1], [8.0, 6.0, 4.0, 2.0], cap_bytes=2, world_size=2, link=SLOW)
    assert step.buckets == [[3, 2], [1, 0]]
    assert step.bucket_bytes == [2, 2]
    assert step.times == [(4.0, 4.0, 8.0), (8.0, 8.0, 12.0)]
    assert (step.backward_s, step.step_s, step.exposed_s) == (8.0, 12.0, 4.0)


def test_smaller_buckets_pay_their_start_more_often():
    arguments = [1, 1, 1, 1], [8.0, 6.0, 4.0, 2.0]
    exposed = [predict_step(*arguments, cap, 2, SLOW).exposed_s for cap in (0, 2, 10)]
    # Four messages of 3 s from second 2 on; two of 4 s; one of 6 s after all.
    assert exposed == [6.0, 4.0, 6.0]
