"""The memory that a function's tensors hold while it runs."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode


class PeakBytes(TorchDispatchMode):
    """Count, inside ``with``, the bytes of new tensors, and the most that exist at one time.

    A storage counts as long as a tensor uses it. Views, tensors from outside, and arrays that are
    not PyTorch's do not count.

    Attributes:
        num_bytes: the most so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self._held = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """To leave it out of compiling, PyTorch would import its compiler: seconds per rank."""
        return False

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                given.add(storage._cdata)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, num_bytes: int) -> None:
        self._held += num_bytes
        self.num_bytes = max(self.num_bytes, self._held)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
