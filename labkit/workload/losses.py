"""Losses as a sum and a weight, which shares of a batch can add up.

The loss of a batch is the sum of its terms, divided by their weight: the number of samples, or of
the targets that are not ignored, or the sum of their classes' weights. A rank computes the
gradient of the sum over its share; the sum of all ranks' gradients is divided by the weight of the
global batch, whatever the sizes of the shares. (A mean of the shares' means would weight the terms
of light shares more.)
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from labkit.workload.samples import Samples, is_integer

# (outputs [n, ...], targets [n, ...]) -> a scalar; a user's may return more, see ``ShareLoss``.
Loss = Callable[[Tensor, Tensor], Any]
# Of torch.nn.functional, the mean over samples.
LOSSES = (
    *("cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss"),
    "binary_cross_entropy_with_logits",
)
_MODULES = {nn.CrossEntropyLoss: functional.cross_entropy, nn.NLLLoss: functional.nll_loss}


class Weighing(enum.Enum):
    """The divisor of the sum of the losses."""

    SAMPLES = enum.auto()  # their number
    DATA = enum.auto()  # a weight that depends on the data, which ranks have to add up
    NOTHING = enum.auto()  # the loss is a sum by its option ``reduction``


def sum_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The sum over samples of the cross-entropy of logits [n, classes] with classes [n]."""
    return functional.cross_entropy(outputs, targets, reduction="sum")


class ClassOptions(NamedTuple):
    """The options of ``cross_entropy`` and ``nll_loss``; ``weight`` [classes] is by class."""

    weight: Tensor | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: str = "mean"

    def weights(self, targets: Tensor) -> Tensor:
        """The weight of each target, float64; PyTorch divides a sum by theirs to get the mean."""
        counts = targets != self.ignore_index
        if self.weight is None:
            return counts.double()
        by_class = self.weight.to(targets.device, torch.float64)
        return by_class[targets.where(counts, 0)] * counts


def named_function(loss: Loss) -> tuple[Any, dict[str, Any]]:
    """The function behind a loss and its options: a partial's, or a module's of ``torch.nn``."""
    if isinstance(loss, partial) and not loss.args:
        return loss.func, dict(loss.keywords)
    if type(loss) in _MODULES:
        names = [name for name in ClassOptions._fields if hasattr(loss, name)]
        return _MODULES[type(loss)], {name: getattr(loss, name) for name in names}
    return loss, {}


@dataclass(frozen=True)
class ShareLoss:
    """(outputs, targets) of a share -> the sum of the loss's terms, and their weight.

    ``loss`` returns the pair itself; or one loss per sample, [n, ...]; or a scalar, the mean over
    samples. PyTorch's ``cross_entropy`` and ``nll_loss`` may ignore targets and weigh classes.

    Attributes:
        weighing: the divisor of the gradient of a sum. (Whether a loss returns pairs shows when
            it is called.)
        classes: the options of PyTorch's losses of classes.
    """

    loss: Loss
    weighing: Weighing = Weighing.SAMPLES
    classes: ClassOptions | None = None

    @classmethod
    def of(cls, loss: Loss, targets: Tensor | None = None, *parts: Samples | None) -> "ShareLoss":
        """Read a loss's options; ``targets`` are a few, ``parts`` are all that it may meet."""
        function, options = named_function(loss)
        reduction = options.get("reduction", getattr(loss, "reduction", "mean"))
        weighing = Weighing.NOTHING if reduction == "sum" else Weighing.SAMPLES
        of_classes = targets is None or is_integer(targets)
        if function not in _MODULES.values() or not of_classes:
            return cls(loss, weighing)
        if not options.keys() <= set(ClassOptions._fields):
            return cls(loss, weighing)
        classes = ClassOptions(**options)
        ignores = any(part and _may_hold(part, classes.ignore_index) for part in parts)
        if reduction == "mean" and (classes.weight is not None or ignores):
            weighing = Weighing.DATA
        return cls(loss, weighing, classes)

    @property
    def ignore_index(self) -> int | None:
        """The target that does not count, if that is known."""
        if self.classes is not None:
            return self.classes.ignore_index
        return getattr(self.loss, "ignore_index", None)

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | float]:
        count = len(targets)
        if not count:
            # The mean of nothing is NaN; this zero has a gradient, for the hooks of DDP.
            return outputs.sum() * 0, 0
        function, options = named_function(self.loss)
        if self.classes is None:
            returned = self.loss(outputs, targets)
        else:
            if self.classes.weight is not None:
                # PyTorch takes weights of the outputs' dtype alone.
                options["weight"] = self.classes.weight.to(outputs)
            if self.weighing is Weighing.DATA:
                total = function(outputs, targets, **options | {"reduction": "sum"})
                return total, self.classes.weights(targets).sum()
            returned = function(outputs, targets, **options)
        if isinstance(returned, tuple):
            total, weight = returned
            if not isinstance(total, Tensor) or not total.requires_grad:
                # Nothing in this share counts.
                total = outputs.sum() * 0 + total
            return total, weight
        if self.weighing is Weighing.NOTHING:
            return returned, count
        if returned.dim() > 0:
            assert len(returned) == count, f"{len(returned)} losses of {count} samples"
            returned = returned.mean()
        return returned * count, count


