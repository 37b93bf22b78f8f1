"""Losses as sums over samples, which shares of a batch can add up.

A rank computes the gradient of the sum over its share, and the sum of all ranks' gradients is
divided by the number of samples in the global batch: the mean over the batch, whatever the sizes
of the shares. (A mean of the shares' means would weight the samples of small shares more.)
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

# (outputs [n, ...], targets [n, ...]) -> a scalar.
Loss = Callable[[Tensor, Tensor], Tensor]

_NAMED: dict[str, Loss] = {
    loss.__name__: loss
    for loss in (
        functional.cross_entropy,
        functional.mse_loss,
        functional.l1_loss,
        functional.smooth_l1_loss,
        functional.binary_cross_entropy_with_logits,
    )
}
LOSSES = tuple(_NAMED)


def sum_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The sum over samples of the cross-entropy of logits [n, classes] with classes [n]."""
    return functional.cross_entropy(outputs, targets, reduction="sum")


@dataclass(frozen=True)
class SumOfMean:
    """The sum over samples, from a loss that is the mean over samples."""

    mean: Loss

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if not len(targets):
            # The mean of nothing is NaN; this zero has a gradient, for the hooks of DDP.
            return outputs.sum() * 0
        return self.mean(outputs, targets) * len(targets)


def named_loss(name: str) -> Loss:
    """One of ``LOSSES``, the mean over samples, as in ``torch.nn.functional``."""
    return _NAMED[name]
