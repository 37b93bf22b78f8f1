"""The memory that a function's tensors hold while it runs."""

import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Of Python's own objects: what a few calls of comm leave behind.
_SMALL_BYTES = 48 * 2**10


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


class HeldBytes:
    """Count, inside ``with``, the most bytes of tensors, arrays and other objects at one time.

    Attributes:
        num_bytes: the most that new tensors held, and the most that all else did, if that is more
            than what a few calls of comm leave behind.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._tensors = PeakBytes()

    def __enter__(self) -> "HeldBytes":
        tracemalloc.start()
        self._tensors.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tensors.__exit__(*error)
        others = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        self.num_bytes = self._tensors.num_bytes + (others if others > _SMALL_BYTES else 0)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
