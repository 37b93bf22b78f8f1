"""The bytes that the stages of a rank keep for their backwards."""

import contextlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from labkit.workload.layers import HeldBytes

# A stage's number, and that of a micro-batch.
Key = tuple[int, int]


class ActivationMeter:
    """Measures ``peak_bytes``, the most bytes that a rank keeps for backwards at one time.

    The parameters and buffers of ``module`` do not count. When ``is_on`` is False, it costs
    nothing, and ``peak_bytes`` stays.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self.is_on = True
        self.peak_bytes = 0
        self._counters: dict[Key, Any] = {}

    def counting(self) -> Any:
        """A context in which a ``HeldBytes`` counts what forwards keep; None if it is off."""
        if self.is_on:
            return HeldBytes(self.module)
        return contextlib.nullcontext()

    def add(self, key: Key, counter: Any) -> None:
        """Count the ``num_bytes`` of a ``HeldBytes`` or ``LayerGraphs`` until ``remove``."""
        if self.is_on:
            self._counters[key] = counter

    def add_tensors(self, key: Key, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were kept without a graph until ``remove``."""
        counter = HeldBytes(self.module)
        for tensor in tensors:
            counter.keep(tensor)
        self.add(key, counter)

    def remove(self, key: Key) -> None:
        """Stop counting what a backward has freed."""
        self._counters.pop(key, None)

    def note_peak(self) -> None:
        """Compare what is kept now with the peak so far."""
        if self.is_on:
            live_bytes = sum(counter.num_bytes for counter in self._counters.values())
            self.peak_bytes = max(self.peak_bytes, live_bytes)

    def clear(self) -> None:
        """Forget what a step that an exception has ended still kept."""
        self._counters.clear()
