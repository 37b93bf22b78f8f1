"""Prepare a rank's process for the learner's function: random numbers, precision, no keyboard."""

import io
import os
import random
import sys
import warnings
from typing import Any, Never

import numpy as np
import torch

_ASK_BEFORE = (
    "ask before the run, and give the answer to the ranks as an argument: "
    "labkit.run(fn, answer, world_size=...)"
)
_PRINT = (
    "print what you want to see (print(tensor.shape) shows the rank, too), or return it and look "
    "at it in the notebook: result.values[rank]"
)


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


def take_keyboard_away() -> None:
    """Let ``input()`` and debuggers raise an error that says what to do instead.

    Otherwise they would find an empty input, and their errors (EOFError) say nothing of ranks; or
    read the caller's terminal, which stops a process in the background.
    """
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.stdin = _NoKeyboard()
    sys.breakpointhook = _refuse_breakpoint


class _NoKeyboard(io.TextIOBase):
    """The ``sys.stdin`` of a rank: input() and pdb read from it."""

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 0

    def read(self, *args: Any) -> Never:
        _refuse("input()", _ASK_BEFORE)

    readline = read


def _refuse_breakpoint(*args: Any, **options: Any) -> None:
    if os.environ.get("PYTHONBREAKPOINT") != "0":
        _refuse("breakpoint()", _PRINT)


def _refuse(what: str, instead: str) -> Never:
    raise RuntimeError(
        f"{what} reads the keyboard, and a rank has none: it is one of several processes. Next "
        f"step: {instead}"
    )
