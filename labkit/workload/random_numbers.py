"""Random numbers that depend on seed, epoch and sample alone, and not on what was drawn before.

So a sample is changed in the same way on whichever rank reads it, in whatever order, and also
after a run was resumed.
"""

import contextlib
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch


def sample_seed(seed: int, epoch: int | None, number: int) -> int:
    """The seed of sample ``number`` in an epoch, counted from 0; None for what is in no epoch."""
    parts = seed, 0 if epoch is None else epoch + 1, number
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


@contextlib.contextmanager
def seedable() -> Iterator[Callable[[int], None]]:
    """Give what seeds torch, ``random`` and NumPy; afterwards they go on as if it had not."""
    # The CPU generator alone: torch.random.fork_rng would look for GPUs.
    before = torch.default_generator.get_state(), random.getstate(), np.random.get_state()

    def seed_all(seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)

    try:
        yield seed_all
    finally:
        torch.default_generator.set_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of torch, ``random`` and NumPy from ``seed``; the states come back after."""
    with seedable() as seed_all:
        seed_all(seed)
        yield
