"""Predicted steps against sums by hand; the planner against all splits there are."""

import itertools
import random

import pytest

from labkit.costs import best_split, predict_split
from labkit.costs.link import Link
from labkit.costs.planner import LayerCost, Profile

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


def test_micro_batches_pay_alpha_each_and_share_the_bytes():
    model = predict_split(HAND, [3], LINK, micro_batches=4)
    assert (model.hop_s, model.hop_bytes) == ((4 * 0.125 + 160 * 2**-7,), (160,))
    # All of a micro-batch once, and three times the longer forward and the longer backward.
    once = 13.0 / 4 + 2 * (0.125 + 40 * 2**-7)
    assert model.step_s == once + 3 * (3.5 + 7.5) / 4
    # A batch of 8 samples makes 8 micro-batches at most.
    assert predict_split(HAND, [3], LINK, micro_batches=20).micro_batches == 8


def test_memory_counts_the_micro_batches_in_flight():
    layer = LayerCost("layer", 1.0, 2.0, 0, 4, 64)
    profile, link, points = Profile("equal", 32, 0, (layer,) * 4), Link(0, 0), [1, 2, 3]
    gpipe = predict_split(profile, points, link, micro_batches=8)
    assert gpipe.memory_bytes == (3 * 4 + 64,) * 4
    eager = predict_split(profile, points, link, micro_batches=8, schedule="1f1b")
    assert eager.memory_bytes == (12 + 32, 12 + 24, 12 + 16, 12 + 8)


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


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_the_planner_finds_what_a_look_at_all_splits_finds(num_stages):
    draw = random.Random(num_stages)
    refused = 0
    for case in range(24):
        profile = random_profile(draw, draw.randrange(num_stages, 10))
        link = Link(draw.choice([0, 1 / 64]), draw.choice([0, 2**-14, 2**-10]))
        options = {
            "micro_batches": (1, 1, 2, 8)[case % 4],
            "schedule": ("gpipe", "1f1b")[case // 4 % 2],
        }
        cap_bytes = draw.choice([10**9, 4000, 8000, 12000, 16000])
        models = [
            predict_split(profile, points, link, **options)
            for points in itertools.combinations(range(1, len(profile.layers)), num_stages - 1)
        ]
        fit = [m.step_s for m in models if max(m.memory_bytes) <= cap_bytes]
        least_bytes = min(max(model.memory_bytes) for model in models)
        options["memory_cap_bytes"] = cap_bytes
        if not fit:
            refused += 1
            with pytest.raises(ValueError, match=f"{cap_bytes:,} bytes: .* {least_bytes:,}$"):
                best_split(profile, num_stages, link, **options)
        else:
            best = best_split(profile, num_stages, link, **options)
            assert best.step_s == pytest.approx(min(fit))
            assert max(best.memory_bytes) <= cap_bytes
    assert 0 < refused < 24
