"""``python -m labkit doctor``: what this machine has, and what to do if something is missing.

Packages that may be absent or broken are imported inside the checks, so that the doctor also runs
where the installation is broken.
"""

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from importlib.metadata import version

from labkit.devices import hardware, plan
from labkit.gpus import num_gpus, nvidia_smi
from labkit.units import format_bytes, format_seconds

# Without these the course does not run.
STOPS = ("torch", "digits", "ranks talk")
_REINSTALL = (
    "in the workbook's folder: python -m pip install -r requirements.txt -e . (torch and "
    "torchvision must be a pair, both CUDA builds or both CPU builds)"
)
_ADVICE = {
    "ranks talk": "first fix what is above. Ranks talk over 127.0.0.1, which a firewall may "
    "forbid; if a path is too long, set TMPDIR=/tmp; CUDA_VISIBLE_DEVICES=-1 works without GPUs",
    "rank to rank": "transport= of labkit.run chooses a way that works",
}


def main() -> int:
    """Print each finding as it is made; return 1 if something stops the course, else 0."""
    failed = []
    for name, check in CHECKS.items():
        try:
            found = check()
        except KeyboardInterrupt:
            print("labkit: stopped", file=sys.stderr)
            return 130
        except Exception as error:
            failed.append(name)
            why = " ".join(str(error).partition("\n\n")[0].split())
            found = f"{type(error).__name__}: {why}\n -> {_ADVICE.get(name, _REINSTALL)}"
        print(f"{name:<13} {found}", flush=True)
    stops = [name for name in failed if name in STOPS]
    if stops:
        print(f"\nThe course does not run here yet. First fix: {', '.join(stops)}.")
    else:
        print("\nThe course runs on this machine.")
    return 1 if stops else 0


def check_packages() -> str:
    names = ("labkit", "torch", "torchvision", "matplotlib", "jupyterlab", "ipywidgets", "nbval")
    return ", ".join(f"{name} {version(name)}" for name in names)


def check_torch() -> str:
    import torch

    assert torch.distributed.is_gloo_available(), "ranks on the CPU talk over gloo"
    return f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"


def check_torchvision() -> str:
    import torch
    import torchvision

    torchvision.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([1.0]), 0.5)
    return "with its compiled operators"


def check_gpus() -> str:
    printed = f"{nvidia_smi()}{nvidia_smi('topo', '-m')}".rstrip()
    found = f"{num_gpus() or 'none'} that this PyTorch counts"
    if printed and not num_gpus():
        found += "; make env TORCH=auto takes a build for this driver; the course runs on CPU, too"
    return f"{found}\n{printed}".rstrip()


def check_machine() -> str:
    cores, memory_gb = hardware()["cores"], hardware()["memory_gb"]
    return f"{cores} cores for this process, {memory_gb} GB of memory"


def check_shm() -> str:
    if not os.path.isdir("/dev/shm"):
        return "not used on this system"
    size = shutil.disk_usage("/dev/shm")
    found = f"{format_bytes(size.free)} of {format_bytes(size.total)} free"
    if size.free >= 512 * 2**20:
        return found
    return (
        f"{found}\n -> the workers of a DataLoader need it. In a container: docker run "
        "--shm-size=1g; elsewhere, as root: mount -o remount,size=1g /dev/shm"
    )


def check_digits() -> str:
    from labkit.workload.datasets import load_dataset

    data = load_dataset("digits")
    train, test = len(data.train_targets), len(data.test_targets)
    return f"intact: {train:,} images to train on, {test:,} held out"


def check_ranks() -> str:
    from labkit.runtime.launch import run

    started_s = time.perf_counter()
    values = run(swap_numbers, world_size=2, timeout_s=60).values
    assert values == [1.0, 0.0], f"ranks 0 and 1 received {values}, not [1.0, 0.0]"
    took, chosen = format_seconds(time.perf_counter() - started_s), plan(2)
    way = "shared memory" if chosen.transport == "shared" else chosen.backend
    return f"2 ranks on {' and '.join(dict.fromkeys(chosen.devices))}, over {way}, in {took}"


def swap_numbers(comm) -> float:
    """On 2 ranks: send a tensor of this rank's number, return the other's."""
    import torch

    mine = torch.full((1024,), float(comm.rank), device=comm.device)
    theirs = torch.empty_like(mine)
    return comm.exchange(mine, 1 - comm.rank, theirs, 1 - comm.rank).mean().item()


def check_speeds() -> str:
    """What a message between 2 ranks costs, on the CPU and on the GPUs."""
    from labkit.training.measured_link import measure_link

    found = []
    for device in ("cpu", "cuda")[: 1 + (num_gpus() > 0)]:
        link = measure_link(2, sizes_bytes=(2**12, 2**22), repeats=3, device=device)
        found.append(f"{device}: {link}")
    return "; ".join(found)


CHECKS: dict[str, Callable[[], str]] = {
    "Python": lambda: f"{platform.python_version()} at {sys.executable}",
    "packages": check_packages,
    "torch": check_torch,
    "torchvision": check_torchvision,
    "GPUs": check_gpus,
    "machine": check_machine,
    "/dev/shm": check_shm,
    "digits": check_digits,
    "ranks talk": check_ranks,
    "rank to rank": check_speeds,
}
