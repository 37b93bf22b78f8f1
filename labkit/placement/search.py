"""The cheapest cuts of a chain of layers into stages, exactly.

``cheapest_rest`` and ``cheapest_cuts`` are a dynamic program, for a cost that is the sum or the
maximum of the stages' costs; ``search_cuts`` is branch and bound, for any other.

Symbols: L layers, P stages.
"""

import heapq
import math
from collections.abc import Callable

from labkit.schedules.split_points import stage_ends

# (stage, start, end) -> the cost of that stage with the layers start to end - 1.
StageCost = Callable[[int, int, int], float]
Combine = Callable[[float, float], float]

# A bound and a total sum the same costs in different orders, so their last bits may differ.
_SAME = 1 + 1e-9


def cheapest_rest(
    cost: StageCost, num_layers: int, num_stages: int, combine: Combine
) -> list[list[float]]:
    """Dynamic program over cuts, from the last stage to the first.

    rest[s][i] = min over k of combine(cost(s, i, k), rest[s + 1][k]): the best cuts of the layers
    from i on do not depend on the cuts before them. This holds for the sum (``operator.add``)
    and the maximum (``max``). It evaluates P L^2 / 2 costs.

    Args:
        cost: of one stage, 0 or more; ``math.inf`` where it is not allowed.
        num_layers: L, at least P.
        combine: the cost of a stage with that of the stages after it.

    Returns:
        [stage][start] -> the least combined cost of stages ``stage`` to P - 1 on the layers from
        ``start`` on; ``math.inf`` where no split is allowed.
    """
    last = num_stages - 1
    rest = [[math.inf] * num_layers for _ in range(num_stages)]
    rest[last] = [cost(last, start, num_layers) for start in range(num_layers)]
    for stage in reversed(range(last)):
        for start in range(stage, num_layers - (last - stage)):
            rest[stage][start] = min(
                combine(cost(stage, start, end), rest[stage + 1][end])
                for end in stage_ends(stage, start, num_layers, num_stages)
            )
    return rest


def cheapest_cuts(
    cost: StageCost, num_layers: int, num_stages: int, combine: Combine
) -> tuple[int, ...]:
    """The split points that cost least; of several, the earliest. As ``cheapest_rest``."""
    rest = cheapest_rest(cost, num_layers, num_stages, combine)
    points: list[int] = []
    start, spent = 0, 0.0
    for stage in range(num_stages - 1):
        choices = []
        for end in stage_ends(stage, start, num_layers, num_stages):
            so_far = combine(spent, cost(stage, start, end))
            choices.append((combine(so_far, rest[stage + 1][end]), end, so_far))
        _, start, spent = min(choices)
        points.append(start)
    return tuple(points)


def search_cuts(
    cost: StageCost,
    through: StageCost,
    total: Callable[[tuple[int, ...]], float],
    num_layers: int,
    num_stages: int,
) -> tuple[int, ...]:
    """Branch and bound: the split with the least ``total``; of equal ones, the earliest cuts.

    The total is at least the cost of any one stage plus ``through`` of all stages before it; with
    the first cuts given, the stages after them cost at least ``cheapest_rest``. Splits are
    extended in the order of this lower bound. Once it exceeds the best total, all other splits
    are skipped: most of the (L - 1 choose P - 1), or only a few.

    Args:
        cost: of one stage; ``math.inf`` where it is not allowed.
        through: what a stage adds to the start of all stages after it.
        total: of a whole split, given its split points; never below the lower bound.
        num_layers: L, at least P.
    """
    rest = cheapest_rest(cost, num_layers, num_stages, max)
    best: tuple[float, tuple[int, ...]] = (math.inf, ())
    opened: list[tuple[float, tuple[int, ...], float]] = [(rest[0][0], (), 0.0)]
    while opened and opened[0][0] <= best[0] * _SAME:
        bound, points, before = heapq.heappop(opened)
        stage, start = len(points), points[-1] if points else 0
        if stage == num_stages - 1:
            best = min(best, (total(points), points))
            continue
        for end in stage_ends(stage, start, num_layers, num_stages):
            after = before + through(stage, start, end)
            own, behind = before + cost(stage, start, end), after + rest[stage + 1][end]
            longer = max(bound, own, behind)
            if longer <= best[0] * _SAME:
                heapq.heappush(opened, (longer, (*points, end), after))
    return best[1]
