"""Staleness on paper: the tracker, the bound, and the timetable that follows from them."""

import itertools
import random

import pytest

from labkit.costs.async_run import simulate
from labkit.schedules.staleness import StalenessTracker, Update, in_time


def apply_what_may_be(tracker):
    while (worker := tracker.next()) is not None:
        tracker.apply(worker)
        tracker.pull(worker)


def play(pushes, workers, bound=None):
    """Push in this order; (whose update, its staleness) of each, and who is held at the end."""
    tracker = StalenessTracker(workers, bound)
    for worker in pushes:
        tracker.push(worker)
        apply_what_may_be(tracker)
    return [tuple(update) for update in tracker.updates], tracker.held


def test_staleness_counts_the_updates_between_a_pull_and_its_push():
    # Worker 3 computes from version 0 all the time, while 1 comes three times and 2 once.
    updates, held = play([1, 2, 1, 1, 3], [1, 2, 3])
    assert updates == [(1, 0), (2, 1), (1, 1), (1, 0), (3, 4)]
    assert held == []


def test_a_bound_of_workers_minus_one_lets_each_in_once_a_round():
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
def test_every_order_of_pushes_keeps_the_bound_and_nobody_waits_for_ever(workers):
    chooser = random.Random(workers)
    for bound, _ in itertools.product(range(workers - 1, workers + 3), range(30)):
        tracker = StalenessTracker(range(workers), bound)
        for _ in range(60):
            computing = [worker for worker in tracker.pulled if worker not in tracker.held]
            assert computing, f"all {workers} are held at version {tracker.version}"
            tracker.push(chooser.choice(computing))
            apply_what_may_be(tracker)
        assert max(update.staleness for update in tracker.updates) <= bound


def test_who_is_dropped_is_waited_for_no_longer():
    tracker = StalenessTracker([1, 2], bound=1)
    for worker in (1, 1):
        tracker.push(worker)
        apply_what_may_be(tracker)
    assert tracker.held == [1]
    tracker.drop(2)
    apply_what_may_be(tracker)
    assert tracker.updates == [Update(1, 0), Update(1, 0)]


def test_a_push_without_a_gradient_is_no_update():
    tracker = StalenessTracker([1, 2])
    tracker.push(1)
    tracker.pull(1)
    assert (tracker.version, tracker.held, tracker.updates) == (0, [], [])


def test_a_bound_that_cannot_be_kept_is_refused_with_the_smallest_that_can():
    with pytest.raises(ValueError, match=r"at most 1 cannot be kept with 3 workers.*Use 2"):
        StalenessTracker([1, 2, 3], bound=1)
    with pytest.raises(ValueError, match="at least one"):
        StalenessTracker([])


def lanes(timetable):
    """By rank, (kind, start, end) of its spans in order."""
    found = {}
    for span in timetable.trace.spans:
        found.setdefault(span.rank, []).append((span.kind, span.start_s, span.end_s))
    return found


def test_the_timetable_of_two_workers_one_of_them_three_times_as_slow():
    timetable = simulate(2, factor=3, duration_s=8, compute_s=1, server_s=1)
    # At second 3 both push, and the server takes them one after the other.
    assert lanes(timetable) == {
        0: [("update", start, start + 1) for start in (1, 3, 4, 6, 7)],
        1: [("compute", 0, 3), ("wait", 3, 4), ("compute", 4, 7), ("wait", 7, 8)],
        2: [
            *[("compute", 0, 1), ("wait", 1, 2), ("compute", 2, 3), ("wait", 3, 5)],
            *[("compute", 5, 6), ("wait", 6, 7), ("compute", 7, 8)],
        ],
    }
    assert timetable.updates == ((2, 0), (1, 1), (2, 1), (2, 0), (1, 2))
    assert timetable.gradients_per_s == 5 / 8


def test_in_rounds_all_go_at_the_stragglers_pace():
    timetable = simulate(2, factor=3, duration_s=10, compute_s=1, server_s=1, synchronous=True)
    # 1 pushes at 3, 2 at 1: the server is busy 1-2 and 3-4, the round ends at 4.
    assert lanes(timetable) == {
        0: [("update", start, start + 1) for start in (1, 3, 5, 7, 9)],
        1: [
            *[("compute", 0, 3), ("wait", 3, 4), ("compute", 4, 7), ("wait", 7, 8)],
            ("compute", 8, 10),
        ],
        2: [
            *[("compute", 0, 1), ("wait", 1, 4), ("compute", 4, 5), ("wait", 5, 8)],
            *[("compute", 8, 9), ("wait", 9, 10)],
        ],
    }
    assert timetable.updates == (Update(1, 0), Update(2, 0)) * 2
    assert timetable.gradients_per_s == 0.4
    assert timetable.waiting_share() == pytest.approx((1 + 1 + 3 + 3 + 1) / 20)


@pytest.mark.parametrize("factor", [1, 4])
def test_mean_staleness_is_the_number_of_other_workers_whoever_straggles(factor):
    # Each update falls between one pull and push of every other worker.
    timetable = simulate(4, factor=factor, duration_s=2000)
    assert timetable.mean_staleness() == pytest.approx(3, rel=0.02)
    largest = max(update.staleness for update in timetable.updates)
    assert (largest > 3) == (factor > 1)


def test_a_tighter_bound_waits_more_and_applies_less():
    free, loose, tight = (
        simulate(3, factor=4, bound=bound, duration_s=500) for bound in (None, 5, 2)
    )
    assert free.gradients_per_s > loose.gradients_per_s > tight.gradients_per_s
    assert free.waiting_share() < loose.waiting_share() < tight.waiting_share()
    for timetable, bound in ((loose, 5), (tight, 2)):
        assert max(update.staleness for update in timetable.updates) <= bound
    rounds = simulate(3, factor=4, duration_s=500, synchronous=True)
    # A bound of W - 1 is one update a worker and round.
    assert tight.gradients_per_s == pytest.approx(rounds.gradients_per_s, rel=0.1)


@pytest.mark.parametrize("wrong", [{"factor": 0.5}, {"duration_s": 0}, {"server_s": -1}])
def test_times_that_cannot_be(wrong):
    with pytest.raises(ValueError, match="the factor 1 or more"):
        simulate(2, **wrong)
