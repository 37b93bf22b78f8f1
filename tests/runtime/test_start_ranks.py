"""The seam to PyTorch's elastic agent and Python's forkserver: what of theirs labkit relies on."""

import contextlib
import inspect
import multiprocessing.process
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partialmethod
from multiprocessing import forkserver

import pytest
import torch
from ranks import (
    end_server,
    is_alive,
    leftovers,
    running_ranks,
    server_pid,
    travel_by_value,
    wait_until,
)
from torch.distributed.elastic import events, rendezvous
from torch.distributed.elastic.agent.server import api

from labkit import DeadlineError, WorkerError, run
from labkit.comm.processes import is_stopped
from labkit.runtime import start_ranks, supervisor
from labkit.runtime.forkserver import end_stopped_server

travel_by_value(__name__)


def rank_of(comm):
    return comm.rank


@pytest.fixture(scope="module", autouse=True)
def warm():
    run(rank_of, world_size=1)


@pytest.fixture
def seen(monkeypatch):
    """The agents of the runs that a test starts."""
    agents = []

    class Seen(start_ranks.Ranks):
        def start(self):
            agents.append(self)
            super().start()

    monkeypatch.setattr(supervisor, "Ranks", Seen)
    return agents


class TestSeam:
    """A failure here names what a new PyTorch or Python has changed, for start_ranks.py."""

    def test_what_an_agent_must_define(self):
        assert api.SimpleElasticAgent.__abstractmethods__ == {
            "_start_workers",
            "_stop_workers",
            "_monitor_workers",
            "_shutdown",
        }
        assert not start_ranks.Ranks.__abstractmethods__

    def test_what_a_rendezvous_must_define(self):
        assert not start_ranks.OneMachine.__abstractmethods__
        assert rendezvous.RendezvousHandler.use_agent_store.fget is not None

    def test_the_agent_makes_its_events_where_we_look_no_name_up(self):
        calls = inspect.getsource(api.SimpleElasticAgent)
        assert "self._construct_event(" in calls
        outside = calls.replace(inspect.getsource(api.SimpleElasticAgent._construct_event), "")
        assert "getfqdn" not in outside
        assert "_get_fq_hostname" not in outside
        assert list(inspect.signature(events.Event).parameters)[:2] == ["name", "source"]

    def test_the_forkserver_has_the_names_that_we_use(self):
        server = forkserver._forkserver
        assert {"_forkserver_pid", "_forkserver_address"} <= vars(server).keys()
        assert is_alive(server_pid())
        assert os.path.exists(server._forkserver_address)

    def test_what_a_lost_exit_code_looks_like(self):
        source = inspect.getsource(sys.modules["multiprocessing.popen_forkserver"].Popen.poll)
        assert f"self.returncode = {start_ranks._UNKNOWN_CODE}" in source


