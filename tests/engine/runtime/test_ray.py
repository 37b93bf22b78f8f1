"""Ranks on the nodes of a real Ray cluster, here of several nodes on one machine."""

import contextlib
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from ranks import is_alive, wait_until

from labkit import WorkerError, run
from labkit.collectives import ring_all_reduce

# Ray reads it when it is imported.
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
ray = pytest.importorskip("ray", reason="Ray is not installed here: make cluster")
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
        ray.init(made.address, logging_level="ERROR")
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
    return os.getpid(), comm.hosts, total.tolist(), os.getcwd()


def test_the_ranks_of_two_nodes_are_one_run(nodes, monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(tmp_path)
    result = run(who, world_size=3, hosts=2)
    _, hosts, totals, folders = zip(*result.values)
    assert set(hosts) == {((0, 1), (2,))}
    assert totals == ([3.0] * 3,) * 3
    assert set(folders) == {str(tmp_path)}
    said = ""

    def says_all():
        nonlocal said
        said += capfd.readouterr().out
        return all(re.search(rf"\(rank {rank} pid=.* line of {rank}", said) for rank in range(3))

    assert wait_until(says_all, 30), said


def test_the_stop_button_ends_the_ranks(nodes, tmp_path):
    def waits(comm):
        (tmp_path / f"{os.getpid()}").touch()
        time.sleep(60)

    def stops():
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 60)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=stops, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run(waits, world_size=2, hosts=2)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert wait_until(lambda: not any(map(is_alive, pids)), 60)


def test_a_node_that_was_killed_is_named(nodes, tmp_path):
    def waits(comm):
        (tmp_path / f"{comm.rank}").touch()
        comm.recv(torch.zeros(3), 2) if comm.rank == 0 else time.sleep(60)

    second = nodes.list_all_nodes()[1]

    def kills():
        wait_until(lambda: (tmp_path / "2").exists(), 60)
        time.sleep(1)
        nodes.remove_node(second, allow_graceful=False)

    threading.Thread(target=kills, daemon=True).start()
    with pytest.raises(WorkerError, match="host 1"):
        run(waits, world_size=3, hosts=2)
