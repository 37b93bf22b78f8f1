"""An asynchronous run on paper: its timeline, its staleness, its pace beside rounds."""

import pytest

from labkit.costs.async_run import simulate


@pytest.mark.parametrize("factor", [1, 4])
def test_mean_staleness_is_the_number_of_other_workers_with_or_without_a_straggler(factor):
    # Each update falls between one pull and push of every other worker.
    run = simulate(4, factor=factor, duration_s=2000)
    assert run.mean_staleness() == pytest.approx(3, rel=0.02)
    largest = max(update.staleness for update in run.updates)
    assert (largest > 3) == (factor > 1)


def test_a_tighter_bound_waits_more_and_applies_less():
    free, tight = (simulate(3, factor=4, bound=bound, duration_s=500) for bound in (None, 2))
    assert len(free.updates) > len(tight.updates)
    assert free.waiting_share() < tight.waiting_share()
    assert max(update.staleness for update in tight.updates) <= 2
    rounds = simulate(3, factor=4, duration_s=500, synchronous=True)
    # A bound of W - 1 is one update per worker and round.
    assert len(tight.updates) == pytest.approx(len(rounds.updates), rel=0.1)
