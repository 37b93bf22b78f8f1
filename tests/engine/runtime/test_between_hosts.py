"""Faults of runs over several hosts: each is told on every host, with rank, host and line.

The ranks are started as torchrun starts them (``tests/hosts.py``), two hosts on this machine.
"""

import os
import re
import signal
import sys

import pytest
import torch
from hosts import on_hosts

import labkit
from labkit.collectives import ring_all_reduce

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc/PID/fd")
HERE = os.path.abspath(__file__)


def where(comment: str) -> str:
    """The only line of this file that ends with this comment, as an explanation names it."""
    with open(HERE) as file:
        (found,) = [n for n, line in enumerate(file, 1) if line.rstrip().endswith(f"# {comment}")]
    return f"{HERE}, line {found}: "


def fails(fault):
    """A program: run ``fault``, and say what came of it."""
    rank = os.environ["RANK"]

    def guarded(comm):
        try:
            comm.barrier()
            return fault(comm)
        finally:
            print(f"finally of rank {rank}", flush=True)

    try:
        labkit.run(guarded, world_size=int(os.environ["WORLD_SIZE"]))
    except BaseException as error:
        print(f"rank {rank} got {type(error).__name__}", flush=True)
        raise


def all_in_recv(comm):
    comm.recv(torch.zeros(4), (comm.rank + 1) % comm.world_size)  # the cycle


def one_never_comes(comm):
    if comm.rank < comm.world_size - 1:
        comm.barrier()  # not the last rank


def other_collectives(comm):
    op = "max" if comm.rank == comm.world_size - 1 else "sum"
    ring_all_reduce(comm, torch.zeros(6), op)  # sum and maximum


def killed(comm):
    if comm.rank == comm.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ring_all_reduce(comm, torch.zeros(6))  # waits for killed


def raises(comm):
    if comm.rank == comm.world_size - 1:
        raise KeyError("of the learner")  # the mistake
    ring_all_reduce(comm, torch.zeros(6))


def told_on(hosts, *expected):
    """Checks that every host tells the same once, with all of ``expected``."""
    first_lines = set()
    for host in hosts:
        told = re.findall(r"^labkit: (.*)", host.text, re.M)
        assert len(told) == 1, host.text
        first_lines.add(told[0])
        for part in expected:
            assert part in host.text, host.text
    assert len(first_lines) == 1, first_lines


class TestFaults:
    """One fault after the other, on two hosts with two ranks each."""

    def told(self, fault, *expected, **settings):
        hosts = on_hosts(fails, [2, 2], fault, **settings)
        told_on(hosts, *expected, "Hosts: host 0 is ")
        codes = hosts[0].codes | hosts[1].codes
        assert all(codes.values())
        for host in hosts:
            # What torchrun shows of the first rank that has ended.
            assert any(expected[0] in text for text in host.files.values())
        return hosts

    def raised(self, hosts, error, *ranks):
        """All of these ranks ran their ``finally``, and then each got the error.

        Outside the run no rank waits for another: one may be ended before it has shown its error,
        since torchrun ends the ranks of a host with the first that fails. That one has got it.
        """
        text = "".join(host.text for host in hosts)
        codes = {rank: code for host in hosts for rank, code in host.codes.items()}
        for rank in ranks:
            assert f"finally of rank {rank}" in text
            was_ended = codes[rank] == -signal.SIGTERM
            assert was_ended or f"rank {rank} got {error}" in text

    def test_a_cycle(self):
        hosts = self.told(all_in_recv, "deadlock: rank 0 (host 0) -> rank 1", where("the cycle"))
        self.raised(hosts, "DeadlockError", 0, 1, 2, 3)

    @pytest.mark.more
    def test_a_rank_that_never_comes(self):
        found = "rank 3 (host 1) has returned, but rank 0 (host 0), rank 1"
        hosts = self.told(one_never_comes, found, where("not the last rank"))
        self.raised(hosts, "DeadlockError", 0, 1, 2)

    @pytest.mark.more
    def test_collectives(self):
        self.told(other_collectives, "call different collectives", where("sum and maximum"))

    @pytest.mark.more
    def test_a_rank_that_is_lost(self):
        # On its own host torchrun has ended the other rank, and says why.
        here, there = on_hosts(fails, [2, 2], killed)
        told_on([here], "rank 3 (host 1) cannot be reached", where("waits for killed"))
        self.raised([here], "WorkerError", 0, 1)
        assert there.codes[3] == -signal.SIGKILL

    def test_an_exception(self):
        hosts = self.told(raises, "rank 3 (host 1) raised KeyError", where("the mistake"))
        self.raised(hosts[:1], "WorkerError", 0, 1)
        self.raised(hosts[1:], "KeyError", 3)
