"""The GPUs of this machine, as torch counts them; the process that asks never initialises CUDA."""

import os
import subprocess
import sys
from typing import Any

# What NVIDIA's and AMD's drivers bring on Linux, also on Linux under Windows.
_DRIVERS = ("/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1", "/dev/kfd")
_PATIENCE_S = 30.0


def may_exist() -> bool:
    """Whether there is a driver; torch is not imported."""
    return not sys.platform.startswith("linux") or any(map(os.path.exists, _DRIVERS))


def num_gpus() -> int:
    """The number of GPUs that torch counts, usable or not: see ``check_usable``."""
    if not may_exist():
        return 0
    import torch

    return torch.cuda.device_count()


def check_usable(device: Any) -> None:
    """Run a small kernel on ``device``, in the process that is to use it.

    Raises:
        RuntimeError: it does not run, for example under a driver that is too old.
    """
    import torch

    try:
        torch.ones(2, device=device).sum().item()
    except Exception as error:
        why = str(error).strip().splitlines()[0]
        raise RuntimeError(
            f"{device} cannot be used: {why}. Choose other GPUs with devices= or "
            'CUDA_VISIBLE_DEVICES, or use device="cpu": all pages run on it'
        ) from error


def nvidia_smi(*arguments: str) -> str:
    """What ``nvidia-smi`` prints; empty where it is not installed or fails."""
    try:
        asked = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_PATIENCE_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout if asked.returncode == 0 else ""


def synchronize(device: Any) -> None:
    """Wait until all that is queued on ``device`` has ended; on the CPU nothing is queued."""
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def synchronize_used(device: Any) -> None:
    """Wait until all that this process has queued has ended, on ``device`` and on any other GPU.

    A GPU that it has not used is left alone: to wait for it would take memory on it.
    """
    import torch

    synchronize(device)
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            if torch._C._cuda_hasPrimaryContext(index):
                synchronize(f"cuda:{index}")
