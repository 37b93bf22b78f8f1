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

# splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
# By NumPy, since torch has no unsigned 64-bit arithmetic.
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))

# A generator for NumPy while samples are read; to make one takes longer than to read a batch.
_for_numpy = np.random.MT19937(0)


def sample_keys(seed: int, epoch: int, numbers: Tensor) -> np.ndarray:
    """A random number for each sample in an epoch: [n] uint64.

    Args:
        seed: of the run.
        epoch: counted from 0.
        numbers: [n] int64, of the samples in their data set.
    """
    of_run = _mixed(np.array([seed * _GOLDEN % 2**64], dtype=np.uint64))
    of_epoch = _mixed(of_run + _nth(epoch))
    return _mixed(of_epoch + (numbers.numpy().astype(np.uint64) + 1) * np.uint64(_GOLDEN))


def draw(keys: np.ndarray, which: int, below: int) -> Tensor:
    """Random number ``which`` of each sample: [n] int64, 0 .. below - 1."""
    # Of 32 bits a remainder is as good as uniform for the few pixels that it is used for.
    return torch.from_numpy((_mixed(keys + _nth(which)) >> 32).astype(np.int64) % below)


def _nth(number: int) -> np.uint64:
    return np.uint64((number + 1) * _GOLDEN % 2**64)


def _mixed(value: np.ndarray) -> np.ndarray:
    for bits, factor in _FACTORS:
        value = (value ^ (value >> bits)) * factor
    return value ^ (value >> 31)


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
