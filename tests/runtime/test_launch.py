"""labkit.run on real processes: results, lost ranks, scripts, output.

What can go wrong is in test_fault_table.py.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import warm_python
from ranks import (
    leftovers,
    open_descriptors,
    running_ranks,
    travel_by_value,
    wait_until,
)

from labkit import DeadlineError, WorkerError, run
from labkit.errors import PeerLostError

travel_by_value(__name__)


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The first run imports torch for all that follow; no deadline below should pay for it."""
    run(ring_neighbour, world_size=1)


@pytest.fixture(autouse=True)
def nothing_is_left(warm):
    before = leftovers()
    yield
    assert wait_until(lambda: not running_ranks(), 2), f"ranks left: {running_ranks()}"
    assert leftovers() <= before
    assert threading.active_count() < 10


def ring_neighbour(comm, offset=0):
    mine = torch.tensor([comm.rank + offset])
    theirs = torch.empty_like(mine)
    if comm.world_size > 1:
        right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        comm.exchange(mine, right, theirs, left)
        return theirs.item()
    return mine.item()


def still_works():
    assert run(ring_neighbour, world_size=2).values == [1, 0]


class TestResults:
    @pytest.mark.parametrize("world_size", [1, 2, 3, 4])
    def test_values_counts_and_spans_come_back_by_rank(self, world_size):
        result = run(ring_neighbour, 10, world_size=world_size)
        ranks = range(world_size)
        assert result.values == [(rank - 1) % world_size + 10 for rank in ranks]
        sent = int(world_size > 1)
        assert result.messages == [sent] * world_size
        assert result.bytes_sent == [8 * sent] * world_size
        assert result.duration_s > 0
        assert sum(span.num_bytes for span in result.trace.spans) == 8 * sent * world_size

    def test_a_function_that_exists_only_here_travels(self):
        scope = {}
        exec("def double(comm, x):\n    return 2 * x + helper()\ndef helper(): return 1", scope)
        assert run(scope["double"], 20, world_size=2).values == [41, 41]

    def test_a_class_that_extends_one_of_pytorchs_in_cpp_travels(self):
        class Ended(torch.distributed.Work):
            def wait(self, timeout=None):
                return "ended"

        assert run(lambda comm: Ended().wait(), world_size=1).values == ["ended"]

    def test_no_descriptor_is_left_open(self):
        still_works()
        before = open_descriptors()
        for _ in range(3):
            still_works()
        assert open_descriptors() <= before + 2

    def test_signal_handlers_of_the_caller_stay(self):
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        before = [signal.getsignal(number) for number in numbers]
        still_works()
        assert [signal.getsignal(number) for number in numbers] == before


class TestNamedDevices:
    @pytest.mark.parametrize("named", ["cpu,cpu", ["cpu", "cpu"], ("cpu",) * 3])
    def test_each_rank_has_the_device_of_its_number(self, named):
        values = run(lambda comm: str(comm.device), world_size=2, devices=named).values
        assert values == ["cpu", "cpu"]

    def test_too_few_of_them_are_refused_before_a_rank_starts(self):
        with pytest.raises(ValueError, match="'cpu,cpu': 2 devices for 3 ranks: name one per"):
            run(print, world_size=3, devices="cpu,cpu")
        with pytest.raises(ValueError, match="'cuda:0': this machine has 0 CUDA GPUs"):
            run(print, world_size=1, devices="cuda:0")


def meets_the_others(comm, how):
    """Rank 1 ends in one way or another; the others exchange tensors before and after."""
    ring_of_two = {0: 2, 2: 0}
    if comm.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "raises":
            raise ValueError("enough")
        elif how == "leaves":
            os._exit(0)
        elif how == "at the end":
            subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {os.getpid()}"])
        return "returned"
    mine = torch.tensor([comm.rank])
    comm.exchange(mine, ring_of_two[comm.rank], theirs := torch.empty_like(mine), 2 - comm.rank)
    time.sleep(0.6)
    comm.exchange(mine, ring_of_two[comm.rank], theirs, 2 - comm.rank)
    return theirs.item()


@pytest.mark.slow
class TestRanksThatMayBeLost:
    @pytest.mark.parametrize(
        ("how", "why"),
        [
            ("killed", "was killed by SIGKILL in mid-run"),
            ("raises", "raised ValueError: enough at "),
            ("leaves", "left early with exit code 0, before its function had returned"),
        ],
    )
    def test_the_run_goes_on_and_says_who_was_lost_and_why(self, how, why):
        result = run(meets_the_others, how, world_size=3, may_lose=[1])
        assert result.values == [2, None, 0]
        assert result.lost.keys() == {1}
        assert why in result.lost[1]
        assert result.messages == [2, 0, 2]

    def test_what_a_rank_returned_before_its_end_counts(self):
        result = run(meets_the_others, "at the end", world_size=3, may_lose=[1])
        assert result.values == [2, "returned", 0]
        assert result.lost == {}

    def test_a_rank_that_is_needed_still_ends_the_run(self):
        with pytest.raises(WorkerError, match="rank 1 raised ValueError: enough"):
            run(meets_the_others, "raises", world_size=3, may_lose=[0, 2])
        with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL in mid-run"):
            run(meets_the_others, "killed", world_size=3, may_lose=[2])
        still_works()

    def test_who_needs_a_lost_rank_after_all_names_it(self):
        def needs_it(comm):
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.recv(torch.empty(1), 1)

        with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL in mid-run"):
            run(needs_it, world_size=2, may_lose=[1])

    @pytest.mark.slow
    def test_a_failure_and_a_deadline_tell_of_ranks_lost_before(self):
        def fails_without_it(comm, late):
            if comm.rank == 1:
                raise ValueError("the cause")
            with contextlib.suppress(PeerLostError):
                comm.recv(torch.empty(1), 1)
            if late:
                time.sleep(60)
            raise RuntimeError("nobody is left")

        why = "rank 1 raised ValueError: the cause at "
        with pytest.raises(WorkerError, match=f"rank 0 raised RuntimeError(?s:.)*{why}"):
            run(fails_without_it, False, world_size=2, may_lose=[1])
        with pytest.raises(DeadlineError, match=why) as caught:
            run(fails_without_it, True, world_size=2, may_lose=[1], timeout_s=3)
        assert "rank 1 was in its own code" not in str(caught.value)

    def test_ranks_that_there_are_not(self):
        with pytest.raises(ValueError, match=r"may_lose \[2\]: with world_size 2 the ranks are 0"):
            run(ring_neighbour, world_size=2, may_lose=[2])


@pytest.mark.fresh
class TestScripts:
    """What people write into a file, or into a pipe."""

    RUN = "from labkit import run\n{guard}print(run(lambda comm: comm.rank, world_size=1).values)"

    def test_a_script_without_the_guard_is_told_of_it(self, tmp_path):
        script = tmp_path / "script.py"
        script.write_text(self.RUN.format(guard=""))
        words = [warm_python.command(), script]
        done = subprocess.run(words, capture_output=True, text=True, timeout=240)
        assert done.returncode == 1
        assert 'labkit.run has to be called under if __name__ == "__main__":' in done.stderr

    def test_a_program_from_standard_input_is_refused(self):
        done = subprocess.run(
            [sys.executable, "-"],
            input=self.RUN.format(guard=""),
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert "save it as a file and run that" in done.stderr.splitlines()[-1]


class TestManyRanks:
    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:world_size 64 is far above:UserWarning")
    def test_sixty_four_start_and_meet(self):
        def meets(comm):
            comm.barrier()
            return comm.rank

        assert run(meets, world_size=64).values == list(range(64))
