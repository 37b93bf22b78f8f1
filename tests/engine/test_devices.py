"""The devices, backend and transport of ranks on each kind of machine, without such machines."""

import pytest
import torch

from labkit.engine import devices, gpus
from labkit.engine.devices import Plan, plan


@pytest.fixture
def machine(monkeypatch):
    """Plans for a machine of so many GPUs."""

    def plans(count, *arguments, **options):
        monkeypatch.setattr(devices, "num_gpus", lambda: count)
        return plan(*arguments, **options)

    return plans


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_without_a_gpu_ranks_run_on_the_cpu_over_gloo(device, machine):
    assert machine(0, 3, device) == machine(8, 3, "cpu")
    assert machine(0, 3, device, "gloo") == Plan("gloo", ("cpu",) * 3, "torch")


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_for_each_rank_means_nccl(device, machine):
    assert machine(4, 2, device) == Plan("nccl", ("cuda:0", "cuda:1"), "torch")


def test_ranks_on_the_cpu_never_ask_for_gpus(monkeypatch):
    def asked():
        raise AssertionError("GPUs were asked for")

    monkeypatch.setattr(devices, "num_gpus", asked)
    assert plan(2, "cpu") == plan(2, devices=["cpu"] * 2)


@pytest.mark.parametrize(
    ("named", "transport", "expected"),
    [
        ("cuda:3, cuda:1", "auto", Plan("nccl", ("cuda:3", "cuda:1"))),
        ("cuda:3,cuda:1,cuda:1", "gloo", Plan("gloo", ("cuda:3", "cuda:1"))),
    ],
)
def test_ranks_get_the_named_devices_in_order(named, transport, expected, machine):
    assert machine(4, 2, "auto", transport, devices=named) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": "cuda:1"}, "'cuda:1': 1 device for 2 ranks: name one per rank"),
        ({"devices": "cuda:1,cuda:7"}, "has 3 CUDA GPUs, counted from cuda:0"),
        ({"devices": "cpu,cuda:1", "device": "cuda"}, "'cpu,cuda:1' contradict device 'cuda'"),
        ({"device": "tpu"}, "choose one of auto, cpu, cuda"),
        ({"transport": "pigeon"}, "unknown transport 'pigeon': choose one of auto, shared"),
        ({"transport": "shared", "device": "cuda"}, "'shared' is for ranks .* on the CPU"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(options, words, machine):
    with pytest.raises(ValueError, match=words):
        machine(3, 2, **options)


def test_a_gpu_on_which_nothing_runs_is_one_error_with_the_way_round():
    with pytest.raises(RuntimeError, match=r'cuda:0 cannot be used: .*device="cpu"') as caught:
        gpus.check_usable(torch.device("cuda:0"))
    assert "\n" not in str(caught.value)
