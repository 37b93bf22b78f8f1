"""Training that goes on after the loss of a rank, if torchrun starts the ranks again.

Usage: ``torchrun ... --max-restarts 1 lost_worker.py FOLDER LOST_AT``. The last rank is lost in
step LOST_AT of the first attempt.
"""

import os
import signal
import sys
from pathlib import Path

import torch

import labkit
from labkit.collectives import ring_all_reduce
from labkit.engine.comm.comm import Comm

STEPS, EVERY, SAMPLES = 24, 8, 32
# How fast the parameters follow the gradient.
RATE = 0.1


def train(comm: Comm, newest: Path, lost_at: int) -> None:
    """Fit a line to points, another batch per step; begin where the newest checkpoint is."""
    first, line = load(newest)
    if comm.rank == 0:
        print(f"process {os.getpid()} begins after step {first}", flush=True)
    for step in range(first + 1, STEPS + 1):
        if comm.rank == comm.world_size - 1 and step == lost_at and first == 0:
            os.kill(os.getpid(), signal.SIGKILL)  # as if the power had failed
        loss, gradient = loss_and_gradient(line, step, comm.rank)
        total = ring_all_reduce(comm, torch.cat([loss.view(1), gradient])) / comm.world_size
        line -= RATE * total[1:]
        if comm.rank == 0:
            print(f"step {step}, loss {total[0].item():.6f}", flush=True)
        if step % EVERY == 0 and comm.rank == 0:
            save(newest, step, line)


def load(newest: Path) -> tuple[int, torch.Tensor]:
    """The step of the newest checkpoint and its parameters [2]; 0 and zeros without one."""
    if not newest.exists():
        return 0, torch.zeros(2)
    checkpoint = torch.load(newest, weights_only=True)
    return checkpoint["step"], checkpoint["line"]


def save(newest: Path, step: int, line: torch.Tensor) -> None:
    """Write a checkpoint aside, then rename it: a reader finds the old one or the new one."""
    aside = newest.with_suffix(".new")
    torch.save({"step": step, "line": line}, aside)
    aside.replace(newest)


def loss_and_gradient(line: torch.Tensor, step: int, rank: int) -> tuple[torch.Tensor, ...]:
    """Loss and gradient of the batch that belongs to this step and rank, always the same."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(SAMPLES, generator=draw)
    y = 2 * x + 1 + 0.1 * torch.randn(SAMPLES, generator=draw)
    error = line[0] * x + line[1] - y
    return (error**2).mean(), 2 * torch.stack([(error * x).mean(), error.mean()])


if __name__ == "__main__":
    newest = Path(sys.argv[1]) / "newest.pt"
    lost_at = int(sys.argv[2])
    labkit.run(train, newest, lost_at, world_size=int(os.environ["WORLD_SIZE"]), device="cpu")
