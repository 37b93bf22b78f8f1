"""A step of DDP on paper, by hand."""

from labkit.costs.ddp_step import bucket_times, predict_step
from labkit.costs.link import Link


def test_a_bucket_waits_for_its_last_gradient_and_for_the_bucket_before():
    # Gradient 3 is there after 1 s, gradient 0 after 4 s.
    gradient_s = [4.0, 3.0, 2.0, 1.0]
    times = bucket_times([[3, 2], [1], [0]], gradient_s, reduce_s=[1.5, 0.2, 2.0])
    assert times == [(2.0, 2.0, 3.5), (3.0, 3.5, 3.7), (4.0, 4.0, 6.0)]


# A link on which a ring of two ranks takes 2 s and 1 s for each byte.
SLOW = Link(alpha_s=1.0, beta_s_per_byte=1.0)


def test_smaller_buckets_pay_alpha_more_often():
    arguments = [1, 1, 1, 1], [8.0, 6.0, 4.0, 2.0]
    exposed = [predict_step(*arguments, cap, 2, SLOW).exposed_s for cap in (0, 2, 10)]
    # Four messages of 3 s from second 2 on; two of 4 s; one of 6 s after all.
    assert exposed == [6.0, 4.0, 6.0]
