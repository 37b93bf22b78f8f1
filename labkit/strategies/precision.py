"""Mixed precision: a forward in 16 bits, and the scale of the loss that keeps small gradients.

Source: Micikevicius et al., "Mixed precision training" (2018), sections 3.1 and 3.2.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """The dtypes of a forward with ``amp`` (``bf16``, ``fp16``, or None for the model's own).

    Attributes:
        half: the 16-bit dtype of matrix products and convolutions, or None.
        scaler: the scale of the loss, which is 1 but in fp16.
    """

    def __init__(self, amp: str | None):
        self.half = _HALVES[amp] if amp else None
        self.scaler = LossScaler(amp == "fp16")

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return the context of a forward on ``device``; each thread needs its own."""
        return torch.autocast(device.type, self.half, enabled=self.half is not None)

    def crossing_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which an activation crosses a cut: float32 in the half dtype."""
        if self.half is not None and dtype == torch.float32:
            return self.half
        return dtype

    def wide(self, outputs: Tensor) -> Tensor:
        """Return outputs as float32: the sum of many losses needs more than the 8 bits of bf16."""
        return outputs.float() if outputs.dtype == self.half else outputs


class LossScaler:
    """The scale of the loss for fp16, by the rule of ``torch.amp.GradScaler``.

    An update whose gradients have overflowed halves it; 2000 without an overflow double it.
    PyTorch's looks at one process. This one hears of an overflow anywhere, so that all ranks have
    the same scale.
    """

    growth_interval = 2000

    def __init__(self, enabled: bool = True):
        self.enabled = enabled
        self.scale = 2.0**16 if enabled else 1.0
        self._growth_tracker = 0  # updates without an overflow since the scale has changed

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divide the gradients by the scale, in place."""
        if self.enabled and gradients:
            torch._foreach_mul_(gradients, 1 / self.scale)

    def update(self, overflowed: bool) -> None:
        """Adapt the scale to an update that was made, or skipped because it ``overflowed``."""
        self._growth_tracker += 1
        if overflowed:
            self.scale /= 2
            self._growth_tracker = 0
        elif self._growth_tracker == self.growth_interval:
            self.scale *= 2
            self._growth_tracker = 0

    def state_dict(self) -> dict[str, Any]:
        if not self.enabled:
            return {}
        return {"scale": self.scale, "_growth_tracker": self._growth_tracker}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``, also from one of ``torch.amp.GradScaler``."""
        if self.enabled:
            self.scale = float(state["scale"])
            self._growth_tracker = int(state["_growth_tracker"])
