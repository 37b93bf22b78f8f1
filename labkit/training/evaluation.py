"""What an epoch reports: the training loss, and loss and accuracy on the held-out samples."""

import math

import torch
from torch import Tensor

from labkit.collectives import ring_all_reduce
from labkit.comm.comm import Comm
from labkit.strategies.base import Strategy
from labkit.training.work import Work
from labkit.workload.samples import is_integer, on_device
from labkit.workload.sampling import share

_BATCH = 512

Row = dict[str, float]
# By index of what ``evaluated`` returns.
_CORRECT, _JUDGED, _LOSS = range(3)


def evaluated(work: Work, strategy: Strategy, index: int, count: int) -> Tensor:
    """Part ``index`` of ``count`` of the held-out samples: correct, judged, sum of losses, [3].

    A sample is judged if its target is a class and the model has one output for each class.
    """
    comm = strategy.comm
    sums = torch.zeros(3, dtype=torch.float64, device=comm.device)
    if work.test is None:
        return sums
    with comm.span("evaluate"):
        parts = [share(b, index, count) for b in torch.arange(len(work.test)).split(_BATCH)]
        for batch in work.test.batches(parts, pinned=strategy.uses_gpu):
            inputs, targets = on_device(batch, comm.device)
            outputs = strategy.predict(inputs)
            if outputs is not None:
                sums[:_LOSS] += _judged(outputs, targets)
                if not work.is_plain:
                    sums[_LOSS] += work.loss(outputs, targets)
    return sums


def row_of(work: Work, loss: float, sums: Tensor) -> Row:
    """An epoch's ``loss``, ``test_accuracy``, and ``test_loss`` unless data and loss are labkit's.

    Args:
        work: what is trained.
        loss: the mean over the training samples.
        sums: of all parts of the held-out samples, see ``evaluated``.
    """
    correct, judged, losses = sums.tolist()
    num_samples = len(work.test) if work.test is not None else 0
    # A model that predicts no classes has no accuracy, and without samples there is no loss.
    row = {"loss": loss, "test_accuracy": correct / judged if judged else math.nan}
    if not work.is_plain:
        row["test_loss"] = losses / num_samples if num_samples else math.nan
    return row


def summed_row(comm: Comm, work: Work, loss_sum: Tensor, sums: Tensor) -> Row:
    """``row_of`` from every rank's sum of training losses, [1], and its part of ``sums``, [3]."""
    with comm.span("evaluate"):
        everything = torch.cat([loss_sum, sums])
        if comm.world_size > 1:
            ring_all_reduce(comm, everything)
    return row_of(work, everything[0].item() / len(work.train), everything[1:])


def told(epoch: int, epochs: int, row: Row) -> str:
    """A line about an epoch."""
    found = [f"epoch {epoch + 1}/{epochs}: loss {row['loss']:.4f}"]
    if not math.isnan(row["test_accuracy"]):
        found.append(f"held-out accuracy {row['test_accuracy']:.2%}")
    elif not math.isnan(row.get("test_loss", math.nan)):
        found.append(f"held-out loss {row['test_loss']:.4f}")
    return ", ".join([*found, f"{row['seconds']:.2f} s"])


def _judged(outputs: Tensor, targets: Tensor) -> Tensor:
    """How many predictions are right, and of how many, [2]."""
    if targets.dim() != 1 or not is_integer(targets) or outputs.dim() != 2:
        return outputs.new_zeros(2, dtype=torch.float64)
    if outputs.shape[1] == 1:
        return outputs.new_zeros(2, dtype=torch.float64)
    correct = (outputs.argmax(dim=1) == targets).sum()
    return torch.stack([correct, correct.new_tensor(len(targets))]).double()
