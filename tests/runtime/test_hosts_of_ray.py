"""Ranks on other hosts, without Ray: the hosts' actors live in threads of this process.

``test_ray.py`` has the same with a cluster of Ray.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from ranks import leftovers, running_ranks, travel_by_value, wait_until

from labkit import DeadlineError, DeadlockError, WorkerError, run
from labkit.collectives import ring_all_reduce
from labkit.config import RunConfig, parse_hosts
from labkit.errors import PeerLostError
from labkit.runtime.hosts import cluster, launch, meeting_store, sent
from labkit.runtime.hosts.cluster import HostLostError, Node, RemoteHost
from labkit.runtime.hosts.host import Host
from labkit.runtime.hosts.spread import spread

travel_by_value(__name__)


class HostHere(RemoteHost):
    """A host whose actor is an object of this process."""

    threads = ThreadPoolExecutor(32)

    def take_actor(self, gpus, sent, *, renew=False):
        self._host, self.gone = Host("127.0.0.1"), threading.Event()

    def ask(self, method, *args):
        # As Ray, which has a copy of everything, and runs the calls in threads.
        return self.threads.submit(getattr(self._host, method), *args)

    def result(self, asked, timeout_s=cluster.ANSWER_S):
        until_s = time.monotonic() + timeout_s
        while not self.gone.is_set() and time.monotonic() < until_s:
            with contextlib.suppress(TimeoutError):
                return asked.result(0.02)
        raise HostLostError(f"{self} does not answer")


@pytest.fixture
def hosts(monkeypatch):
    """Let ``hosts=N`` mean hosts of this process; the list fills with those of each run."""
    made = []

    def host(number, node):
        made.append(HostHere(number, node))
        return made[-1]

    def nodes_for(hosts):
        names = [f"10.0.0.{number}" for number in range(1, hosts + 1)]
        return [Node(name, name, frozenset([name]), 1, 0) for name in names]

    monkeypatch.setattr(launch, "RemoteHost", host)
    monkeypatch.setattr(launch, "nodes_for", nodes_for)
    monkeypatch.setattr(Host, "take", lambda host, sent: None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    before = leftovers()
    yield made
    assert wait_until(lambda: not running_ranks(), 10)
    assert leftovers() == before


def places(comm):
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    total = ring_all_reduce(comm, torch.full((7,), comm.rank + 1.0))
    print(f"line of {comm.rank}")
    return comm.hosts, comm.host, [int(os.environ[name]) for name in names], total.tolist()


class TestARun:
    def test_ranks_are_numbered_host_by_host_and_speak_in_order(self, hosts, capfd):
        result = run(places, world_size=3, hosts=2)
        assert [value[0] for value in result.values] == [((0, 1), (2,))] * 3
        assert [value[1] for value in result.values] == [0, 0, 1]
        expected = [[0, 0, 2, 0, 2], [1, 1, 2, 0, 2], [2, 0, 1, 1, 2]]
        assert [value[2] for value in result.values] == expected
        assert all(value[3] == [6.0] * 7 for value in result.values)
        lines = [f"[rank {rank}] line of {rank}" for rank in range(3)]
        assert capfd.readouterr().out.splitlines() == lines
        assert {span.rank for span in result.trace.spans} == {0, 1, 2}

    def test_one_host_is_as_this_machine(self, hosts):
        there, here = run(places, world_size=2, hosts=1), run(places, world_size=2)
        assert there.values == here.values
        assert there.bytes_sent == here.bytes_sent

    def test_output_is_limited_and_never_gets_in_the_way(self, hosts, capfd):
        def speaks(comm):
            for _ in range(40):
                print("x" * 100_000)
            return comm.rank

        assert run(speaks, world_size=2, hosts=2).values == [0, 1]
        lines = capfd.readouterr().out.splitlines()
        assert [line for line in lines if "more characters cut" in line].__len__() == 2

    def test_a_large_result_arrives_whole(self, hosts):
        result = run(lambda comm: torch.arange(2_000_000) + comm.rank, world_size=2, hosts=2)
        assert [int(value[-1]) for value in result.values] == [1_999_999, 2_000_000]


def fails(comm):
    if comm.rank == 2:
        raise ValueError("no such layer")
    comm.recv(torch.zeros(3), 2) if comm.rank == 0 else comm.barrier()


def dies(comm):
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.recv(torch.zeros(3), 2)


def in_a_circle(comm):
    comm.recv(torch.zeros(3), (comm.rank + 1) % comm.world_size)


def of_other_shapes(comm):
    if comm.rank == 0:
        comm.send(torch.zeros(3), 2)
    if comm.rank == 2:
        comm.recv(torch.zeros(4), 0)


def other_collectives(comm):
    ring_all_reduce(comm, torch.zeros(2 if comm.rank else 3))


class TestFailures:
    def test_an_exception_is_told_with_rank_host_and_line(self, hosts):
        with pytest.raises(
            WorkerError, match=r"rank 2 \(host 1\) raised ValueError: no such"
        ) as e:
            run(fails, world_size=3, hosts=2)
        assert e.value.rank == 2
        assert "test_hosts_of_ray.py" in e.value.location
        assert "host 1 is 10.0.0.2" in str(e.value)

    def test_a_killed_rank_is_named(self, hosts):
        told = r"rank 2 \(host 1\) was killed by SIGKILL in mid-run"
        with pytest.raises(WorkerError, match=told) as error:
            run(dies, world_size=3, hosts=2)
        assert "Rank 0 (host 0) was waiting for it in recv" in str(error.value)

    def test_a_deadlock_over_hosts_is_explained(self, hosts):
        with pytest.raises(DeadlockError, match=r"rank 0 .* -> rank 1 .* -> rank 2 .*-> rank 0"):
            run(in_a_circle, world_size=3, hosts=2)

    @pytest.mark.parametrize("fn", [of_other_shapes, other_collectives])
    def test_two_ends_that_do_not_fit_are_told(self, hosts, fn):
        with pytest.raises(DeadlockError, match=r"float32 \[[34]\]"):
            run(fn, world_size=3, hosts=2)

    def test_the_deadline_holds_every_stack(self, hosts):
        def sleeps(comm):
            time.sleep(60)

        with pytest.raises(DeadlineError) as error:
            run(sleeps, world_size=2, hosts=2, timeout_s=0.5)
        assert str(error.value).count("time.sleep(60)") == 2

    def test_a_run_can_do_without_a_rank(self, hosts):
        def goes_on(comm):
            if comm.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                comm.recv(torch.zeros(3), 2)
            except PeerLostError:
                return "lost"

        result = run(goes_on, world_size=3, hosts=2, may_lose=[2])
        assert result.values == ["lost", "lost", None]
        assert "SIGKILL" in result.lost[2]

    def test_a_host_that_is_silent_is_named_with_who_waits_for_it(self, hosts, tmp_path):
        def waits(comm):
            comm.barrier()
            (tmp_path / "here").touch()
            if comm.rank == 0:
                comm.recv(torch.zeros(3), 2)
            time.sleep(60)

        def falls_silent():
            wait_until((tmp_path / "here").exists, 60)
            time.sleep(1)
            hosts[1].gone.set()

        threading.Thread(target=falls_silent).start()
        told = r"rank 2 \(host 1\) was lost in mid-run: host 1 \(10.0.0.2\) does not answer"
        with pytest.raises(WorkerError, match=told) as error:
            run(waits, world_size=3, hosts=2)
        assert "Rank 0 (host 0) was waiting for it in recv" in str(error.value)
        # What the driver cannot reach any more ends by itself when it is not asked any more.
        for host_run in list(hosts[1]._host._runs.values()):
            host_run.close()

    def test_the_stop_button_ends_the_ranks_everywhere(self, hosts, tmp_path):
        def sleeps(comm):
            (tmp_path / str(comm.rank)).touch()
            time.sleep(60)

        def stops():
            wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 60)
            # Until what the ranks said of themselves has reached the driver.
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=stops).start()
        with pytest.raises(KeyboardInterrupt) as stop:
            run(sleeps, world_size=2, hosts=2)
        assert "rank 1 (host 1) was in its own code" in stop.value.__notes__[0]

    def test_a_host_ends_its_ranks_when_its_driver_is_silent(self, hosts, monkeypatch):
        monkeypatch.setattr("labkit.runtime.hosts.host._SILENCE_S", -1.0)
        with pytest.raises(WorkerError, match="its driver was not heard"):
            run(lambda comm: time.sleep(60), world_size=2, hosts=2)

    def test_a_host_may_be_told_to_end_a_run_by_several_at_once(self, hosts, tmp_path):
        def sleeps(comm):
            (tmp_path / str(comm.rank)).touch()
            time.sleep(60)

        def ends():
            wait_until((tmp_path / "1").exists, 60)
            (host_run,) = list(hosts[1]._host._runs.values())
            with ThreadPoolExecutor(4) as pool:
                ended = [pool.submit(host_run.close) for _ in range(4)]
            done.append([one.exception() for one in ended])

        done = []
        thread = threading.Thread(target=ends)
        thread.start()
        with pytest.raises(WorkerError, match=r"rank 1 \(host 1\) was killed by SIGKILL"):
            run(sleeps, world_size=2, hosts=2)
        thread.join()
        assert done == [[None] * 4]


class TestSettings:
    @pytest.mark.parametrize("hosts", [0, -1, True, 2.0, "", "a,,b", [], ["a", 1], {"a"}, None])
    def test_what_is_no_hosts_is_refused(self, hosts):
        with pytest.raises(ValueError, match="hosts must be"):
            parse_hosts(hosts)

    def test_numbers_and_addresses(self):
        assert parse_hosts(2) == parse_hosts(" 2 ") == 2
        assert parse_hosts("a, b") == parse_hosts(["a", "b"]) == ("a", "b")
        assert RunConfig(hosts=2, world_size=2).hosts == "2"
        assert RunConfig(hosts=["a", "b"], world_size=2).hosts == "a,b"

    def test_ranks_are_spread_as_evenly_as_possible(self):
        for world_size in range(1, 12):
            for num_hosts in range(1, world_size + 1):
                ranges = spread(world_size, num_hosts)
                assert [rank for ranks in ranges for rank in ranks] == list(range(world_size))
                sizes = [len(ranks) for ranks in ranges]
                assert max(sizes) - min(sizes) <= 1
                assert sizes == sorted(sizes, reverse=True)
        with pytest.raises(ValueError, match="3 hosts for 2 ranks"):
            spread(2, 3)

    def test_shared_memory_alone_does_not_reach_other_hosts(self, hosts):
        with pytest.raises(ValueError, match="'shared' is for ranks of one host"):
            run(places, world_size=2, hosts=2, transport="shared")

    def test_under_torchrun_the_ranks_exist_already(self, monkeypatch):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(ValueError, match="torchrun has started the ranks"):
            run(places, world_size=2, hosts=2)

    def test_without_ray_the_error_says_how_to_install_it(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(ValueError, match=r"pip install 'labkit\[cluster\]'.* make cluster"):
            run(places, world_size=2, hosts=2)

    def test_nobody_else_imports_ray(self):
        texts = {
            path: path.read_text() for path in Path(cluster.__file__).parents[2].rglob("*.py")
        }
        assert [path.name for path, text in texts.items() if "import ray" in text] == [
            "cluster.py"
        ]


class TestWhatTravels:
    def test_the_variables_that_the_program_has_set(self, monkeypatch):
        monkeypatch.setenv("MY_SETTING", "1")
        monkeypatch.setenv("RAY_SETTING", "1")
        variables = sent.of_this_process().variables
        assert variables["MY_SETTING"] == "1"
        assert "RAY_SETTING" not in variables
        assert "HOME" not in variables

    def test_functions_of_modules_that_are_not_installed(self, hosts, tmp_path, monkeypatch):
        (tmp_path / "my_part.py").write_text("def twice(x):\n    return 2 * x\n")
        monkeypatch.syspath_prepend(tmp_path)
        import my_part

        def calls(comm):
            sys.modules.pop("my_part", None)
            return my_part.twice(comm.rank)

        monkeypatch.delitem(sys.modules, "my_part")
        sys.modules["my_part"] = my_part
        (tmp_path / "my_part.py").unlink()
        assert run(calls, world_size=2, hosts=2).values == [0, 2]


class TestTheStore:
    def test_it_listens_on_the_one_address_alone(self):
        store = meeting_store.serve_store("127.0.0.1")
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        local = [line.split()[1] for line in lines if line.split()[3] == "0A"]
        mine = [at for at in local if int(at.partition(":")[2], 16) == store.port]
        assert mine == [f"0100007F:{store.port:04X}"]
        assert not [line for line in _tcp6_listeners() if line.endswith(f":{store.port:04X}")]
        client = meeting_store.MeetingStore("127.0.0.1", store.port).store(1)
        client.set("key", "value")
        assert store.get("key") == b"value"

    def test_the_interface_of_an_address(self):
        assert meeting_store.interface_of("127.0.0.1") == "lo"
        assert meeting_store.interface_of("192.0.2.77") == ""

    def test_an_address_of_another_machine_is_refused(self):
        with pytest.raises(OSError, match="assign"):
            meeting_store.serve_store("192.0.2.77")


def _tcp6_listeners():
    path = Path("/proc/net/tcp6")
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    return [line.split()[1] for line in lines if line.split()[3] == "0A"]
