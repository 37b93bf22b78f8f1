"""The shared-memory transport: messages, waiting, lost peers, and no leftovers of a killed run.

Much of it is tested between threads of this process, which may hold the two ends of a channel as
well as two processes may. What concerns processes (a kill, waiting without work, what is left) is
tested on real ranks, on both transports where they must agree.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from ranks import (
    wait_until,
)

from labkit import run
from labkit.collectives import direct_all_reduce, fast_ring_all_reduce
from labkit.engine.comm.board import LEFT
from labkit.engine.comm.shared_memory import NUM_SLOTS, SEGMENT_BYTES, Arena
from labkit.engine.comm.shared_transport import SharedTransport

ALL_SLOTS = NUM_SLOTS * SEGMENT_BYTES


def threads_as_ranks(world_size, function, timeout_s=20.0):
    """[function(transport, rank)] of P threads that share one arena."""
    arena = Arena(world_size)
    with ThreadPoolExecutor(world_size) as pool:
        ranks = range(world_size)
        transports = [SharedTransport(arena, rank, timeout_s) for rank in ranks]
        return list(pool.map(function, transports, ranks))


def numbered(num_bytes, start=0):
    return (torch.arange(num_bytes) + start).to(torch.uint8)


class TestMessages:
    def test_an_exchange_with_one_side_much_larger(self):
        sizes = [(1, 3 * ALL_SLOTS), (3 * ALL_SLOTS, 0), (5, 5)]

        def unequal(transport, rank):
            found = []
            for both in sizes:
                mine, theirs = numbered(both[rank], rank), numbered(both[1 - rank], 1 - rank)
                target = torch.zeros_like(theirs)
                transport.exchange(mine, 1 - rank, target, 1 - rank)
                found.append(torch.equal(target, theirs))
            return found

        assert threads_as_ranks(2, unequal) == [[True] * 3] * 2

    def test_what_was_sent_before_the_senders_end_still_arrives(self):
        def sends_and_leaves(transport, rank):
            if rank == 0:
                transport.send(numbered(5), 1)
                transport.arena.board.ranks[0]["state"] = LEFT
                return None
            transport.channel_from(0).ready.post()
            assert wait_until(lambda: transport.arena.board.ranks[0]["state"] == LEFT, 60)
            return transport.channel_from(0).arrive(5, torch.uint8).tolist()

        assert threads_as_ranks(2, sends_and_leaves)[1] == [0, 1, 2, 3, 4]


# On real ranks


def waits_for_rank_0(comm):
    """The share of a core that a rank uses while it waits, by operation."""
    one, peer = torch.ones(1), 1 - comm.rank
    operations = {
        "recv": lambda: comm.recv(one, 0) if comm.rank else send_to_all(comm, one),
        "exchange": lambda: comm.rank > 1 or comm.exchange(one, peer, torch.ones(1), peer),
        "barrier": comm.barrier,
        "fast ring": lambda: fast_ring_all_reduce(comm, one),
        "direct": lambda: direct_all_reduce(comm, one),
    }
    shares = {}
    for name, operation in operations.items():
        comm.barrier()
        busy_s, started_s = time.process_time(), time.perf_counter()
        if comm.rank == 0:
            time.sleep(1.0)
        operation()
        waited_s = max(1.0, time.perf_counter() - started_s)
        shares[name] = (time.process_time() - busy_s) / waited_s
    return shares


def send_to_all(comm, tensor):
    for dst in range(1, comm.world_size):
        comm.send(tensor, dst)


@pytest.mark.slow
def test_a_rank_that_waits_uses_no_core():
    more_than_cores = min(len(os.sched_getaffinity(0)) + 1, 6)
    for shares in run(waits_for_rank_0, world_size=max(3, more_than_cores)).values:
        assert max(shares.values()) < 0.15, shares
