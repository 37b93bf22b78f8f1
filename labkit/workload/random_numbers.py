"""Random numbers that depend on seed, epoch and sample alone, and not on what was drawn before.

So a sample is changed in the same way on whichever rank or worker process reads it, in whatever
order, and also after a run was resumed.
"""

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# A generator for NumPy while samples are read; to make one takes longer than to read a batch.
_for_numpy = np.random.MT19937(0)


def sample_seeds(seed: int, epoch: int, numbers: Tensor) -> list[int]:
    """A seed for each sample of an epoch.

    Args:
        seed: of the run.
        epoch: counted from 0; -1 for what is read outside of any.
        numbers: [n] int64, of the samples in their data set.
    """
    parts = ((seed, epoch + 1, number) for number in numbers.tolist())
    return [int(np.random.SeedSequence(part).generate_state(1)[0]) for part in parts]


def uniform(seeds: Iterable[int], count: int) -> Tensor:
    """``count`` random numbers for each seed: [n, count] float64, at least 0 and below 1."""
    generator = torch.Generator()
    found = [
        torch.rand(count, dtype=torch.float64, generator=generator.manual_seed(seed))
        for seed in seeds
    ]
    return torch.stack(found) if found else torch.empty(0, count, dtype=torch.float64)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of torch, ``random`` and NumPy from ``seed``; the states come back after."""
    with _kept_states(np.random.MT19937(0)):
        _seed_all(seed)
        yield


class SeededReader:
    """Reads samples of a learner's own Dataset, which may draw random numbers for each of them.

    Each sample is read with the random numbers of torch, ``random`` and NumPy that belong to it.
    Most Datasets draw nothing, and seeding takes longer than reading from memory: so a batch is
    read without seeds first, until one has drawn something.

    Args:
        read: numbers of samples -> these samples.
    """

    def __init__(self, read: Callable[[Sequence[int]], list[Any]]):
        self.read, self.draws = read, False

    def __call__(self, numbers: Sequence[int], seeds: Callable[[], Iterable[int]]) -> list[Any]:
        """The samples of ``numbers``; ``seeds`` gives the seed of each of them."""
        with _kept_states(_for_numpy) as rewind:
            if not self.draws:
                expected = _next_draws()
                rewind()
                items = self.read(numbers)
                if _next_draws() == expected:
                    return items
                self.draws = True
            items = []
            for number, seed in zip(numbers, seeds()):
                _seed_all(seed)
                items += self.read([number])
            return items


@contextlib.contextmanager
def _kept_states(for_numpy: Any) -> Iterator[Callable[[], None]]:
    """Let all generators go on afterwards as if nothing had been drawn.

    What it gives rewinds them to the beginning: NumPy's, which is ``for_numpy`` meanwhile, is
    then seeded.
    """
    # The CPU generator alone: torch.random.fork_rng would look for GPUs.
    before = torch.default_generator.get_state(), random.getstate()
    # Reading the state of NumPy's generator takes far longer than using another one.
    numpys_before = np.random.get_bit_generator()
    np.random.set_bit_generator(for_numpy)
    np.random.seed(0)

    def rewind() -> None:
        torch.default_generator.set_state(before[0])
        random.setstate(before[1])
        np.random.seed(0)

    try:
        yield rewind
    finally:
        rewind()
        np.random.set_bit_generator(numpys_before)


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _next_draws() -> tuple[float, ...]:
    return random.random(), torch.rand(()).item(), np.random.random_sample()
