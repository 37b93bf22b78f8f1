"""``early_stop.py`` with labkit. Usage: ``torchrun ... early_stop_labkit.py SEED``."""

import sys

import torch

import labkit
from labkit.collectives import ring_all_reduce
from labkit.comm.comm import Comm
from workbook.exercises.programs.early_stop import DIMENSION, losses_of


def train(comm: Comm, seed: int) -> None:
    """Average a gradient per step, until the loss of this rank is good enough."""
    for loss in losses_of(seed, comm.world_size)[:, comm.rank].tolist():
        if loss < 0.1:
            break
        gradient = torch.full((DIMENSION,), loss)
        ring_all_reduce(comm, gradient)
    comm.barrier()


if __name__ == "__main__":
    labkit.run(train, int(sys.argv[1]), world_size=4, device="cpu")
