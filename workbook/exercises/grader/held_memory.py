"""The memory that a function's tensors hold while it runs."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class PeakBytes(TorchDispatchMode):
    """Count, inside ``with``, the bytes of new tensors; ``num_bytes`` is the most at one time.

    A storage counts as long as a tensor uses it. Views, tensors from outside, and arrays that are
    not PyTorch's do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = self._held = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: leaving it out of compiling would import PyTorch's compiler (seconds)."""
        return False

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # A result has the storage of none of the tensors in a list.
        known = set()
        for arg in (*args, *(kwargs or {}).values()):
            if isinstance(arg, Tensor):
                known.add(arg.untyped_storage()._cdata)
        results = result if isinstance(result, (tuple, list)) else [result]
        for tensor in results:
            if not isinstance(tensor, Tensor) or tensor.untyped_storage()._cdata in known:
                continue
            storage = tensor.untyped_storage()
            known.add(storage._cdata)
            self._add(storage.nbytes())
            weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, num_bytes: int) -> None:
        self._held += num_bytes
        self.num_bytes = max(self.num_bytes, self._held)
