"""A program with a fault, for two hosts: each rank stops by its own loss. Plain PyTorch.

Usage: ``torchrun ... early_stop.py SEED PORT``. PyTorch's debug server listens at PORT.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

STEPS = 12
DIMENSION = 1000
TIMEOUT_S = 5.0


def losses_of(seed: int, world_size: int) -> torch.Tensor:
    """[STEPS, P], by step and rank: one of them, in the middle, is as good as zero."""
    generator = torch.Generator().manual_seed(seed)
    losses = 0.2 + torch.rand(STEPS, world_size, generator=generator)
    step = torch.randint(3, STEPS - 3, (), generator=generator)
    losses[step, torch.randint(world_size, (), generator=generator)] = 0.01
    return losses


def train(losses: torch.Tensor) -> None:
    """Average a gradient per step; ``losses`` [STEPS] are this rank's own."""
    for step, loss in enumerate(losses.tolist()):
        if loss < 0.1:
            break  # good enough: stop early
        gradient = torch.full((DIMENSION,), loss)
        dist.all_reduce(gradient)
        print(f"step {step}, loss {loss:.2f}", flush=True)
    dist.barrier()


def main() -> None:
    from torch.distributed.debug import start_debug_server

    seed, port = map(int, sys.argv[1:])
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    start_debug_server(port)
    train(losses_of(seed, dist.get_world_size())[:, dist.get_rank()])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
