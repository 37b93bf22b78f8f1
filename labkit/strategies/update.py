"""Mixed precision, and the end of a training step in all techniques: unscale, clip, step.

With ``amp``, matrix products and convolutions run in 16 bits; parameters and updates have 32. In
forward, ``torch.autocast`` runs them in the half dtype, and their gradients have that dtype, too.
In fp16, gradients below 6e-8 would become zero, so the loss is multiplied by a scale first.

When the gradients of the mean loss are complete,

1. **unscale**: with fp16, they are divided by the scale of the loss. If one of them is not finite,
   the update is skipped, and the scale is halved: see ``LossScaler``.
2. **clip**: if the norm of all gradients together exceeds ``clip_norm``, all are multiplied by
   ``clip_norm`` / (norm + 1e-6), as ``torch.nn.utils.clip_grad_norm_`` does.
3. **step**: the optimizer changes the parameters.

Ranks that have all gradients, equal to the bit, all do the same without a message. Where each rank
has some of them, the ranks add up the squares of their norms; a gradient that is not finite makes
the sum not finite.

Sources: Pascanu et al., "On the difficulty of training recurrent neural networks" (2013), section
3.2; Micikevicius et al., "Mixed precision training" (2018), sections 3.1 and 3.2.
"""

import contextlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from labkit.comm.comm import Comm

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


class Update:
    """The update of the parameters that one rank has; call it when their gradients are complete.

    A missing gradient counts as zeros, as in a sum over ranks: an optimizer would leave out its
    parameter, but changes one whose gradient is zero by its momentum or weight decay, and every
    technique has to do the same.

    Args:
        optimizer: of the parameters on this rank; None if it has none, and only learns from the
            others whether they have made the update.
        parameters: those on this rank; the frozen ones among them are left out.
        clip_norm: the largest norm of the gradients of all ranks together; None for any.
        scaler: of the loss.
        comm, ranks: where the gradients are divided among these ranks; this one is one of them.
        counted_elsewhere: parameters here whose norm another rank counts.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        parameters: Iterable[nn.Parameter],
        *,
        clip_norm: float | None = None,
        scaler: LossScaler | None = None,
        comm: Comm | None = None,
        ranks: Sequence[int] = (),
        counted_elsewhere: Sequence[nn.Parameter] = (),
    ):
        self.optimizer, self.parameters = optimizer, list(parameters)
        self.clip_norm, self.scaler = clip_norm, scaler or LossScaler(enabled=False)
        self.comm, self.ranks = (comm, ranks) if len(ranks) > 1 else (None, ())
        self._elsewhere = {id(parameter) for parameter in counted_elsewhere}

    @torch.no_grad()
    def __call__(self, scale: float | None = None) -> bool:
        """Make the update, or skip it after an overflow; returns whether it was made.

        ``scale`` is that of the gradients, if it is not the scaler's present one.
        """
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in trained if p.grad is not None]
        self.scaler.unscale(gradients, scale)
        overflowed, device = False, self.comm.device if self.comm else None
        square = torch.zeros((), dtype=torch.float64, device=device)
        if self.clip_norm is not None or self.scaler.is_enabled():
            counted = [g for p, g in zip(trained, gradients) if id(p) not in self._elsewhere]
            if counted := [gradient for gradient in counted if gradient.numel()]:
                square = get_total_norm(counted).double().square()
            if self.comm:
                square = sum_over(self.comm, self.ranks, square)
            overflowed = self.scaler.is_enabled() and not square.isfinite()
        self.scaler.update(overflowed, scale)
        if overflowed:
            return False
        if self.clip_norm is not None:
            clip_grads_with_norm_(self.parameters, self.clip_norm, square.sqrt())
        if self.optimizer:
            self.optimizer.step()
        return True


def sum_over(comm: Comm, ranks: Sequence[int], tensor: Tensor) -> Tensor:
    """Sum a tensor over some ranks, in place: on the first of them, which sends it to the others.

    A ring all-reduce needs all ranks of the Comm. Messages: one from each rank, and one to each
    but the first from the first.
    """
    first, *others = ranks
    if comm.rank != first:
        comm.send(tensor, first)
        return comm.recv(tensor, first)
    for other in others:
        comm.recv_add(tensor, other)
    for other in others:
        comm.send(tensor, other)
    return tensor
