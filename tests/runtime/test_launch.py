"""labkit.run on real processes: results, and every way in which a run can go wrong.

The numbers in the class names are the rows of the fault table that the tests stand for.
"""

import contextlib
import gc
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from fifo_transport import over_streams  # noqa: F401  (a fixture)
from ranks import (
    is_alive,
    leftovers,
    open_descriptors,
    running_ranks,
    session_of,
    travel_by_value,
    wait_until,
    write_program_that_never_ends,
)

from labkit import DeadlineError, DeadlockError, WorkerError, devices, gpus, run
from labkit.collectives import broadcast, fast_ring_all_reduce, ring_all_reduce, tree_all_reduce
from labkit.errors import PeerLostError
from labkit.runtime import launch, torchrun

travel_by_value(__name__)

HERE = Path(__file__).name


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

    def test_ranks_are_fresh_processes_that_share_nothing_with_the_caller(self):
        # Row 23: a forked child would inherit an initialised CUDA, and could not use it.
        os.environ["LABKIT_TEST_MARK"] = "parent"
        torch.labkit_test_mark = "parent"

        def look(comm):
            mark = getattr(torch, "labkit_test_mark", None)
            shared = gc.get_freeze_count() > 100_000
            cuda = torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()
            return os.getpid(), mark, *cuda, shared, gc.isenabled()

        try:
            result = run(look, world_size=2)
        finally:
            del torch.labkit_test_mark, os.environ["LABKIT_TEST_MARK"]
        assert len({pid for pid, *_ in result.values} | {os.getpid()}) == 3
        # What the forkserver has loaded is frozen, and nothing else is shared.
        assert [rest for _, *rest in result.values] == [[None, False, False, True, True]] * 2
        assert not torch.cuda.is_initialized()

    def test_a_large_result_comes_back(self):  # row 20
        values = run(lambda comm: torch.full((25_000_000,), 2.0), world_size=1).values
        assert values[0].sum().item() == 50_000_000

    def test_a_large_result_says_what_it_costs_and_what_to_do(self, capsys, monkeypatch):
        run(lambda comm: torch.zeros(comm.rank * 1000), world_size=3)
        assert capsys.readouterr().err == ""
        monkeypatch.setattr(launch, "LARGE_RESULT_BYTES", 10_000)
        run(lambda comm: torch.zeros(comm.rank * 1000), world_size=3)
        said = capsys.readouterr().err
        assert re.search(r"^the ranks have returned 1\d\.\d KiB \(rank 2: [89]\.\d+ KiB\)", said)
        assert re.search(r"it took [\d.]+ m?s to pickle, send and unpickle", said)
        assert "Next step: return what you need" in said

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


class Planned(Exception):
    """Raised with the plan in place of a start of ranks on GPUs."""


