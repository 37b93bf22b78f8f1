"""Peak memory: what counts, what does not, and that nothing is told where nothing is known."""

import pytest
import torch

import labkit
from labkit.engine.comm.peak_memory import MemoryMeter, Part

CPU = torch.device("cpu")
MB = 10**6


on_linux = pytest.mark.skipif(
    MemoryMeter().total().process_bytes is None, reason="the system keeps no peak to set back"
)


def take(megabytes):
    """Touch so much memory, and free it."""
    torch.ones(megabytes * MB // 4)


def around(megabytes):
    return pytest.approx(megabytes * MB, abs=20 * MB)


# Training


def wide():
    """A model whose activations are large and whose parameters are not."""
    middle = [torch.nn.Tanh() for _ in range(8)]
    layers = [torch.nn.Flatten(), torch.nn.Linear(64, 2048), *middle, torch.nn.Linear(2048, 10)]
    return torch.nn.Sequential(*layers)


@on_linux
def test_four_micro_batches_per_update_hold_a_quarter_of_the_activations():
    common = {"world_size": 1, "device": "cpu", "batch_size": 1024, "train_size": 1024}
    whole, quarters = (
        labkit.train_with("ddp", model=wide, accumulate=count, **common) for count in (None, 4)
    )
    # The outputs of nine layers, [1024, 2048] each in float32.
    activations = 9 * 1024 * 2048 * 4
    peaks = [run.peak_memory[0].process_bytes for run in (whole, quarters)]
    assert peaks[0] > activations
    assert peaks[1] < 0.6 * peaks[0]
    assert whole.as_dict()["peak_memory"] == [{"process_bytes": peaks[0], "devices": {}}]


@on_linux
def test_a_model_that_is_given_as_an_object_counts_like_one_that_the_rank_makes():
    # Of blocks below 32 MB, the C library may keep some that are free.
    data = torch.zeros(4, 100_000), torch.tensor([0, 1, 0, 1])

    def large():
        return torch.nn.Linear(100_000, 100)

    common = {"device": "cpu", "dataset": data, "batch_size": 2}
    for model in (large, large(), [large()]):
        (peak,) = labkit.train_with("single", model=model, **common).peak_memory
        # Parameters, gradients and momentum.
        assert peak.process_bytes == around(3 * 40)


# The meter


def take_in_parts(comm):
    """In a process of its own: what other tests leave may be freed at any time."""
    take(200)
    meter = MemoryMeter()
    take(120)
    part = Part(meter)
    with part.counted():
        take(60)
    take(90)
    with part.counted():
        take(40)
    take(20)
    return part.peak.process_bytes, meter.total().process_bytes


@on_linux
def test_a_part_has_its_own_peak_and_the_whole_has_the_largest():
    (found,) = labkit.run(take_in_parts, world_size=1, device="cpu").values
    assert found == (around(60), around(120))
