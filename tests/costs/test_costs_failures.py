"""The checkpoint interval that loses least, and goodput: against a simulated clock."""

import random

import pytest

from labkit.costs import checkpoint_interval_s, goodput


def simulated(interval_s, checkpoint_s, between_failures_s, recovery_s, failures):
    """The useful part of the time until so many failures, at random moments."""
    draw = random.Random(1)
    cycle_s = interval_s + checkpoint_s
    useful_s = elapsed_s = 0.0
    for _ in range(failures):
        # From the end of the last recovery.
        until_failure_s = draw.expovariate(1 / (between_failures_s - recovery_s))
        useful_s += until_failure_s // cycle_s * interval_s
        elapsed_s += until_failure_s + recovery_s
    return useful_s / elapsed_s


@pytest.mark.parametrize("interval_s", [100.0, 400.0])
def test_goodput_is_what_failures_at_random_moments_leave(interval_s):
    case = (interval_s, 10.0, 5000.0, 300.0)
    assert goodput(*case) == pytest.approx(simulated(*case, failures=100_000), rel=0.01)


def test_young_s_interval_has_the_best_goodput():
    best_s = checkpoint_interval_s(10.0, 5000.0)
    found = {scale: goodput(scale * best_s, 10.0, 5000.0, 300.0) for scale in (0.5, 1, 2)}
    assert max(found, key=found.get) == 1
    # Both halves of the loss are equal there.
    assert 10.0 / best_s == pytest.approx(best_s / (2 * 5000.0))


def test_more_failures_than_recoveries_leave_nothing():
    assert goodput(10.0, 1.0, 60.0, 120.0) == 0.0
    with pytest.raises(ValueError, match="between_failures_s"):
        checkpoint_interval_s(10.0, 0.0)
