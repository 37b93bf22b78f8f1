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
import psutil
import pytest
import torch
import torch.distributed as dist
from jupyter_client.manager import start_new_kernel
from jupyter_client.provisioning import KernelProvisionerFactory
from ranks import is_alive, leftovers, running_ranks, server_pid, wait_until

from labkit import WorkerError, run
from labkit.engine.comm.board import Board
from labkit.engine.runtime.failures import Evidence, failure_error
from labkit.engine.runtime.messages import Report


@pytest.fixture(autouse=True)
def nothing_is_left():
    before, threads = leftovers(), threading.active_count()
    yield
    assert wait_until(lambda: not running_ranks(), 60), f"ranks left: {running_ranks()}"
    assert leftovers() <= before
    assert wait_until(lambda: threading.active_count() <= threads, 60)


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
        assert wait_until(lambda: not any(map(is_alive, children)), 60)


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

    run(lambda comm: None, world_size=1)
    with pytest.raises(WorkerError, match="left early with exit code 255"):
        run(works, server_pid(), world_size=2)
    assert run(lambda comm: comm.rank, world_size=2).values == [0, 1]


@pytest.mark.fresh
def test_a_kernel_ends_without_a_signal_and_its_forkserver_with_it(monkeypatch):
    factory = KernelProvisionerFactory.instance()
    monkeypatch.setattr(factory, "default_provisioner_name", "local-provisioner")
    code = "import labkit, os; labkit.warm_up(training=False)\n"
    code += "print(labkit.run(lambda comm: os.getppid(), world_size=1).values[0])"
    manager, client = start_new_kernel()
    said, process = [], manager.provisioner.process
    client.execute_interactive(code, output_hook=said.append, timeout=60)
    (server,) = (int(m["content"]["text"]) for m in said if m["msg_type"] == "stream")
    client.stop_channels()
    manager.shutdown_wait_time = 20  # after half of them Jupyter sends one
    manager.shutdown_kernel()
    assert process.returncode == 0
    assert not is_alive(server)


def test_a_consequence_that_is_reported_first_does_not_hide_the_cause():
    lost, cause = Report(1, "peer_lost", summary="lost"), Report(0, "raised", summary="raised")
    assert failure_error(Evidence(Board(2), reports={1: lost, 0: cause})).rank == 0


def connections_of_many(comm):
    """Return this rank's established connections at the start, and a sum over gloo."""
    process = psutil.Process()
    before = len([one for one in process.net_connections() if one.status == "ESTABLISHED"])
    comm.barrier()  # in shared memory: no rank has been connected by another one's sum
    total = torch.ones(1)
    dist.all_reduce(total)
    return before, total.item()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:world_size 24 is far above")
def test_many_ranks_are_connected_when_they_first_talk():
    """Or the connections of a start would grow with the square of the ranks."""
    for before, total in run(connections_of_many, world_size=24).values:
        assert (before, total) == (0, 24.0)


def test_a_function_may_use_pytorchs_own_kinds_of_modules_and_operators():
    aten = torch.ops.aten
    packet = torch.ops.aten.relu
    overload = torch.ops.aten.relu.default

    def uses(comm):
        torch.backends.cudnn.deterministic = True
        negative = -torch.ones(2)
        by_each = [torch.ops.aten.relu(negative), aten.relu(negative)]
        by_each += [packet(negative), overload(negative)]
        return [result.tolist() for result in by_each], torch.backends.cudnn.deterministic

    assert run(uses, world_size=2).values == [([[0, 0]] * 4, True)] * 2