def _may_hold(samples: Samples, target: int) -> bool:
    """True if some samples have this target, or if only reading all of them would show it."""
    if isinstance(samples.dataset, TensorDataset):
        return bool((samples.dataset.tensors[1] == target).any())
    return True


def count_right(
    outputs: Tensor, targets: Tensor, ignore_index: int | None
) -> tuple[Tensor, Tensor] | None:
    """Right predictions, and of how many targets that are a class; None if none can be one.

    Targets [n, ...] are classes if outputs [n, K, ...] tell K > 1 classes apart. One that is not
    in 0 to K - 1, or ``ignore_index``, is not predicted.
    """
    if outputs.ndim < 2 or targets.shape != outputs.shape[:1] + outputs.shape[2:]:
        return None
    if not is_integer(targets) or outputs.shape[1] < 2:
        return None
    is_class = (targets >= 0) & (targets < outputs.shape[1])
    if ignore_index is not None:
        is_class &= targets != ignore_index
    right = (outputs.argmax(dim=1) == targets) & is_class
    return right.sum(), is_class.sum()


class CountedLoss:
    """The sum of a share's losses; counts their weight and the right predictions beside it.

    So the accuracy on the training samples needs no second forward. The counts stay on the
    outputs' device, which the host does not wait for.
    """

    def __init__(self, loss: ShareLoss):
        self.loss = loss
        self.right: Tensor | int = 0
        self.judged: Tensor | int = 0
        self.weight: Tensor | float = 0
        self.step_weight: Tensor | float = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            counts = count_right(outputs, targets, self.loss.ignore_index)
        if counts is not None:
            self.right = self.right + counts[0]
            self.judged = self.judged + counts[1]
        total, weight = self.loss(outputs, targets)
        self.count_weight(weight)
        return total

    def count_weight(self, weight: Tensor | float) -> None:
        if isinstance(weight, Tensor):
            weight = weight.detach()
        # (In place, copies would count, too.)
        self.weight = self.weight + weight
        self.step_weight = self.step_weight + weight

    def take_step(self) -> Tensor | float:
        """The weight since the last call: of this rank's share in a step."""
        weight = self.step_weight
        self.step_weight = 0
        return weight

    def take_weight(self) -> Tensor | float:
        """The weight of the losses since the last call."""
        weight = self.weight
        self.weight = self.step_weight = 0
        return weight

    def take(self) -> tuple[Tensor | int, Tensor | int]:
        """Right predictions since the last call, a scalar, and of how many targets."""
        counts = self.right, self.judged
        self.right = self.judged = 0
        return counts
