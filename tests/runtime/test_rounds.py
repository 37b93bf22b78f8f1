"""How the ranks of a round find each other in a store that earlier ranks have used."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from labkit.runtime import rounds


def meet(store, world_size, timeout_s=10.0):
    """What the ranks agree on, by rank."""

    def rank(number):
        function = rounds._as_first if number == 0 else rounds._as_other
        return function(store, number, world_size, timeout_s)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(rank, reversed(range(world_size)), timeout=240))[::-1]


@pytest.mark.parametrize("sizes", [(1, 3, 2), (4, 4)])
def test_each_start_has_a_number_of_its_own(sizes):
    """Though nothing is ever removed from the store, and other ranks come later."""
    store, numbers = dist.HashStore(), set()
    for world_size in sizes:
        found = meet(store, world_size)
        assert len({number for number, _ in found}) == 1
        numbers.add(found[0][0])
        hosts = [[one["host"] for one in told] for _, told in found]
        assert hosts == [hosts[0]] * world_size
        assert len(hosts[0]) == world_size
    assert len(numbers) == len(sizes)


def test_ranks_that_wait_at_the_offer_of_a_dead_rank_0_join_the_next():
    store = dist.HashStore()
    store.set("offer", "dead")
    found = meet(store, 3)
    assert {number for number, _ in found} == {store.get("offer").decode()} != {"dead"}


def test_a_rank_that_does_not_come_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    store = dist.HashStore()
    store.set("offer", "x")
    with pytest.raises(ConnectionError, match=r"rank 0 of 3 waited 0.1 s for 2 ranks \(1, 2\)"):
        rounds._as_first(store, 0, 3, 0.1)
    with pytest.raises(ConnectionError, match=r"rank 2 of 3 waited 0.1 s"):
        rounds._as_other(store, 2, 3, 0.1)


@pytest.mark.parametrize(
    "forged",
    [b"", b"\xff", b"[7]", b"7", b'{"token": 1}', json.dumps({"token": "a" * 999}).encode()],
)
def test_what_no_rank_has_written_is_refused(forged, monkeypatch):
    monkeypatch.setattr(rounds.secrets, "token_hex", lambda count: "guessed")
    store = dist.HashStore()
    for key in ("guessed/1", "guessed/all"):
        store.set(key, forged)
    with pytest.raises(ConnectionError, match="which labkit does not write"):
        rounds._as_first(store, 0, 2, 5.0)
    with pytest.raises(ConnectionError, match="which labkit does not write"):
        rounds._as_other(store, 1, 2, 5.0)


def test_texts_of_all_ranks_in_the_order_of_the_calls():
    store = dist.HashStore()
    found = [rounds.Round(r, 2, ["h"] * 2, store) for r in range(2)]

    def rank(one):
        return [one.exchange(f"{call} of {one.rank}", "a call") for call in range(3)]

    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(rank, found, timeout=240))
    assert told == [[[f"{call} of 0", f"{call} of 1"] for call in range(3)]] * 2


def test_a_rank_that_does_not_come_to_a_call(monkeypatch):
    monkeypatch.setattr(rounds, "_CHECKS_S", 0.2)
    one = rounds.Round(0, 2, ["a", "b"], dist.HashStore())
    with pytest.raises(
        ConnectionError, match=r"rank 0 waited 0.2 s for rank 1 on b to come to the"
    ):
        one.exchange("", "the checks")
