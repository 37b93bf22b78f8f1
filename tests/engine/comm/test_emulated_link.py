"""The emulated link: its arithmetic on a clock that stands still, and real runs over it.

Every transport's contract holds over it, too: tests/engine/comm/test_transports.py.
"""

import statistics
import time

import pytest
import torch
import torch.distributed as dist

from labkit import EmulatedLink, collectives, run
from labkit.costs import Link, all_reduce_seconds
from labkit.engine.comm import emulated_link
from labkit.engine.comm.emulated_link import Card
from labkit.engine.comm.shared_memory import HAS_SEMAPHORES, Arena

# The arithmetic


def test_messages_queue_up_on_each_side_of_a_card():
    card = Card(EmulatedLink(2.0, 10.0))
    assert card.book(100.0, out_bytes=50) == 100 + 2 + 50 / 10
    assert card.book(103.0, out_bytes=50) == 100 + 2 * 7, "after the first, to whichever rank"
    assert card.book(103.0, in_bytes=20) == 103 + 4, "the other side is free"
    assert card.book(200.0, out_bytes=0, in_bytes=20) == 200 + 4, "the later of the two"


class FreeLock:
    """Always free."""

    def wait(self, timeout_s):
        return True

    def post(self):
        pass


def test_on_a_shared_card_bytes_queue_up_and_latencies_overlap():
    shared = torch.zeros(2, dtype=torch.float64), FreeLock()
    one, other = Card(EmulatedLink(2.0, 10.0, 2), shared), Card(EmulatedLink(2.0, 10.0, 2), shared)
    assert one.book(100.0, out_bytes=50) == 105 + 2
    assert other.book(100.0, out_bytes=50) == 110 + 2, "two ranks at the same time"
    assert one.book(101.0, out_bytes=10, in_bytes=30) == 111 + 2, "the two sides are independent"


@pytest.mark.skipif(not HAS_SEMAPHORES, reason="shared cards need semaphores")
def test_a_booking_that_fails_leaves_the_shared_card_to_others():
    arena = Arena(1)
    card = Card(EmulatedLink(2.0, 10.0, 2), arena.card(0))
    with pytest.raises(TypeError):
        card.book(100.0, out_bytes="a message")
    assert card.book(100.0, out_bytes=50) == 105 + 2


@pytest.mark.parametrize(
    ("per_host", "hosts"), [(None, ((0, 1, 2),)), (1, ((0,), (1,), (2,))), (2, ((0, 1), (2,)))]
)
def test_ranks_stand_on_hosts_in_their_order(per_host, hosts):
    assert EmulatedLink(ranks_per_host=per_host).hosts(3) == hosts


# Real runs. A sleep never ends early, so "at least" cannot fail by chance.


def there_and_back(comm):
    tensor = torch.zeros(1000, dtype=torch.uint8)
    for _ in range(5):
        for transfer in (comm.send, comm.recv) if comm.rank == 0 else (comm.recv, comm.send):
            transfer(tensor, 1 - comm.rank)
        comm.exchange(tensor, 1 - comm.rank, torch.empty_like(tensor), 1 - comm.rank)


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_every_message_takes_at_least_its_time_on_both_ends(transport):
    link = EmulatedLink(0.01, 1e5)
    trace = run(there_and_back, world_size=2, transport=transport, link=link).trace
    for rank in (0, 1):
        seconds = [span.duration_s for span in trace.of(rank, "communicate")]
        assert len(seconds) == 15
        # A span begins when the peer has come: with one that comes late, after its message.
        for of_one_operation in (seconds[place::3] for place in range(3)):
            assert statistics.median(of_one_operation) > 0.9 * 0.02


def least_seconds(comm, names, num_elements, repeats=3):
    """The quickest of some repeats, by name, until the last rank is done."""
    tensor, seconds = torch.ones(num_elements), {name: [] for name in names}
    for name in names * repeats:
        comm.barrier()
        start_s = time.perf_counter()
        getattr(collectives, name)(comm, tensor)
        comm.barrier()
        seconds[name].append(time.perf_counter() - start_s)
    return {name: min(repeats) for name, repeats in seconds.items()}


def test_all_reduces_take_the_time_of_the_model():
    """At least: this machine adds time, and how much depends on what else runs on it."""
    link, model = EmulatedLink(0.002, 5e6), Link(0.002, 1 / 5e6)
    names = ("naive_all_reduce", "ring_all_reduce")
    measured = run(least_seconds, names, 25_000, world_size=4, link=link).values[0]
    naive_s, ring_s = (all_reduce_seconds(name, 100_000, 4, model) for name in ("naive", "ring"))
    assert measured["naive_all_reduce"] > 0.98 * naive_s
    assert measured["ring_all_reduce"] > 0.98 * ring_s
    # A third of it by the model. Both were measured, in turns, whatever else runs here.
    assert measured["ring_all_reduce"] < measured["naive_all_reduce"]


def on_hosts(comm):
    """Where this rank is, what shares memory with it, and when the card of its host is free.

    After messages inside hosts, and then after one message from each rank to the other host.
    """
    group = dist.new_group([1, 2, 3], backend="labkit")
    found = [comm.hosts, comm.host]
    if comm.rank:
        found.append(group._comms["collectives"].hosts)
    state = emulated_link._card.free_s
    beside, across = comm.rank ^ 1, (comm.rank + 2) % 4
    tensor, landing = torch.zeros(1000, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)
    comm.exchange(tensor, beside, landing, beside)
    comm.barrier()
    found.append(state.tolist())
    start_s = time.monotonic()
    comm.barrier()
    comm.exchange(tensor, across, landing, across)
    comm.barrier()
    return *found, [free_s - start_s for free_s in state.tolist()], dict(comm.bytes_to)


def test_only_messages_between_hosts_pass_the_card_that_a_hosts_ranks_share():
    link = EmulatedLink(0.001, 1e5, ranks_per_host=2)
    for rank, found in enumerate(run(on_hosts, world_size=4, link=link).values):
        hosts, host, *in_group, before, passed_s, bytes_to = found
        assert hosts == ((0, 1), (2, 3))
        assert host == rank // 2
        assert in_group == ([((0,), (1, 2))] if rank else [])
        assert before == [0, 0], "the card of each host was idle"
        # Two messages of 1000 bytes in each direction, one after the other.
        assert min(passed_s) >= 2 * 1000 / 1e5
        assert bytes_to == {rank ^ 1: 1000, (rank + 2) % 4: 1000}