class TestEndsOfRanks:
    @pytest.mark.slow
    def test_a_rank_that_dies_when_its_function_has_returned_hangs_nothing(self, seen):
        outcomes = set()
        # On a busy machine the first moments are before there are ranks.
        for number in range(60):
            timer = threading.Timer(number / 200, _kill_one, (seen,))
            timer.start()
            started_s = time.monotonic()
            outcomes.add(_whole_or_named())
            timer.join()
            assert time.monotonic() - started_s < 10
            if number >= 15 and "named" in outcomes:
                break
        assert outcomes <= {"whole", "named"}
        assert "named" in outcomes

    def test_killed_after_all_have_returned_the_values_are_there(self, monkeypatch, seen):
        def kills_before_it_may_go(control):
            for pid in seen[-1].pids.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            let_go(control)

        let_go = supervisor.let_go
        monkeypatch.setattr(supervisor, "let_go", kills_before_it_may_go)
        assert run(rank_of, world_size=3).values == [0, 1, 2]

    @pytest.mark.slow
    def test_a_rank_that_is_stopped_in_the_middle_of_its_report_is_named(self, monkeypatch, seen):
        def stops_the_sender(inbox):
            complete = read(inbox)
            if not complete:
                os.kill(seen[-1].pids[0], signal.SIGSTOP)
            return complete

        read = supervisor.Inbox.read
        monkeypatch.setattr(supervisor.Inbox, "read", stops_the_sender)
        with pytest.raises(DeadlineError, match=r"rank 0 is stopped by a signal.*kill -CONT"):
            run(lambda comm: torch.zeros(1_000_000), world_size=1, timeout_s=1)

    @pytest.mark.slow
    def test_a_stopped_rank_is_named_at_the_deadline_and_ended(self):
        def one_stops(comm):
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            comm.barrier()

        with pytest.raises(DeadlineError) as caught:
            run(one_stops, world_size=2, timeout_s=1)
        assert "rank 0 was in barrier" in str(caught.value)
        assert "rank 1 is stopped by a signal (SIGSTOP, or Ctrl-Z)" in str(caught.value)
        assert "endless loop" not in str(caught.value)
        assert wait_until(lambda: not running_ranks(), 1)

    def test_a_rank_that_a_child_of_its_own_outlives_is_missed_at_once(self):
        def forks_and_dies(comm):
            if comm.rank == 1:
                if os.fork() == 0:
                    time.sleep(5)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)
            comm.barrier()

        started_s = time.monotonic()
        with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL in mid-run"):
            run(forks_and_dies, world_size=2)
        assert time.monotonic() - started_s < 4

    @pytest.mark.slow
    def test_a_thread_that_a_rank_leaves_behind_does_not_hold_the_run(self):
        def leaves_a_thread(comm):
            threading.Thread(target=time.sleep, args=(60,)).start()
            return comm.rank

        started_s = time.monotonic()
        assert run(leaves_a_thread, world_size=2).values == [0, 1]
        assert time.monotonic() - started_s < 8

    def test_the_second_interrupt_ends_the_wait_for_ranks_that_do_not_go(self, monkeypatch, seen):
        """As in the kernel's own uninterruptible sleep: nothing that we send ends them."""

        def interrupts(self, timeout_s=None):
            waited.append(timeout_s)
            raise KeyboardInterrupt

        waited = []
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()

        class Stays(start_ranks.Ranks):
            def __init__(self, *args):
                super().__init__(*args)
                self.finished.wait = interrupts.__get__(self.finished)

        monkeypatch.setattr(supervisor, "Ranks", Stays)
        with pytest.raises(KeyboardInterrupt):
            run(lambda comm: time.sleep(60), world_size=2)
        assert len(waited) == 2
        assert wait_until(lambda: not running_ranks(), 5)


def _whole_or_named():
    try:
        assert run(rank_of, world_size=2).values == [0, 1]
    except WorkerError as error:
        return "named" if "was killed by SIGKILL" in str(error) else str(error)
    return "whole"


