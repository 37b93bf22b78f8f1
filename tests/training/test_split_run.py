"""Split models measured on real processes: what is counted is exact, what is timed is there."""

from pathlib import Path

import pytest
import torch
from torch import nn

from labkit.training.measured import measure_profile, measure_split

SMALL = {"batch_size": 6, "input_shape": (1, 8, 8), "steps": 2}


def test_bytes_and_hops_of_a_pipeline():
    found = measure_split("small_cnn", (3, 5), micro_batches=4, schedule="1f1b", **SMALL)
    # What layers 2 and 4 hand on: 32 and 64 channels of 4x4 pixels.
    assert found.hop_bytes == [6 * 32 * 16 * 4, 6 * 64 * 16 * 4]
    assert [len(hops) for hops in found.forward_hop_s + found.backward_hop_s] == [2] * 4
    assert all(s > 0 for hops in found.forward_hop_s + found.backward_hop_s for s in hops)
    assert len(found.step_s) == 2
    for stage in range(3):
        forwards = found.trace.of(stage, "forward")
        assert len(forwards) == len(found.trace.of(stage, "backward")) == 2 * 4
        assert sum(span.duration_s for span in forwards) <= sum(found.step_s)
    # One step alone, without the marks between steps.
    step = found.typical_step()
    assert {*step.kinds} == {"forward", "backward", "communicate", "wait", "update"}
    assert len(step.of(kind="update")) == 3
    busy_s = [a + b for a, b in zip(found.forward_s, found.backward_s)]
    assert max(busy_s) < max(found.step_s)


def test_a_frozen_backbone_sends_nothing_back():
    found = measure_split("small_cnn", (3, 5), frozen=3, micro_batches=9, **SMALL)
    assert found.micro_batches == 6  # there are no more samples
    assert found.backward_hop_s[0] == []
    assert len(found.backward_hop_s[1]) == 2
    assert found.backward_s[0] == 0 < found.backward_s[1]
    # Parameters of layers 0 to 2, once; of layers 3 and 4 with gradient and momentum.
    assert found.memory_bytes[0] == (9 * 32 + 32) * 4
    assert found.memory_bytes[1] == 3 * (32 * 64 * 9 + 64) * 4 + found.held_bytes[1]


def test_a_profile_of_this_machine():
    profile = measure_profile("mlp", batch_size=4, input_shape=(1, 8, 8), repeats=1)
    floats = [64, 64, 64, 64, 64, 10]
    assert [layer.output_bytes for layer in profile.layers] == [4 * 4 * n for n in floats]


OWN = {
    "nested": (nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(64, 8), nn.ReLU())), (1, 8, 8)),
    "tokens": (nn.Sequential(nn.Embedding(5, 6), nn.Flatten(), nn.Linear(18, 3)), (3,)),
    "a class per pixel": (nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 2, 3)), (1, 8, 8)),
    "float64": (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double(), (4,)),
}


@pytest.mark.parametrize("name", OWN)
def test_ones_own_chain_of_layers_is_run_and_not_changed(name):
    model, input_shape = OWN[name]
    before = [parameter.clone() for parameter in model.parameters()]
    found = measure_split(model, (1,), batch_size=4, input_shape=input_shape, steps=1)
    assert len(found.step_s) == 1
    first = model[0](torch.zeros((4, *input_shape), dtype=found_dtype(model)))
    assert found.hop_bytes == [first.nbytes]
    assert all(map(torch.equal, model.parameters(), before))
    assert all(parameter.requires_grad for parameter in model.parameters())


def found_dtype(model):
    is_tokens = isinstance(model[0], nn.Embedding)
    return torch.int64 if is_tokens else next(model.parameters()).dtype


def test_what_measures_nothing_is_refused_before_a_process_starts():
    with pytest.raises(ValueError, match="split point 6 leaves a stage without layers"):
        measure_split("mlp", (6,), **SMALL)
    with pytest.raises(ValueError, match="steps must be an integer from 1 up, got 0"):
        measure_split("mlp", (2,), steps=0)
    with pytest.raises(ValueError, match="unknown model 'vgg'"):
        measure_split("vgg", (2,))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no peak can be set back")
def test_1f1b_holds_fewer_activations_than_gpipe_also_as_the_system_counts():
    layers = [nn.Flatten(), nn.Linear(64, 2048), *[nn.Tanh() for _ in range(6)]]
    model = nn.Sequential(*layers, nn.Linear(2048, 8), nn.Linear(8, 10))
    common = {"batch_size": 1024, "input_shape": (1, 8, 8), "micro_batches": 8, "steps": 2}
    gpipe, eager = (
        measure_split(model, (9,), schedule=name, device="cpu", **common)
        for name in ("gpipe", "1f1b")
    )
    assert gpipe.held_bytes[0] >= 3 * eager.held_bytes[0]
    first, last = (
        [run.peak_memory[stage].process_bytes for run in (gpipe, eager)] for stage in (0, 1)
    )
    assert first[0] >= gpipe.held_bytes[0]
    assert first[0] > 1.2 * first[1] > 2 * max(last)
    assert gpipe.trace.devices == gpipe.typical_step().devices == {0: "cpu", 1: "cpu"}
