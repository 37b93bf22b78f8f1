"""The ring on paper: the textbook's, and what must hold for any number of ranks."""

import pytest

from labkit.schedules.ring import (
    chunk_bounds,
    num_blocks,
    owned_chunk,
    ring_contributions,
    ring_share_only,
    ring_share_reduce,
    rings_between,
)


def table(schedule, world_size):
    """[step] -> "rank sends chunk" for all ranks, as the textbook prints it."""
    rows = zip(*(schedule(rank, world_size) for rank in range(world_size)))
    return [" ".join(f"{r}:{step.send_chunk}" for r, step in enumerate(row)) for row in rows]


def test_the_textbooks_schedule_for_four_ranks():
    assert table(ring_share_reduce, 4) == ["0:0 1:1 2:2 3:3", "0:3 1:0 2:1 3:2", "0:2 1:3 2:0 3:1"]
    assert table(ring_share_only, 4) == ["0:1 1:2 2:3 3:0", "0:0 1:1 2:2 3:3", "0:3 1:0 2:1 3:2"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_each_rank_owns_one_complete_chunk_then_has_all(world_size):
    states = ring_contributions(world_size)
    everyone = frozenset(range(world_size))
    assert len(states) == 2 * (world_size - 1) + 1
    for rank in range(world_size):
        middle = states[world_size - 1][rank]
        complete = [chunk for chunk, held in enumerate(middle) if held == everyone]
        if world_size > 1:
            assert complete == [owned_chunk(rank, world_size)]
        assert states[-1][rank] == [everyone] * world_size
    assert sorted(owned_chunk(r, world_size) for r in range(world_size)) == sorted(everyone)


@pytest.mark.parametrize("num_elements", [0, 1, 3, 4, 10, 17])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_chunks_cover_everything_and_differ_by_one_at_most(num_elements, world_size):
    bounds = chunk_bounds(num_elements, world_size)
    sizes = [end - start for start, end in bounds]
    assert len(bounds) == world_size
    assert sum(sizes) == num_elements
    assert max(sizes) - min(sizes) <= 1
    assert [start for start, _ in bounds] == [sum(sizes[:i]) for i in range(world_size)]


@pytest.mark.parametrize(
    "hosts",
    [
        ((0, 1, 2),),
        ((0,), (1,), (2,)),
        ((0, 2), (1, 3)),
        ((0,), (1, 2)),
        ((0, 1), (2, 3, 4)),
        ((3, 1), (0,), (2, 5, 4), (6, 7)),
    ],
)
def test_the_rings_between_hosts_have_a_rank_of_each_and_cover_the_tensor(hosts):
    found = {}
    for rank in (rank for ranks in hosts for rank in ranks):
        for members, blocks in rings_between(rank, hosts):
            assert rank in members
            assert all(member in ranks for member, ranks in zip(members, hosts, strict=True))
            assert found.setdefault(blocks, members) == members
    starts, ends = zip(*sorted(found))
    assert (starts[0], *ends) == (*starts, num_blocks(hosts))
