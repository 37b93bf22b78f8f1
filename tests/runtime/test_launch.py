"""labkit.run on real processes: results, lost ranks, scripts, and what odd functions do to it.

What users run into is in test_fault_table.py.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
import warm_python
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

    def test_a_tensor_comes_without_its_graph(self):
        def in_a_graph(comm):
            weight = torch.nn.Parameter(torch.ones(2))
            return [weight, {"loss": weight.sum()}]

        ((weight, found),) = run(in_a_graph, world_size=1).values
        assert isinstance(weight, torch.nn.Parameter)
        assert (found["loss"].item(), found["loss"].requires_grad) == (2.0, False)

    def test_named_devices(self):
        where = lambda comm: str(comm.device)  # noqa: E731
        assert run(where, world_size=2, devices=("cpu",) * 3).values == ["cpu", "cpu"]
        with pytest.raises(ValueError, match="'cpu,cpu': 2 devices for 3 ranks: name one per"):
            run(print, world_size=3, devices="cpu,cpu")


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

    def test_a_rank_that_is_needed_ends_the_run(self):
        with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL in mid-run"):
            run(meets_the_others, "killed", world_size=3, may_lose=[2])


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

    def test_they_end_with_a_rank_that_is_killed_and_do_not_hide_its_end(self, tmp_path):
        def leaves_a_child(comm, folder):
            if comm.rank == 1:
                if (child := os.fork()) == 0:
                    time.sleep(60)
                (folder / str(child)).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            comm.barrier()

        with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL in mid-run"):
            run(leaves_a_child, tmp_path, world_size=2)
        (child,) = (int(path.name) for path in tmp_path.iterdir())
        assert wait_until(lambda: not is_alive(child), 5)


class TestOddFunctions:
    def test_functions_whose_call_does_nothing(self):
        async def waits(comm):
            pass

        def yields(comm):
            yield comm.rank

        for fn in (waits, yields):
            with pytest.raises(ValueError, match=f"{fn.__name__} is an async or a generator fun"):
                run(fn, world_size=1)

    @pytest.mark.parametrize(
        ("make", "args", "says"),
        [(int, ("not a number",), "ValueError: invalid lit"), (sys.exit, (3,), "SystemExit: 3")],
        ids=["raises", "exits"],
    )
    def test_a_result_that_cannot_be_made_anew(self, make, args, says):
        def picky(comm):
            class Picky:
                def __reduce__(self):
                    return make, args

            return Picky() if comm.rank else None

        words = f"rank 1 returned a value that cannot be unpickled here: {says}"
        with pytest.raises(WorkerError, match=words):
            run(picky, world_size=2)


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

    def test_the_callers_variables_as_they_are_now(self, monkeypatch):
        def variables(comm, *names):
            return [os.environ.get(name) for name in names]

        for value in ("set", "changed, with ü"):
            monkeypatch.setenv("LABKIT_TEST_MARK", value)
            assert run(variables, "LABKIT_TEST_MARK", world_size=2).values == [[value]] * 2
        monkeypatch.delenv("HOME")
        assert run(variables, "HOME", "RANK", world_size=1).values == [[None, "0"]]


@pytest.mark.fresh
def test_a_run_that_loses_its_forkserver_ends_and_the_next_run_works():
    def works(comm, server):
        os.kill(server, signal.SIGKILL)
        time.sleep(60)

    run(right_neighbour, world_size=1)
    with pytest.raises(WorkerError, match="left early with exit code 255"):
        run(works, server_pid(), world_size=2)
    assert run(right_neighbour, world_size=2).values == [1, 0]


@pytest.mark.fresh
def test_a_script_without_the_guard_is_told_of_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from labkit import run\nrun(lambda comm: comm.rank, world_size=1)")
    words = [warm_python.command(), script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert 'labkit.run has to be called under if __name__ == "__main__":' in done.stderr
