"""Answers to ``check.placement``."""

import functools
from itertools import chain, combinations, pairwise

import numpy as np
import torch
from graded import Answers
from ranks import travel_by_value

from labkit import check
from labkit.placement.planner import best_split

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


def with_cost(cost):
    """A search that keeps the cap and minimises ``cost(profile, points, link)``."""

    def fn(profile, max_stages, link, cap_bytes):
        return search(
            profile,
            range(max_stages),
            lambda points: all(memory(layers) <= cap_bytes for layers in stages(profile, points)),
            lambda points: cost(profile, points, link),
        )

    return fn


def with_all_devices(cost):
    def fn(profile, max_stages, link, cap_bytes):
        return search(
            profile,
            [max_stages - 1],
            lambda points: all(memory(layers) <= cap_bytes for layers in stages(profile, points)),
            lambda points: cost(profile, points, link),
        )

    return fn


def longest_stage_s(profile, points, link):
    return max(sum(layer.forward_s for layer in layers) for layers in stages(profile, points))


def most_layers(profile, points, link):
    return max(map(len, stages(profile, points)))


def fewest_cuts(profile, max_stages, link, cap_bytes):
    return with_cost(lambda profile, points, link: (len(points), step_s(profile, points, link)))(
        profile, max_stages, link, cap_bytes
    )


WRONG = [
    (with_all_devices(most_layers), "cuts.equal_layers"),
    (with_all_devices(longest_stage_s), "cuts.equal_seconds"),
    (lambda *args: best_cuts(*args[:3], float("inf")), "cuts.cap_forgotten"),
    (lambda *args: best_cuts(*args[:3], args[3] - 1), "cuts.cap_excluded"),
    (
        with_cost(lambda f, p, link: sum(link.message_seconds(sent(f, k + 1)) for k in p)),
        "cuts.output_behind",
    ),
    (with_all_devices(step_s), "cuts.all_devices"),
    (fewest_cuts, "cuts.fewest"),
    (with_cost(lambda f, p, link: sum(sent(f, k) for k in p)), "cuts.bytes_alone"),
    (
        with_cost(lambda f, p, link: max((sent(f, k) for k in p), default=0)),
        "cuts.largest_hop",
    ),
    (with_memory(lambda layers: memory(layers, times=1)), "cuts.value_alone"),
    (with_memory(lambda layers: memory(layers, held=False)), "cuts.activations_forgotten"),
    (lambda *args: (0,), "cuts.invalid"),
    (lambda *args: (3, 2), "cuts.invalid"),
    (lambda *args: (1, 2, 3), "cuts.devices"),
    (lambda *args: (3,), "cuts.memory"),
    (lambda *args: (8,), "cuts.memory", "stage 0 needs 1.18 MiB"),
    (lambda *args: 4, "cuts.kind"),
    (lambda *args: None, "cuts.kind"),
    (lambda *args: {}["cut"], "answer.raised"),
    (lambda profile: (4,), "answer.raised"),
]


def planner(profile, max_stages, link, cap_bytes):
    found = []
    for stages in range(1, max_stages + 1):
        try:
            found.append(best_split(profile, stages, link, memory_cap_bytes=cap_bytes))
        except ValueError:
            continue
    return min(found, key=lambda split: split.step_s).split_points


def by_dynamic_programming(profile, max_stages, link, cap_bytes):
    layers = profile.layers

    @functools.cache
    def best_from(start, stages):
        """(seconds, cuts) of the layers from start on, in at most so many stages."""
        options = []
        if memory(layers[start:]) <= cap_bytes:
            options.append((0.0, ()))
        for cut in range(start + 1, len(layers) if stages > 1 else 0):
            if memory(layers[start:cut]) <= cap_bytes:
                rest_s, rest = best_from(cut, stages - 1)
                options.append((link.message_seconds(sent(profile, cut)) + rest_s, (cut, *rest)))
        return min(options, default=(float("inf"), ()))

    return best_from(0, max_stages)[1]


def by_branch_and_bound(profile, max_stages, link, cap_bytes):
    best = [float("inf"), None]

    def extend(points, seconds):
        if seconds >= best[0]:
            return
        start = points[-1] if points else 0
        if memory(profile.layers[start:]) <= cap_bytes:
            best[:] = seconds, points
        if len(points) + 1 < max_stages:
            for cut in range(start + 1, len(profile.layers)):
                if memory(profile.layers[start:cut]) <= cap_bytes:
                    extend([*points, cut], seconds + link.message_seconds(sent(profile, cut)))

    extend([], 0.0)
    return best[1]


def by_bit_masks(profile, max_stages, link, cap_bytes):
    found = []
    for mask in range(2 ** (len(profile.layers) - 1)):
        points = [k + 1 for k in range(len(profile.layers) - 1) if mask >> k & 1]
        parts = stages(profile, points)
        if len(parts) <= max_stages and max(map(memory, parts)) <= cap_bytes:
            found.append((step_s(profile, points, link), len(points), points))
    return iter(min(found)[2])


def last_of_the_equal(profile, max_stages, link, cap_bytes):
    """Takes another one of splits that are equally quick."""
    layers = range(1, len(profile.layers))
    splits = chain.from_iterable(combinations(layers, cuts) for cuts in range(max_stages))
    fitting = [p for p in splits if all(memory(s) <= cap_bytes for s in stages(profile, p))]
    return min(reversed(fitting), key=lambda points: step_s(profile, points, link))


def as_an_array(*args):
    return np.array(best_cuts(*args), dtype=np.int32)


def as_a_tensor(*args):
    return torch.tensor(best_cuts(*args), dtype=torch.long)


def greedy(profile, max_stages, link, cap_bytes):
    """Cuts as late as the memory allows."""
    points, start = [], 0
    for k in range(1, len(profile.layers) + 1):
        if memory(profile.layers[start:k]) > cap_bytes:
            points.append(k - 1)
            start = k - 1
    return tuple(points)


def without_latency(profile, max_stages, link, cap_bytes):
    return with_cost(lambda f, p, link: sum(sent(f, k) for k in p))(
        profile, max_stages, link, cap_bytes
    )


def up_to_all_devices_but_one(profile, max_stages, link, cap_bytes):
    try:
        return best_cuts(profile, max_stages - 1, link, cap_bytes)
    except ValueError:
        return best_cuts(profile, max_stages, link, cap_bytes)


WRONG += [
    (greedy, "cuts.slower", "not answer.raised"),
    (without_latency, "cuts.bytes_alone"),
    (up_to_all_devices_but_one, "cuts.slower"),
    (lambda *args: [str(k) for k in best_cuts(*args)], "cuts.invalid"),
    (lambda *args: (k for k in (*best_cuts(*args), 99)), "cuts.invalid"),
]
ANSWERS = [
    Answers(
        check.placement.best_cuts,
        [
            best_cuts,
            lambda *args: list(best_cuts(*args)),
            by_dynamic_programming,
            by_branch_and_bound,
            by_bit_masks,
            last_of_the_equal,
            as_an_array,
            as_a_tensor,
            planner,
        ],
        WRONG,
    ),
]
