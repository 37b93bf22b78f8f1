"""Answers to ``check.placement``."""

from itertools import combinations, pairwise

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


ANSWERS = [
    Answers(
        check.placement.best_cuts,
        [best_cuts, lambda *args: list(best_cuts(*args)), planner],
        WRONG,
    ),
]
