"""Answers to ``check.mesh``."""

from collections import defaultdict

import torch
from graded import Answers

from workbook import check

# groups(dp, pp, tp)


def by_tensor(dp, pp, tp, order=(0, 1, 2)):
    sizes = dp, pp, tp
    ranks = torch.arange(dp * pp * tp).view([sizes[side] for side in order])
    ranks = ranks.permute([order.index(side) for side in range(3)])
    rows = {}
    for number, side in enumerate(("dp", "pp", "tp")):
        lists = ranks.movedim(number, -1).reshape(-1, sizes[number]).tolist()
        rows[side] = sorted(lists)
    return rows


def by_loops(dp, pp, tp):
    def rank(d, s, t):
        return (d * pp + s) * tp + t

    return {
        "dp": [[rank(d, s, t) for d in range(dp)] for s in range(pp) for t in range(tp)],
        "pp": [[rank(d, s, t) for s in range(pp)] for d in range(dp) for t in range(tp)],
        "tp": [[rank(d, s, t) for t in range(tp)] for d in range(dp) for s in range(pp)],
    }


def as_tuples(dp, pp, tp):
    """A defaultdict of tuples."""
    groups = defaultdict(list)
    for side, rows in by_loops(dp, pp, tp).items():
        groups[side].extend(map(tuple, rows))
    return groups


def data_innermost(dp, pp, tp):
    return by_tensor(dp, pp, tp, (2, 1, 0))


def stages_innermost(dp, pp, tp):
    return by_tensor(dp, pp, tp, (0, 2, 1))


# partners(rank, dp, pp, tp)


def from_groups(rank, dp, pp, tp):
    mine = {}
    for side, lists in by_loops(dp, pp, tp).items():
        (mine[side],) = [ranks for ranks in lists if rank in ranks]
    stage = mine["pp"].index(rank)
    beside = [r for s, r in enumerate(mine["pp"]) if abs(s - stage) == 1]
    return mine["dp"], mine["tp"], beside


def all_stages(rank, dp, pp, tp):
    gradients, activations, _ = from_groups(rank, dp, pp, tp)
    return gradients, activations, [r for r in range(dp * pp * tp) if r % tp == rank % tp]


def exchanged(rank, dp, pp, tp):
    gradients, activations, beside = from_groups(rank, dp, pp, tp)
    return activations, gradients, beside


def one_neighbor(rank, dp, pp, tp):
    *sums, beside = from_groups(rank, dp, pp, tp)
    return *sums, beside[-1:]


def descending(rank, dp, pp, tp):
    *sums, beside = from_groups(rank, dp, pp, tp)
    return *sums, beside[::-1]


GROUPS = [by_tensor, by_loops, as_tuples]
ANSWERS = [
    Answers(check.mesh.groups, GROUPS, [data_innermost, stages_innermost]),
    Answers(
        check.mesh.partners,
        [from_groups],
        [all_stages, exchanged, one_neighbor, descending],
    ),
    Answers(
        check.mesh.hybrid_bytes,
        [lambda size, s, r: (3 * (size - size // s), 2 * (size // s - size // s // r))],
        [
            lambda size, s, r: (3 * size * (s - 1) // s, 2 * size * (r - 1) // r),
            lambda size, s, r: (2 * size * (s - 1) // s, 2 * size // s * (r - 1) // r),
        ],
    ),
]
