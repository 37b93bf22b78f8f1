"""Answers to ``check.placement``."""

from itertools import combinations, pairwise

from graded import Answers
from ranks import travel_by_value

from labkit.placement.planner import best_split, predict_split
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


def one_device_too_many(profile, max_stages, link, cap_bytes):
    return best_cuts(profile, max_stages + 1, link, cap_bytes)


def up_to_all_devices_but_one(profile, max_stages, link, cap_bytes):
    try:
        return best_cuts(profile, max_stages - 1, link, cap_bytes)
    except ValueError:
        return best_cuts(profile, max_stages, link, cap_bytes)


WRONG += [
    (greedy, "cuts.slower", "not answer.raised"),
    (without_latency, "cuts.bytes_alone"),
    (one_device_too_many, "cuts.devices", "there are only 2 devices"),
    (up_to_all_devices_but_one, "cuts.slower"),
    (lambda *args: [str(k) for k in best_cuts(*args)], "cuts.invalid"),
    (lambda *args: (k for k in (*best_cuts(*args), 99)), "cuts.invalid"),
]


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
        [crossing(), crossing_in_other_order],
        [
            crossing(behind=0),
            crossing(both=lambda cut, frozen: cut <= frozen),
            lambda shapes, batch_size, split_points, frozen: shapes[9],
        ],
    ),
    Answers(
        check.placement.step_seconds,
        [step(), step_by_the_planner],
        [step(stages=max), step(hops=max), lambda profile, split_points, link: profile.seconds],
    ),
    Answers(
        check.placement.best_cuts,
        [best_cuts, planner],
        [
            with_all_devices(most_layers),
            with_memory(lambda layers: memory(layers, held=False)),
            lambda profile: (4,),
        ],
    ),
]
