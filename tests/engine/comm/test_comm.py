"""Comm on real ranks: results, counters and refused calls."""

import itertools
import os
import signal
import threading
import time

import pytest
import torch
from ranks import until_they_wait

from labkit import EmulatedLink, collectives, run
from labkit.engine.comm.comm import SubComm, exchange_under_way
from labkit.engine.errors import PeerLostError


def misuse(comm):
    """Returns the error message of each misuse, and the number of messages sent."""
    other, five = 1 - comm.rank, torch.ones(5)
    calls = {
        "cannot send to itself": lambda: comm.send(torch.ones(1), comm.rank),
        "with world size 2 the ranks are 0 to 1": lambda: comm.send(torch.ones(1), 2),
        "a rank is an integer": lambda: comm.send(torch.ones(1), 0.5),
        "a tensor is needed, got list": lambda: comm.send([1.0], other),
        "to_dense": lambda: comm.send(torch.ones(2, 2).to_sparse(), other),
        "move it with .to(comm.device)": lambda: comm.send(torch.ones(1, device="meta"), other),
        "its elements share memory": lambda: comm.recv(torch.ones(1).expand(4), other),
        "which share memory": lambda: comm.exchange(five[:3], other, five[2:], other),
        "sources is empty": lambda: comm.recv_any(five, []),
    }
    missed = []
    for words, call in calls.items():
        try:
            call()
        except ValueError as error:
            missed += [] if words in str(error) else [(words, str(error))]
        else:
            missed.append(words)
    # No refusal has sent anything, or left the ranks apart.
    comm.barrier()
    return missed, comm.messages


def test_misuse_is_refused_with_the_numbers_and_the_next_step():
    assert run(misuse, world_size=2).values == [([], 0)] * 2


def exchange_parts(comm):
    """Exchange parts of one tensor: halves, interleaved, columns, blocks; returns the tensors."""
    whole, other = torch.arange(16.0).add(100 * comm.rank).view(4, 4), 1 - comm.rank
    flat, empty = whole.view(-1), whole[1, :0]
    pairs = [(whole[:2], whole[2:]), (flat[::2], flat[1::2]), (whole[:, 0], whole[:, 3])]
    pairs += [(whole[:, :2], whole[:, 2:]), (empty, whole[0, :0]), (empty, empty)]
    found = []
    for sent, received in pairs:
        expected = sent.add(100 * (other - comm.rank))
        comm.exchange(sent, other, received, other)
        found.append(torch.equal(received, expected))
        whole.copy_(torch.arange(16.0).add(100 * comm.rank).view(4, 4))
    return found


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_parts_of_one_tensor_that_share_no_element_are_exchanged(transport):
    values = run(exchange_parts, world_size=2, transport=transport).values
    assert values == [[True] * 6] * 2


def serve_all(comm, rounds):
    """Rank 0 receives from any: (source, value, length) of each; others send twice per round."""
    if comm.rank:
        for number in range(rounds):
            comm.send(torch.full((700_000,), float(number)), 0)
            comm.send(torch.empty(0, 3), 0)
        return None
    got, tensor, nothing = [], torch.empty(700_000), torch.empty(0, 3)
    others = set(range(1, comm.world_size))
    while len(got) < rounds * len(others):
        source = comm.recv_any(tensor, others)
        comm.recv(nothing, source)  # leaves a ring that nobody waited for
        got.append((source, tensor[0].item(), tensor[-1].item()))
    return got


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_receiving_from_any_takes_each_message_once_in_the_order_of_its_source(transport):
    result = run(serve_all, 4, world_size=4, transport=transport)
    got = result.values[0]
    for source in (1, 2, 3):
        assert [row for row in got if row[0] == source] == [(source, n, n) for n in range(4)]
    assert result.messages == [0, 8, 8, 8]
    kinds = {span.kind for span in result.trace.of(rank=0)}
    assert "communicate" in kinds
    assert kinds <= {"communicate", "wait"}


def test_nobody_is_served_twice_before_another_was_once():
    def in_turns(comm):
        if comm.rank == 0:
            until_they_wait(comm, [1, 2])
            number = torch.empty(1)
            return [comm.recv_any(number, [1, 2]) for _ in range(6)]
        for _ in range(3):
            comm.send(torch.ones(1), 0)
        return None

    order = run(in_turns, world_size=3).values[0]
    assert sorted(order[:2]) == [1, 2], "both wait from the start"


