"""Page 12: the groups of a mesh, who sums what with whom, and the bytes over slow links.

Symbols: D x S x T ranks, rank = (d S + s) T + t.
"""

from collections.abc import Callable
from random import Random
from typing import Any

from workbook.exercises.grader import solved


def _more_meshes(random: Random) -> list[tuple]:
    return [tuple(random.sample((1, 2, 3, 4), 3)) for _ in range(3)]


def _data_innermost(rule: Callable, dp: int, pp: int, tp: int) -> dict[str, Any]:
    groups = rule(tp, pp, dp)
    return {"dp": groups["tp"], "pp": groups["pp"], "tp": groups["dp"]}


def _stages_innermost(rule: Callable, dp: int, pp: int, tp: int) -> dict[str, Any]:
    groups = rule(dp, tp, pp)
    return {"dp": groups["dp"], "pp": groups["tp"], "tp": groups["pp"]}


def _one_replica(rule: Callable, dp: int, pp: int, tp: int) -> dict[str, Any]:
    return rule(dp, pp, tp) | {"tp": rule(1, pp, tp)["tp"]}


@solved(
    *((2, 2, 2), (2, 1, 2), (1, 2, 3), (3, 2, 1), (1, 1, 1), (4, 2, 8)),
    more=_more_meshes,
    mistakes={
        "tensor is innermost: its ranks are neighbors, those of data are furthest apart": (
            _data_innermost
        ),
        "stages are outside tensor: a step along a stage is T ranks": _stages_innermost,
        "every replica has its own tensor groups, not only the first": _one_replica,
        "the groups of dp and of pp are in each other's place": lambda rule, *sides: (
            rule(*sides) | {"dp": rule(*sides)["pp"], "pp": rule(*sides)["dp"]}
        ),
        "stages do not lie outside data: rank = (d S + s) T + t": lambda rule, dp, pp, tp: (
            rule(pp, dp, tp) | {"dp": rule(pp, dp, tp)["pp"], "pp": rule(pp, dp, tp)["dp"]}
        ),
    },
)
def groups(dp: int, pp: int, tp: int) -> dict[str, list[list[int]]]:
    """Grade ``fn(dp, pp, tp)``: by side the groups of ranks, each ascending, by first rank."""
    ranks = range(dp * pp * tp)
    by_side: dict[str, list[list[int]]] = {"dp": [], "pp": [], "tp": []}
    strides = {"dp": (pp * tp, dp), "pp": (tp, pp), "tp": (1, tp)}
    for side, (stride, length) in strides.items():
        for first in ranks:
            if first // stride % length == 0:
                by_side[side].append([first + stride * step for step in range(length)])
    return by_side


def _in_a_circle(rule: Callable, rank: int, dp: int, pp: int, tp: int) -> tuple:
    gradients, activations, _ = rule(rank, dp, pp, tp)
    replica = rank - rank % (pp * tp)
    neighbors = {replica + (rank - replica + step) % (pp * tp) for step in (-tp, tp)}
    return gradients, activations, sorted(neighbors - {rank})


def _more_ranks(random: Random) -> list[tuple]:
    meshes = [(2, 3, 2), *_more_meshes(random)]
    return [(random.randrange(dp * pp * tp), dp, pp, tp) for dp, pp, tp in meshes]


# rank, dp, pp, tp
@solved(
    *((5, 2, 2, 2), (0, 2, 2, 2), (3, 2, 1, 2), (4, 3, 2, 1), (2, 1, 1, 4), (6, 1, 4, 2)),
    (9, 2, 3, 2),
    more=_more_ranks,
    mistakes={
        "a pipeline is no ring: its last stage sends nothing to the first": _in_a_circle,
        "the stage before is T ranks before, the one behind T ranks behind": (
            lambda rule, rank, *mesh: (
                *rule(rank, *mesh)[:2],
                [rank + (peer - rank) // mesh[-1] for peer in rule(rank, *mesh)[2]],
            )
        ),
        "all ranks sum all gradients: only those that hold the same parameters": (
            lambda rule, rank, dp, pp, tp: ([*range(dp * pp * tp)], *rule(rank, dp, pp, tp)[1:])
        ),
        "gradients are summed along data, activations along tensor": lambda rule, *given: (
            [rule(*given)[side] for side in (1, 0, 2)]
        ),
        "gradients go back to the stage before": (
            lambda rule, rank, *mesh: (
                *rule(rank, *mesh)[:2],
                [peer for peer in rule(rank, *mesh)[2] if peer > rank],
            )
        ),
    },
)
def partners(rank: int, dp: int, pp: int, tp: int) -> tuple[list[int], list[int], list[int]]:
    """Grade ``fn(rank, dp, pp, tp)``: with whom ``rank`` works, in three ascending lists of ranks.

    Those that sum gradients with it and those that sum activations with it, itself among them in
    both; and the stages before and after it, to which it sends activations or their gradients.
    """
    stage = rank // tp % pp
    replica = pp * tp
    gradients = list(range(rank % replica, dp * replica, replica))
    first = rank - rank % tp
    neighbors = []
    if stage > 0:
        neighbors.append(rank - tp)
    if stage < pp - 1:
        neighbors.append(rank + tp)
    return gradients, list(range(first, first + tp)), neighbors


# bytes of parameters, S ranks that shard, R replicas of them
@solved(
    *((4800, 2, 2), (4800, 4, 2), (96000, 8, 4), (4800, 2, 1), (960, 1, 4)),
    mistakes={
        "inside, parameters are gathered twice, and gradients reduced once": (
            lambda rule, *sizes: (rule(*sizes)[0] * 2 // 3, rule(*sizes)[1])
        ),
    },
)
def hybrid_bytes(parameter_bytes: int, shards: int, replicas: int) -> tuple[int, int]:
    """Grade ``fn(parameter_bytes, shards, replicas)``: (bytes inside, bytes between) of a rank.

    One step of hybrid sharding: parameters are gathered in forward and again in backward.
    """
    inside = 3 * parameter_bytes * (shards - 1) // shards
    between = 2 * (parameter_bytes // shards) * (replicas - 1) // replicas
    return inside, between
