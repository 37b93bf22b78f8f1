"""Training on GPUs: every technique, ours and PyTorch's, equals one device."""

import itertools

import needs
import pytest
import torch
from torch import nn

from labkit import WorkerError, run, train_with
from labkit.schedules.ring import chunk_bounds
from labkit.strategies import STRATEGIES
from labkit.strategies.ring_attention import ring_attention

# A batch that does not divide, and a last batch that is smaller.
DATA = {"model": "small_cnn", "batch_size": 35, "train_size": 177}
# A GPU sums in another order for other batch sizes.
FURTHEST = {"float64": 1e-10, "float32": 1e-4}
IN_ONE_PROCESS, OWN_PACE = {"single", "data_parallel"}, {"async_parameter_server"}
STAGED = {"model_parallel": {}, "pipeline": {"micro_batches": 4, "schedule": "1f1b"}}
CUT = {"sharded": {}, "tensor_parallel": {}}
# What cuts layers cuts those of a transformer.
OF_TEXT = {"model": "gpt", "dataset": "text", "train_size": 77}
OWN_WORK = {"tensor_parallel": OF_TEXT}
SYNCHRONOUS = [s for s in STRATEGIES if s not in IN_ONE_PROCESS | OWN_PACE | {"mesh"}]


def alone(dtype="float64", **settings):
    return train_with("single", device="cuda", dtype=dtype, **{**DATA, **settings})


def cases(world_size):
    """(strategy, builtin, devices) for everything that can run."""
    for strategy, builtin in itertools.product(SYNCHRONOUS, (False, True)):
        shared, own = needs.placed(world_size)
        # PyTorch's pipelines send from GPU to GPU, and gloo sends host memory only; nor does it
        # take the collectives of DTensor.
        for devices in (own,) if builtin and strategy in STAGED | CUT else (shared, own):
            name = f"{'torch ' * builtin}{strategy}, {devices.id}"
            yield pytest.param(strategy, builtin, *devices.values, id=name, marks=devices.marks)


@pytest.mark.parametrize(("strategy", "builtin", "devices"), [*cases(2), *cases(3)])
def test_every_technique_equals_one_device(strategy, builtin, devices):
    settings = {"world_size": len(devices.split(",")), "builtin": builtin}
    # Named devices would mean stages in one process.
    settings |= {"device": "cuda"} if strategy == "model_parallel" else {"devices": devices}
    work = DATA | OWN_WORK.get(strategy, {})
    for dtype, furthest in FURTHEST.items():
        result = train_with(strategy, dtype=dtype, **settings, **work, **STAGED.get(strategy, {}))
        assert result.difference_from(alone(dtype, **work)) < furthest
        assert result.replicas_agree in (True, None)


@pytest.mark.parametrize("devices", needs.placed(4))
@pytest.mark.parametrize("sides", [{"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}, {"dp": 2, "pp": 2}])
def test_a_mesh_equals_one_device(sides, devices):
    settings = DATA | OF_TEXT | {"dtype": "float64"}
    result = train_with("mesh", devices=devices, **sides, **settings)
    assert result.difference_from(alone(**settings)) < 1e-10
    assert result.replicas_agree


@needs.real
@pytest.mark.parametrize("devices", needs.placed(4)[1:])
def test_a_mesh_of_pytorch_equals_one_device(devices):
    settings = DATA | OF_TEXT | {"dtype": "float64"}
    result = train_with("mesh", devices=devices, dp=2, tp=2, builtin=True, **settings)
    assert result.difference_from(alone(**settings)) < 1e-10


def attended(comm, length):
    """The output of ring attention and the gradients of its inputs, for this rank's positions."""
    torch.manual_seed(0)
    whole = torch.randn(4, 2, 3, length, 8, dtype=torch.float64)
    part = slice(*chunk_bounds(length, comm.world_size)[comm.rank])
    *inputs, gradient = (each[..., part, :].to(comm.device) for each in whole)
    inputs = [each.requires_grad_() for each in inputs]
    output = ring_attention(comm, *inputs, length=length)
    found = output.detach(), *torch.autograd.grad(output, inputs, gradient)
    return [each.cpu() for each in found]


@pytest.mark.parametrize("devices", [*needs.placed(2), *needs.placed(3)])
def test_ring_attention_equals_that_of_one_rank(devices):
    parts = run(attended, 70, world_size=len(devices.split(",")), devices=devices).values
    (due,) = run(attended, 70, world_size=1, device="cuda").values
    for found, one in zip(zip(*parts), due):
        torch.testing.assert_close(torch.cat(found, dim=2), one, rtol=0, atol=1e-10)


def normed():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 36, 10)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("strategy", ["ddp", "parameter_server"])
@pytest.mark.parametrize("devices", [*needs.placed(2), *needs.placed(3)])
def test_batch_norm_over_the_global_batch_equals_one_device(strategy, devices):
    settings = {"world_size": len(devices.split(",")), "devices": devices, "model": normed()}
    settings |= {"accumulate": 2, "dtype": "float64", "sync_batch_norm": True}
    synced = train_with(strategy, **DATA | settings)
    assert synced.difference_from(alone(model=normed(), accumulate=2)) < 1e-10
    assert synced.replicas_agree


@pytest.mark.parametrize("builtin", [False, True])
@pytest.mark.parametrize("devices", [*needs.placed(2), *needs.placed(3)])
def test_the_asynchronous_server_learns_with_bounded_staleness(devices, builtin):
    settings = {"world_size": len(devices.split(",")), "devices": devices, "epochs": 3}
    settings |= {"batch_size": 64, "max_staleness": 2, "builtin": builtin}
    result = train_with("async_parameter_server", **settings)
    assert result.epochs[-1]["loss"] < result.epochs[0]["loss"]
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


@pytest.mark.parametrize(
    "devices",
    [
        pytest.param("cuda:0,cpu", marks=needs.gpus(1)),
        pytest.param("cpu,cuda:0", marks=needs.gpus(1)),
        pytest.param("cuda:1,cuda:0", marks=needs.gpus(2)),
    ],
)
def test_a_model_in_one_process_equals_one_device_and_its_hops_are_timed(devices):
    settings = DATA | {"dtype": "float64", "split_points": "3"}
    placed = train_with("model_parallel", devices=devices, **settings)
    assert placed.difference_from(alone()) < 1e-10
    for kind in ("hop", "hop back"):
        hops = placed.trace.of(0, kind)
        assert hops
        assert all(0 < hop.duration_s < 1 for hop in hops)


@pytest.mark.parametrize("strategy", CUT)
@pytest.mark.parametrize("devices", [needs.placed(2)[0]])
def test_where_dtensor_would_crash_there_is_an_error(strategy, devices):
    with pytest.raises(WorkerError, match="NCCL"):
        train_with(strategy, builtin=True, devices=devices, **DATA | OF_TEXT)