class TestNamedDevices:
    @pytest.fixture
    def four_gpus(self, monkeypatch):
        found = gpus.Gpus(tuple(gpus.Gpu(index) for index in range(4)))
        monkeypatch.setattr(gpus, "found", lambda: found)
        monkeypatch.setattr(devices, "_told", set())

        def planned(plan, *args, **options):
            raise Planned(plan)

        monkeypatch.setattr(launch, "Supervisor", lambda job: planned(job.plan))
        monkeypatch.setattr(torchrun, "connect", planned)

    def plan_of(self, **options):
        with pytest.raises(Planned) as caught:
            run(print, **options)
        return caught.value.args[0]

    @pytest.mark.parametrize("named", ["cpu,cpu", ["cpu", "cpu"], ("cpu",) * 3])
    def test_each_rank_has_the_device_of_its_number(self, named):
        values = run(lambda comm: str(comm.device), world_size=2, devices=named).values
        assert values == ["cpu", "cpu"]

    def test_ranks_get_the_gpus_that_are_named_in_order(self, four_gpus):
        plan = self.plan_of(world_size=2, devices="cuda:3, cuda:1")
        assert (plan.backend, plan.devices) == ("nccl", ("cuda:3", "cuda:1"))

    @pytest.mark.parametrize("local_rank", ["0", "1"])
    def test_under_torchrun_the_list_is_that_of_the_machine(
        self, four_gpus, monkeypatch, capsys, local_rank
    ):
        variables = {"RANK": "2", "LOCAL_RANK": local_rank, "WORLD_SIZE": "4"}
        variables |= {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert self.plan_of(world_size=4, devices="cuda:3,cuda:3").devices == ("cuda:3",) * 2
        told = capsys.readouterr().err
        assert ("2 ranks share 1 GPU" in told) == (local_rank == "0"), "once per machine"

    def test_too_few_of_them_are_refused_before_a_rank_starts(self):
        with pytest.raises(ValueError, match="'cpu,cpu': 2 devices for 3 ranks: name one per"):
            run(print, world_size=3, devices="cpu,cpu")
        with pytest.raises(ValueError, match="'cuda:0': this machine has 0 CUDA GPUs"):
            run(print, world_size=1, devices="cuda:0")


def raises_on_one(comm):
    if comm.rank == 1:
        {}["the missing key"]
    comm.recv(torch.empty(1), 1)


class TestRow1WorkerRaises:
    def test_rank_traceback_and_line(self):
        with pytest.raises(WorkerError) as caught:
            run(raises_on_one, world_size=3)
        error = caught.value
        assert error.rank == 1
        assert "rank 1 raised KeyError: 'the missing key'" in str(error)
        assert HERE in error.location
        assert '{}["the missing key"]' in error.location
        assert "raises_on_one" in error.worker_traceback
        assert "labkit/runtime/worker.py" not in error.worker_traceback
        still_works()

    def test_a_cause_is_shown(self):
        def fails(comm):
            try:
                torch.ones(2) @ torch.ones(3)
            except RuntimeError as error:
                raise ValueError("the shapes") from error

        with pytest.raises(WorkerError, match="inconsistent tensor size") as caught:
            run(fails, world_size=1)
        assert "ValueError: the shapes" in str(caught.value)

    def test_the_line_is_the_learners_also_where_a_library_raises(self):
        def fails(comm):
            return json.loads("{")

        with pytest.raises(WorkerError, match="JSONDecodeError") as caught:
            run(fails, world_size=1)
        assert 'json.loads("{")' in caught.value.location


class TestRow2WorkerKilled:
    def test_inside_an_operation(self):
        def killed(comm):
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.recv(torch.empty(1), 1)

        with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL") as caught:
            run(killed, world_size=3)
        assert caught.value.rank == 1
        still_works()

    def test_inside_a_barrier_the_others_are_named_and_not_itself(self):
        def killed_while_waiting(comm):
            if comm.rank == 2:
                time.sleep(60)
            if comm.rank == 1:
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
            comm.barrier()

        with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL") as caught:
            run(killed_while_waiting, world_size=3)
        assert "Rank 0 was waiting for it in barrier" in str(caught.value)
        assert str(caught.value).count("was waiting") == 1

    def test_outside_any_operation(self):
        def crashes(comm):
            if comm.rank == 0:
                os.kill(os.getpid(), signal.SIGABRT)
            time.sleep(30)

        with pytest.raises(WorkerError, match="rank 0 was killed by SIGABRT"):
            run(crashes, world_size=2)

    def test_at_the_start(self):
        def killer(comm, _):
            pass

        class KillsItsProcess:
            def __reduce__(self):
                return eval, ("__import__('os').kill(__import__('os').getpid(), 9)",)

        with pytest.raises(WorkerError, match="was killed by SIGKILL before it had started"):
            run(killer, KillsItsProcess(), world_size=2)

    def test_at_the_end(self):
        def killed_later(comm):
            if comm.rank == 1:
                pid = os.getpid()
                subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {pid}"])
            else:
                time.sleep(1)

        with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL after its function"):
            run(killed_later, world_size=2)


class TestRow3WorkerLeaves:
    @pytest.mark.parametrize("code", [0, 3])
    def test_who_left_with_what_and_who_waits(self, code):
        def leaves(comm):
            if comm.rank == 1:
                time.sleep(0.5)
                os._exit(code)
            comm.recv(torch.empty(1), 1)

        start_s = time.monotonic()
        with pytest.raises(WorkerError) as caught:
            run(leaves, world_size=2)
        assert time.monotonic() - start_s < 10
        assert f"rank 1 left early with exit code {code}" in str(caught.value)
        assert "Rank 0 was waiting for it in recv at" in str(caught.value)

    def test_all_leave_at_once(self):
        with pytest.raises(WorkerError, match="left early with exit code 0"):
            run(lambda comm: os._exit(0), world_size=2)

    def test_sys_exit(self):
        def leaves(comm):
            if comm.rank == 0:
                time.sleep(0.2)
                sys.exit("enough")
            comm.barrier()

        with pytest.raises(DeadlockError, match=r"rank 0 called sys\.exit\('enough'\)") as caught:
            run(leaves, world_size=2)
        assert "Rank 1 was waiting for it in barrier" in str(caught.value)


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

    def test_without_a_loss_nothing_is_different(self):
        result = run(ring_neighbour, world_size=3, may_lose={0, 1, 2})
        assert result.values == [2, 0, 1]
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
            run(fails_without_it, True, world_size=2, may_lose=[1], timeout_s=0.8)
        assert "rank 1 was in its own code" not in str(caught.value)

    def test_ranks_that_there_are_not(self):
        with pytest.raises(ValueError, match=r"may_lose \[2\]: with world_size 2 the ranks are 0"):
            run(ring_neighbour, world_size=2, may_lose=[2])


def both_receive_first(comm):
    other = torch.empty(2)
    comm.recv(other, (comm.rank + 1) % comm.world_size)
    comm.send(other, (comm.rank - 1) % comm.world_size)


class TestRow4Deadlock:
    @pytest.mark.parametrize("world_size", [2, 3, 4])
    def test_the_cycle_is_named_with_operation_peer_and_line(self, world_size):
        start_s = time.monotonic()
        with pytest.raises(DeadlockError) as caught:
            run(both_receive_first, world_size=world_size)
        assert time.monotonic() - start_s < 10
        text = str(caught.value)
        ring = " -> ".join(f"rank {rank % world_size}" for rank in range(world_size + 1))
        assert f"deadlock: {ring}" in text
        assert "rank 0 is in recv, waiting for rank 1 to send float32 [2]" in text
        assert "comm.recv(other, (comm.rank + 1) % comm.world_size)" in text
        assert "comm.exchange" in text

    def test_both_send_first(self):
        def both_send_first(comm):
            comm.send(torch.ones(1), 1 - comm.rank)

        with pytest.raises(DeadlockError, match="is in send, waiting for rank 1 to receive"):
            run(both_send_first, world_size=2)
        still_works()

    def test_a_part_of_the_ranks_while_another_computes(self):
        def two_of_three(comm):
            if comm.rank == 0:
                time.sleep(60)
            comm.recv(torch.empty(1), 3 - comm.rank)

        with pytest.raises(DeadlockError, match="rank 1 -> rank 2 -> rank 1"):
            run(two_of_three, world_size=3)

    def test_a_rank_that_never_comes(self):
        def one_returns(comm):
            if comm.rank:
                comm.recv(torch.empty(3), 0)

        with pytest.raises(DeadlockError) as caught:
            run(one_returns, world_size=2)
        assert "rank 0 has returned, but rank 1 still waits for it" in str(caught.value)

    def test_a_barrier_that_one_rank_skips(self):
        def one_skips(comm):
            comm.barrier()
            if comm.rank != 1:
                comm.barrier()

        with pytest.raises(DeadlockError, match="waiting for rank 1 at barrier number 2"):
            run(one_skips, world_size=3)

    def test_slow_ranks_are_not_taken_for_stuck_ones(self):
        def slow(comm):
            for _ in range(3):
                time.sleep(0.2 * comm.rank)
                comm.barrier()
            return ring_neighbour(comm)

        assert run(slow, world_size=3).values == [2, 0, 1]


@pytest.mark.usefixtures("over_streams")
class TestRow4DeadlockOverAStream(TestRow4Deadlock):
    """The same where operations are only queued, as on NCCL."""


class TestRow5Hang:
    @pytest.mark.slow
    def test_the_deadline_shows_each_ranks_stack(self):
        def hangs(comm):
            if comm.rank == 1:
                while True:
                    pass
            comm.recv(torch.empty(1), 1)

        with pytest.raises(DeadlineError) as caught:
            run(hangs, world_size=2, timeout_s=1)
        text = str(caught.value)
        assert "deadline of 1 s" in text
        assert "rank 1 was in its own code" in text
        assert "rank 0 was in recv" in text
        assert text.count(HERE) == 2
        assert isinstance(caught.value, DeadlockError)
        still_works()

    def test_a_deadline_before_anything_can_be_done_is_a_deadline(self):
        with pytest.raises(DeadlineError) as caught:
            run(lambda comm: time.sleep(1), world_size=2, timeout_s=0.001)
        assert "still going at its deadline of 0.001 s" in str(caught.value)
        assert "Traceback" not in str(caught.value)
        still_works()


TRANSPORTS = pytest.mark.parametrize("transport", ["shared", "gloo"])


def misfit(comm, sent, expected, late):
    """Rank 0 sends one tensor and rank 1 expects the other; one of them comes later."""
    if comm.rank == late:
        time.sleep(0.2)
    try:
        if comm.rank == 0:
            comm.send(sent, 1)
        else:
            comm.recv(expected, 0)
    finally:
        # Nothing may have moved.
        print(f"{expected.unique().tolist()}")


def sums_of(comm, tensors, collective):
    collective(comm, tensors[comm.rank])


def shown_name(collective, transport):
    """The fast ring has no other way over gloo than to be the readable one."""
    name = collective.__name__
    return name if transport == "shared" else name.removeprefix("fast_")


COLLECTIVES = [fast_ring_all_reduce, ring_all_reduce, tree_all_reduce, broadcast]


@TRANSPORTS
class TestRow6Shapes:
    @pytest.mark.parametrize("late", [0, 1])
    def test_of_a_message(self, transport, late, capsys):
        sent, expected = torch.ones(3), torch.zeros(2, 2)
        with pytest.raises(DeadlockError) as caught:
            run(misfit, sent, expected, late, world_size=2, transport=transport)
        text = str(caught.value)
        assert "rank 0 sends float32 [3], at" in text
        assert "rank 1 receives into float32 [2, 2], at" in text
        assert "comm.send(sent, 1)" in text
        assert "comm.recv(expected, 0)" in text
        assert "[1.0]" not in capsys.readouterr().out

    @pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda f: f.__name__)
    def test_of_a_collective(self, transport, collective):
        # As many elements on both: only their shapes tell.
        tensors = [torch.ones(4), torch.ones(2, 2)]
        with pytest.raises(DeadlockError, match="call different collectives") as caught:
            run(sums_of, tensors, collective, world_size=2, transport=transport)
        name = shown_name(collective, transport)
        assert f"rank 0: 1. {name} float32 [4]" in str(caught.value)
        assert f"rank 1: 1. {name} float32 [2, 2]" in str(caught.value)
        assert "collective(comm, tensors[comm.rank])" in str(caught.value.location)


