"""labkit.run on real processes: results, lost ranks, scripts, and what odd functions do to it.

What users run into is in test_fault_table.py.
"""

import os
import random
import signal
import subprocess
import threading
import time

import numpy as np
import pytest
import torch
from ranks import (
    is_alive,
    leftovers,
    running_ranks,
    server_pid,
    travel_by_value,
    wait_until,
)

from labkit import WorkerError, run

travel_by_value(__name__)


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = leftovers()
    yield
    assert wait_until(lambda: not running_ranks(), 2), f"ranks left: {running_ranks()}"
    assert leftovers() <= before
    assert threading.active_count() < 10


def right_neighbour(comm, offset=0):
    mine = torch.tensor([comm.rank + offset])
    theirs = torch.empty_like(mine)
    if comm.world_size > 1:
        right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        comm.exchange(mine, right, theirs, left)
        return theirs.item()
    return mine.item()


class TestResults:
    @pytest.mark.parametrize("world_size", [1, 2, 4])
    def test_values_counts_and_spans_come_back_by_rank(self, world_size):
        result = run(right_neighbour, 10, world_size=world_size)
        assert result.values == [(rank - 1) % world_size + 10 for rank in range(world_size)]
        sent = int(world_size > 1)
        assert result.messages == [sent] * world_size
        assert result.bytes_sent == [8 * sent] * world_size
        assert result.duration_s > 0
        assert sum(span.num_bytes for span in result.trace.spans) == 8 * sent * world_size

    def test_what_exists_only_here_travels(self):
        scope = {}
        exec("def double(comm, x):\n    return 2 * x + helper()\ndef helper(): return 1", scope)
        assert run(scope["double"], 20, world_size=2).values == [41, 41]

        class Ended(torch.distributed.Work):
            def wait(self, timeout=None):
                return "ended"

        assert run(lambda comm: Ended().wait(), world_size=1).values == ["ended"]


def meets_the_others(comm, how):
    """Rank 1 ends in one way or another; the others exchange tensors before and after."""
    if comm.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "raises":
            raise ValueError("enough")
        elif how == "leaves":
            os._exit(0)
        return "returned"
    mine = torch.tensor([comm.rank])
    comm.exchange(mine, 2 - comm.rank, theirs := torch.empty_like(mine), 2 - comm.rank)
    time.sleep(0.6)
    comm.exchange(mine, 2 - comm.rank, theirs, 2 - comm.rank)
    return theirs.item()


@pytest.mark.slow
class TestRanksThatMayBeLost:
    @pytest.mark.parametrize(
        ("how", "why"),
        [
            ("killed", "was killed by SIGKILL in mid-run"),
            ("raises", "raised ValueError: enough at "),
            ("leaves", "left early with exit code 0, in mid-run"),
        ],
    )
    def test_the_run_goes_on_and_says_who_was_lost_and_why(self, how, why):
        result = run(meets_the_others, how, world_size=3, may_lose=[1])
        assert result.values == [2, None, 0]
        assert result.lost.keys() == {1}
        assert why in result.lost[1]
        assert result.messages == [2, 0, 2]


class TestChildrenOfRanks:
    @pytest.mark.parametrize("how", ["returns", "sleeps", "is a program"])
    def test_they_report_nothing_and_end_with_the_run(self, how):
        def has_a_child(comm, how):
            if how == "is a program":
                return subprocess.Popen(["sleep", "60"]).pid
            if child := os.fork():
                return child
            time.sleep(60 * (how == "sleeps"))
            return "the child's"

        children = run(has_a_child, how, world_size=2).values
        assert all(isinstance(pid, int) for pid in children)
        assert wait_until(lambda: not any(map(is_alive, children)), 5)


def draws(comm):
    """Two numbers of each generator, so that a generator that repeats itself shows, too."""
    python = random.random(), random.random()
    numpy = np.random.rand(2).tolist()
    return [*python, *numpy, *torch.rand(2).tolist(), torch.randint(2**40, (1,)).item()]


class TestWhatARankIsGiven:
    def test_random_numbers_of_its_own_and_the_same_in_each_run_of_any_size(self):
        first = run(draws, world_size=3).values
        drawn = [number for rank in first for number in rank]
        assert len(set(drawn)) == len(drawn)
        torch.manual_seed(77)
        random.seed(77)
        assert run(draws, world_size=2).values == first[:2]


@pytest.mark.fresh
def test_a_run_that_loses_its_forkserver_ends_and_the_next_run_works():
    def works(comm, server):
        os.kill(server, signal.SIGKILL)
        time.sleep(60)

    run(right_neighbour, world_size=1)
    with pytest.raises(WorkerError, match="left early with exit code 255"):
        run(works, server_pid(), world_size=2)
    assert run(right_neighbour, world_size=2).values == [1, 0]
