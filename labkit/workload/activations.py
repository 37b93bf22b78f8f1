"""What autograd keeps of a forward pass for the backward."""

import torch
from torch import Tensor, nn


class NoLeaf(torch.autograd.Function):
    """The leaf's memory and gradient in a tensor that is none: autograd lets layers that work in
    place, such as ``nn.ReLU(inplace=True)``, change no leaf."""

    @staticmethod
    def forward(ctx, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class HeldBytes(torch.autograd.graph.saved_tensors_hooks):
    """Count, inside ``with``, the bytes that forward passes keep for their backward.

    A storage counts once, however many operations keep it; parameters and buffers, which are there
    anyway, do not count. Storages stay alive as long as this object.

    Attributes:
        num_bytes: found so far.
    """

    def __init__(self, module: nn.Module):
        own = [t.untyped_storage() for t in (*module.parameters(), *module.buffers())]
        # With the storages themselves: the address of one that is freed may be another's next.
        self._seen = {storage.data_ptr(): storage for storage in own}
        self.num_bytes = 0
        super().__init__(self._pack, lambda tensor: tensor)

    def __enter__(self) -> "HeldBytes":
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen[storage.data_ptr()] = storage
            # Of a part of a batch its part; of an expanded tensor what is there.
            self.num_bytes += min(storage.nbytes(), tensor.nbytes)
        return tensor
