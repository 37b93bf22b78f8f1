"""The devices, backend and transport of ranks on each kind of machine, without such machines."""

import contextlib

import pytest

from labkit import devices, run, train_with
from labkit.devices import Plan, check_world_size, hardware, num_cores, plan, versions


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_without_a_gpu_ranks_run_on_the_cpu_over_gloo(device):
    assert plan(3, device, gpus=0) == plan(3, "cpu", gpus=8)
    assert plan(3, device, gpus=0).devices == ("cpu", "cpu", "cpu")
    assert plan(3, device, gpus=0).backend == "gloo"


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_for_each_rank_means_nccl(device):
    choice = plan(2, device, gpus=4)
    assert (choice.backend, choice.devices, choice.note) == ("nccl", ("cuda:0", "cuda:1"), "")


def test_more_ranks_than_gpus_share_and_the_consequence_is_said_in_one_line():  # row 22
    choice = plan(3, "auto", gpus=2)
    assert choice.backend == "gloo"
    assert choice.devices == ("cuda:0", "cuda:1", "cuda:0")
    assert "3 ranks share 2 GPUs" in choice.note
    assert "\n" not in choice.note


def test_cuda_where_there_is_none_is_refused_in_one_line():  # row 22
    with pytest.raises(ValueError, match="shows no CUDA GPU: use device 'cpu'"):
        plan(1, "cuda", gpus=0)


def test_an_unknown_device_lists_the_known_ones():
    with pytest.raises(ValueError, match="choose one of auto, cpu, cuda"):
        plan(1, "tpu")


@pytest.mark.parametrize(
    "begin",
    [
        lambda: check_world_size(5),
        lambda: run(print, world_size=5),
        lambda: train_with("ring_all_reduce", world_size=5, device="cpu"),
    ],
    ids=["itself", "run", "train_with"],
)
def test_too_many_ranks_are_warned_of_at_the_caller_s_line(begin, monkeypatch, recwarn):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(devices, "num_cores", lambda: 1)
    monkeypatch.setattr("labkit.runtime.supervisor.Supervisor.run", stop)
    with contextlib.suppress(KeyboardInterrupt):
        begin()
    (warning,) = recwarn.list
    assert "far above this machine's 1 core:" in str(warning.message)
    assert warning.filename == __file__


def test_a_world_size_within_reason_is_silent(recwarn):
    check_world_size(2)
    assert not recwarn.list


def test_results_can_name_what_made_them():
    assert hardware()["cores"] == num_cores() >= 1
    assert hardware()["memory_gb"] > 0
    assert {"python", "torch", "labkit"} <= versions().keys()


def test_transports_by_machine():
    assert plan(2, "cpu", "gloo", gpus=0).transport == "torch"
    assert plan(2, "cpu", "shared", gpus=0).transport == "shared"
    assert plan(2, "cuda", "auto", gpus=2) == Plan("nccl", ("cuda:0", "cuda:1"), "torch")
    assert plan(2, "cuda", "gloo", gpus=2).backend == "gloo"
    sharing = plan(2, "cuda", "shared", gpus=1)
    assert (sharing.backend, sharing.transport) == ("gloo", "shared")
    assert "CUDA IPC" in sharing.note


def test_an_unknown_transport_and_a_system_without_shared_memory(monkeypatch):
    with pytest.raises(ValueError, match="unknown transport 'pigeon': choose one of auto, sha"):
        plan(2, "cpu", "pigeon", gpus=0)
    monkeypatch.setattr("sys.platform", "darwin")
    assert plan(2, "cpu", "auto", gpus=0).transport == "torch"
    with pytest.raises(ValueError, match="needs Linux"):
        plan(2, "cpu", "shared", gpus=0)
