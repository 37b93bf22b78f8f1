"""Predicted steps against sums by hand; the planner against all splits there are."""

import itertools
import random
from dataclasses import replace

import pytest

from labkit.costs.link import Link
from labkit.costs.pipeline_timeline import bubble
from labkit.placement.planner import best_split, predict_split
from labkit.placement.stage_costs import LayerCost, Profile
from labkit.placement.vgg16_splits import VGG16_SPLITS
from labkit.schedules.split_points import check_split_points, stage_bounds
from labkit.workload.models import VGG16_CHANNELS

# Seconds and bytes of a batch of 8; exact in binary, so that sums are equal, not about equal.
#                 forward backward output parameters held
HAND = Profile(
    "hand",
    8,
    64,
    (
        LayerCost("conv", 2.0, 4.0, 800, 100, 80),
        LayerCost("relu", 0.5, 0.5, 800, 0, 160),
        LayerCost("conv", 1.0, 3.0, 160, 200, 240),
        LayerCost("pool", 0.25, 0.25, 40, 0, 16),
        LayerCost("linear", 0.5, 1.0, 8, 40, 8),
    ),
)
LINK = Link(0.125, 2**-7)


def test_one_micro_batch_is_the_sum_of_everything():
    model = predict_split(HAND, [2, 3], LINK)
    assert (model.forward_s, model.backward_s) == ((2.5, 1.0, 0.75), (4.5, 3.0, 1.25))
    assert model.hop_bytes == (800, 160)
    assert model.hop_s == model.backward_hop_s == (0.125 + 6.25, 0.125 + 1.25)
    assert model.step_s == 13.0 + 2 * (6.375 + 1.375)
    assert model.bubble == 1 - 13.0 / (3 * model.step_s)
    # Value, gradient and momentum of each parameter, and what the layers hold.
    assert model.memory_bytes == (3 * 100 + 240, 3 * 200 + 240, 3 * 40 + 24)
    assert predict_split(HAND, [2, 3], LINK, schedule="1f1b") == replace(model, schedule="1f1b")


def test_one_stage_has_no_hops_and_no_bubble():
    model = predict_split(HAND, (), LINK, micro_batches=4)
    assert (model.hop_s, model.step_s, model.bubble) == ((), 13.0, 0.0)


def test_frozen_layers_have_no_backward_and_send_no_gradient_back():
    model = predict_split(HAND, [2, 3], LINK, frozen=2)
    assert model.backward_s == (0.0, 3.0, 1.25)
    assert model.backward_hop_s == (0.0, 1.375)
    assert model.step_s == 4.25 + 4.25 + 6.375 + 2 * 1.375
    assert model.memory_bytes == (100, 3 * 200 + 240, 3 * 40 + 24)
    # Layer 3 has nothing to train, so with three frozen only the linear layer has a backward.
    head = predict_split(HAND, [1, 3], LINK, frozen=3)
    assert (head.backward_s, head.first_trained) == ((0.0, 0.0, 1.0), 2)
    assert head.backward_hop_s == (0.0, 0.0)
    assert head.memory_bytes == (100, 200, 3 * 40 + 8)
    none = predict_split(HAND, [1, 3], LINK, frozen=5)
    assert (none.first_trained, sum(none.backward_s)) == (3, 0.0)
    assert none.step_s == 4.25 + sum(none.hop_s)
    # A cut inside the frozen part, and one after the first trained layer.
    assert predict_split(HAND, [1, 4], LINK, frozen=1).first_trained == 1


def equal_layers(count, output_bytes=0):
    layer = LayerCost("layer", 1.0, 2.0, output_bytes, 4, 64)
    return Profile("equal", 32, 0, (layer,) * count)


def test_micro_batches_pay_alpha_each_and_share_the_bytes():
    model = predict_split(HAND, [3], LINK, micro_batches=4)
    assert model.hop_s == (4 * 0.125 + 160 * 2**-7,)
    assert model.hop_bytes == (160,)
    # All of a micro-batch once, and three times the longer forward and the longer backward.
    once = 13.0 / 4 + 2 * (0.125 + 40 * 2**-7)
    assert model.step_s == once + 3 * (3.5 + 7.5) / 4
    # A batch of 8 samples makes 8 micro-batches at most.
    many = predict_split(HAND, [3], LINK, micro_batches=20)
    assert many == predict_split(HAND, [3], LINK, micro_batches=8)
    assert many.micro_batches == 8


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_slots_are_the_step_that_was_predicted(schedule):
    for frozen, micro_batches in itertools.product((0, 1, 3, 5), (1, 3, 8)):
        options = {"micro_batches": micro_batches, "schedule": schedule, "frozen": frozen}
        model = predict_split(HAND, [1, 2, 4], LINK, **options)
        slots = model.slots()
        assert max(slot.end_s for slot in slots) == model.step_s
        assert bubble(slots) == pytest.approx(model.bubble)
        backward = {slot.stage for slot in slots if slot.kind == "backward"}
        assert backward == set(range(model.first_trained, 4))


