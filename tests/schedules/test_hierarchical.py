"""The hierarchical all-reduce on paper: two hosts of two ranks, and what holds for any hosts."""

import pytest

from labkit.schedules.hierarchical import (
    flat_ring,
    hierarchical_all_reduce,
    host_of,
    num_blocks,
    own_blocks,
    rounds,
)
from labkit.schedules.ring import ring_all_reduce

HOSTS = [
    ((0,),),
    ((0, 1, 2),),
    ((0,), (1,), (2,)),
    ((0, 1), (2, 3)),
    ((0, 2), (1, 3)),
    ((0,), (1, 2)),
    ((0, 1, 2), (3,)),
    ((0, 1), (2, 3, 4)),
    ((0, 1), (2, 3), (4, 5)),
    ((0, 1, 2, 3), (4, 5, 6, 7)),
    ((0,), (1, 2, 3), (4, 5)),
    ((3, 1), (0,), (2, 5, 4), (6, 7)),
]


def all_ranks(hosts):
    return sorted(rank for ranks in hosts for rank in ranks)


def test_two_hosts_of_two_ranks():
    """Ranks 0 and 2 have the second half of their host's sum, ranks 1 and 3 the first."""
    drawn = [
        {rank: (step.is_between, step.dst, step.send) for rank, step in sorted(found.items())}
        for found in rounds(hierarchical_all_reduce, ((0, 1), (2, 3)))
    ]
    inside, between = False, True
    assert drawn == [
        {r: (inside, r ^ 1, (0, 2) if r in (0, 2) else (2, 4)) for r in range(4)},
        {
            0: (between, 2, (2, 3)),
            1: (between, 3, (0, 1)),
            2: (between, 0, (3, 4)),
            3: (between, 1, (1, 2)),
        },
        {
            0: (between, 2, (3, 4)),
            1: (between, 3, (1, 2)),
            2: (between, 0, (2, 3)),
            3: (between, 1, (0, 1)),
        },
        {r: (inside, r ^ 1, (2, 4) if r in (0, 2) else (0, 2)) for r in range(4)},
    ]


@pytest.mark.parametrize("hosts", HOSTS)
def test_messages_stay_on_their_level_and_meet_their_other_end(hosts):
    found = rounds(hierarchical_all_reduce, hosts)
    assert sum(map(len, found)) == sum(
        len(list(hierarchical_all_reduce(rank, hosts))) for rank in all_ranks(hosts)
    )
    for steps in found:
        for rank, step in steps.items():
            assert step.is_between == (host_of(rank, hosts) != host_of(step.dst, hosts))
            assert steps[step.src].dst == rank
            assert steps[step.src].send == step.recv


@pytest.mark.parametrize("hosts", HOSTS)
def test_inside_a_host_each_rank_gets_one_part_of_the_hosts_sum(hosts):
    for ranks in hosts:
        parts = sorted(own_blocks(rank, hosts) for rank in ranks)
        assert [start for start, _ in parts] == [0, *(end for _, end in parts[:-1])]
        assert parts[-1][1] == num_blocks(hosts)
        inside = len(ranks) - 1
        for rank in ranks:
            steps = list(hierarchical_all_reduce(rank, hosts))
            phases = [(step.phase, step.is_between) for step in steps]
            assert phases[:inside] == [("share_reduce", False)] * inside
            assert phases[len(phases) - inside :] == [("share_only", False)] * inside
            assert all(between for _, between in phases[inside : len(phases) - inside])


@pytest.mark.parametrize("hosts", [((0,),), ((0, 1, 2),), ((0,), (1,), (2,)), ((0, 1, 2, 3),)])
def test_with_one_host_or_one_rank_per_host_it_is_the_flat_ring(hosts):
    ranks = all_ranks(hosts)
    assert num_blocks(hosts) == len(ranks)
    for rank in ranks:
        steps, flat = (list(kind(rank, hosts)) for kind in (hierarchical_all_reduce, flat_ring))
        assert steps == flat
        assert [(step.phase, step.dst, step.send[0]) for step in steps] == [
            (step.phase, step.dst, step.send_chunk) for step in ring_all_reduce(rank, len(ranks))
        ]


def test_a_rank_on_no_host_is_refused():
    with pytest.raises(ValueError, match=r"rank 4 is on none of the hosts \[\[0, 1\], \[2, 3\]\]"):
        list(hierarchical_all_reduce(4, HOSTS[3]))
