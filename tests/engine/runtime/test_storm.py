"""Short storms (see storm.py); the long ones are ``make storm`` and ``make storm-resume``."""

import random

import pytest
import storm


@pytest.mark.fresh
def test_every_run_ends_whole_or_with_the_cause_named():
    """Ctrl-C twice, each signal three times to a rank, three to the forkserver."""
    seen = storm.strike_runs(runs=17, seed=12)
    assert sum(count for (*_, outcome), count in seen.items() if outcome == "named") > 4


def test_a_run_whose_rank_is_killed_goes_on_to_the_bit():
    assert storm.kill_and_resume("ring_all_reduce", 1, random.Random(0))
