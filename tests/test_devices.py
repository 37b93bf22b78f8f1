"""The devices, backend and transport of ranks on each kind of machine, without such machines."""

import contextlib

import pytest
import torch

from labkit import devices, gpus, run, train_with
from labkit.devices import (
    Plan,
    check_world_size,
    hardware,
    num_cores,
    num_gpus,
    plan,
    tell_once,
    versions,
)
from labkit.gpus import Gpu, Gpus


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


FOUR = tuple(Gpu(index, f"GPU {index}") for index in range(4))


@pytest.fixture
def machine(monkeypatch):
    """Let this machine have these GPUs, and forget which notes were printed."""

    def has(*indices, why_not=""):
        found = Gpus(tuple(FOUR[index] for index in indices), why_not)
        monkeypatch.setattr(gpus, "found", lambda: found)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(devices, "_told", set())

    return has


def test_ranks_leave_out_a_gpu_in_the_middle_that_cannot_be_used_and_say_so(machine):
    machine(0, 2, 3, why_not="cuda:1 cannot be used: busy")
    choice = plan(3, "auto")
    assert (choice.backend, choice.devices) == ("nccl", ("cuda:0", "cuda:2", "cuda:3"))
    assert choice.note == "cuda:1 cannot be used: busy"
    assert plan(4, "cuda").devices == ("cuda:0", "cuda:2", "cuda:3", "cuda:0")
    assert num_gpus() == 3


def test_without_a_usable_gpu_auto_says_why_and_cuda_is_refused_with_the_reason(machine):
    machine(why_not="cuda:0 cannot be used: the driver is too old: update it")
    choice = plan(2, "auto")
    assert (choice.devices, choice.transport) == (("cpu", "cpu"), plan(2, "cpu").transport)
    assert choice.note.startswith("the ranks run on the CPU: cuda:0 cannot be used: the driver")
    with pytest.raises(ValueError, match=r"can use no GPU .*driver is too old.* use device 'cpu'"):
        plan(2, "cuda")


def test_ranks_on_the_cpu_never_ask_for_gpus(monkeypatch):
    def asked():
        raise AssertionError("GPUs were asked for")

    monkeypatch.setattr(gpus, "found", asked)
    assert plan(2, "cpu").devices == plan(2, devices=["cpu"] * 2).devices == ("cpu", "cpu")


def test_notes_are_told_once_per_reason_whatever_their_numbers(machine, capsys):
    machine(0, 1, why_not="cuda:2 cannot be used: busy")
    for ranks in (3, 4, 2):
        tell_once(plan(ranks, "auto").notes)
    unusable, shared = capsys.readouterr().err.splitlines()
    assert unusable == "cuda:2 cannot be used: busy"
    assert shared.startswith("3 ranks share 2 GPUs: they talk over gloo")


class TestNamedDevices:
    def test_ranks_get_those_that_are_named_in_order(self, machine):
        machine(0, 1, 2, 3)
        choice = plan(2, devices="cuda:3, cuda:1")
        assert choice == Plan("nccl", ("cuda:3", "cuda:1"), "torch")
        assert plan(2, devices="cuda:3,cuda:1", transport="gloo").backend == "gloo"
        assert plan(2, devices="cuda:3,cuda:1", transport="shared").transport == "shared"
        assert plan(1, "cuda", devices=("cuda:3", "cuda:1", "cuda:1")) == Plan("nccl", ("cuda:3",))

    def test_a_gpu_that_is_named_twice_is_shared(self, machine):
        machine(0, 1, 2, 3)
        choice = plan(3, devices="cuda:2,cuda:1,cuda:2")
        assert (choice.backend, choice.devices[2]) == ("gloo", "cuda:2")
        assert choice.note.startswith("3 ranks share 2 GPUs: they talk over gloo")
        shared = plan(2, devices="cuda:2,cuda:2", transport="shared")
        assert (shared.backend, shared.transport) == ("gloo", "shared")
        assert "2 ranks share 1 GPU: they talk over CUDA IPC" in shared.note

    def test_the_cpu_and_gpus_talk_over_gloo_and_it_is_said(self, machine):
        machine(0, 1)
        choice = plan(3, devices="cpu,cuda:1,cuda:0")
        assert (choice.backend, choice.transport) == ("gloo", "torch")
        assert choice.note.startswith("ranks on the CPU and on GPUs talk over gloo")
        with pytest.raises(ValueError, match="'shared' is for ranks that are all on the CPU"):
            plan(2, devices="cpu,cuda:1", transport="shared")

    def test_the_cpu_alone_is_as_without_names(self):
        assert plan(2, devices="cpu,cpu") == plan(2, "cpu")

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"devices": "cuda:1"}, "'cuda:1': 1 device for 2 ranks: name one per rank"),
            ({"devices": "cuda:1,cuda:7"}, "has 3 CUDA GPUs, .*cuda:0, cuda:1, cuda:3 can be"),
            ({"devices": "cuda:1,cuda:2"}, "be used.. cuda:2 cannot be used: busy$"),
            ({"devices": "cpu,cuda:1", "device": "cuda"}, "'cpu,cuda:1' contradict device 'cuda'"),
            ({"devices": "cpu,cuda:1", "device": "cpu"}, "contradict device 'cpu'"),
            ({"device": "cuda:1"}, "unknown device 'cuda:1': .* as in devices='cuda:1'"),
        ],
    )
    def test_what_cannot_be_is_refused_with_the_numbers(self, machine, options, told):
        machine(0, 1, 3, why_not="cuda:2 cannot be used: busy")
        with pytest.raises(ValueError, match=told):
            plan(2, **options)

    def test_the_choice_of_visible_gpus_is_named_where_one_is_missing(self, machine, monkeypatch):
        machine(0)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
        with pytest.raises(ValueError, match=r"has 1 CUDA GPU, .*CUDA_VISIBLE_DEVICES is 5$"):
            plan(1, devices="cuda:5")


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


def test_the_gpus_of_a_machine_are_named_without_initialising_cuda(machine, monkeypatch):
    def refuse(*args):
        raise RuntimeError("this process would initialise CUDA")

    for name in ("init", "get_device_properties", "get_device_name"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    machine(0, 2, why_not="cuda:1 cannot be used: busy")
    assert hardware()["gpus"] == ["GPU 0", "GPU 2"]
    machine(why_not="no GPU is used, since the driver hangs")
    assert hardware()["gpus"] == []


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
