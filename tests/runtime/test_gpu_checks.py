"""The doctor's findings on recorded machines with GPUs, and the rules behind them."""

import os

import pytest
import recorded_gpus as recorded
import torch

from labkit import gpus
from labkit.doctor import CHECKS, WIDTH, examine, render
from labkit.gpus import Gpu, Gpus
from labkit.runtime import gpu_checks, nvidia_smi
from labkit.runtime.gpu_checks import is_too_old, runs_on

GPU_CHECKS = [name for name, check in CHECKS.items() if check.__module__ == gpu_checks.__name__]
GIB = 2**30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with these answers of ``nvidia-smi`` and these GPUs that can be used."""
    usual = os.environ["PATH"]

    def pretend(answers, usable=(), why_not="", built="13.2"):
        nvidia_smi._asked.cache_clear()
        folder = tmp_path / ("with" if answers else "without")
        folder.mkdir(exist_ok=True)
        if answers:
            recorded.write_program(folder, answers)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{usual}" if answers else str(folder))
        seen = tuple(Gpu(i, name, memory, can) for i, (name, memory, can) in enumerate(usable))
        monkeypatch.setattr(gpus, "found", lambda: Gpus(seen, why_not))
        monkeypatch.setattr(torch.version, "cuda", built)

    def forbidden(*args):
        raise AssertionError("CUDA is initialised in this process")

    monkeypatch.setattr(torch.cuda, "_lazy_init", forbidden)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", forbidden, raising=False)
    monkeypatch.setattr(nvidia_smi, "DRIVER_FILES", (tmp_path / "absent",))
    monkeypatch.setattr(nvidia_smi, "_ALSO_IN", str(tmp_path / "absent"))
    monkeypatch.setattr(
        torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_86", "sm_90", "sm_120"]
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    yield pretend
    nvidia_smi._asked.cache_clear()


def finding(name):
    found = examine(name, CHECKS[name])
    assert "Error" not in found.found, found
    return found


A100S = [(recorded.A100, 80 * GIB, (8, 0))] * 8
RTX = [("NVIDIA GeForce RTX 5090", 32 * GIB, (12, 0))] * 2
L40S = [("NVIDIA L40S", 45 * GIB, (8, 9))]
V100 = [("Tesla V100-SXM2-16GB", 16 * GIB, (7, 0))] * 4


@pytest.mark.parametrize("name", recorded.MACHINES)
def test_on_every_machine_every_line_fits_and_nothing_stops(name, machine):
    machine(recorded.MACHINES[name])
    for check in GPU_CHECKS:
        found = finding(check)
        lines = render(found).splitlines()
        assert max(map(len, lines)) <= WIDTH
        assert found.status in ("ok", "note")
        assert found.advice or found.status == "ok"


def test_a_laptop_has_one_note_and_it_is_no_warning(machine):
    machine(None)
    found = {name: finding(name) for name in GPU_CHECKS}
    assert [name for name, one in found.items() if one.status != "ok"] == ["GPUs"]
    assert found["GPUs"].advice.startswith("the whole course runs on CPU; make env TORCH=cpu")
    machine(None, built=None)
    assert "TORCH" not in finding("GPUs").advice


def test_eight_gpus_over_nvlink_are_a_picture(machine):
    machine(recorded.DGX, A100S)
    found = finding("GPU to GPU")
    assert (found.status, found.found) == ("ok", "every pair over 12 NVLinks")
    lines = found.picture.splitlines()
    assert lines[0].split() == [f"GPU{i}" for i in range(8)]
    assert lines[3].split() == ["GPU2", "NV12", "NV12", "-", *["NV12"] * 5]
    assert "network mlx5_3 through one PCIe switch: GPUs 4-5" in lines
    assert "network cards only at another CPU: GPUs 2-3, 6-7" in lines
    assert "CPU cores 112-127, 240-255: GPUs 4-5" in lines
    assert finding("GPUs").found == f"8 x {recorded.A100}, 80 GiB"
    assert finding("NVIDIA driver").found.endswith("for CUDA 13.2 (one generation is enough)")


def test_of_unequal_pairs_the_best_is_named_among_the_gpus_that_can_be_used(machine):
    machine(recorded.FOUR_V100, V100, built="12.6")
    found = finding("GPU to GPU")
    assert found.found.startswith("2 of 6 pairs over 2 NVLinks; 2 of 6 pairs over 1 NVLink; ")
    assert "on 2 of 6 pairs they cannot read each other's memory" in found.found
    assert found.advice.endswith("--devices cuda:0,cuda:2")
    assert "SYS    through two CPUs and the link between them" in found.picture
    machine(recorded.FOUR_V100, V100[:2], built="12.6")
    assert "--devices" not in finding("GPU to GPU").advice


def test_numbers_that_differ_from_pytorchs_are_told(machine, monkeypatch):
    machine(recorded.FOUR_V100, V100[:2], built="12.6")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert finding("GPU to GPU").picture.endswith("here cuda:0 is GPU3, cuda:1 is GPU1")
    mixed = recorded.log(
        "580.1",
        "13.0",
        recorded.gpu("Small", "8 GiB", "0 MiB", uuid="GPU-aa"),
        recorded.gpu("Large", "80 GiB", "9 GiB", uuid="GPU-bb"),
    )
    machine(recorded.PCIE | {"-q -x": mixed}, RTX)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb,GPU-a")
    assert "here cuda:0 is GPU1, cuda:1 is GPU0" in finding("GPU to GPU").picture
    assert "GPU 1: 9 GiB of 80 GiB" in finding("GPU sharing").found
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in finding("GPU to GPU").picture
    assert "--devices" not in finding("GPU sharing").advice
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert finding("GPU sharing").advice.endswith("--devices cuda:0")


def test_memory_that_others_use_names_the_free_gpus(machine):
    machine(recorded.PCIE, RTX)
    found = finding("GPU sharing")
    assert found.status == "note"
    assert found.found == "GPU 0: 30.3 GiB of 31.8 GiB in use by 2 programs"
    assert found.advice == "free ones are chosen with --devices cuda:1"


def test_exclusive_and_prohibited_gpus_are_told_with_the_command(machine):
    machine(recorded.EXCLUSIVE, L40S, "cuda:1 cannot be used (held by another program)")
    found = finding("GPU sharing")
    assert "GPUs 0-1: exclusive mode, one process at a time, so ranks cannot share" in found.found
    assert "GPU 2: compute mode Prohibited" in found.found
    assert "programs that this container or user does not see" in found.found
    assert found.advice.endswith(
        "nvidia-smi -i 0,1,2 -c DEFAULT; free ones are chosen with --devices cuda:0"
    )
    assert "cuda:1 cannot be used" in finding("GPUs").found
    assert finding("GPUs").status == "note"


def test_slices_of_a_gpu_are_told(machine):
    machine(recorded.MIG, [("NVIDIA H100 PCIe MIG 3g.40gb", 20 * GIB, (9, 0))])
    found = finding("GPU sharing")
    assert "MIG is on (2 slices); a process sees one slice only" in found.found
    assert found.advice.endswith("nvidia-smi -i 0 -mig 0")
    empty = recorded.log("580.1", "13.0", recorded.gpu("H", "80 GiB", "0 MiB", mig="Enabled"))
    machine({"-q -x": empty})
    assert "MIG is on (no slices yet); nothing runs there" in finding("GPU sharing").found


def test_a_driver_that_is_too_old_recommends_another_build(machine):
    machine(recorded.OLD, why_not="the driver is too old")
    found = finding("NVIDIA driver")
    assert (found.status, "make env TORCH=auto" in found.advice) == ("note", True)
    assert found.found.startswith("384.130; too old for this PyTorch, whose CUDA 13.2 needs 580")
    assert finding("GPUs").found == "none; the driver is too old"
    # NVIDIA's forward compatibility: the trial has the last word.
    machine(recorded.OLD, RTX)
    assert finding("NVIDIA driver").status == "ok"


def test_a_build_without_cuda_beside_gpus_recommends_one_with_it(machine):
    machine(recorded.DGX, built=None)
    found = finding("GPUs")
    assert "nvidia-smi lists 8: this PyTorch is built without CUDA" in found.found
    assert "make env TORCH=auto" in found.advice


def test_hidden_gpus_are_not_called_absent(machine, monkeypatch):
    machine(recorded.PCIE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "CUDA_VISIBLE_DEVICES='-1' hides the 2" in finding("GPUs").found


def test_a_driver_that_does_not_answer_is_told_with_advice(machine):
    machine(recorded.NO_DRIVER)
    assert finding("NVIDIA driver").status == "note"
    assert "install or restart" in finding("NVIDIA driver").advice
    assert "first see the driver above" in finding("GPUs").advice
    mismatch = "Failed to initialize NVML: Driver/library version mismatch\n"
    machine({"-q -x": (18, mismatch)})
    assert "restart the machine" in finding("NVIDIA driver").advice


def test_a_program_that_fails_or_hangs_is_asked_once_by_all_checks(machine, tmp_path):
    machine(recorded.NO_DRIVER, RTX)
    recorded.program(tmp_path / "with", f'echo "$*" >> {tmp_path}/asked; exit 9')
    for check in GPU_CHECKS:
        finding(check)
    assert (tmp_path / "asked").read_text() == "-q -x\n"


def test_usable_gpus_without_nvidia_smi_are_told_as_in_a_container(machine):
    machine(None, RTX)
    assert finding("GPUs").status == "ok"
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in finding("NVIDIA driver").advice
    for check in ("GPU to GPU", "GPU sharing"):
        assert finding(check).found == "not known: nvidia-smi is not installed"
        assert finding(check).status == "note"


def test_a_card_without_code_in_this_build_is_named(machine):
    machine(recorded.FOUR_V100, why_not="no kernel image")
    found = finding("GPU architecture")
    assert found.status == "note"
    assert "Tesla V100-SXM2-16GB is sm_70; this PyTorch has code for sm_75" in found.found
    machine(recorded.OLD)
    assert finding("GPU architecture").status == "ok"


def test_a_build_without_cuda_is_not_compared_with_cards(machine, monkeypatch):
    machine(recorded.DGX, built=None)
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    found = finding("GPU architecture")
    assert (found.status, found.found[-17:]) == ("ok", "for the CPU alone")


@pytest.mark.parametrize(
    ("capability", "built", "fits"),
    [
        ((8, 0), "sm_80", True),
        ((8, 6), "sm_80", True),
        ((8, 0), "sm_86", False),
        ((9, 0), "sm_80 sm_86", False),
        ((9, 0), "sm_80 compute_80", True),
        ((7, 5), "compute_80", False),
        ((9, 0), "sm_90a", True),
        ((9, 1), "sm_90a", False),
        ((10, 3), "sm_100f", True),
        ((12, 1), "sm_120", True),
        ((12, 0), "sm_100f compute_100a", False),
        ((12, 0), "compute_90", True),
        ((8, 0), "", False),
        ((8, 0), "gfx90a sm_", False),
    ],
)
def test_which_architectures_run_what_is_built(capability, built, fits):
    assert runs_on(capability, built.split()) == fits


@pytest.mark.parametrize(
    ("version", "cuda", "built", "too_old"),
    [
        ("580.65.06", "13.0", "13.2", False),
        ("575.57.08", "12.9", "13.0", True),
        ("575.57.08", "12.9", "12.6", False),
        ("525.60.13", "12.0", "12.9", False),
        ("590.44", "13.1", "12.6", False),
        ("384.130", "", "13.0", True),
        ("580.1", "", "13.0", False),
        ("550.1", "", "14.0", False),
        ("", "", "13.0", False),
        ("384.130", "N/A", "12.0", True),
    ],
)
def test_which_drivers_are_too_old(version, cuda, built, too_old):
    assert is_too_old(version, cuda, built) == too_old


def test_nccl_says_how_many_ranks_it_takes(machine, monkeypatch):
    machine(recorded.PCIE, RTX)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    found = finding("NCCL")
    assert (found.status, found.found) == ("ok", "2.27.5; takes one rank per GPU: up to 2 here")


@pytest.mark.parametrize(("usable", "status"), [((), "ok"), (RTX, "note")])
def test_a_torch_without_nccl_matters_only_where_gpus_are(usable, status, machine, monkeypatch):
    machine(recorded.PCIE, usable)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert finding("NCCL").status == status
