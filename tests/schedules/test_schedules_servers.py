"""The turns of parameter servers and workers."""

import pytest

from labkit.schedules.servers import server_turns, worker_turns


@pytest.mark.parametrize(("servers", "workers"), [(1, 3), (2, 3), (3, 3), (3, 2), (4, 1)])
def test_in_a_turn_no_server_and_no_worker_meets_two(servers, workers):
    """Ranks that go through their turns in order, each meeting both need: M turns for everyone."""
    of_server = {s: server_turns(s, servers, workers) for s in range(servers)}
    of_worker = {w: worker_turns(w, servers, workers) for w in range(workers)}
    turns = 0
    while any(of_server.values()):
        pairs = [
            (s, row[0]) for s, row in of_server.items() if row and of_worker[row[0]][:1] == [s]
        ]
        assert pairs, "everyone waits for somebody else"
        for server, worker in pairs:
            of_server[server].pop(0)
            of_worker[worker].pop(0)
        turns += 1
    assert turns == max(servers, workers)
    assert not any(of_worker.values())
    assert sorted(server_turns(0, servers, workers)) == list(range(workers))


def test_with_one_server_workers_come_in_the_order_of_their_numbers():
    assert server_turns(0, 1, 4) == [0, 1, 2, 3]
    assert [server_turns(server, 2, 3) for server in range(2)] == [[0, 1, 2], [1, 2, 0]]
