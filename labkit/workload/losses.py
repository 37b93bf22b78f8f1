"""Losses as sums over samples, which shares of a batch can add up.

A rank computes the gradient of the sum over its share, and the sum of all ranks' gradients is
divided by the number of samples in the global batch: the mean over the batch, whatever the sizes
of the shares. (A mean of the shares' means would weight the samples of small shares more.)
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from labkit.workload.samples import is_integer

# (outputs [n, ...], targets [n, ...]) -> a scalar.
Loss = Callable[[Tensor, Tensor], Tensor]
# Of torch.nn.functional, the mean over samples.
LOSSES = (
    *("cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss"),
    "binary_cross_entropy_with_logits",
)


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


def predicts_classes(outputs: Tensor, targets: Tensor) -> bool:
    """Whether targets [n, ...] are classes, and outputs [n, K, ...] tell K > 1 classes apart."""
    if outputs.ndim < 2 or targets.shape != outputs.shape[:1] + outputs.shape[2:]:
        return False
    return is_integer(targets) and outputs.shape[1] > 1


class CountedLoss:
    """A loss that also counts the right predictions among the samples that it is called with.

    So the accuracy on the training samples needs no second forward. The count stays on the
    outputs' device, which the host does not wait for.
    """

    def __init__(self, loss: Loss):
        self.loss = loss
        self._right: Tensor | int = 0
        self._judged = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if predicts_classes(outputs, targets):
            with torch.no_grad():
                self._right += (outputs.argmax(dim=1) == targets).sum()
            self._judged += targets.numel()
        return self.loss(outputs, targets)

    def take(self) -> tuple[Tensor | int, int]:
        """Right predictions since the last call, a scalar, and of how many samples."""
        taken = self._right, self._judged
        self._right, self._judged = 0, 0
        return taken
