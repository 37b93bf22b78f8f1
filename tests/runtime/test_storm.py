"""A short storm of signals (see storm.py); the long one is ``make storm``."""

import os
import random
import signal

import pytest
import storm


@pytest.mark.fresh
def test_every_run_ends_whole_or_with_the_cause_named():
    """Ctrl-C twice, each signal three times to a rank, three to the forkserver."""
    seen = storm.weather(runs=17, seed=12)
    assert sum(count for (*_, outcome), count in seen.items() if outcome == "named") > 4


@pytest.mark.fresh
@pytest.mark.parametrize(
    ("number", "seed", "send"),
    [
        (signal.SIGSTOP, 16, os.kill),  # goes on, and is killed
        (signal.SIGHUP, 11, os.killpg),  # a terminal that closes
    ],
)
def test_what_a_program_has_started_ends_with_it(number, seed, send):
    storm.strike_program(number, random.Random(seed), send)
