"""Split points: the cuts of a chain of layers into stages.

A **split point** k means that a stage begins with layer k; P - 1 of them make P stages.
Symbols: L layers, P stages.
"""

from collections.abc import Sequence

from labkit.units import format_count


def check_split_points(
    split_points: Sequence[int], num_layers: int, num_stages: int | None = None
) -> tuple[int, ...]:
    """Split points as a tuple, if they cut ``num_layers`` layers into non-empty stages.

    ``num_stages`` is P, if the number of ranks or devices determines it. ValueError for points
    that are out of range or order, repeated, not integers, or not P - 1 of them.
    """
    points = tuple(split_points)
    shown = ", ".join(map(str, points)) or "none"
    for before, point in zip((0, *points), points):
        if not isinstance(point, int) or not before < point < num_layers:
            raise ValueError(
                f"split point {point} leaves a stage without layers: with "
                f"{format_count(num_layers, 'layer')} they are integers from 1 to "
                f"{num_layers - 1}, each greater than the one before"
            )
    if num_stages is not None and len(points) != num_stages - 1:
        raise ValueError(
            f"{format_count(len(points), 'split point')} ({shown}) for "
            f"{format_count(num_stages, 'stage')}: give {num_stages - 1}"
        )
    return points


def stage_bounds(split_points: Sequence[int], num_layers: int) -> list[tuple[int, int]]:
    """The layers of each stage as (start, end), end excluded."""
    points = check_split_points(split_points, num_layers)
    return list(zip((0, *points), (*points, num_layers)))
