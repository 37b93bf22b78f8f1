"""Random numbers that depend on seed, epoch and sample alone, and not on what was drawn before.

So a sample is changed in the same way on whichever rank or worker process reads it, in whatever
order, and also after a run was resumed.
"""

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014); its
# unsigned 64-bit constants as the signed numbers that torch has.
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def sample_keys(seed: int, epoch: int, numbers: Tensor) -> Tensor:
    """A random number of 64 bits for each sample in an epoch: int64, in the shape of ``numbers``.

    Args:
        seed: of the run, 0 or more.
        epoch: counted from 0.
        numbers: int64, of the samples in their data set.
    """
    of_epoch = _mixed(_mixed(_times_golden(torch.tensor(seed))) + _times_golden(epoch + 1))
    return _mixed(of_epoch + _times_golden(numbers + 1))


def draw(keys: Tensor, which: int, below: int) -> Tensor:
    """Random number ``which`` of each sample: int64, 0 .. below - 1, in the shape of ``keys``."""
    # Of 31 bits a remainder is as good as uniform for the few pixels that it is used for.
    return _shifted(_mixed(keys + _times_golden(which + 1)), 33) % below


def _times_golden(number: Any) -> Any:
    """The product modulo 2^64, as signed; of an integer, or of a tensor, which wraps around."""
    if isinstance(number, Tensor):
        return number * (_GOLDEN - 2**64)
    return (number * _GOLDEN + 2**63) % 2**64 - 2**63


def _mixed(value: Tensor) -> Tensor:
    for bits, factor in _FACTORS:
        value = (value ^ _shifted(value, bits)) * factor
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, bits: int) -> Tensor:
    """To the right; torch repeats the sign, which the mask takes away."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


@contextlib.contextmanager
def seeded(seed: int, numpys: Any = None) -> Iterator[None]:
    """Random numbers of torch, ``random`` and NumPy from ``seed``; the states come back after.

    Args:
        seed: 0 or more.
        numpys: a generator for NumPy to use meanwhile; by default a new one.
    """
    numpy = sys.modules.get("numpy")
    before = random.getstate()
    # The CPU generator alone: torch.manual_seed would initialise CUDA.
    with torch.random.fork_rng(devices=[]):
        if numpy:
            # Reading the state of a generator takes far longer than using another one.
            numpys_before = numpy.random.get_bit_generator()
            numpy.random.set_bit_generator(numpys or numpy.random.MT19937(0))
        try:
            _seed_all(seed)
            yield
        finally:
            random.setstate(before)
            if numpy:
                numpy.random.set_bit_generator(numpys_before)


def read_seeded(
    read: Callable[[Sequence[int]], list[Any]], numbers: Sequence[int], seeds: Sequence[int]
) -> list[Any]:
    """Samples of a learner's own Dataset, which may draw random numbers for each of them.

    Each sample is read with the random numbers of torch, ``random`` and NumPy that belong to it.
    All are read at once first, since most Datasets draw nothing, and seeding takes longer than
    reading from memory.

    Args:
        read: numbers of samples -> these samples.
        numbers: of the samples.
        seeds: of each of them.
    """
    with seeded(0, _for_numpy()):
        expected = _next_draws()
        _seed_all(0)
        items = read(numbers)
        if _next_draws() == expected:
            return items
        items = []
        for number, seed in zip(numbers, seeds):
            _seed_all(seed)
            items += read([number])
        return items


@functools.cache
def _for_numpy() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy and numpy.random.MT19937(0)


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def _next_draws() -> tuple[float, ...]:
    numpy = sys.modules.get("numpy")
    return random.random(), torch.rand(()).item(), numpy.random.random_sample() if numpy else 0.0