@TRANSPORTS
@pytest.mark.parametrize("other", [torch.float64, torch.int32], ids=["other size", "same size"])
class TestRow7Dtypes:
    def test_of_a_message(self, transport, other, capsys):
        name = str(other).removeprefix("torch.")
        sent, expected = torch.ones(3), torch.zeros(3, dtype=other)
        with pytest.raises(DeadlockError) as caught:
            run(misfit, sent, expected, 1, world_size=2, transport=transport)
        assert "rank 0 sends float32 [3], at" in str(caught.value)
        assert f"rank 1 receives into {name} [3], at" in str(caught.value)
        assert "[1" not in capsys.readouterr().out

    def test_of_a_collective(self, transport, other):
        tensors = [torch.ones(3), torch.ones(3, dtype=other)]
        name = str(other).removeprefix("torch.")
        with pytest.raises(DeadlockError) as caught:
            run(sums_of, tensors, tree_all_reduce, world_size=2, transport=transport)
        assert "rank 0: 1. tree_all_reduce float32 [3] sum" in str(caught.value)
        assert f"rank 1: 1. tree_all_reduce {name} [3] sum" in str(caught.value)


@TRANSPORTS
class TestRow8Order:
    def test_another_order(self, transport):
        def another_order(comm):
            comm.barrier()
            calls = [broadcast, ring_all_reduce]
            for call in calls if comm.rank == 0 else reversed(calls):
                call(comm, torch.ones(2))

        with pytest.raises(DeadlockError, match="call different collectives") as caught:
            run(another_order, world_size=3, transport=transport)
        assert "rank 0: 1. barrier, 2. broadcast float32 [2] from rank 0" in str(caught.value)
        assert ": 1. barrier, 2. ring_all_reduce float32 [2] sum" in str(caught.value)
        assert "the same order" in str(caught.value)

    @pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda f: f.__name__)
    def test_one_call_more(self, transport, collective):
        def one_more(comm):
            for _ in range(5 + (comm.rank == 1)):
                collective(comm, torch.ones(2))

        with pytest.raises(DeadlockError, match="has returned, but rank 1 still") as caught:
            run(one_more, world_size=2, transport=transport)
        text, call = str(caught.value), f"{shown_name(collective, transport)} float32 [2]"
        more = next(line for line in text.splitlines() if line.startswith("  rank 1: ..., "))
        less = next(line for line in text.splitlines() if line.startswith("  rank 0: ..., "))
        assert f"6. {call}" in more
        assert f"5. {call}" in less
        assert "6." not in less
        assert "collective(comm, torch.ones(2))" in text


