"""Answers to ``check.placement``."""

from itertools import combinations, pairwise

from graded import Answers
from ranks import travel_by_value

from labkit.placement.planner import predict_split
from workbook import check

travel_by_value(__name__)


def step_s(profile, points, link):
    compute_s = sum(layer.forward_s + layer.backward_s for layer in profile.layers)
    return compute_s + 2 * sum(link.message_seconds(sent(profile, k)) for k in points)


def sent(profile, point):
    return profile.layers[point - 1].output_bytes


def memory(layers, times=3, held=True):
    return sum(times * layer.parameter_bytes + held * layer.held_bytes for layer in layers)


def stages(profile, points):
    edges = [0, *points, len(profile.layers)]
    return [profile.layers[a:b] for a, b in pairwise(edges)]


def search(profile, counts, fits, cost):
    layers = range(1, len(profile.layers))
    splits = [points for count in counts for points in combinations(layers, count)]
    return min((points for points in splits if fits(points)), key=lambda p: (cost(p), p))


def best_cuts(profile, max_stages, link, cap_bytes, needs=memory):
    return search(
        profile,
        range(max_stages),
        lambda points: all(needs(layers) <= cap_bytes for layers in stages(profile, points)),
        lambda points: step_s(profile, points, link),
    )


def with_memory(needs):
    return lambda *args: best_cuts(*args, needs=needs)


def with_all_devices(cost):
    def fn(profile, max_stages, link, cap_bytes):
        return search(
            profile,
            [max_stages - 1],
            lambda points: all(memory(layers) <= cap_bytes for layers in stages(profile, points)),
            lambda points: cost(profile, points, link),
        )

    return fn


def most_layers(profile, points, link):
    return max(map(len, stages(profile, points)))


# Bytes over cuts


def crossing(
    behind=1,
    size=4,
    both=lambda cut, frozen: cut > frozen,
    one=lambda cut, frozen: True,
    whole=list,
    batch=True,
):
    """A learner's ``bytes_over_cuts``; each option changes a part of it."""

    def fn(shapes, batch_size, split_points, frozen):
        found = []
        for cut in split_points:
            one_way = size * (batch_size if batch else 1)
            for length in shapes[cut - behind]:
                one_way *= length
            found.append(one_way * one(cut, frozen) + one_way * both(cut, frozen))
        return whole(found)

    return fn


def crossing_in_other_order(*, split_points, frozen, batch_size, shapes):
    return crossing()(shapes, batch_size, split_points, frozen)


# The step of a split


def step(
    compute=lambda layer: layer.forward_s + layer.backward_s,
    stages=sum,
    behind=1,
    hop=lambda link, n: 2 * link.message_seconds(n),
    hops=sum,
    scale=1.0,
):
    """A learner's ``step_seconds``; each option changes a part of it."""

    def fn(profile, split_points, link):
        edges = [0, *split_points, len(profile.layers)]
        computing = [sum(map(compute, profile.layers[a:b])) for a, b in pairwise(edges)]
        crossing = [hop(link, profile.layers[k - behind].output_bytes) for k in split_points]
        return scale * (stages(computing) + (hops(crossing) if crossing else 0))

    return fn


def step_by_the_planner(profile, split_points, link):
    return predict_split(profile, split_points, link).step_s


ANSWERS = [
    Answers(
        check.placement.bytes_over_cuts,
        [crossing_in_other_order],
        [
            crossing(behind=0),
            crossing(both=lambda cut, frozen: cut <= frozen),
            lambda shapes, batch_size, split_points, frozen: shapes[9],
        ],
    ),
    Answers(
        check.placement.step_seconds,
        [step_by_the_planner],
        [step(stages=max), step(hops=max), lambda profile, split_points, link: profile.seconds],
    ),
    Answers(
        check.placement.best_cuts,
        [best_cuts],
        [
            with_all_devices(most_layers),
            with_memory(lambda layers: memory(layers, held=False)),
            lambda profile: (4,),
        ],
    ),
]
