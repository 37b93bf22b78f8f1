"""The GPUs of this machine, as torch counts them.

To count them does not initialize CUDA, so a process that asks may still fork; ``check_usable``
does.
"""

import os
import subprocess
import sys
from typing import Any

# Files of NVIDIA's and AMD's drivers on Linux, also on Linux under Windows.
_DRIVERS = ("/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1", "/dev/kfd")


def may_exist() -> bool:
    """True if there may be a driver; torch is not imported."""
    return not sys.platform.startswith("linux") or any(map(os.path.exists, _DRIVERS))


def num_gpus() -> int:
    """The number of GPUs that torch counts, usable or not: see ``check_usable``."""
    if not may_exist():
        return 0
    import torch

    return torch.cuda.device_count()


def check_usable(device: Any) -> None:
    """Run a small kernel on ``device``, in the process that is to use it, or RuntimeError."""
    import torch

    try:
        torch.ones(2, device=device).sum().item()
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise RuntimeError(
            f"{device} cannot be used: {reason}. Choose other GPUs with devices= or "
            'CUDA_VISIBLE_DEVICES, or use device="cpu": all pages run on it'
        ) from error


def nvidia_smi(*arguments: str) -> str:
    """The output of ``nvidia-smi``; empty where it is not installed or fails."""
    try:
        command = ["nvidia-smi", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def synchronize(device: Any) -> None:
    """Wait until all that is queued on ``device`` has ended; on the CPU nothing is queued."""
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
