"""An asynchronous run on paper: its timeline, its staleness, its pace beside rounds."""

import pytest

from labkit.costs.async_run import simulate


def lanes(run):
    """By rank, (kind, start, end) of its spans in order."""
    found = {}
    for span in run.trace.spans:
        found.setdefault(span.rank, []).append((span.kind, span.start_s, span.end_s))
    return found


def test_two_workers_one_of_them_three_times_as_slow():
    run = simulate(2, factor=3, duration_s=8, server_s=1)
    # At second 3 both push, and the server takes them one after the other.
    assert lanes(run) == {
        0: [("update", start, start + 1) for start in (1, 3, 4, 6, 7)],
        1: [("compute", 0, 3), ("wait", 3, 4), ("compute", 4, 7), ("wait", 7, 8)],
        2: [
            *[("compute", 0, 1), ("wait", 1, 2), ("compute", 2, 3), ("wait", 3, 5)],
            *[("compute", 5, 6), ("wait", 6, 7), ("compute", 7, 8)],
        ],
    }
    assert run.updates == ((2, 0), (1, 1), (2, 1), (2, 0), (1, 2))
    assert run.duration_s == 8


def test_in_rounds_all_go_at_the_stragglers_pace():
    run = simulate(2, factor=3, duration_s=10, server_s=1, synchronous=True)
    # 1 pushes at 3, 2 at 1: the server is busy 1-2 and 3-4, the round ends at 4.
    assert lanes(run) == {
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
    assert run.updates == ((1, 0), (2, 0)) * 2
    assert run.waiting_share() == pytest.approx((1 + 1 + 3 + 3 + 1) / 20)


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
