"""The check of the best cuts: it accepts what is as quick as the planner, and names mistakes."""

from itertools import combinations, pairwise

import pytest

from labkit import check
from labkit.check import placement as planned
from labkit.placement.planner import best_split


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


def told(verdict, capsys):
    capsys.readouterr()
    assert not verdict
    (note,) = verdict.notes
    return note


def with_memory(needs):
    return lambda *args: best_cuts(*args, needs=needs)


def with_cost(cost):
    """Keeps the cap, and makes ``cost(profile, points, link)`` small."""

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
    (with_all_devices(most_layers), "equally many layers"),
    (with_all_devices(longest_stage_s), "stages are made equally long"),
    (lambda *args: best_cuts(*args[:3], float("inf")), "the cap is forgotten"),
    (lambda *args: best_cuts(*args[:3], args[3] - 1), "may need all that the cap allows"),
    (
        with_cost(lambda f, p, link: sum(link.message_seconds(sent(f, k + 1)) for k in p)),
        "the output of layer k - 1, not that of layer k",
    ),
    (with_all_devices(step_s), "not all devices have to be used"),
    (fewest_cuts, "the fewest cuts are not always best"),
    (with_cost(lambda f, p, link: sum(sent(f, k) for k in p)), "bytes alone are counted"),
    (
        with_cost(lambda f, p, link: max((sent(f, k) for k in p), default=0)),
        "the dearest hop alone",
    ),
    (with_memory(lambda layers: memory(layers, times=1)), "its value, its gradient"),
    (with_memory(lambda layers: memory(layers, held=False)), "activations until backward"),
    (lambda *args: (0,), "split point 0 leaves a stage without layers"),
    (lambda *args: (3, 2), "out of order"),
    (lambda *args: (1, 2, 3), "there are 2 devices"),
    (lambda *args: (3,), "stage 1 needs"),
    (lambda *args: (8,), "stage 0 needs 1.18 MiB"),
    (lambda *args: 4, "it returns 4, where split points are due"),
    (lambda *args: None, "it returns None"),
    (lambda *args: {}["cut"], "raised KeyError"),
    (lambda profile: (4,), "raised TypeError"),
]


def test_the_best_cuts_pass(capsys):
    assert check.placement.best_cuts(best_cuts)
    assert check.placement.best_cuts(lambda *args: list(best_cuts(*args)))


@pytest.mark.parametrize(("wrong", "sentence"), WRONG)
def test_wrong_cuts_are_named(wrong, sentence, capsys):
    note = told(check.placement.best_cuts(wrong), capsys)
    assert sentence in note


def test_a_stub_is_not_attempted(capsys):
    def best_cuts(profile, max_stages, link, cap_bytes):
        raise NotImplementedError

    assert check.placement.best_cuts(best_cuts).status == "not attempted yet"
    assert "a function is needed, got tuple" in told(check.placement.best_cuts((4,)), capsys)


def test_the_planner_itself_passes(capsys):
    def planner(profile, max_stages, link, cap_bytes):
        found = []
        for stages in range(1, max_stages + 1):
            try:
                found.append(best_split(profile, stages, link, memory_cap_bytes=cap_bytes))
            except ValueError:
                continue
        return min(found, key=lambda split: split.step_s).split_points

    assert check.placement.best_cuts(planner)


def test_no_two_mistakes_look_alike():
    right = [planned._search(case) for case in planned._CASES]
    found = {}
    for sentence, rules in planned._MISTAKES.items():
        for rule in rules:
            splits = tuple(planned._search(case, **rule) for case in planned._CASES)
            assert list(splits) != right
            assert found.setdefault(splits, sentence) == sentence
