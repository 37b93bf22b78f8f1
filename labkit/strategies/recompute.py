"""A forward that runs once more, for its backward, in the state in which it ran the first time.

Beside its input and parameters, a forward may read random numbers (Dropout) and buffers that it
changes (the vectors of spectral_norm, the running averages of BatchNorm). With others, the
gradient would be that of another forward than the one whose output was sent on.
"""

import contextlib
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class ForwardState:
    """A copy of the state of all generators of random numbers, and of the buffers of ``module``.

    The generators are those of torch, ``random`` and NumPy, not one that a layer has made for
    itself. Numbers that a layer counts in Python are not kept either.

    Attributes:
        buffers: copies, with the layer and the name of each.
    """

    def __init__(self, module: nn.Module, device: torch.device):
        # For each generator: the functions that get and set its state, and the state.
        self.generators: list[tuple[Any, Any, Any]] = [
            (torch.get_rng_state, torch.set_rng_state, torch.get_rng_state()),
            (random.getstate, random.setstate, random.getstate()),
            (np.random.get_state, np.random.set_state, np.random.get_state()),
        ]
        if device.type == "cuda":
            get_state = partial(torch.cuda.get_rng_state, device)
            set_state = partial(torch.cuda.set_rng_state, device=device)
            self.generators.append((get_state, set_state, get_state()))
        copies: dict[Tensor, Tensor] = {}  # one for all layers that share a buffer
        self.buffers: list[tuple[nn.Module, str, Tensor]] = []
        for layer in module.modules():
            for name, buffer in layer.named_buffers(recurse=False):
                copied = copies.setdefault(buffer, buffer.clone())
                self.buffers.append((layer, name, copied))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which the state is that of the copy; after it, it is as before.

        The layers have the copies meanwhile: what autograd keeps of them is never changed again.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        """Exchange the copies for the state that there is now."""
        for index, (get_state, set_state, state) in enumerate(self.generators):
            self.generators[index] = get_state, set_state, get_state()
            set_state(state)
        for index, (layer, name, copied) in enumerate(self.buffers):
            self.buffers[index] = layer, name, getattr(layer, name)
            setattr(layer, name, copied)
