"""Every technique's step on GPUs that do not exist: no tensor is on the wrong device.

And the host waits for no GPU where the technique does not need it (``tests/fake_gpus.py``).
PyTorch's counterparts are not here: their C++ asks the driver.
"""

import pytest
import torch
from fake_gpus import FakeComm, pretended
from torch import nn

from labkit import strategies
from labkit.workload.samples import on_device

STEPS = 3


def model():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
    )


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batches(comm):
    for _ in range(STEPS):
        inputs, targets = torch.randn(6, 1, 8, 8), torch.zeros(6, dtype=torch.int64)
        pinned = inputs.pin_memory(), targets.pin_memory()
        yield *on_device(pinned, comm.device), 6 * min(2, comm.world_size)


# technique, ranks, options
ON_RANKS = [
    ("single", 1, {"accumulate": 2, "amp": "bf16"}),
    ("ring_all_reduce", 2, {"compress": "fp16", "amp": "bf16"}),
    ("ring_all_reduce", 2, {"compress": "topk"}),
    ("ddp", 2, {"bucket_mb": 0, "accumulate": 2}),
    ("parameter_server", 3, {"servers": 2, "amp": "bf16"}),
    ("model_parallel", 2, {"split_points": (3,), "amp": "bf16", "accumulate": 2}),
    ("pipeline", 2, {"split_points": (3,), "micro_batches": 3}),
    ("pipeline", 2, {"split_points": (3,), "amp": "bf16", "schedule": "1f1b"}),
]
IN_ONE_PROCESS = [
    (technique, devices)
    for technique in ("data_parallel", "model_parallel")
    for devices in (
        ("cuda:0", "cuda:1"),
        ("cuda:1", "cuda:0"),
        ("cuda:0", "cpu"),
        ("cpu", "cuda:0"),
    )
]


def waits(gpus, strategy, comm):
    """Where the host waits for a GPU in each step after the first, of one rank."""
    strategy.setup(comm, model(), sgd)
    for number, batch in enumerate(batches(comm)):
        if number == 1:
            gpus.waits.clear()
        loss = strategy.step(*batch)
        assert loss.device == comm.device
    found = list(gpus.waits)
    strategy.end_epoch()
    logits = strategy.predict(batch[0])
    assert logits is None or logits.device == comm.device
    strategy.full_state()
    return found


@pytest.mark.parametrize(("technique", "ranks", "options"), ON_RANKS)
def test_a_step_stays_on_the_ranks_gpu_and_waits_for_nothing(
    technique, ranks, options, monkeypatch
):
    for rank in range(ranks):
        with pretended(monkeypatch) as gpus:
            comm = FakeComm(rank, ranks, f"cuda:{rank}")
            strategy = strategies.get(technique)(**options)
            strategy.clip_norm = 0.5
            assert waits(gpus, strategy, comm) == []


@pytest.mark.parametrize(("technique", "devices"), IN_ONE_PROCESS)
def test_in_one_process_each_tensor_is_where_it_has_to_be(technique, devices, monkeypatch):
    options = {"split_points": (3,)} if technique == "model_parallel" else {}
    strategy = strategies.get(technique, in_one_process=True)(devices=devices, **options)
    # Between the host and a GPU, the norms cross as well.
    strategy.clip_norm = None if "cpu" in devices else 0.5
    with pretended(monkeypatch) as gpus:
        found = waits(gpus, strategy, FakeComm(0, 1, devices[0]))
    if "cpu" not in devices:
        assert found == []
    # What crosses between host and GPU in the middle of a step has to be there.
    crossings = ("return tensor.to(", "return value.to(", "targets.to(", ".to(total.device)")
    assert all(any(word in wait for word in crossings) for wait in found), found
