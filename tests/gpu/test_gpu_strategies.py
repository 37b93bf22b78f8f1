"""Training on GPUs: every technique, ours and PyTorch's, equals one device."""

import itertools

import needs
import pytest
import torch
from ranks import travel_by_value
from torch import nn

from labkit import train_with
from labkit.strategies import STRATEGIES

travel_by_value(__name__)

# A batch that does not divide, and a last batch that is smaller.
DATA = {"model": "small_cnn", "batch_size": 35, "train_size": 177}
# A GPU sums in another order for other batch sizes.
FURTHEST = {"float64": 1e-10, "float32": 1e-4}
IN_ONE_PROCESS, OWN_PACE = {"single", "data_parallel"}, {"async_parameter_server"}
STAGED = {"model_parallel": {}, "pipeline": {"micro_batches": 4}}
SYNCHRONOUS = [s for s in STRATEGIES if s not in IN_ONE_PROCESS | OWN_PACE]


def alone(dtype="float64", **settings):
    return train_with("single", device="cuda", dtype=dtype, **{**DATA, **settings})


def cases(world_size):
    """(strategy, builtin, devices) for everything that can run."""
    for strategy, builtin in itertools.product(SYNCHRONOUS, (False, True)):
        shared, own = needs.placed(world_size)
        # PyTorch's pipelines send from GPU to GPU, and gloo sends host memory only.
        for devices in (own,) if builtin and strategy in STAGED else (shared, own):
            name = f"{'torch ' * builtin}{strategy}, {devices.id}"
            yield pytest.param(strategy, builtin, *devices.values, id=name, marks=devices.marks)


@pytest.mark.parametrize(("strategy", "builtin", "devices"), [*cases(2), *cases(3)])
def test_every_technique_equals_one_device(strategy, builtin, devices):
    world_size = len(devices.split(","))
    options, where = STAGED.get(strategy, {}), {"devices": devices}
    if strategy == "model_parallel":
        # Named devices would mean stages in one process.
        where = {"device": "cuda"}
    for dtype, furthest in FURTHEST.items():
        result = train_with(
            strategy,
            world_size=world_size,
            builtin=builtin,
            dtype=dtype,
            **where,
            **DATA,
            **options,
        )
        assert result.difference_from(alone(dtype)) < furthest
        assert result.replicas_agree in (True, None)


def normed():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 36, 10)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("strategy", ["ddp", "ring_all_reduce", "parameter_server"])
@pytest.mark.parametrize("devices", [*needs.placed(2), *needs.placed(3)])
def test_batch_norm_over_the_global_batch_equals_one_device(strategy, devices):
    settings = {"world_size": len(devices.split(",")), "devices": devices, "model": normed()}
    for options in ({}, {"accumulate": 2}):
        synced = train_with(
            strategy, dtype="float64", sync_batch_norm=True, **DATA | settings | options
        )
        assert synced.difference_from(alone(model=normed(), **options)) < 1e-10
        assert synced.replicas_agree


@pytest.mark.parametrize("world_size", [2, 3])
@needs.real
def test_pytorchs_sync_batch_norm_equals_one_gpu(world_size):
    if world_size > needs.GPUS:
        pytest.skip(f"needs {world_size} GPUs, this machine has {needs.GPUS}")
    settings = {"world_size": world_size, "device": "cuda", "dtype": "float64", "builtin": True}
    synced = train_with("ddp", sync_batch_norm=True, **DATA | settings | {"model": normed()})
    assert synced.notes == {"sync_batch_norm": {"by": "torch", "layers": 1}}
    assert synced.difference_from(alone(model=normed())) < 1e-10


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@needs.gpus(1)
def test_both_schedules_on_a_shared_gpu(schedule):
    # Never more stages than the model has layers.
    world_size = min(needs.GPUS + 1, 4)
    options = {"schedule": schedule, "micro_batches": world_size}
    split = train_with(
        "pipeline", world_size=world_size, device="cuda", dtype="float64", **DATA, **options
    )
    assert split.difference_from(alone()) < 1e-10


