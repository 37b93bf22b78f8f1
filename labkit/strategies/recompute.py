"""A forward that runs once more, for its backward, in the state in which it ran the first time.

Beside its input and parameters, a forward may read random numbers (Dropout) and buffers that it
changes (the vectors of spectral_norm, the running averages of BatchNorm). With others, the
gradient would be that of another forward than the one whose output was sent on.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class ForwardState:
    """The generators of torch, ``random`` and NumPy, and the buffers of ``module``, as of now.

    (Not a generator that a layer has made for itself, nor numbers that it counts in Python.)

    Attributes:
        buffers: copies, with the layer and the name of each.
    """

    def __init__(self, module: nn.Module, device: torch.device):
        self.device, self.generators = device, generator_states(device)
        copies: dict[Tensor, Tensor] = {}  # one for all layers that share a buffer
        self.buffers: list[tuple[nn.Module, str, Tensor]] = []
        for layer in module.modules():
            for name, buffer in layer.named_buffers(recurse=False):
                copy = copies.setdefault(buffer, buffer.clone())
                self.buffers.append((layer, name, copy))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which all is as it was; after it all is as before it.

        The layers have the copies meanwhile: what autograd keeps of them is never changed again.
        """
        after = generator_states(self.device)
        buffers = [(layer, name, getattr(layer, name)) for layer, name, _ in self.buffers]
        try:
            restore(self.generators)
            for layer, name, copy in self.buffers:
                setattr(layer, name, copy)
            yield
        finally:
            restore(after)
            for layer, name, buffer in buffers:
                setattr(layer, name, buffer)


def generator_states(device: torch.device) -> list[tuple[Callable[[Any], object], Any]]:
    """The states of all generators that a forward on ``device`` uses, each after what sets it."""
    states: list[tuple[Callable[[Any], object], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),
    ]
    if device.type == "cuda":
        set_on_gpu = partial(torch.cuda.set_rng_state, device=device)
        states.append((set_on_gpu, torch.cuda.get_rng_state(device)))
    return states


def restore(states: list[tuple[Callable[[Any], object], Any]]) -> None:
    for set_state, state in states:
        set_state(state)