def until_all_are_lost(comm, how):
    """Rank 0 receives from any until all are lost; returns the rank that each error names."""
    if comm.rank == 0:
        tensor, left, lost = torch.empty(3_000_000), [1, 2], []
        while left:
            try:
                comm.recv_any(tensor, left)
            except PeerLostError as error:
                lost.append(error.rank)
                left.remove(error.rank)
        return lost
    if how == "waiting" and comm.rank == 2:
        threading.Timer(0.3, os._exit, (3,)).start()
    if how == "mid-send" and comm.rank == 2:
        comm.transport.channel_to(0).commit = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    if how == "computing" and comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 1:
        time.sleep(0.5)
        comm.send(torch.empty(3_000_000), 0)
        raise ValueError("enough")
    comm.recv(torch.empty(1), 0) if how == "waiting" else comm.send(torch.empty(3_000_000), 0)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("how", ["waiting", "mid-send", "computing"])
def test_a_source_that_ends_is_named_and_the_others_go_on(how):
    result = run(until_all_are_lost, how, world_size=3, may_lose=[1, 2])
    assert sorted(result.values[0]) == [1, 2]
    assert result.lost.keys() == {1, 2}
    assert "raised ValueError: enough" in result.lost[1]


def among_some(comm):
    """The ranks 3, 1, 0 in this order: sums, a gather, and what the board and the trace say."""
    mine = torch.tensor([10.0**comm.rank])
    with comm.collective("some"):
        if comm.rank == 2:
            return None
        some = SubComm(comm, [3, 1, 0], phase="between_hosts")
        total = collectives.ring_all_reduce(some, mine.clone()).item()
        everyone = [tensor.item() for tensor in collectives.all_gather(some, mine)]
        with pytest.raises(ValueError, match="the ranks are 0 to 2"):
            some.send(mine, 3)
    announced, peers = int(comm.session.board.collectives[comm.rank]), set(comm.bytes_to)
    if comm.rank != 1:
        # Some of some.
        ends = SubComm(some, [2, 0])
        assert collectives.fast_ring_all_reduce(ends, mine.clone()).item() == 1001
    return some.rank, total, everyone, announced, peers


def test_some_ranks_are_numbered_anew_and_messages_go_to_the_right_ones():
    result = run(among_some, world_size=4)
    expected = {3: (0, {1}), 1: (1, {0}), 0: (2, {3})}
    for rank, (number, peers) in expected.items():
        # Only the collective around it, of all ranks, is announced.
        assert result.values[rank] == (number, 1011, [1000, 10, 1], 1, peers)
    assert {span.kind for span in result.trace.spans if span.num_bytes} == {"between_hosts"}


def beside(comm):
    """Exchange across while summing with a neighbor; the spans must not overlap in their lane."""
    across, next_to = (comm.rank + 2) % 4, comm.rank ^ 1
    out, back = torch.full((1000,), float(comm.rank)), torch.empty(1000)
    near = SubComm(comm, sorted((comm.rank, next_to)))
    before = comm.operations, comm.messages
    with exchange_under_way(comm, out, across, back, across):
        inside = collectives.naive_all_reduce(near, torch.ones(1) * comm.rank).item()
    slot = comm.session.board.ranks[comm.rank]
    found = back.unique().tolist(), inside, slot["op"].decode(), dict(comm.bytes_to)
    return *found, comm.operations - before[0], comm.messages - before[1]


@pytest.mark.parametrize(
    "settings", [{}, {"transport": "gloo"}, {"link": EmulatedLink(0.005, 1e6, 2)}]
)
def test_an_exchange_goes_on_beside_messages_with_other_ranks(settings):
    result = run(beside, world_size=4, **settings)
    for rank, (back, inside, op, bytes_to, operations, messages) in enumerate(result.values):
        assert back == [(rank + 2) % 4]
        assert inside == (1 if rank < 2 else 5)
        assert op == "", "it has left the exchange"
        assert bytes_to == {(rank + 2) % 4: 4000, rank ^ 1: 4}
        # A send and a receive inside.
        assert (operations, messages) == (3, 2)
        spans = sorted(result.trace.of(rank, lane=0), key=lambda span: span.start_s)
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(spans))


def lost_beside(comm):
    if comm.rank == 3:
        raise RuntimeError("gone")
    out, back = torch.ones(4), torch.empty(4)
    with exchange_under_way(comm, out, (comm.rank + 2) % 4, back, (comm.rank + 2) % 4):
        comm.recv(torch.empty(1), comm.rank ^ 1)


def test_a_lost_rank_is_named_beside_and_inside():
    with pytest.raises(Exception, match=r"rank 3[\s\S]*gone"):
        run(lost_beside, world_size=4, timeout_s=60)
