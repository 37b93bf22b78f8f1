"""Some of the ranks as a Comm of their own, and an exchange that goes on beside other messages."""

import itertools

import pytest
import torch
from ranks import travel_by_value

from labkit import EmulatedLink, collectives, run
from labkit.comm.comm import SubComm, exchange_under_way

travel_by_value(__name__)


def among_some(comm):
    """The ranks 3, 1, 0 in this order: sums, a gather, and what the board and the trace say."""
    mine = torch.tensor([10.0**comm.rank])
    with comm.collective("some"):
        if comm.rank == 2:
            return None
        some = SubComm(comm, [3, 1, 0], phase="between_hosts")
        total = collectives.ring_all_reduce(some, mine.clone()).item()
        everyone = [tensor.item() for tensor in collectives.all_gather(some, mine)]
        kind = "compress"
        with some.span(kind):
            if some.rank == 0:
                some.send(mine, 1)
            elif some.rank == 1:
                mine += some.recv(torch.empty(1), 0)
                some.recv_add(mine, 2)
            else:
                some.send(mine, 1)
    announced = int(comm.session.board.collectives[comm.rank])
    return some.rank, total, everyone, mine.item(), announced, dict(comm.bytes_to)


def test_ranks_are_numbered_anew_and_messages_go_to_the_right_ones():
    result = run(among_some, world_size=4)
    expected = {3: (0, 1000.0), 1: (1, 10.0 + 1000 + 1), 0: (2, 1.0)}
    right = {3: 1, 1: 0, 0: 3}
    for rank, found in enumerate(result.values):
        if rank == 2:
            assert found is None
            continue
        number, total, everyone, mine, announced, bytes_to = found
        assert (number, mine) == expected[rank]
        assert total == 1011
        assert everyone == [1000, 10, 1]
        assert announced == 1, "only the collective around it, of all ranks"
        assert bytes_to[right[rank]] >= 4
        assert set(bytes_to) <= {right[rank], 1}
    kinds = {span.kind for span in result.trace.spans if span.num_bytes}
    assert kinds == {"between_hosts", "compress"}


def misused(comm):
    some, found = SubComm(comm, [1, 0]), []
    for use in (some.barrier, lambda: some.exchange(torch.ones(1), 0, torch.ones(1), 2)):
        try:
            use()
        except (NotImplementedError, IndexError, ValueError) as error:
            found.append(type(error).__name__)
    return found


def test_it_has_no_barrier_and_no_other_ranks():
    assert run(misused, world_size=2).values == [["NotImplementedError", "IndexError"]] * 2


def beside(comm):
    """Exchange across while summing with a neighbour; the spans must not overlap in their lane."""
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
