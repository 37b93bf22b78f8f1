"""Answers to ``check.placement``."""

import functools
from itertools import chain, combinations, pairwise

import numpy as np
import torch
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


def best_by_predict_split(profile, max_stages, link, cap_bytes):
    """With the function that the page offers."""
    best = float("inf"), None
    for count in range(max_stages):
        for points in combinations(range(1, len(profile.layers)), count):
            split = predict_split(profile, points, link)
            if all(needed <= cap_bytes for needed in split.memory_bytes):
                best = min(best, (split.step_s, points))
    return best[1]


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


def crossing_in_numpy(shapes, batch_size, split_points, frozen):
    sizes = np.array([np.prod(shape) for shape in shapes])
    cuts = np.array(split_points, dtype=int)
    return 4 * batch_size * sizes[cuts - 1] * np.where(cuts > frozen, 2, 1)


def crossing_as_a_tensor(shapes, batch_size, split_points, frozen):
    sizes = [torch.Size(shapes[cut - 1]).numel() for cut in split_points]
    one_way = torch.tensor(sizes, dtype=torch.int64) * batch_size * 4
    return one_way + one_way * (torch.tensor(split_points) > frozen)


def crossing_one_by_one(shapes, batch_size, split_points, frozen):
    for cut in split_points:
        activation = torch.empty(batch_size, *shapes[cut - 1], dtype=torch.float32).nbytes
        yield activation
        if cut > frozen:
            yield activation


def crossing_yielded(shapes, batch_size, split_points, frozen):
    for cut in split_points:
        activation = torch.empty(batch_size, *shapes[cut - 1], device="meta").nbytes
        yield activation * (2 if any(layer >= frozen for layer in range(cut)) else 1)


def crossing_by_recursion(shapes, batch_size, split_points, frozen):
    if not split_points:
        return ()
    first, *rest = split_points
    one = functools.reduce(lambda a, b: a * b, shapes[first - 1], 4.0 * batch_size)
    rest = crossing_by_recursion(shapes, batch_size, rest, frozen)
    return (one if first <= frozen else 2 * one, *rest)


def crossing_in_other_order(*, split_points, frozen, batch_size, shapes):
    return crossing()(shapes, batch_size, split_points, frozen)


RIGHT_BYTES = [
    crossing(),
    crossing(whole=tuple),
    crossing_in_numpy,
    crossing_as_a_tensor,
    crossing_yielded,
    crossing_by_recursion,
    crossing_in_other_order,
]
WRONG_BYTES = [
    (crossing(behind=0), "crossing.output_behind"),
    (crossing(size=1), "crossing.numbers"),
    (crossing(size=8), "crossing.eight_bytes"),
    (crossing(batch=False), "crossing.one_sample"),
    (crossing(both=lambda cut, frozen: False), "crossing.one_way"),
    (crossing(both=lambda cut, frozen: True), "crossing.frozen_ignored"),
    (crossing(both=lambda cut, frozen: cut >= frozen), "crossing.frozen_at_cut"),
    (crossing(both=lambda cut, frozen: cut <= frozen), "crossing.frozen_reversed"),
    (crossing(one=lambda cut, frozen: cut > frozen), "crossing.nothing_frozen"),
    (crossing(whole=sum), "crossing.total"),
    (crossing(whole=lambda found: [sum(found)]), "crossing.total_in_list"),
    (crossing_one_by_one, "answer.wrong"),
    (crossing(both=lambda cut, frozen: frozen == 0), "answer.wrong"),
    (crossing(whole=lambda found: None), "answer.nothing"),
    (lambda shapes, batch_size, split_points, frozen: shapes[9], "answer.raised"),
]


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


def step_as_a_timetable(profile, split_points, link):
    """Goes through the model, forward and then backward, and looks at the clock."""
    clock_s = 0.0
    for number, layer in enumerate(profile.layers):
        if number in split_points:
            clock_s += link.message_seconds(profile.layers[number - 1].output_bytes)
        clock_s += layer.forward_s
    for number in reversed(range(len(profile.layers))):
        clock_s += profile.layers[number].backward_s
        if number in split_points:
            clock_s += link.message_seconds(profile.layers[number - 1].output_bytes)
    return clock_s


def step_by_the_formula(profile, split_points, link):
    num_bytes = sum(profile.layers[cut - 1].output_bytes for cut in split_points)
    hops_s = 2 * (len(split_points) * link.alpha_s + num_bytes * link.beta_s_per_byte)
    return hops_s + sum(layer.backward_s + layer.forward_s for layer in profile.layers)


def step_in_numpy(profile, split_points, link):
    sent_bytes = np.array([layer.output_bytes for layer in profile.layers], dtype=float)
    hops_s = link.alpha_s + link.beta_s_per_byte * sent_bytes[np.array(split_points, int) - 1]
    return np.float64(step_s(profile, (), link)) + 2 * hops_s.sum()


def step_as_a_tensor(profile, split_points, link):
    layers = torch.tensor([[one.forward_s, one.backward_s] for one in profile.layers])
    hops_s = [link.message_seconds(sent(profile, cut)) for cut in split_points]
    return layers.double().sum() + 2 * torch.tensor(hops_s, dtype=torch.float64).sum()


def step_by_recursion(profile, split_points, link):
    if not split_points:
        return step_s(profile, (), link)
    *rest, last = split_points
    hop_s = link.message_seconds(sent(profile, last))
    return step_by_recursion(profile, rest, link) + hop_s + hop_s


def step_by_the_planner(profile, split_points, link):
    return predict_split(profile, split_points, link).step_s


def all_cuts_in_one(profile, split_points, link):
    num_bytes = sum(sent(profile, cut) for cut in split_points)
    return step_s(profile, (), link) + (2 * link.message_seconds(num_bytes) if num_bytes else 0)


RIGHT_STEPS = [
    step(),
    step_as_a_timetable,
    step_by_the_formula,
    step_in_numpy,
    step_as_a_tensor,
    step_by_recursion,
    step_by_the_planner,
]
WRONG_STEPS = [
    (step(stages=max), "step.slowest_stage"),
    (step(stages=max, hop=lambda link, n: 0.0), "step.slowest_stage_alone"),
    (step(stages=lambda found: sum(found) / len(found)), "step.shared_out"),
    (step(hop=lambda link, n: 0.0), "step.no_hops"),
    (step(hop=lambda link, n: link.message_seconds(n)), "step.one_way"),
    (step(hop=lambda link, n: link.message_seconds(2 * n)), "step.one_message"),
    (all_cuts_in_one, "step.all_cuts_in_one"),
    (step(hop=lambda link, n: 2 * n * link.beta_s_per_byte), "step.no_latency"),
    (step(hops=max), "step.longest_hop"),
    (step(behind=0), "step.output_behind"),
    (step(compute=lambda layer: layer.forward_s), "step.forward_alone"),
    (step(stages=lambda found: 0.0), "step.hops_alone"),
    (step(scale=1e3), "step.differs"),
    (lambda profile, split_points, link: None, "answer.nothing"),
    (lambda profile, split_points, link: [1.0, 2.0], "answer.wrong"),
    (lambda profile, split_points, link: profile.seconds, "answer.raised"),
]


ANSWERS = [
    Answers(check.placement.bytes_over_cuts, RIGHT_BYTES, WRONG_BYTES),
    Answers(check.placement.step_seconds, RIGHT_STEPS, WRONG_STEPS),
    Answers(
        check.placement.best_cuts,
        [
            best_cuts,
            best_by_predict_split,
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
