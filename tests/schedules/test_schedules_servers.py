"""Servers on paper: their turns, and the bound on staleness."""

import itertools
import random

import pytest

from labkit.schedules.servers import server_turns, worker_turns
from labkit.schedules.staleness import StalenessTracker


@pytest.mark.parametrize(("servers", "workers"), [(1, 3), (2, 3), (3, 3), (3, 2), (4, 1)])
def test_in_a_turn_no_server_and_no_worker_meets_two(servers, workers):
    """Ranks that go through their turns in order, each meeting both need: M turns for everyone."""
    of_server = {s: server_turns(s, servers, workers) for s in range(servers)}
    of_worker = {w: worker_turns(w, servers, workers) for w in range(workers)}
    turns = 0
    while any(of_server.values()):
        pairs = [
            (s, row[0]) for s, row in of_server.items() if row and of_worker[row[0]][:1] == [s]
        ]
        assert pairs, "everyone waits for somebody else"
        for server, worker in pairs:
            of_server[server].pop(0)
            of_worker[worker].pop(0)
        turns += 1
    assert turns == max(servers, workers)
    assert not any(of_worker.values())


def apply_all_allowed(tracker):
    while (worker := tracker.next_worker()) is not None:
        tracker.apply(worker)
        tracker.pull(worker)


@pytest.mark.parametrize(
    ("pushes", "workers", "bound", "updates", "held"),
    [
        # Worker 3 computes from version 0 all the time, while 1 comes three times and 2 once.
        ([1, 2, 1, 1, 3], 3, None, [(1, 0), (2, 1), (1, 1), (1, 0), (3, 4)], []),
        # The second push of 1 waits until 2 and 3 have been in.
        ([1, 1, 2, 3, 2], 3, 2, [(1, 0), (2, 1), (3, 2), (1, 2), (2, 2)], []),
        # After two updates worker 2 would be 2 late: a third must wait for it.
        ([1, 1, 1], 2, 2, [(1, 0), (1, 0)], [1]),
        # At version 2 worker 2 would be 2 late, and 3 after it 3: one step ahead is not enough.
        ([1, 1], 3, 2, [(1, 0)], [1]),
    ],
)
def test_staleness_counts_the_updates_between_and_a_push_is_held(
    pushes, workers, bound, updates, held
):
    tracker = StalenessTracker(range(1, workers + 1), bound)
    for worker in pushes:
        tracker.push(worker)
        apply_all_allowed(tracker)
    assert (tracker.updates, tracker.waiting) == (updates, held)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_every_order_of_pushes_keeps_the_bound_and_nobody_waits_forever(workers):
    chooser = random.Random(workers)
    for bound, _ in itertools.product(range(workers - 1, workers + 3), range(30)):
        tracker = StalenessTracker(range(workers), bound)
        for _ in range(60):
            computing = [worker for worker in tracker.pulled if worker not in tracker.waiting]
            assert computing, f"all {workers} are held at version {tracker.version}"
            tracker.push(chooser.choice(computing))
            apply_all_allowed(tracker)
        assert max(update.staleness for update in tracker.updates) <= bound
        # Nobody waits for a worker that is dropped.
        for worker in range(workers - 1):
            tracker.drop(worker)
        apply_all_allowed(tracker)
        assert not tracker.waiting
