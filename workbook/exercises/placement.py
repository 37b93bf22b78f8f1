"""Page 08, without ranks: bytes over cuts, a split's step, and the best cuts.

Symbols: L layers, P stages, one device per stage.
"""

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

from labkit.costs.link import Link
from labkit.costs.planner import LayerCost, Profile, predict_split
from labkit.schedules.split_points import check_split_points
from labkit.units import format_bytes, format_seconds
from workbook.exercises.grader import Wrong, judged, solved
from workbook.exercises.grader.compare import fit, short

Points = tuple[int, ...]

_SHAPES = ((24, 16, 16), (24, 8, 8), (40, 8, 8), (40, 4, 4), (96,), (10,))
# (shapes, batch size, split points, frozen layers)
_BYTE_CASES: tuple[tuple[tuple, int, Points, int], ...] = (
    *((_SHAPES, 4, (2,), 0), (_SHAPES, 7, (1, 3, 5), 0), (_SHAPES, 1, (4,), 0)),
    *((_SHAPES, 4, (1, 3, 5), 3), (_SHAPES, 3, (2, 4), 1)),
    *((_SHAPES[::-1], 5, (2, 4), 5), (_SHAPES, 4, (), 0)),
)


@solved(
    *_BYTE_CASES,
    mistakes={
        "a gradient of as many bytes comes back": (
            lambda crossing, shapes, n, points, _: crossing(shapes, n, points, len(shapes))
        ),
    },
)
def bytes_over_cuts(
    shapes: tuple, batch_size: int, split_points: Points, frozen: int
) -> list[int]:
    """Grade ``fn(shapes, batch_size, split_points, frozen)``: by cut, the bytes of one step.

    ``shapes`` holds what each layer makes of one sample, a tuple of sizes; numbers are float32,
    and layers 0 to ``frozen`` - 1 are not trained.
    """
    by_cut = []
    for cut in split_points:
        activation_bytes = 4 * batch_size * math.prod(shapes[cut - 1])
        has_gradient = cut > frozen
        by_cut.append(2 * activation_bytes if has_gradient else activation_bytes)
    return by_cut


class _Model(Profile):
    """A profile that is shown by its name."""

    def __repr__(self) -> str:
        return f"the {self.model}"


def _profile(name: str, *layers: tuple[int, int, int, int]) -> Profile:
    """A profile by layer: forward ms (backward: i ms more), KiB of output, parameters, held."""
    costs = []
    for i, (ms, *kib) in enumerate(layers):
        num_bytes = [1024 * number for number in kib]
        costs.append(LayerCost(f"layer {i}", ms / 1e3, (ms + i) / 1e3, *num_bytes))
    return _Model(name, 8, 16 * 1024, tuple(costs))


# As in a network for images: activations shrink, parameters grow.
_FUNNEL = _profile(
    *("funnel", (4, 156, 2, 180), (2, 136, 6, 172), (2, 100, 10, 136), (1, 44, 14, 68)),
    *((3, 76, 18, 76), (4, 20, 28, 40), (3, 16, 34, 28), (4, 4, 50, 24), (1, 1, 96, 41)),
)
# Small outputs at three places, large ones between them.
_DUMBBELL = _profile(
    *("dumbbell", (2, 6, 12, 60), (1, 16, 8, 80), (3, 200, 12, 70), (4, 180, 8, 90)),
    *((3, 220, 12, 60), (1, 12, 8, 70), (2, 70, 16, 50), (1, 8, 4, 60), (1, 2, 8, 60)),
)
_NEAR = Link(1e-4, 1e-8)
_FAR = Link(2e-2, 1e-7)


def _slowest_stage_s(_: Callable, *given: Any) -> float:
    """As if all stages computed at the same time."""
    split = predict_split(*given)
    return max(map(sum, zip(split.forward_s, split.backward_s))) + 2 * sum(split.hop_s)


@solved(
    *((_FUNNEL, (4,), _FAR), (_DUMBBELL, (2, 6), _FAR), (_DUMBBELL, (1, 3, 5, 8), _NEAR)),
    *((_FUNNEL, (7, 8), _NEAR), (_FUNNEL, (), _FAR)),
    mistakes={
        "an activation and its gradient are two messages, and each costs alpha": (
            lambda step, profile, points, link: (
                step(profile, points, link) - len(points) * link.alpha_s
            )
        ),
        "the stages wait for each other, so the times of all layers add up": _slowest_stage_s,
    },
)
def step_seconds(profile: Profile, split_points: Points, link: Link) -> float:
    """Grade ``fn(profile, split_points, link)``: seconds of a step, with all layers trained."""
    compute_s = sum(layer.forward_s + layer.backward_s for layer in profile.layers)
    sizes = [profile.layers[cut - 1].output_bytes for cut in split_points]
    return compute_s + 2 * sum(map(link.message_seconds, sizes))


# profile, most stages, link, cap: the first cut is before the last layer, the fifth behind the
# first; in the fourth a third device would be of use; in the last one cut of more bytes is quicker
# than two of fewer.
_CASES = (
    *((_FUNNEL, 2, _NEAR, 1210 * 1024), (_FUNNEL, 3, _NEAR, 640 * 1024)),
    *((_DUMBBELL, 3, _NEAR, 460 * 1024), (_DUMBBELL, 2, _NEAR, 460 * 1024)),
    *((_DUMBBELL, 4, _FAR, 780 * 1024), (_DUMBBELL, 3, _NEAR, math.inf)),
    (_FUNNEL, 3, _FAR, 785 * 1024),
)


@judged("profile, max_stages, link, cap_bytes", *_CASES)
def best_cuts(
    fn: Callable, profile: Profile, max_stages: int, link: Link, cap_bytes: float
) -> Wrong | None:
    """Grade ``fn(profile, max_stages, link, cap_bytes)``: the split points of the shortest step.

    No stage may need more than ``cap_bytes``. Any split that is as quick as the best of all is
    right.
    """
    answer = fit(fn(profile, max_stages, link, cap_bytes), [])
    text = f"it returned {short(answer)}"
    if not isinstance(answer, list):
        return Wrong(f"{text}, not a sequence of split points")
    try:
        points = check_split_points(answer, len(profile.layers))
    except ValueError as error:
        return Wrong(f"{text}: {error}")
    if len(points) >= max_stages:
        return Wrong(f"{text}, which makes {len(points) + 1} stages: one more than the cuts")
    split = predict_split(profile, points, link)
    largest = max(split.memory_bytes)
    if largest > cap_bytes:
        needs = f"stage {split.memory_bytes.index(largest)} needs {format_bytes(largest)}"
        return Wrong(f"{text}: {needs}, and the cap is {format_bytes(cap_bytes)}")
    best_s = math.inf
    for num_cuts in range(max_stages):
        for cuts in combinations(range(1, len(profile.layers)), num_cuts):
            candidate = predict_split(profile, cuts, link)
            if max(candidate.memory_bytes) <= cap_bytes:
                best_s = min(best_s, candidate.step_s)
    # A learner may add up in another order than the planner.
    if split.step_s <= best_s * (1 + 1e-9):
        return None
    text += f": its step takes {format_seconds(split.step_s)}, expected {format_seconds(best_s)}"
    if points and predict_split(profile, (), link).step_s == best_s:
        text += "\none device, without a cut, is the quickest: () is a split, too"
    return Wrong(text)
