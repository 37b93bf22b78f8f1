"""How the ranks of a round find each other in a store that earlier ranks have used."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from labkit.engine.runtime import rounds


def meet(store, world_size):
    """What the ranks agree on, by rank."""
    with ThreadPoolExecutor(world_size) as pool:
        ranks = reversed(range(world_size))
        return list(pool.map(lambda r: rounds.agree(store, r, world_size, 10.0), ranks))[::-1]


@pytest.mark.parametrize("sizes", [(1, 3, 2), (4, 4)])
def test_each_start_has_a_number_of_its_own(sizes):
    """Though nothing is ever removed from the store, and a dead rank 0 has made an offer."""
    store, numbers = dist.HashStore(), {"dead"}
    store.set("offer", "dead")
    for world_size in sizes:
        found = meet(store, world_size)
        assert found == [found[0]] * world_size
        assert len(found[0][1]) == world_size
        numbers.add(found[0][0])
    assert len(numbers) == 1 + len(sizes)


def test_a_rank_that_does_not_come_is_named():
    store = dist.HashStore()
    store.set("offer", "x")
    with pytest.raises(ConnectionError, match=r"rank 0 of 3 waited 0.1 s"):
        rounds.agree(store, 0, 3, 0.1)
    with pytest.raises(ConnectionError, match=r"rank 2 of 3 waited 0.1 s"):
        rounds.agree(store, 2, 3, 0.1)


@pytest.mark.parametrize("forged", [b"", b"\xff", b"7", b'{"a": 1}'])
def test_what_no_rank_has_written_is_refused(forged):
    store = dist.HashStore()
    store.set("offer", "x")
    store.set("x/all", forged)
    with pytest.raises(ConnectionError, match="which labkit does not write"):
        rounds.agree(store, 1, 2, 5.0)
