"""Mixed precision: products in 16 bits, parameters and their updates in 32.

In forward, ``torch.autocast`` runs matrix products and convolutions in the half dtype, and their
gradients have that dtype, too. In fp16, gradients below 6e-8 would become zero, so the loss is
multiplied by a scale first, and the gradients are divided by it before the update.

Source: Micikevicius et al., "Mixed precision training" (2018), sections 3.1 and 3.2.
"""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MOST = torch.finfo(torch.float32).max


class LossScaler:
    """The scale of the loss for fp16, by the rule of ``torch.amp.GradScaler``.

    An update whose gradients have overflowed is skipped, and the scale is halved; it is doubled
    after 2000 updates without an overflow. PyTorch's looks at the gradients of one process. This
    one is told of an overflow anywhere, so that all ranks have the same scale.
    """

    growth_interval = 2000

    def __init__(self, enabled: bool = True):
        self._enabled, self._scale, self._good = enabled, 2.0**16 if enabled else 1.0, 0

    def is_enabled(self) -> bool:
        return self._enabled

    def get_scale(self) -> float:
        return self._scale

    def set_scale(self, scale: float) -> None:
        """Take the scale that a server has decided on."""
        self._scale = scale

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self._scale if self._enabled else loss

    def unscale(self, gradients: list[Tensor], scale: float | None = None) -> None:
        """Divide the gradients, in place, by the scale or by another ``scale``."""
        if self._enabled and gradients:
            torch._foreach_mul_(gradients, 1 / (scale or self._scale))

    def update(self, overflowed: bool, scale: float | None = None) -> None:
        """Adapt the scale to an update that was made, or skipped because it ``overflowed``."""
        # With another scale, of an asynchronous worker, it says nothing about the present one.
        if not self._enabled or scale not in (None, self._scale):
            return
        self._good = 0 if overflowed else self._good + 1
        if overflowed:
            self._scale /= 2
        elif self._good == self.growth_interval:
            self._good = 0
            self._scale *= 2 if 2 * self._scale <= _MOST else 1

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._scale, "_growth_tracker": self._good} if self._enabled else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict``, also from one of ``torch.amp.GradScaler``."""
        if self._enabled:
            self._scale, self._good = float(state["scale"]), int(state["_growth_tracker"])


class MixedPrecision:
    """What a technique does differently with ``amp``, ``bf16`` or ``fp16``.

    ``half`` is the dtype of products in forward, ``scaler`` is of the loss, enabled with fp16.
    """

    def __init__(self, amp: str | None = None):
        self.half = _HALVES[amp] if amp else None
        self.scaler = LossScaler(enabled=amp == "fp16")

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """The context of a forward on ``device``; each thread needs its own."""
        return torch.autocast(device.type, self.half) if self.half else contextlib.nullcontext()

    def wide(self, outputs: Tensor) -> Tensor:
        """Outputs as float32: the sum of many losses needs more than the 8 bits of bf16."""
        return outputs.float() if outputs.dtype == self.half else outputs
