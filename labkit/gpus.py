"""Which GPUs of this machine can be used: a GPU counts once a kernel has run on it.

The driver also lists GPUs on which nothing runs: with a driver that is too old for this PyTorch, a
card that it no longer supports, or a GPU that another program holds for itself. So each is tried
once, in a process of its own: the process that asks never initialises CUDA.
"""

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

# To import torch and initialise CUDA takes seconds, on a slow disk many more.
_PATIENCE_S = 120
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_TRY_ALL = """
import json, torch

for index in range(torch.cuda.device_count()):
    found = {"index": index, "error": ""}
    try:
        gpu = torch.cuda.get_device_properties(index)
        found |= {"name": gpu.name, "memory_bytes": gpu.total_memory}
        found["capability"] = [gpu.major, gpu.minor]
        assert (torch.ones(2, device=f"cuda:{index}") * 2).sum().item() == 4, "wrong result"
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    print(json.dumps(found), flush=True)
"""


@dataclass(frozen=True)
class Gpu:
    """A GPU as PyTorch numbers it here: ``cuda:{index}``; ``error`` is empty if it can be used."""

    index: int
    name: str = ""
    memory_bytes: int = 0
    capability: tuple[int, int] = (0, 0)
    error: str = ""


@dataclass(frozen=True)
class Gpus:
    """What trying them has shown.

    Attributes:
        usable: the GPUs on which a kernel has run.
        why_not: why some that the driver lists do not count, in one sentence; empty if all do.
    """

    usable: tuple[Gpu, ...] = ()
    why_not: str = ""


def found() -> Gpus:
    """The visible GPUs, tried once per process and setting of CUDA_VISIBLE_DEVICES."""
    return _tried(os.environ.get(_VISIBLE))


@functools.cache
def _tried(visible: str | None) -> Gpus:
    import torch

    listed = torch.cuda.device_count()
    if not listed:
        return Gpus()
    command = [sys.executable, "-c", _TRY_ALL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        return Gpus(why_not=f"trying {listed} GPUs took longer than {_PATIENCE_S} s")
    gpus = [_gpu(json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    broken = [gpu for gpu in gpus if gpu.error]
    usable = tuple(gpu for gpu in gpus if not gpu.error)
    if done.returncode and not broken:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Gpus(usable, f"the process that tried the GPUs ended early: {last}")
    why = "; ".join(f"cuda:{gpu.index} cannot be used ({gpu.error})" for gpu in broken)
    return Gpus(usable, why)


def _gpu(row: dict[str, Any]) -> Gpu:
    return Gpu(**row | {"capability": tuple(row.get("capability", (0, 0)))})


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
