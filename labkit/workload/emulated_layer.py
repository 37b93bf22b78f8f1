"""An emulated layer: a stage of a model that takes a known time, whatever machine it runs on."""

import time
from typing import Any

import torch
from torch import Tensor, nn


class EmulatedLayer(nn.Module):
    """Takes time as a device of its own would, asleep: more of them than cores can work at once.

    A forward takes ``call_s`` + n x ``sample_s`` seconds, a backward twice as long, as it does in
    most layers. In between it multiplies by a trained number, so that it can be cut, trained and
    compared like any other layer.

    Args:
        sample_s: seconds per sample of a forward.
        call_s: seconds per call of a forward, whatever its size (a kernel's launch, for example).

    Shapes: [n, ...] to [n, ...].
    """

    def __init__(self, sample_s: float, call_s: float = 0.0):
        super().__init__()
        self.sample_s, self.call_s = sample_s, call_s
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, value: Tensor) -> Tensor:
        # Without memory (the meta device) only shapes are asked for.
        seconds = 0.0 if value.is_meta else self.call_s + len(value) * self.sample_s
        return _Asleep.apply(value * self.scale, seconds)

    def extra_repr(self) -> str:
        return f"sample_s={self.sample_s}, call_s={self.call_s}"


class _Asleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None