@pytest.mark.parametrize("builtin", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@needs.gpus(2)
def test_both_schedules_over_nccl(schedule, builtin):
    world_size = min(needs.GPUS, 4)
    options = {"schedule": schedule, "micro_batches": 2 * world_size, "builtin": builtin}
    split = train_with(
        "pipeline", world_size=world_size, device="cuda", dtype="float64", **DATA, **options
    )
    assert split.difference_from(alone()) < 1e-10


@pytest.mark.parametrize("builtin", [False, True])
@pytest.mark.parametrize("devices", [*needs.placed(2), *needs.placed(3)])
def test_the_asynchronous_server_learns_with_bounded_staleness(devices, builtin):
    world_size = len(devices.split(","))
    settings = {"world_size": world_size, "devices": devices, "epochs": 3, "batch_size": 64}
    if not builtin:
        settings["max_staleness"] = 2
    result = train_with("async_parameter_server", builtin=builtin, **settings)
    assert result.epochs[-1]["loss"] < result.epochs[0]["loss"]
    if not builtin:
        assert max(staleness for _, staleness in result.notes["staleness"]) <= 2


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
@pytest.mark.parametrize("devices", needs.placed(2))
def test_mixed_precision_learns_and_replicas_agree(devices, amp):
    settings = {"world_size": 2, "devices": devices, "amp": amp, "epochs": 2}
    for builtin in (False, True):
        result = train_with("ddp", builtin=builtin, **settings, batch_size=64, train_size=640)
        assert result.replicas_agree
        assert result.epochs[-1]["loss"] < result.epochs[0]["loss"]


@needs.gpus(1)
def test_replicas_in_threads_end_where_one_gpu_ends():
    gpus = [f"cuda:{index}" for index in range(needs.GPUS)]
    # A GPU may hold two replicas of ours, and one of PyTorch's.
    settings = {**DATA, "dtype": "float64"}
    ours = train_with("data_parallel", devices=",".join([*gpus, gpus[0]]), **settings)
    torchs = train_with("data_parallel", builtin=True, devices=",".join(gpus), **settings)
    assert ours.difference_from(alone()) < 1e-10
    assert torchs.difference_from(alone()) < 1e-10
    assert torchs.notes["replicas"] == len(gpus)


def hops_of(devices, points, **settings):
    placed = train_with("model_parallel", devices=devices, split_points=points, **settings)
    return placed, {(hop["cut"], hop["direction"]): hop for hop in placed.notes["hops"]}


@pytest.mark.parametrize("devices", ["cuda:0,cpu", "cpu,cuda:0"])
@needs.gpus(1)
def test_a_model_between_card_and_host_equals_one_device_and_its_hops_are_timed(devices):
    settings = {"model": "small_cnn", "batch_size": 64, "train_size": 256}
    placed, hops = hops_of(devices, "3", **settings)
    single = train_with("single", device="cpu", **settings)
    assert placed.difference_from(single) < 1e-4
    assert hops.keys() == {(0, "forward"), (0, "backward")}
    for hop in hops.values():
        assert hop["num_bytes"] == 64 * 32 * 16 * 4
        assert 0 < hop["median_s"] < 1


@needs.gpus(2)
def test_a_model_between_two_gpus_equals_one_device_and_its_hops_are_timed():
    settings = {"model": "small_cnn", "batch_size": 64, "train_size": 256, "dtype": "float64"}
    placed, hops = hops_of("cuda:1,cuda:0", "3", **settings)
    single = train_with("single", device="cuda", **settings)
    assert placed.difference_from(single) < 1e-10
    assert all(hop["num_bytes"] == 64 * 32 * 16 * 8 for hop in hops.values())
    assert all(0 < hop["median_s"] < 1 for hop in hops.values())