def _kill_one(agents):
    if agents and (pids := agents[-1].pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(next(reversed(pids.values())), signal.SIGKILL)


def stopped_server():
    server = server_pid()
    os.kill(server, signal.SIGSTOP)
    assert wait_until(lambda: is_stopped(server), 5)
    return server


def first_killed(process, start):
    end_server()
    raise EOFError  # as Python says of a server that is gone, had it not just replaced it


def killed_between_two_ranks(process, start):
    """The second rank is there, and nobody has been told its number."""
    start(process)
    if process.name == "labkit-rank-1":
        os.kill(server_pid(), signal.SIGABRT)
        time.sleep(0.5)
        raise EOFError


def first_stopped(process, start):
    stopped_server()
    start(process)


@pytest.mark.fresh
@pytest.mark.usefixtures("light_server")
class TestForkserver:
    def test_lost_while_ranks_start_it_is_named_and_the_next_run_works(self, monkeypatch):
        start = type(multiprocessing.get_context("forkserver").Process()).start
        for fault, end in (
            (killed_between_two_ranks, "was killed by SIGABRT"),
            (first_killed, "was killed by SIGKILL"),
            (first_stopped, "is stopped by a signal"),
        ):
            with monkeypatch.context() as patch:
                faulty = partialmethod(fault, start)
                patch.setattr(multiprocessing.process.BaseProcess, "start", faulty)
                with pytest.raises(WorkerError, match=rf"the forkserver, pid \d+\) {end}"):
                    run(lambda comm: comm.barrier(), world_size=3)
        assert run(rank_of, world_size=2).values == [0, 1]

    def test_a_run_goes_on_without_it(self):
        def works(comm, server):
            if comm.rank == 0:
                os.kill(server, signal.SIGKILL)
            time.sleep(0.5)
            comm.barrier()
            return comm.rank

        server = server_pid()
        assert run(works, server, world_size=2).values == [0, 1]
        assert run(rank_of, world_size=2).values == [0, 1]
        assert server_pid() != server

    def test_one_that_goes_on_in_a_moment_stays_and_one_that_does_not_is_replaced(self):
        server = stopped_server()
        threading.Timer(0.3, os.kill, (server, signal.SIGCONT)).start()
        end_stopped_server()
        assert run(rank_of, world_size=2).values == [0, 1]
        assert server_pid() == server
        stopped_server()
        assert run(rank_of, world_size=2).values == [0, 1]
        assert not is_alive(server)

    def test_a_forked_child_has_one_of_its_own(self):
        before = leftovers()
        child = os.fork()
        if child == 0:
            # Whatever happens here, this copy of the test run must not go on.
            with contextlib.suppress(BaseException):
                os._exit(0 if run(rank_of, world_size=2).values == [0, 1] else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert run(rank_of, world_size=2).values == [0, 1]
        assert wait_until(lambda: leftovers() <= before, 10)


class TestManyRanks:
    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:world_size 64 is far above:UserWarning")
    def test_sixty_four_start_and_meet(self):
        def meets(comm):
            comm.barrier()
            return comm.rank

        assert run(meets, world_size=64).values == list(range(64))

    @pytest.mark.filterwarnings("ignore:world_size 300 is far above:UserWarning")
    def test_more_than_this_process_may_open_files_for_are_refused_with_the_way_round(
        self, monkeypatch
    ):
        monkeypatch.setattr("resource.getrlimit", lambda _: (1024, 4096))
        words = (
            r"needs about 1900 open files, .* may have 1024: use at most 154 ranks, .*ulimit -n"
        )
        with pytest.raises(ValueError, match=words):
            run(rank_of, world_size=300)


NAMES = """
    import ctypes, fcntl, os, socket, struct, sys, threading, time

    CLONE_NEWNS, CLONE_NEWNET = 0x20000, 0x40000000
    MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
    libc = ctypes.CDLL(None, use_errno=True)

    def do(result):
        if result:
            print("cannot:", os.strerror(ctypes.get_errno()))
            sys.exit(77)

    def another_file(path, content):
        mine = os.path.join(sys.argv[1], os.path.basename(path))
        with open(mine, "w") as file:
            file.write(content)
        do(libc.mount(mine.encode(), path.encode(), None, MS_BIND, None))

    import torch
    from labkit import run, warm_up

    def sums(comm):
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        return total.item()

    if __name__ == "__main__":
        # A machine of its own: its loopback is up, and its one name server never answers.
        do(libc.unshare(CLONE_NEWNS | CLONE_NEWNET))
        do(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
        another_file("/etc/resolv.conf", "nameserver 127.0.0.1\\n")
        another_file("/etc/hosts", "")
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14s", b"lo", 1 | 64, b""))
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        server.bind(("127.0.0.1", 53))
        asked = []

        def listen():
            while True:
                asked.append(server.recvfrom(512)[0])

        threading.Thread(target=listen, daemon=True).start()

        warm_up(training=False)
        for transport in ("shared", "gloo"):
            run(sums, world_size=2, transport=transport)
        try:
            run(lambda comm: 1 / 0, world_size=2)
        except Exception as error:
            print(type(error).__name__)
        started_s = time.monotonic()
        print(run(sums, world_size=2).values, len(asked), time.monotonic() - started_s < 5)
        print(*asked)
"""


@pytest.mark.fresh
def test_a_launch_asks_no_name_server(tmp_path):
    if os.getuid() != 0:
        pytest.skip("needs root: a network of its own, with a name server that never answers")
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(NAMES))
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    if done.returncode == 77:
        pytest.skip(f"no network of its own here: {done.stdout}")
    assert done.stdout.splitlines()[:2] == ["WorkerError", "[2.0, 2.0] 0 True"], done.stderr
