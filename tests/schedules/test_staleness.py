"""Staleness on paper: the tracker and the bound."""

import itertools
import random

import pytest

from labkit.schedules.staleness import StalenessTracker, Update, in_time


def apply_all_allowed(tracker):
    while (worker := tracker.next()) is not None:
        tracker.apply(worker)
        tracker.pull(worker)


def play(pushes, workers, bound=None):
    """Push in this order; (whose update, its staleness) of each, and who is held at the end."""
    tracker = StalenessTracker(workers, bound)
    for worker in pushes:
        tracker.push(worker)
        apply_all_allowed(tracker)
    return [tuple(update) for update in tracker.updates], tracker.held


def test_staleness_counts_the_updates_between_a_pull_and_its_push():
    # Worker 3 computes from version 0 all the time, while 1 comes three times and 2 once.
    updates, held = play([1, 2, 1, 1, 3], [1, 2, 3])
    assert updates == [(1, 0), (2, 1), (1, 1), (1, 0), (3, 4)]
    assert held == []


def test_a_bound_of_workers_minus_one_lets_each_worker_in_once_per_round():
    updates, held = play([1, 1, 2, 3, 2], [1, 2, 3], bound=2)
    # The second push of 1 waits until 2 and 3 have been in.
    assert updates == [(1, 0), (2, 1), (3, 2), (1, 2), (2, 2)]
    assert held == []


def test_a_push_is_held_while_it_would_make_another_too_late():
    updates, held = play([1, 1, 1], [1, 2], bound=2)
    # After two updates worker 2 would be 2 late: a third must wait for it.
    assert updates == [(1, 0), (1, 0)]
    assert held == [1]


def test_looking_one_step_ahead_would_not_be_enough():
    # Two gradients from version 0 are under way. At version 2 the first would be 2 late and the
    # second 3: with a bound of 2 only one update may come before them.
    assert in_time([0, 0], version=1, bound=2)
    assert not in_time([0, 0], version=2, bound=2)
    updates, held = play([1, 1], [1, 2, 3], bound=2)
    assert (updates, held) == ([(1, 0)], [1])


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_every_order_of_pushes_keeps_the_bound_and_nobody_waits_forever(workers):
    chooser = random.Random(workers)
    for bound, _ in itertools.product(range(workers - 1, workers + 3), range(30)):
        tracker = StalenessTracker(range(workers), bound)
        for _ in range(60):
            computing = [worker for worker in tracker.pulled if worker not in tracker.held]
            assert computing, f"all {workers} are held at version {tracker.version}"
            tracker.push(chooser.choice(computing))
            apply_all_allowed(tracker)
        assert max(update.staleness for update in tracker.updates) <= bound


def test_nobody_waits_for_a_dropped_worker():
    tracker = StalenessTracker([1, 2], bound=1)
    for worker in (1, 1):
        tracker.push(worker)
        apply_all_allowed(tracker)
    assert tracker.held == [1]
    tracker.drop(2)
    apply_all_allowed(tracker)
    assert tracker.updates == [Update(1, 0), Update(1, 0)]


def test_a_bound_that_cannot_be_kept_is_refused_with_the_smallest_that_can():
    with pytest.raises(ValueError, match=r"at most 1 cannot be kept with 3 workers.*Use 2"):
        StalenessTracker([1, 2, 3], bound=1)
    with pytest.raises(ValueError, match="at least one"):
        StalenessTracker([])
