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
from labkit.comm.emulated_link import Card, LinkTransport, plug_in
from labkit.config import parse_link
from labkit.costs import Link, all_reduce_seconds, hosts_all_reduce_seconds
from labkit.strategies.ddp import BucketedDDP, NaiveDDP

travel_by_value(__name__)

ALL_REDUCES = ("naive_all_reduce", "ring_all_reduce", "fast_ring_all_reduce", "tree_all_reduce")


def at_second(*seconds):
    """A clock that shows these seconds, one after another."""
    return iter(seconds).__next__


# The arithmetic


def test_a_message_takes_latency_and_bytes_over_bandwidth():
    card = Card(EmulatedLink(2.0, 10.0), now=at_second(100.0))
    assert card.book(out_bytes=50) == 2 + 50 / 10


def test_messages_to_different_ranks_queue_up_on_the_senders_card():
    card = Card(EmulatedLink(2.0, 10.0), now=at_second(100.0, 100.0, 103.0))
    assert [card.book(out_bytes=50) for _ in range(3)] == [7, 14, 21 - 3]


def test_a_card_that_has_been_idle_begins_at_once():
    card = Card(EmulatedLink(1.0), now=at_second(0.0, 50.0))
    assert [card.book(in_bytes=8), card.book(in_bytes=8)] == [1, 1]


def test_a_card_sends_and_receives_at_the_same_time():
    card = Card(EmulatedLink(0.0, 10.0), now=at_second(0.0, 0.0, 0.0))
    assert card.book(out_bytes=100) == 10
    assert card.book(in_bytes=50) == 5
    assert card.book(out_bytes=0, in_bytes=20) == 10, "an exchange ends with the later of the two"


LINKS = [EmulatedLink(), EmulatedLink(1e-5, 1e22), EmulatedLink(0.1, 3), EmulatedLink(0, 5.5, 2)]


@pytest.mark.parametrize("link", LINKS)
def test_the_command_line_reads_what_a_link_prints(link):
    assert EmulatedLink(*parse_link(str(link))) == link


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((-1.0,), "latency_s must be a number from 0 up, got -1.0"),
        ((float("nan"),), "latency_s must be"),
        ((0.0, 0), "bandwidth_bytes_per_s must be a number above 0, got 0"),
        ((0.0, float("nan")), "bandwidth_bytes_per_s must be"),
        ((0.0, 1.0, 0), "ranks_per_host must be an integer from 1 up, got 0"),
        ((0.0, 1.0, 2.5), r"ranks_per_host must be an integer from 1 up, got 2\.5"),
        ((0.0, 1.0, True), "ranks_per_host must be an integer"),
    ],
)
def test_links_that_cannot_be(numbers, message):
    with pytest.raises(ValueError, match=message):
        EmulatedLink(*numbers)


def test_another_object_is_not_a_link():
    with pytest.raises(ValueError, match=r"is not a labkit\.EmulatedLink"):
        run(print, world_size=1, link=Link(0.1, 0.1))


# Hosts whose ranks share a card


class FreeLock:
    """Counts, instead of locking."""

    taken = given = 0

    def wait(self, timeout_s):
        self.taken += 1
        return True

    def post(self):
        self.given += 1


def host_card(link, *seconds):
    return Card(link, (torch.zeros(2, dtype=torch.float64), FreeLock()), now=at_second(*seconds))


def test_on_a_shared_card_bytes_queue_up_and_latencies_overlap():
    card = host_card(EmulatedLink(2.0, 10.0, 2), 100.0, 100.0, 101.0)
    assert card.book(out_bytes=50) == 5 + 2
    assert card.book(out_bytes=50) == 10 + 2, "two ranks at the same time"
    assert card.book(out_bytes=10, in_bytes=30) == 11 - 1 + 2, "the two sides are independent"


@pytest.mark.parametrize(
    ("per_host", "world_size", "hosts"),
    [
        (None, 3, ((0, 1, 2),)),
        (1, 3, ((0,), (1,), (2,))),
        (2, 3, ((0, 1), (2,))),
        (2, 4, ((0, 1), (2, 3))),
        (9, 2, ((0, 1),)),
    ],
)
def test_ranks_stand_on_hosts_in_their_order(per_host, world_size, hosts):
    assert EmulatedLink(ranks_per_host=per_host).hosts(world_size) == hosts


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
    transport, others = comm.transport, [r for r in range(comm.world_size) if r != comm.rank]
    group = dist.new_group([1, 2, 3], backend="labkit")
    found = [comm.hosts, comm.host, [r for r in others if transport.shares_memory_with(r)]]
    if comm.rank:
        found.append(group._comms["collectives"].hosts)
    state = transport._card._free_s
    beside, across = comm.rank ^ 1, (comm.rank + 2) % 4
    tensor, landing = torch.zeros(1000, dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)
    comm.exchange(tensor, beside, landing, beside)
    comm.barrier()
    found.append(list(state))
    start_s = time.monotonic()
    comm.barrier()
    comm.exchange(tensor, across, landing, across)
    comm.barrier()
    return *found, [free_s - start_s for free_s in state], dict(comm.bytes_to)


def test_only_messages_between_hosts_pass_the_card_that_a_hosts_ranks_share():
    link = EmulatedLink(0.001, 1e5, ranks_per_host=2)
    for rank, found in enumerate(run(on_hosts, world_size=4, link=link).values):
        hosts, host, in_memory, *in_group, before, passed_s, bytes_to = found
        assert hosts == ((0, 1), (2, 3))
        assert host == rank // 2
        assert in_memory == [rank ^ 1]
        assert in_group == ([((0,), (1, 2))] if rank else [])
        assert before == [0, 0], "the card of each host was idle"
        # Two messages of 1000 bytes in each direction, one after the other.
        assert min(passed_s) >= 2 * 1000 / 1e5
        assert bytes_to == {rank ^ 1: 1000, (rank + 2) % 4: 1000}


def test_over_hosts_takes_less_time_than_the_flat_ring():
    """At least the model's: this machine adds time, and how much depends on what runs on it."""
    link, memory, card = EmulatedLink(0.004, 5e6, 2), Link(0, 0), Link(0.004, 1 / 5e6)
    names = ("ring_all_reduce", "hierarchical_all_reduce")
    measured = run(least_seconds, names, 25_000, world_size=4, link=link).values[0]
    ring_s, over_s = (
        hosts_all_reduce_seconds(way, 100_000, link.hosts(4), memory, card)
        for way in ("ring", "hierarchical")
    )
    assert ring_s == pytest.approx(6 * (0.004 + 0.005))
    assert over_s == pytest.approx(2 * (0.004 + 0.01))
    assert measured["ring_all_reduce"] > 0.98 * ring_s
    # The rings of a host's two ranks overlap: no less than all bytes on the card, and a latency.
    least_s = 4 * 0.005 + 0.004
    assert 0.98 * least_s < measured["hierarchical_all_reduce"] < measured["ring_all_reduce"]


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


def in_pytorchs_group(comm):
    assert isinstance(comm.transport, LinkTransport)
    group = dist.new_group(backend="labkit")
    start_s = time.perf_counter()
    dist.all_reduce(torch.ones(4), group=group)
    return time.perf_counter() - start_s


def test_the_backend_sends_over_the_link_too():
    for seconds in run(in_pytorchs_group, world_size=2, link=EmulatedLink(0.02)).values:
        assert seconds > 2 * 0.02


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("ddp", {}),
        ("ddp", {"builtin": True, "backend": "labkit"}),
        ("ring_all_reduce", {"compress": "topk"}),
        ("parameter_server", {}),
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
