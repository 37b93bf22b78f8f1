"""Comm on real ranks: results, counters and refused calls."""

import os
import signal
import threading
import time

import pytest
import torch
from ranks import travel_by_value, until_they_wait

from labkit import DeadlockError, WorkerError, run
from labkit.comm.comm import Comm
from labkit.errors import PeerLostError

travel_by_value(__name__)


def test_receiving_into_a_strided_view_writes_through_it():
    def receives(comm):
        if comm.rank == 0:
            comm.send(torch.arange(3.0), 1)
            return None
        whole = torch.zeros(3, 2)
        comm.recv(whole[:, 1], 0)
        return whole

    whole = run(receives, world_size=2).values[1]
    assert whole.tolist() == [[0, 0], [0, 1], [0, 2]]


def test_what_is_received_may_be_added_where_it_lies():
    def add_up(comm):
        sums = []
        for num_elements in (0, 1, 300_001):  # more than a segment
            own = torch.full((num_elements,), 10.0**comm.rank, dtype=torch.float64)
            if comm.rank:
                comm.send(own, 0)
            else:
                comm.recv_add(own, 1)
                comm.recv_add(own, 2)
                sums.append(own.unique().tolist())
        if comm.rank == 0:
            with pytest.raises(ValueError, match="contiguous"):
                comm.recv_add(torch.ones(4)[::2], 1)
        return sums, comm.messages, comm.operations

    for transport in ("shared", "gloo"):
        values = run(add_up, world_size=3, transport=transport).values
        assert values == [([[], [111.0], [111.0]], 0, 6), ([], 3, 3), ([], 3, 3)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_exchange_around_the_ring_counts_messages_bytes_and_peers(world_size):
    def around(comm):
        right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        value = torch.tensor([float(comm.rank)] * 5)
        for _ in range(comm.world_size):
            comm.exchange(value, right, value := torch.empty(5), left)
        return value[0].item(), dict(comm.bytes_to)

    result = run(around, world_size=world_size)
    for rank, (value, bytes_to) in enumerate(result.values):
        assert value == rank
        assert bytes_to == {(rank + 1) % world_size: 20 * world_size}
    assert result.messages == [world_size] * world_size
    assert {span.kind for span in result.trace.spans} <= {"communicate", "wait"}


def test_a_barrier_is_met_by_all_and_counts_nothing():
    def meets(comm):
        import time

        time.sleep(0.1 * comm.rank)
        before = time.monotonic()
        comm.barrier()
        return before, time.monotonic()

    result = run(meets, world_size=3)
    assert min(after for _, after in result.values) >= max(before for before, _ in result.values)
    assert result.messages == [0, 0, 0]
    assert {span.kind for span in result.trace.spans} == {"wait"}


def misuse(comm):
    """Returns the error message of each misuse, and the number of messages sent."""
    other, five = 1 - comm.rank, torch.ones(5)
    calls = {
        "self": lambda: comm.send(torch.ones(1), comm.rank),
        "beyond": lambda: comm.send(torch.ones(1), comm.world_size),
        "negative": lambda: comm.recv(torch.ones(1), -1),
        "nothing to nobody": lambda: comm.send(None, -1),
        "float": lambda: comm.send(torch.ones(1), 0.5),
        "list": lambda: comm.send([1.0], other),
        "sparse": lambda: comm.send(torch.ones(2, 2).to_sparse(), other),
        "meta": lambda: comm.send(torch.ones(1, device="meta"), other),
        "expanded": lambda: comm.recv(torch.ones(1).expand(4), other),
        "itself": lambda: comm.exchange(five[:4], other, five[:4], other),
        "overlapping": lambda: comm.exchange(five[:3], other, five[2:], other),
    }
    texts = {}
    for how, call in calls.items():
        try:
            call()
        except ValueError as error:
            texts[how] = str(error)
    # No refusal has sent anything, or left the ranks apart.
    comm.barrier()
    return texts, comm.messages


MISUSES = {
    "self": "cannot send to itself",
    "beyond": "with world size 2 the ranks are 0 to 1",
    "negative": "cannot receive from rank -1",
    "nothing to nobody": "cannot send to rank -1",
    "float": "a rank is an integer",
    "list": "a tensor is needed, got list",
    "sparse": "to_dense",
    "meta": "move it with .to(comm.device)",
    "expanded": "elements share memory",
    "itself": "cannot exchange float32 [4] for float32 [4], which share memory",
    "overlapping": "Receive into a new tensor (torch.empty_like), or send a copy",
}


def test_misuse_is_refused_with_the_numbers_and_the_next_step():
    for texts, messages in run(misuse, world_size=2).values:
        assert texts.keys() == MISUSES.keys()
        for how, words in MISUSES.items():
            assert words in texts[how]
        assert messages == 0
    with pytest.raises(WorkerError, match=r"rank \d cannot send to itself") as caught:
        run(lambda comm: comm.send(torch.ones(1), comm.rank), world_size=2)
    assert "lambda comm: comm.send(" in caught.value.worker_traceback


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


def test_a_message_is_compared_before_it_moves():
    def misfit(comm):
        target = torch.full((4,), 7.0)
        if comm.rank == 0:
            comm.send(torch.ones(3), 1)
        else:
            try:
                comm.recv(target, 0)
            finally:
                print(target.tolist())

    with pytest.raises(WorkerError, match=r"float32 \[3\]"):
        run(misfit, world_size=2)


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


def test_nobody_starves_while_another_sends_without_end():
    def greedy(comm):
        if comm.rank == 0:
            number = torch.empty(1)
            return [comm.recv_any(number, [1, 2]) for _ in range(100)]
        if comm.rank == 2:
            time.sleep(0.05)
        for _ in range(99 if comm.rank == 1 else 1):
            comm.send(torch.ones(1), 0)
        return None

    def in_turns(comm):
        if comm.rank == 0:
            until_they_wait(comm, [1, 2])
            number = torch.empty(1)
            return [comm.recv_any(number, [1, 2]) for _ in range(6)]
        for _ in range(3):
            comm.send(torch.ones(1), 0)
        return None

    assert sorted(run(greedy, world_size=3).values[0]) == [1] * 99 + [2]
    order = run(in_turns, world_size=3).values[0]
    # Both wait from the start: neither is served twice before the other was once.
    assert sorted(order[:2]) == [1, 2]


def test_receiving_from_any_without_a_board_goes_through_gloo():
    def blindly(comm):
        number = torch.tensor([float(comm.rank)])
        if comm.rank:
            comm.send(number, 0)
            comm.recv(number, 0)
            comm.send(number, 0)
            return None
        comm = Comm(comm.rank, comm.world_size, comm.device, comm.transport)
        first = comm.recv_any(number, [1, 2]), number.item()
        last = comm.recv_any(number, [3 - first[0]]), number.item()
        for rank in (2, 1):
            comm.send(number, rank)
        # Rank 1 sends again, too: its message waits for a call that asks for it.
        later = comm.recv_any(number, [2]), comm.recv_any(number, [1])
        return sorted((first, last)), later

    found = run(blindly, world_size=3, transport="gloo").values[0]
    assert found == ([(1, 1.0), (2, 2.0)], (2, 1))


def test_what_was_received_ahead_goes_to_the_next_receive_that_fits():
    def ahead(comm):
        number, others = torch.tensor([float(comm.rank)]), torch.zeros(2)
        if comm.rank:
            if comm.rank == 2:
                time.sleep(0.2)
            comm.send(number, 0)
            comm.send(others + comm.rank, 0)
            return None
        comm = Comm(comm.rank, comm.world_size, comm.device, comm.transport)
        first = comm.recv_any(number, [1, 2])
        # One message of the other rank is expected already, by its shape.
        rest = [comm.recv(torch.zeros(1), 3 - first).item()]
        return first + rest[0], [comm.recv(torch.zeros(2), rank).tolist() for rank in (2, 1)]

    found = run(ahead, world_size=3, transport="gloo").values[0]
    assert found == (3.0, [[2.0, 2.0], [1.0, 1.0]])


def test_receiving_from_any_of_none_or_of_itself_is_refused():
    def misuses(comm):
        for sources, words in (([], "sources is empty"), ([0], "cannot receive from itself")):
            with pytest.raises(ValueError, match=words):
                comm.recv_any(torch.ones(1), sources)

    run(misuses, world_size=1)


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_a_misfit_is_found_by_receiving_from_any_too(transport):
    def misfit(comm):
        if comm.rank == 0:
            comm.recv_any(torch.empty(4), [1, 2])
        elif comm.rank == 2:
            comm.send(torch.ones(3), 0)
        else:
            time.sleep(30)

    with pytest.raises(WorkerError, match=r"rank 0 receives into float32 \[4\]"):
        run(misfit, world_size=3, transport=transport)


def test_sources_that_all_wait_or_have_returned_are_a_deadlock():
    def nobody_sends(comm):
        if comm.rank == 0:
            comm.recv_any(torch.empty(4), [1, 2])
        elif comm.rank == 1:
            comm.recv(torch.empty(4), 0)

    with pytest.raises(DeadlockError, match="rank 0 is in recv_any, waiting for rank 1 to send"):
        run(nobody_sends, world_size=3)


def test_a_source_that_ends_is_told_of_while_others_keep_coming():
    def busy(comm):
        number, told, until_s = torch.zeros(1), None, time.monotonic() + 10
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        while not number:
            if comm.rank == 1:
                comm.send(number, 0)
                comm.recv(number, 0)
                continue
            try:
                comm.recv_any(number, [1, 2])
            except PeerLostError as error:
                told = error.rank
            else:
                number += told is not None or time.monotonic() > until_s
                comm.send(number, 1)
        return told

    assert run(busy, world_size=3, may_lose=[2]).values[0] == 2


def until_all_are_lost(comm, how):
    """Rank 0 receives from any until all are lost; returns the rank that each error names."""
    if comm.rank == 0:
        tensor, told = torch.empty(3_000_000), []
        for _ in range(4):
            try:
                comm.recv_any(tensor, [1, 2])
            except PeerLostError as error:
                told.append(error.rank)
        return told
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
def test_a_source_that_ends_is_named_once_and_the_others_go_on(how):
    result = run(until_all_are_lost, how, world_size=3, may_lose=[1, 2])
    *told, nobody = result.values[0]
    assert sorted(told) == [1, 2]
    assert nobody is None
    assert result.lost.keys() == {1, 2}
    assert "raised ValueError: enough" in result.lost[1]
