"""Trees and exchanges on paper: the textbook's, and what must hold for any number of ranks."""

import pytest

from labkit.schedules.halving_doubling import recursive_halving
from labkit.schedules.tree import (
    binomial_broadcast,
    binomial_reduce,
    recursive_doubling,
    recursive_doubling_return,
)

WORLD_SIZES = [1, 2, 3, 5, 8, 13]


def by_step(schedule, world_size, *args):
    """[{rank: Transfer}] by step, all ranks together."""
    steps = {}
    for rank in range(world_size):
        for transfer in schedule(rank, world_size, *args):
            steps.setdefault(transfer.step, {})[rank] = transfer
    assert sorted(steps) == list(range(min(steps, default=0), max(steps, default=-1) + 1))
    return [steps[step] for step in sorted(steps)]


def arrows(schedule, world_size, *args):
    """[step] -> "from>to" of every message, as the textbook prints it."""
    return [
        " ".join(f"{rank}>{t.dst}" for rank, t in row.items() if t.dst is not None)
        for row in by_step(schedule, world_size, *args)
    ]


def play(schedule, world_size, held, *args):
    """Who holds whose values after the schedule; a message carries all its sender holds."""
    for row in by_step(schedule, world_size, *args):
        before = dict(enumerate(held))
        for rank, transfer in row.items():
            if transfer.dst is not None:
                assert row[transfer.dst].src == rank, "a message that no rank receives"
            if transfer.src is not None:
                assert row[transfer.src].dst == rank, "waits for a message that no rank sends"
                held[rank] = held[rank] | before[transfer.src]
    return held


def alone(world_size):
    return [frozenset({rank}) for rank in range(world_size)]


def rounds(world_size):
    """ceil(log2 P), in numbers that need no logarithm."""
    return next(s for s in range(world_size) if 2**s >= world_size)


def test_the_textbooks_trees_for_eight_ranks_and_for_six():
    assert arrows(binomial_broadcast, 8) == ["0>1", "0>2 1>3", "0>4 1>5 2>6 3>7"]
    assert arrows(binomial_reduce, 8) == ["4>0 5>1 6>2 7>3", "2>0 3>1", "1>0"]
    assert arrows(binomial_broadcast, 4, 2) == ["2>3", "2>0 3>1"]
    assert arrows(recursive_doubling, 4) == ["0>1 1>0 2>3 3>2", "0>2 1>3 2>0 3>1"]
    assert arrows(recursive_doubling, 6) == ["4>0 5>1", "0>1 1>0 2>3 3>2", "0>2 1>3 2>0 3>1"]
    assert arrows(recursive_doubling_return, 6) == ["0>4 1>5"]
    assert arrows(recursive_doubling_return, 8) == []


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_binomial_tree_reaches_everyone_and_backwards_collects_everyone(world_size):
    everyone = frozenset(range(world_size))
    for root in {0, world_size - 1}:
        start = [frozenset({root}) if rank == root else frozenset() for rank in range(world_size)]
        assert play(binomial_broadcast, world_size, start, root) == [{root}] * world_size
        assert play(binomial_reduce, world_size, alone(world_size), root)[root] == everyone
        assert len(by_step(binomial_broadcast, world_size, root)) == rounds(world_size)


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
def test_halving_leaves_each_rank_one_block_with_everyone_in_it(world_size):
    everyone = frozenset(range(world_size))
    held = [[frozenset({rank})] * world_size for rank in range(world_size)]
    steps = [list(recursive_halving(rank, world_size)) for rank in range(world_size)]
    for row in zip(*steps, strict=True):
        before = [list(blocks) for blocks in held]
        for rank, (peer, sent, kept) in enumerate(row):
            assert (row[peer].sent, row[peer].kept) == (kept, sent)
            for block in range(*kept):
                held[rank][block] |= before[peer][block]
    assert [held[rank][rank] for rank in range(world_size)] == [everyone] * world_size
    assert len(steps[0]) == rounds(world_size)
