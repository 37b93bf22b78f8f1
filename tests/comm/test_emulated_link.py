"""The emulated link: its arithmetic on a clock that stands still, and real runs over it.

Every transport's contract holds over it, too: tests/comm/test_transports.py.
"""

import itertools
import time

import pytest
import torch
import torch.distributed as dist
from ranks import travel_by_value
from torch import nn

from labkit import EmulatedLink, collectives, run, train_with
from labkit.comm.emulated_link import Card, plug_in
from labkit.config import parse_link
from labkit.costs import Link, all_reduce_seconds
from labkit.strategies.ddp import BucketedDDP, NaiveDDP

travel_by_value(__name__)

ALL_REDUCES = ("naive_all_reduce", "ring_all_reduce", "fast_ring_all_reduce", "tree_all_reduce")


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


LINKS = [EmulatedLink(), EmulatedLink(1e-5, 1e22), EmulatedLink(0.1, 3), EmulatedLink(0, 5.5, 2)]


@pytest.mark.parametrize("link", LINKS)
def test_the_command_line_reads_what_a_link_prints(link):
    assert EmulatedLink(**parse_link(str(link))) == link


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((-1.0,), "latency_s must be a number from 0 up, got -1.0"),
        ((0.0, 0), "bandwidth_bytes_per_s must be a number above 0, got 0"),
        ((0.0, 1.0, 2.5), r"ranks_per_host must be an integer from 1 up, got 2\.5"),
    ],
)
def test_links_that_cannot_be(numbers, message):
    with pytest.raises(ValueError, match=message):
        EmulatedLink(*numbers)


@pytest.mark.parametrize(
    ("per_host", "hosts"), [(None, ((0, 1, 2),)), (1, ((0,), (1,), (2,))), (2, ((0, 1), (2,)))]
)
def test_ranks_stand_on_hosts_in_their_order(per_host, hosts):
    assert EmulatedLink(ranks_per_host=per_host).hosts(3) == hosts


def test_hosts_are_emulated_on_one_machine_only():
    try:
        with pytest.raises(ValueError, match=r"(?s)ranks_per_host emulates hosts on one machine"):
            plug_in(EmulatedLink(ranks_per_host=2), 0, arena=None)
    finally:
        plug_in(None)


# Real runs. A sleep never ends early, so "at least" cannot fail by chance.


def sums(comm):
    found = {}
    for name in ALL_REDUCES:
        before = comm.messages, comm.bytes_sent
        total = getattr(collectives, name)(comm, torch.arange(1000.0) * (comm.rank + 1))
        counted = comm.messages - before[0], comm.bytes_sent - before[1]
        found[name] = total.tolist(), counted
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_sums_and_counts_are_the_same_over_a_link(transport, world_size):
    plain = run(sums, world_size=world_size, transport=transport)
    linked = run(sums, world_size=world_size, transport=transport, link=EmulatedLink(1e-4, 1e9))
    assert linked.values == plain.values
    assert linked.bytes_sent == plain.bytes_sent


def there_and_back(comm):
    tensor = torch.zeros(1000, dtype=torch.uint8)
    for transfer in (comm.send, comm.recv) if comm.rank == 0 else (comm.recv, comm.send):
        transfer(tensor, 1 - comm.rank)
    comm.exchange(tensor, 1 - comm.rank, torch.empty_like(tensor), 1 - comm.rank)


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_every_message_takes_at_least_its_time_on_both_ends(transport):
    link = EmulatedLink(0.01, 1e5)
    trace = run(there_and_back, world_size=2, transport=transport, link=link).trace
    for rank in (0, 1):
        spans = trace.of(rank, "communicate")
        assert len(spans) == 3
        # The message begins when both have come: a span may begin a little later than that.
        assert all(span.duration_s > 0.9 * link.message_seconds(1000) for span in spans)


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
    transport = comm.transport
    group = dist.new_group([1, 2, 3], backend="labkit")
    found = [comm.hosts, comm.host]
    if comm.rank:
        found.append(group._comms["collectives"].hosts)
    state = transport.link.card.free_s
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


class SlowBackward(torch.autograd.Function):
    """The identity; its backward takes as long as that of a larger layer."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.1)
        return gradient


class Slow(nn.Module):
    def forward(self, x):
        return SlowBackward.apply(x)


def one_backward(comm, bucketed):
    model = nn.Sequential(nn.Linear(8, 8), Slow(), nn.Linear(8, 8))
    replica = BucketedDDP(comm, model, bucket_mb=0) if bucketed else NaiveDDP(comm, model)
    comm.barrier()
    with comm.span("compute"):
        replica(torch.ones(1, 8)).sum().backward()


def overlapped(trace):
    """Whether a rank sends in one thread while it computes in another."""
    computes = trace.of(kind="compute")
    sends = [span for span in trace.spans if span.num_bytes]
    return any(
        send.rank == compute.rank
        and send.lane != compute.lane
        and max(send.start_s, compute.start_s) < min(send.end_s, compute.end_s)
        for send, compute in itertools.product(sends, computes)
    )


def test_backward_goes_on_while_a_bucket_is_on_the_link():
    link = EmulatedLink(0.02)
    bucketed = run(one_backward, True, world_size=2, link=link)
    naive = run(one_backward, False, world_size=2, link=link)
    assert overlapped(bucketed.trace)
    assert not overlapped(naive.trace)


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("ddp", {}),
        ("ddp", {"builtin": True, "backend": "labkit"}),
        ("async_parameter_server", {"max_staleness": 2}),
        ("pipeline", {"micro_batches": 2}),
    ],
)
def test_any_technique_trains_over_a_link(strategy, settings):
    link = EmulatedLink(1e-4, 1e9)
    result = train_with(
        strategy, world_size=2, train_size=128, batch_size=64, link=link, **settings
    )
    assert result.config.link == "0.0001s,1000000000.0B/s"
    assert result.epochs
