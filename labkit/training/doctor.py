"""``python -m labkit doctor``: what this machine has, and what to do if something is missing."""

import os
import platform
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version

from labkit import __version__
from labkit.engine.devices import hardware
from labkit.engine.gpus import num_gpus, nvidia_smi
from labkit.extras import EXTRAS, absent
from labkit.units import format_bytes

# Without these the course does not run.
STOPS = ("torch", "digits", "ranks talk")
_ADVICE = (
    "in the workbook's folder: python -m pip install -r requirements.txt -e . (torch and "
    "torchvision must be a pair, both CUDA builds or both CPU builds). Ranks talk over 127.0.0.1, "
    "which a firewall may forbid; if a path is too long, set TMPDIR=/tmp. The way round NCCL is "
    'transport="gloo", round all GPUs CUDA_VISIBLE_DEVICES=-1'
)


def main() -> int:
    """Print each finding as it is made; return 1 if something stops the course, else 0."""
    failed = []
    for name, check in CHECKS.items():
        try:
            finding = check()
        except Exception as error:
            failed.append(name)
            reason = " ".join(str(error).partition("\n\n")[0].split())
            finding = f"{type(error).__name__}: {reason}"
        print(f"{name:<13} {finding}", flush=True)
    if failed:
        print(f"\n -> {_ADVICE}")
    stops = [name for name in failed if name in STOPS]
    if stops:
        print(f"\nThe course does not run here yet. First fix: {', '.join(stops)}.")
    elif absent("course"):
        print(
            "\nlabkit runs on this machine. The pages of the course need its extra, in the clone: "
            "pip install -e '.[course]'"
        )
    else:
        print("\nThe course runs on this machine.")
    return 1 if stops else 0


def check_packages() -> str:
    names = ("torch", "numpy", "cloudpickle", "safetensors", "psutil")
    packages = [f"{name} {version(name)}" for name in names]
    return ", ".join([f"labkit {__version__}", *packages])


def check_extras() -> str:
    findings = []
    for extra in EXTRAS:
        missing = absent(extra)
        if missing:
            findings.append(f"{extra} lacks {', '.join(missing)}")
        else:
            findings.append(f"{extra} is complete")
    return "; ".join(findings)


def check_torch() -> str:
    # A package that may be absent or broken is imported inside its check.
    import torch

    if "torchvision" not in absent("course"):
        import torchvision

        # A build of torchvision for another torch lacks its compiled operators.
        torchvision.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([1.0]), 0.5)
    assert torch.distributed.is_gloo_available(), "ranks on the CPU talk over gloo"
    return f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"


def check_gpus() -> str:
    printed = f"{nvidia_smi()}{nvidia_smi('topo', '-m')}".rstrip()
    text = f"{num_gpus() or 'none'} that this PyTorch counts"
    if printed and not num_gpus():
        text += "; make env TORCH=auto takes a build for this driver; the course runs on CPU, too"
    return f"{text}\n{printed}".rstrip()


def check_shm() -> str:
    if not os.path.isdir("/dev/shm"):
        return "not used on this system"
    size = shutil.disk_usage("/dev/shm")
    text = f"{format_bytes(size.free)} of {format_bytes(size.total)} free"
    if size.free < 512 * 2**20:
        text += "; the workers of a DataLoader need more: docker run --shm-size=1g"
    return text


def check_digits() -> str:
    from labkit.workload.datasets import load_dataset

    data = load_dataset("digits")
    num_train = len(data.train_targets)
    return f"intact: {num_train:,} images to train on, {len(data.test_targets):,} held out"


def check_ranks(device: str = "cpu") -> str:
    from labkit.training.measured import measure_link

    return str(measure_link(2, sizes_bytes=(2**12, 2**22), repeats=3, device=device))


CHECKS: dict[str, Callable[[], str]] = {
    "Python": lambda: f"{platform.python_version()} at {sys.executable}",
    "packages": check_packages,
    "extras": check_extras,
    "torch": check_torch,
    "GPUs": check_gpus,
    "machine": lambda: "{cores} cores, {memory_gb} GB of memory".format(**hardware()),
    "/dev/shm": check_shm,
    "digits": check_digits,
    "ranks talk": check_ranks,
    "GPUs talk": lambda: check_ranks("cuda") if num_gpus() else "there are none",
}
