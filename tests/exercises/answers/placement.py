"""Answers to ``check.placement``."""

import math
from itertools import combinations, pairwise

from graded import Answers

from labkit.costs.planner import predict_split
from workbook import check


def bytes_over_cuts(shapes, batch_size, split_points, frozen):
    return [
        4 * batch_size * math.prod(shapes[cut - 1]) * (2 if cut > frozen else 1)
        for cut in split_points
    ]


def trains_all(shapes, batch_size, split_points, frozen):
    return bytes_over_cuts(
        shapes=shapes, batch_size=batch_size, split_points=split_points, frozen=0
    )


def output_of_the_layer_behind(shapes, batch_size, split_points, frozen):
    return bytes_over_cuts(
        shapes=shapes[1:], batch_size=batch_size, split_points=split_points, frozen=frozen
    )


def step_by_the_planner(profile, split_points, link):
    return predict_split(profile, split_points, link).step_s


def stages(profile, points):
    edges = [0, *points, len(profile.layers)]
    return [profile.layers[a:b] for a, b in pairwise(edges)]


def step(profile, split_points, link, stages_take=sum, messages=2):
    computing = [
        sum(layer.forward_s + layer.backward_s for layer in one)
        for one in stages(profile, split_points)
    ]
    sizes = [profile.layers[point - 1].output_bytes for point in split_points]
    return stages_take(computing) + messages * sum(map(link.message_seconds, sizes))


def all_stages_at_once(profile, split_points, link):
    return step(profile, split_points, link, stages_take=max)


def one_way_only(profile, split_points, link):
    return step(profile, split_points, link, messages=1)


def best_cuts(profile, max_stages, link, cap_bytes, fewest=0, held=True):
    def fits(points):
        needs = (
            sum(3 * layer.parameter_bytes + held * layer.held_bytes for layer in one)
            for one in stages(profile, points)
        )
        return max(needs) <= cap_bytes

    layers = range(1, len(profile.layers))
    splits = [p for count in range(fewest, max_stages) for p in combinations(layers, count)]
    return min(filter(fits, splits), key=lambda points: step(profile, points, link))


def on_all_devices(profile, max_stages, link, cap_bytes):
    return best_cuts(profile, max_stages, link, cap_bytes, fewest=max_stages - 1)


def forgets_what_is_held(profile, max_stages, link, cap_bytes):
    return best_cuts(profile, max_stages, link, cap_bytes, held=False)


def fewest_bytes(profile, max_stages, link, cap_bytes):
    """Two cuts of few bytes take longer than one of more, where each message is slow."""
    splits = []
    for count in range(max_stages):
        for points in combinations(range(1, len(profile.layers)), count):
            if max(predict_split(profile, points, link).memory_bytes) <= cap_bytes:
                splits.append(points)
    return min(splits, key=lambda points: sum(profile.layers[k - 1].output_bytes for k in points))


ANSWERS = [
    Answers(
        check.placement.bytes_over_cuts,
        [bytes_over_cuts],
        [
            trains_all,
            output_of_the_layer_behind,
        ],
    ),
    Answers(
        check.placement.step_seconds,
        [step_by_the_planner, step],
        [all_stages_at_once, one_way_only],
    ),
    Answers(
        check.placement.best_cuts,
        [best_cuts],
        [on_all_devices, forgets_what_is_held, fewest_bytes],
    ),
]