def test_memory_counts_the_micro_batches_in_flight():
    profile, link, points = equal_layers(4), Link(0, 0), [1, 2, 3]
    whole = 3 * 4 + 64
    gpipe = predict_split(profile, points, link, micro_batches=8)
    assert gpipe.memory_bytes == (whole,) * 4
    eager = predict_split(profile, points, link, micro_batches=8, schedule="1f1b")
    assert eager.memory_bytes == (12 + 32, 12 + 24, 12 + 16, 12 + 8)
    few = predict_split(profile, points, link, micro_batches=2, schedule="1f1b")
    assert few.memory_bytes == (whole, whole, whole, 12 + 32)


def random_profile(draw, num_layers):
    """Multiples of 1/64 s, so that sums do not depend on their order; many are equal."""
    layers = [
        LayerCost(
            str(index),
            draw.randrange(1, 5) / 64,
            draw.randrange(8) / 64,
            draw.choice([64, 128, 1024, 4096]),
            draw.choice([0, 0, 256, 2048]),
            draw.choice([0, 512, 4096]),
        )
        for index in range(num_layers)
    ]
    return Profile("random", 32, 64, tuple(layers))


def brute_force(profile, num_stages, link, objective, cap_bytes, **options):
    """(value, split points) of the best one within the cap, and the smallest possible cap."""
    models = [
        predict_split(profile, points, link, **options)
        for points in itertools.combinations(range(1, len(profile.layers)), num_stages - 1)
    ]
    fit = [model for model in models if max(model.memory_bytes) <= cap_bytes]
    least_bytes = min(max(model.memory_bytes) for model in models)
    return min(fit, key=lambda m: (value(m, objective), m.split_points), default=None), least_bytes


def value(model, objective):
    if objective == "step":
        return model.step_s
    return max(map(sum, zip(model.forward_s, model.backward_s)))


