"""Several ranks on one GPU over NCCL: whether it works here, tried once in processes of its own.

NCCL takes one rank per GPU. From version 2.30 on its error names a variable with which it takes
more, and nothing else is documented: so two ranks exchange a message before it is relied upon.
"""

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from labkit.devices import Plan

# For NCCL, in a rank that shares its GPU.
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}

# Two processes import torch and initialise CUDA and NCCL.
_PATIENCE_S = 120
_LOOK_S = 0.05
_TRY = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

rank, path, device = int(sys.argv[1]), sys.argv[2], torch.device(sys.argv[3])
torch.cuda.set_device(device)
store = dist.FileStore(path, 2)
patience = timedelta(seconds=60)
dist.init_process_group(
    "nccl", store=store, rank=rank, world_size=2, timeout=patience, device_id=device
)
mine = torch.full((1000,), float(rank), device=device)
theirs = torch.empty_like(mine)
ends = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
for work in dist.batch_isend_irecv(ends):
    work.wait()
dist.all_reduce(mine)
assert theirs.eq(1 - rank).all().item() and mine.eq(1).all().item(), "wrong values"
dist.destroy_process_group()
"""


def shares_gpus(plan: Plan) -> bool:
    """Whether two ranks of a plan are on one GPU."""
    return len(set(plan.devices)) < len(plan.devices)


def check_sharing(plan: Plan) -> None:
    """Refuse a plan in which ranks share a GPU over NCCL, unless that works here.

    Raises:
        ValueError: it does not; the message says why, and what to use.
    """
    if plan.backend != "nccl" or not shares_gpus(plan):
        return
    shared = next(name for name in plan.devices if plan.devices.count(name) > 1)
    if why := why_not(shared):
        raise ValueError(
            f"transport 'nccl' with several ranks on {shared} does not work on this machine: "
            f"{why}. Use transport 'auto' (gloo) or 'shared' (CUDA IPC), or a GPU for each rank"
        )


def why_not(device: str = "cuda:0") -> str:
    """Why two ranks on one GPU cannot talk over NCCL; empty if they can.

    Tried once per GPU, and again if the visible GPUs are others.
    """
    return _tried(device, os.environ.get("CUDA_VISIBLE_DEVICES"))


@functools.cache
def _tried(device: str, visible: str | None) -> str:
    return _try_two(device)


def _try_two(device: str) -> str:
    with tempfile.TemporaryDirectory(prefix="labkit-") as folder, contextlib.ExitStack() as stack:
        said = [stack.enter_context((Path(folder) / f"{rank}").open("w+")) for rank in range(2)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _TRY, str(rank), f"{folder}/store", device],
                env=os.environ | SHARING,
                stdout=subprocess.DEVNULL,
                stderr=said[rank],
            )
            for rank in range(2)
        ]
        try:
            ended = _first_to_fail(ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if ended is None:
            return f"two ranks had not exchanged a message after {_PATIENCE_S} s"
        said[ended].seek(0)
        return _reason(said[ended].read()) if ranks[ended].returncode else ""


def _first_to_fail(ranks: list[subprocess.Popen[bytes]]) -> int | None:
    """The rank that has failed, or any if all have ended well; None if that takes too long."""
    until_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until_s:
        codes = [rank.poll() for rank in ranks]
        # The other rank waits for one that has failed, and says nothing of the cause.
        if failed := [rank for rank, code in enumerate(codes) if code]:
            return failed[0]
        if None not in codes:
            return 0
        time.sleep(_LOOK_S)
    return None


def _reason(stderr: str) -> str:
    """The exception that a failed try ends with, without the C++ stack behind it."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line or line.startswith("Multiple Ranks")]
    return (named or lines or ["it ended without a message"])[-1].rstrip(".")
