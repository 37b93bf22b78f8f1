"""The end of a training step in all techniques: unscale, clip, step.

When the gradients of the mean loss are complete,

1. **unscale**: with fp16, they are divided by the scale of the loss. If one of them is not finite,
   the update is skipped, and the scale is halved: see ``LossScaler``.
2. **clip**: if the norm of all gradients together exceeds ``clip_norm``, all are multiplied by
   ``clip_norm`` / (norm + 1e-6), as ``torch.nn.utils.clip_grad_norm_`` does. A norm that is not
   finite makes them NaN or zero, as there.
3. **step**: the optimizer changes the parameters.

Ranks that have all gradients, equal to the bit, all do the same without a message. Where each rank
has some of them, the decisions need all: ``Parts``.

Sources: Pascanu et al., "On the difficulty of training recurrent neural networks" (2013), section
3.2; Micikevicius et al., "Mixed precision training" (2018), section 3.2.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from labkit.comm.comm import Comm
from labkit.strategies.mixed_precision import LossScaler


@dataclass(frozen=True)
class Parts:
    """How ranks with different parts of the gradients find out about all of them.

    The norms of all gradients form one short vector, in which each rank fills in those of its own
    gradients and leaves zeros in all other places. The sum of the ranks' vectors then has all
    norms, in the order of one device, and the same bits on all ranks. With fp16 one more number
    counts the ranks that have an overflow.

    Attributes:
        comm: this rank's Comm.
        ranks: those that take part, this rank among them.
        places: by gradient of this rank, its place in the vector; None if another rank has the
            same gradient (a tied parameter) and counts it.
        count: the number of places.
        dtype: of the vector, the widest of the gradients' dtypes.
    """

    comm: Comm
    ranks: Sequence[int]
    places: Sequence[int | None]
    count: int
    dtype: torch.dtype

    def norms(self, gradients: Sequence[Tensor]) -> Tensor:
        """The vector with the norms of this rank's gradients, [count]."""
        norms = self.zeros(self.count)
        for place, gradient in zip(self.places, gradients, strict=True):
            if place is not None:
                norms[place] = get_total_norm([gradient])
        return norms

    def zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=self.dtype, device=self.comm.device)


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
        parts: if other ranks have other gradients.
        sizes: of the model's parameters on this rank, if they form one flat parameter; so the
            norm is computed from those of the model's gradients, as on one device.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        parameters: Iterable[nn.Parameter],
        *,
        clip_norm: float | None = None,
        scaler: LossScaler | None = None,
        parts: Parts | None = None,
        sizes: Sequence[int] | None = None,
    ):
        self.optimizer, self.parameters = optimizer, list(parameters)
        self.clip_norm, self.scaler = clip_norm, scaler or LossScaler(enabled=False)
        self.parts, self.sizes = parts, sizes

    @torch.no_grad()
    def __call__(self, scale: float | None = None) -> bool:
        """Make the update, or skip it after an overflow.

        Args:
            scale: with which the gradients were computed, if that is not the scaler's present one.

        Returns:
            Whether it was made.
        """
        gradients = self._gradients()
        self.scaler.unscale(gradients, scale)
        norm, overflowed = self._over_all_ranks(gradients)
        self.scaler.update(overflowed, scale)
        if overflowed:
            return False
        if self.clip_norm is not None:
            clip_grads_with_norm_(self.parameters, self.clip_norm, norm)
        if self.optimizer:
            self.optimizer.step()
        return True

    def _gradients(self) -> list[Tensor]:
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        if self.sizes is None or not gradients:
            return gradients
        return list(gradients[0].split(list(self.sizes)))

    def _over_all_ranks(self, gradients: list[Tensor]) -> tuple[Tensor, bool]:
        """The norm of all gradients, and whether one is not finite; only what is needed."""
        clips, may_overflow = self.clip_norm is not None, self.scaler.is_enabled()
        if self.parts is None or not (clips or may_overflow):
            norm = get_total_norm(gradients) if clips else torch.zeros(())
            return norm, may_overflow and not _are_finite(gradients)
        numbers = self.parts.norms(gradients) if clips else self.parts.zeros(0)
        if may_overflow:
            numbers = torch.cat([numbers, numbers.new_tensor([not _are_finite(gradients)])])
        sum_over(self.parts.comm, self.parts.ranks, numbers)
        norms, overflows = numbers.split([len(numbers) - may_overflow, int(may_overflow)])
        return torch.linalg.vector_norm(norms), may_overflow and bool(overflows)


def _are_finite(gradients: list[Tensor]) -> bool:
    # The largest magnitude is finite only if all are; without elements there is none.
    some = [gradient for gradient in gradients if gradient.numel()]
    return not some or bool(get_total_norm(some, math.inf).isfinite())


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