@pytest.mark.parametrize("objective", ["step", "largest_stage"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_the_planner_finds_what_a_look_at_all_splits_finds(num_stages, objective):
    draw = random.Random(num_stages)
    refused = 0
    for case in range(24):
        profile = random_profile(draw, draw.randrange(num_stages, 10))
        link = Link(draw.choice([0, 1 / 64]), draw.choice([0, 2**-14, 2**-10]))
        options = {
            "micro_batches": (1, 1, 2, 8)[case % 4],
            "schedule": ("gpipe", "1f1b")[case // 4 % 2],
            "frozen": draw.choice([0, 0, 1, len(profile.layers)]),
        }
        cap_bytes = draw.choice([10**9, 4000, 8000, 12000, 16000])
        asked = (profile, num_stages, link)
        best, least_bytes = brute_force(*asked, objective, cap_bytes, **options)
        options |= {"objective": objective, "memory_cap_bytes": cap_bytes}
        if best is None:
            refused += 1
            with pytest.raises(ValueError, match=f"{cap_bytes:,} bytes .* {least_bytes:,} "):
                best_split(*asked, **options)
        else:
            assert best_split(*asked, **options) == best
    assert 0 < refused < 24


def test_the_planner_on_a_model_as_long_as_vgg16():
    """Against all 496 splits into three stages, with costs that are not round numbers."""
    draw = random.Random(3)
    layers = [
        LayerCost("", draw.random(), draw.random(), draw.randrange(10**6), 4, 4) for _ in range(33)
    ]
    profile, link = Profile("long", 32, 0, tuple(layers)), Link(1e-2, 1e-7)
    for schedule in ("gpipe", "1f1b"):
        options = {"micro_batches": 4, "schedule": schedule}
        best, _ = brute_force(profile, 3, link, "step", 10**9, **options)
        found = best_split(profile, 3, link, **options)
        assert (found.step_s, found.split_points) == (best.step_s, best.split_points)


def test_rounding_hides_no_split_that_is_as_good():
    """Seconds that are not exact in binary: a lower bound may come out above the step itself."""
    tenths = [(2, 1), (7, 2), (1, 1), (1, 1), (1, 2), (7, 1), (7, 3)]
    layers = [LayerCost("", f / 10, b / 10, 1, 4, 4) for f, b in tenths]
    profile, free = Profile("tenths", 8, 1, tuple(layers)), Link(0, 0)
    options = {"micro_batches": 2, "schedule": "1f1b"}
    best, _ = brute_force(profile, 4, free, "step", 10**9, **options)
    assert best_split(profile, 4, free, **options) == best


def test_where_every_cut_is_as_good_the_earliest_is_taken():
    free = Link(0, 0)
    assert best_split(equal_layers(6), 3, free).split_points == (1, 2)
    # Five layers on two stages: three of them on one of the two.
    two = best_split(equal_layers(5), 2, free, objective="largest_stage")
    assert two.split_points == (2,)
    assert best_split(equal_layers(5), 2, free, micro_batches=4).split_points == (2,)


def test_a_cut_right_before_the_first_trained_layer_counts_once():
    layers = [LayerCost("layer", 1.0, 2.0, size, 4, 64) for size in (900, 500, 100, 60, 8)]
    profile, link = Profile("narrow", 8, 900, tuple(layers)), Link(0, 1)
    assert best_split(profile, 2, link, frozen=3).step_s == 5 + 4 + 100
    assert best_split(profile, 2, link, frozen=2).step_s == 5 + 6 + 2 * 60


def test_a_cap_names_the_smallest_one_that_works():
    assert best_split(HAND, 2, LINK).split_points == (4,)
    assert best_split(HAND, 2, LINK, memory_cap_bytes=1380).split_points == (3,)
    # Cuts 1 and 2 send the same; the first one needs 1144 bytes.
    assert best_split(HAND, 2, LINK, memory_cap_bytes=1144).split_points == (1,)
    assert best_split(HAND, 2, LINK, memory_cap_bytes=984).memory_bytes == (540, 984)
    with pytest.raises(ValueError, match=r"into 2 stages .* 983 bytes .* 984 \(984 B\)\."):
        best_split(HAND, 2, LINK, memory_cap_bytes=983)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_stages": 6}, "num_stages .* from 1 to 5, the number of layers of hand; got 6"),
        ({"micro_batches": 0}, "micro_batches must be .* from 1 up, got 0"),
        ({"frozen": 6}, "frozen .* from 0 to 5, the number of layers of hand; got 6"),
        ({"schedule": "zb"}, "unknown schedule 'zb': choose one of gpipe, 1f1b"),
        ({"objective": "bytes"}, "unknown objective 'bytes': choose one of step, largest_stage"),
    ],
)
def test_what_cannot_be_planned_is_named(options, words):
    with pytest.raises(ValueError, match=words):
        best_split(HAND, options.pop("num_stages", 2), LINK, **options)
    if "objective" not in options and options:
        with pytest.raises(ValueError, match=words):
            predict_split(HAND, [2], LINK, **options)


def vgg16_profile():
    """Multiplications of a 32x32 sample for seconds, by layer, from the published table."""
    layers, channels, side = [], 3, 32
    for entry in VGG16_CHANNELS:
        if entry == "pool":
            side //= 2
            layers.append(LayerCost("pool", 0.0, 0.0, channels * side**2, 0, 0))
            continue
        seconds = float(9 * channels * entry * side**2)
        channels = entry
        layers.append(LayerCost("conv", seconds, 0.0, channels * side**2, 4, 0))
        layers.append(LayerCost("relu", 0.0, 0.0, channels * side**2, 0, 0))
    for name in ("average", "flatten", "linear"):
        layers.append(LayerCost(name, 0.0, 0.0, 512 if name != "linear" else 10, 0, 0))
    return Profile("vgg16", 1, 3 * 32 * 32, tuple(layers))


def test_the_named_splits_fit_vgg16():
    profile = vgg16_profile()
    assert len(profile.layers) == 34
    for name, points in VGG16_SPLITS.items():
        assert len(check_split_points(points, 34)) == int(name[0]) - 1, name
        for cut in points if "pool" in name else ():
            assert profile.layers[cut - 1].name == "pool", name
    assert stage_bounds(VGG16_SPLITS["4 devices"], 34)[1:3] == [(15, 31), (31, 33)]


def test_the_even_split_has_the_smallest_largest_stage():
    profile, link = vgg16_profile(), Link(0, 1)
    even = predict_split(profile, VGG16_SPLITS["4 devices, even compute"], link)
    best = best_split(profile, 4, link, objective="largest_stage")
    assert max(even.forward_s) == max(best.forward_s)
    pools = predict_split(profile, VGG16_SPLITS["4 devices, after pools 2, 3 and 4"], link)
    assert max(even.forward_s) < max(pools.forward_s) < 1.02 * max(even.forward_s)
    assert sum(pools.hop_bytes) < sum(even.hop_bytes) / 2
