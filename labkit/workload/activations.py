"""Activations in autograd: the bytes kept for backward, and the inputs of stages."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class NonLeaf(torch.autograd.Function):
    """An identity whose output is not a leaf: ``NonLeaf.apply(leaf)`` shares the leaf's memory.

    Autograd forbids in-place changes of a leaf, and a layer such as ``nn.ReLU(inplace=True)`` may
    be the first layer of a stage and get the stage's input, a leaf.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class HeldBytes:
    """Count, inside ``with``, the bytes that forward passes keep for their backward.

    A storage counts once, however many operations keep it. Storages stay alive as long as this
    object.

    Args:
        module: its parameters and buffers exist anyway and do not count.

    Attributes:
        num_bytes: counted so far.
    """

    def __init__(self, module: nn.Module):
        own = [t.untyped_storage() for t in (*module.parameters(), *module.buffers())]
        # Keep the storages themselves: the address of a freed one may be used again.
        self._seen = {storage.data_ptr(): storage for storage in own}
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self.num_bytes = 0

    def __enter__(self) -> "HeldBytes":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen[storage.data_ptr()] = storage
            # Of a slice of a batch count only the slice, of an expanded tensor only what exists.
            self.num_bytes += min(storage.nbytes(), tensor.nbytes)
        return tensor
