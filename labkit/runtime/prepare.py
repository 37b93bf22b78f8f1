"""Prepare a rank's process for the learner's function: random numbers and precision."""

import random
import warnings
from typing import Any

import numpy as np
import torch


def seed_random_numbers(rank: int) -> None:
    """Seed ``random``, NumPy's global generator and torch's from ``rank``.

    Each rank draws other numbers, and the same from run to run. The seeds come from NumPy's
    ``SeedSequence``: with ``rank`` itself as the seed, a rank would draw the same numbers as a
    caller that has seeded with 0 or 1.
    """
    for_python, for_numpy, for_torch = np.random.SeedSequence(rank).generate_state(3)
    random.seed(int(for_python))
    np.random.seed(int(for_numpy))
    torch.manual_seed(int(for_torch))


def allow_tf32(allowed: bool) -> None:
    """Whether this process's GPUs may round the factors of float32 products to TF32's 10 bits.

    By default cuDNN's convolutions do, and matrix products do not; in NVIDIA's containers both do
    (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1). Runs that are compared need all 23 bits.
    """
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    # PyTorch has an old switch and a new one, and reading the old one is an error if they differ.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions warn of the old one
        cuda.matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    for operation in (cuda.matmul, cudnn.conv, cudnn.rnn):
        operation.fp32_precision = "tf32" if allowed else "ieee"
