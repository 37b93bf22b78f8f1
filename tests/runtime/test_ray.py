"""Ranks on the nodes of a real Ray cluster, here of several nodes on one machine.

Most of what a run on other hosts does is tested in ``test_hosts.py``, without Ray.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from ranks import is_alive, travel_by_value, wait_until

from labkit import WorkerError, run, train_with
from labkit.collectives import ring_all_reduce
from labkit.runtime.hosts import cluster as ours

ray = pytest.importorskip("ray", reason="Ray is not installed here: make cluster")
travel_by_value(__name__)
ATTEMPTS = 3


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """A cluster of two nodes, to which this process is connected."""
    from ray.cluster_utils import Cluster

    # Its sockets' paths must be short.
    folder = Path(os.environ["TESTS_TMPDIR"]) / f"lkr{os.getpid()}"
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    settings |= {"RAY_prestart_worker_first_driver": "0", "RAY_TMPDIR": str(folder)}
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        for name, value in settings.items():
            patch.setenv(name, value)
        with at_once():
            made = started(Cluster)
        stack.callback(made.shutdown)
        ray.init(made.address, log_to_driver=False, logging_level="ERROR")
        stack.callback(ray.shutdown)
        yield made


def started(kind):
    """A cluster of two nodes. Ray itself gives up on a machine that is too busy."""
    for attempt in range(ATTEMPTS):
        made = kind()
        try:
            made.add_node(num_cpus=1, include_dashboard=False)
            made.add_node(num_cpus=1)
        except Exception:
            made.shutdown()
            if attempt == ATTEMPTS - 1:
                raise
        else:
            return made
    return None


@contextlib.contextmanager
def at_once():
    """Let what starts here go first, where that may be: Ray gives its helpers 15 s to start."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def who(comm):
    total = ring_all_reduce(comm, torch.ones(3))
    print(f"line of {comm.rank}")
    return os.getpid(), comm.hosts, total.tolist(), os.getcwd(), os.environ.get("MY_SETTING")


def test_the_ranks_of_two_nodes_are_one_run(nodes, monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_SETTING", "1")
    result = run(who, world_size=3, hosts=2)
    pids, hosts, totals, folders, settings = zip(*result.values)
    assert set(hosts) == {((0, 1), (2,))}
    assert totals == ([3.0] * 3,) * 3
    assert set(folders) == {str(tmp_path)}
    assert set(settings) == {"1"}
    lines = [f"[rank {rank}] line of {rank}" for rank in range(3)]
    assert capfd.readouterr().out.splitlines() == lines
    assert wait_until(lambda: not any(map(is_alive, pids)), 10)


def test_the_actors_are_kept_and_keep_no_cores(nodes):
    before = {name: kept[1] for name, kept in ours._kept_actors().items()}
    assert len(before) == 2
    unset = [value[4] for value in run(who, world_size=2, hosts=2).values]
    assert unset == [None, None]
    assert {name: kept[1] for name, kept in ours._kept_actors().items()} == before
    assert ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"]


def test_training_over_two_nodes_equals_one_device(nodes):
    same = {"train_size": 50, "batch_size": 14, "dtype": "float64"}
    there = train_with("ring_all_reduce", world_size=3, hosts=2, **same)
    one = train_with("single", **same)
    assert len(set(there.checksums)) == 1
    for name, value in one.state.items():
        torch.testing.assert_close(there.state[name], value, rtol=1e-10, atol=1e-10)


def test_nodes_that_the_cluster_does_not_have_are_refused(nodes):
    address = ray.util.get_node_ip_address()
    with pytest.raises(ValueError, match=r"hosts=3: the cluster has 2 nodes .*use fewer hosts"):
        run(who, world_size=3, hosts=3)
    with pytest.raises(ValueError, match=r"'10.9.8.7' is not a node of the cluster, whose nodes"):
        run(who, world_size=2, hosts=["10.9.8.7", address])
    with pytest.raises(ValueError, match="is named twice"):
        run(who, world_size=3, hosts=[address] * 3)
    assert len(ours.nodes_for(f"{address},{address}")) == 2


def test_an_actor_that_was_killed_is_named_and_renewed(nodes):
    def ends_its_host(comm):
        if comm.rank == 1:
            os.kill(multiprocessing.parent_process().pid, signal.SIGKILL)
        comm.barrier()

    with pytest.raises(WorkerError, match=r"rank 1 \(host 1\) was lost .*host 1 \(.*\) is lost"):
        run(ends_its_host, world_size=2, hosts=2)
    assert run(who, world_size=2, hosts=2).values[0][1] == ((0,), (1,))


def test_a_node_that_was_killed_is_named(nodes, tmp_path):
    def waits(comm):
        (tmp_path / f"{comm.rank}").touch()
        comm.recv(torch.zeros(3), 2) if comm.rank == 0 else time.sleep(60)

    second = nodes.list_all_nodes()[1]

    def kills():
        while not (tmp_path / "2").exists():
            time.sleep(0.1)
        # The driver hears several times per second how far the ranks are.
        time.sleep(1)
        nodes.remove_node(second, allow_graceful=False)

    threading.Thread(target=kills, daemon=True).start()
    with pytest.raises(WorkerError, match=r"rank 2 \(host 1\) was lost in mid-run") as error:
        run(waits, world_size=3, hosts=2)
    assert "Rank 0 (host 0) was waiting for it in recv" in str(error.value)


def test_ranks_end_with_their_drivers_connection(nodes, tmp_path):
    """As they do with the driver itself: Ray ends its actors, and a rank ends with its actor."""

    def waits(comm):
        (tmp_path / f"{os.getpid()}").touch()
        time.sleep(60)

    def runs():
        with pytest.raises(WorkerError, match="was lost"):
            run(waits, world_size=2, hosts=1)
        ended.set()

    ended = threading.Event()
    threading.Thread(target=runs).start()
    assert wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 60)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    ray.shutdown()
    assert ended.wait(20)
    assert wait_until(lambda: not any(map(is_alive, pids)), 20)