class TestRow14Lifetime:
    def test_a_comm_used_after_its_run_says_so(self):
        def keeps(comm):
            torch.kept = comm

            class Late:
                def __reduce__(self):
                    comm.session.close()
                    comm.barrier()

            return Late()

        with pytest.raises(WorkerError, match="used after the end of its run"):
            run(keeps, world_size=1)

    def test_a_comm_cannot_be_returned(self):
        with pytest.raises(WorkerError, match="a comm belongs to its rank"):
            run(lambda comm: {"comm": comm}, world_size=1)

    def test_initialising_twice_is_refused(self):
        def again(comm):
            torch.distributed.init_process_group("gloo")

        with pytest.raises(WorkerError, match="ValueError: trying to initialize"):
            run(again, world_size=1)


class TestRow15Ports:
    def test_the_usual_ports_may_be_taken(self):
        with socket.socket() as one, socket.socket() as other:
            for taken, port in ((one, 29500), (other, 12355)):
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                taken.bind(("127.0.0.1", port))
                taken.listen()
            still_works()

    @pytest.mark.fresh
    def test_an_unreachable_rendezvous_names_address_and_seconds(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        code = """
            import labkit
            labkit.run(lambda comm: 1, world_size=2, timeout_s=2)
        """
        environment = os.environ | {
            "RANK": "1",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "test",
        }
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        assert "ConnectionError" in last
        assert f"127.0.0.1:{port}" in last
        assert re.search(r" in \d+ s: ", last)


class TestRow17StopButton:
    def test_interrupt_ends_the_ranks_and_the_next_run_works(self):
        def sleeps(comm):
            time.sleep(60)

        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        start_s = time.monotonic()
        with pytest.raises(KeyboardInterrupt) as caught:
            run(sleeps, world_size=2)
        assert time.monotonic() - start_s < 10
        (note,) = caught.value.__notes__
        assert note.count("was in its own code, at ") == 2
        assert note.count(f"{HERE}, line ") == 2
        assert note.count("time.sleep(60)") == 2
        assert wait_until(lambda: not running_ranks(), 1)
        still_works()

    def test_an_interrupt_while_the_engine_starts(self, monkeypatch):
        def starts_and_is_interrupted(thread):
            really_start(thread)
            if thread.name == "labkit-agent":
                wait_until(running_ranks, 10)
                thread._started.clear()  # as it is until the new thread has come up
                raise KeyboardInterrupt

        really_start = threading.Thread.start
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", starts_and_is_interrupted)
            with pytest.raises(KeyboardInterrupt):
                run(lambda comm: time.sleep(60), world_size=2)
        assert wait_until(lambda: not running_ranks(), 5)
        still_works()

    @pytest.mark.fresh
    def test_a_signal_to_the_whole_group_while_the_server_starts(self, tmp_path):
        """A terminal and Jupyter signal every process of the group, the server among them."""
        script = tmp_path / "stopped.py"
        script.write_text(
            textwrap.dedent("""
            import time
            from labkit import run

            def sleeps(comm):
                time.sleep(60)

            if __name__ == "__main__":
                print("about to run", flush=True)
                try:
                    run(sleeps, world_size=2)
                except KeyboardInterrupt:
                    print(run(lambda comm: comm.rank, world_size=2).values)
            """)
        )
        command = [sys.executable, str(script)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        program = subprocess.Popen(command, start_new_session=True, **pipes)
        try:
            assert program.stdout.readline() == "about to run\n"
            wait_until(lambda: len(session_of(program.pid)) >= 3, 30)
            os.killpg(program.pid, signal.SIGINT)
            out, err = program.communicate(timeout=60)
        finally:
            program.kill()
        assert (out, err) == ("[0, 1]\n", "")


@pytest.mark.fresh
class TestRow18KernelKilled:
    def test_no_rank_outlives_its_parent(self, tmp_path):
        script = write_program_that_never_ends(tmp_path)
        kernel = subprocess.Popen([sys.executable, str(script), str(tmp_path)])
        try:
            assert wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2, 60)
            ranks = [int(path.stem) for path in tmp_path.glob("*.pid")]
        finally:
            kernel.kill()
            kernel.wait()
        assert wait_until(lambda: not any(map(is_alive, ranks)), 2)


class TestRow19Threads:
    def test_from_a_thread_and_two_at_once(self):
        found = {}

        def start(offset):
            found[offset] = run(ring_neighbour, offset, world_size=2).values

        threads = [threading.Thread(target=start, args=(offset,)) for offset in (10, 20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {10: [11, 10], 20: [21, 20]}

    def test_a_run_inside_a_run_is_refused(self):
        def nested(comm):
            return run(ring_neighbour, world_size=1).values

        with pytest.raises(WorkerError, match="inside a rank of another run"):
            run(nested, world_size=1)


@pytest.mark.fresh
class TestScripts:
    """What people write into a file, or into a pipe."""

    RUN = "from labkit import run\n{guard}print(run(lambda comm: comm.rank, world_size=1).values)"

    def test_a_script_without_the_guard_is_told_of_it(self, tmp_path):
        script = tmp_path / "script.py"
        script.write_text(self.RUN.format(guard=""))
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert 'labkit.run has to be called under if __name__ == "__main__":' in done.stderr

    def test_a_program_from_standard_input_is_refused(self):
        done = subprocess.run(
            [sys.executable, "-"],
            input=self.RUN.format(guard=""),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "save it as a file and run that" in done.stderr.splitlines()[-1]


class TestRow20Pickling:
    def test_a_closure_that_cannot_travel_is_named(self):
        lock = threading.Lock()
        with pytest.raises(ValueError, match=r"it uses lock \(_thread.lock\)"):
            run(lambda comm: lock, world_size=2)

    def test_an_argument_that_cannot_travel_is_named(self):
        with pytest.raises(ValueError, match=r"args\[0\]\['lock'\] \(_thread.lock\)"):
            run(ring_neighbour, {"lock": threading.Lock()}, world_size=2)

    def test_a_result_that_cannot_travel_is_named(self):
        def locks(comm):
            return {"fine": 1, "locks": [threading.Lock()]}

        with pytest.raises(WorkerError, match=r"value\['locks'\]\[0\] \(_thread.lock\)"):
            run(locks, world_size=1)

    def test_something_that_is_no_function(self):
        with pytest.raises(ValueError, match="fn must be a function"):
            run(3, world_size=1)


class TestRow21Output:
    def test_lines_come_by_rank_in_order(self, capsys):
        def talks(comm):
            for number in range(3):
                print("line", number)
                comm.barrier()

        run(talks, world_size=3)
        lines = capsys.readouterr().out.splitlines()
        assert lines == [f"[rank {r}] line {n}" for r in range(3) for n in range(3)]

    def test_a_flood_is_cut_and_counted(self, capsys):
        def floods(comm):
            for _ in range(30):
                print("x" * 10_000)

        run(floods, world_size=2)
        out = capsys.readouterr().out
        assert out.count("x") == 2 * (200_000 - 19)
        assert "[rank 1] ... 100,029 more characters cut (a rank may print 200,000)" in out

    def test_binary_stderr_and_c_level_output_arrive(self, capsys):
        def odd(comm):
            os.write(1, b"bin \xff\x00\n")
            print("to stderr", file=sys.stderr)
            os.system("echo from a child")
            sys.stdout.write("no newline at the end")

        run(odd, world_size=1)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "[rank 0] bin \\xff\x00"
        assert "[rank 0] to stderr" in lines
        assert "[rank 0] from a child" in lines
        assert "[rank 0] no newline at the end" in lines

    @pytest.mark.slow
    def test_output_arrives_while_the_run_goes_on(self, tmp_path):
        gate = tmp_path / "gate"

        def waits(comm, path):
            print("hello from", comm.rank)
            while not os.path.exists(path):
                time.sleep(0.02)

        seen = []

        class Gate:
            """A stdout that opens the gate once both ranks have been heard."""

            def write(self, text):
                seen.append(text)
                if all(f"hello from {rank}" in "".join(seen) for rank in (0, 1)):
                    gate.touch()

            def flush(self):
                pass

        keep, sys.stdout = sys.stdout, Gate()
        try:
            run(waits, str(gate), world_size=2, timeout_s=30)
        finally:
            sys.stdout = keep
        assert gate.exists()

    def test_what_was_printed_before_a_failure_is_shown(self, capsys):
        def fails(comm):
            print("before the end")
            raise ValueError("now")

        with pytest.raises(WorkerError):
            run(fails, world_size=1)
        assert "[rank 0] before the end" in capsys.readouterr().out


def asks_for_a_gigabyte(comm, kind):
    """Rank 1 may have 256 MiB more than it has."""
    if comm.rank == 0:
        comm.barrier()
    else:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + 2**28
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        torch.empty(2**30, dtype=torch.uint8) if kind == "torch" else bytearray(2**30)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts pages in /proc")
class TestRow25Memory:
    def test_a_tensor_too_large_names_rank_line_and_request(self):
        with pytest.raises(WorkerError) as caught:
            run(asks_for_a_gigabyte, "torch", world_size=2)
        assert caught.value.rank == 1
        assert "1073741824 bytes" in str(caught.value)
        assert "torch.empty(2**30" in str(caught.value)

    def test_an_object_too_large_names_rank_line_and_what_was_held(self):
        with pytest.raises(WorkerError) as caught:
            run(asks_for_a_gigabyte, "python", world_size=2)
        assert caught.value.rank == 1
        assert re.search(
            r"the rank held up to \d+ MiB, its limit is [\d.]+ [MG]iB", str(caught.value)
        )
        assert "bytearray(2**30)" in str(caught.value)
