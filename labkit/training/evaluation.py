"""What an epoch reports: loss and accuracy on the samples trained on and on the held-out ones."""

import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.collectives import ring_all_reduce
from labkit.comm.board import KINDS
from labkit.comm.comm import Comm
from labkit.strategies.base import Strategy
from labkit.training.resolve import Work
from labkit.workload.losses import predicts_classes
from labkit.workload.samples import on_device
from labkit.workload.sampling import share

_BATCH = 512
# A batch of large images has fewer, to save memory: 512 of 32 x 32 pixels, 7 of 299 x 299.
_MOST_VALUES = 2**21
# Accuracy among the likeliest classes says something only where there are more classes.
_TOP = 5
# Characters of a kind of span, and bytes that suffice for a row of the board's kinds as JSON.
_KIND, _TEXT = 32, 256 * KINDS

# Numbers by name, and ``phases_s``: seconds by kind.
Row = dict[str, Any]
Seconds = dict[str, float]


def evaluated(work: Work, strategy: Strategy, index: int, count: int) -> Tensor:
    """Part ``index`` of ``count`` of the held-out samples, as sums over them, [5].

    Correct predictions and of how many, targets among the five likeliest classes and of how many,
    and the sum of the losses. A sample is judged if its target is a class and the model has one
    output for each class.
    """
    comm = strategy.comm
    sums = torch.zeros(5, dtype=torch.float64, device=comm.device)
    if work.test is None:
        return sums
    with comm.span("evaluate"):
        size = min(_BATCH, max(1, _MOST_VALUES // work.test.sample_values))
        parts = [share(b, index, count) for b in torch.arange(len(work.test)).split(size)]
        # Not every model takes an empty batch.
        parts = [part for part in parts if len(part)]
        for batch in work.test.batches(parts, pinned=strategy.uses_gpu):
            inputs, targets = on_device(batch, comm.device)
            outputs = strategy.predict(inputs)
            if outputs is None:
                continue
            sums[4] += work.loss(outputs, targets)
            if predicts_classes(outputs, targets):
                sums[0] += (outputs.argmax(dim=1) == targets).sum()
                sums[1] += len(targets)
                if outputs.shape[1] > _TOP:
                    likeliest = outputs.topk(_TOP, dim=1).indices
                    sums[2] += (likeliest == targets[:, None]).sum()
                    sums[3] += len(targets)
    return sums


def row_of(work: Work, loss: float, seconds: float, train_accuracy: float, sums: Tensor) -> Row:
    """An epoch's numbers, NaN where there is nothing to measure.

    ``loss``, ``test_accuracy``, ``seconds``, ``train_accuracy``, ``test_loss``, ``test_top5``.

    Args:
        work: what is trained.
        loss, train_accuracy: means over the training samples, while they were trained on.
        seconds: of training.
        sums: of all parts of the held-out samples, see ``evaluated``.
    """
    correct, judged, in_top, ranked, losses = sums.tolist()
    return {
        "loss": loss,
        # A model that predicts no classes has no accuracy, and without samples there is no loss.
        "test_accuracy": _part(correct, judged),
        "seconds": seconds,
        "train_accuracy": train_accuracy,
        "test_loss": _part(losses, len(work.test) if work.test is not None else 0),
        "test_top5": _part(in_top, ranked),
    }


def summed_row(
    comm: Comm,
    work: Work,
    seconds: float,
    loss_sum: Tensor,
    finite: Tensor,
    trained: Tensor,
    sums: Tensor,
    spent_s: Seconds,
) -> tuple[Row, int]:
    """``row_of`` from what every rank has counted, with ``phases_s``, the mean over the ranks.

    Args:
        comm: this rank's Comm.
        work: what is trained.
        seconds: of training.
        loss_sum, finite, trained: of this rank, see ``progress.Progress``.
        sums: of this rank's part of the held-out samples.
        spent_s: this rank's seconds by kind.

    Returns:
        The row, and after how many steps the losses of all ranks were finite.
    """
    with comm.span("evaluate"):
        of_ranks = torch.zeros(comm.world_size, dtype=torch.float64, device=comm.device)
        of_ranks[comm.rank] = finite[0]
        everything = torch.cat([loss_sum, trained, sums, of_ranks])
        if comm.world_size > 1:
            ring_all_reduce(comm, everything)
        phases_s = _mean_over_ranks(comm, spent_s)
    loss, right, judged = everything[:3].tolist()
    row = row_of(work, loss / len(work.train), seconds, _part(right, judged), everything[3:8])
    return row | {"phases_s": phases_s}, int(everything[8:].min())


def spent_since(before_s: Seconds, strategy: Strategy) -> Seconds:
    """This rank's seconds by kind of span since they were ``before_s``; {} is the start.

    Of a technique in one process, whose threads compute at the same time, the main thread's alone.
    """
    session = strategy.comm.session
    assert session.sums is not None, "the run has started"
    # On a GPU it waits for the spans' ends: the host has waited for them already.
    session.recorder.settle()
    now_s = session.sums.so_far(main_lane_only=strategy.in_one_process)
    spent_s = {kind: seconds - before_s.get(kind, 0.0) for kind, seconds in now_s.items()}
    return {kind: seconds for kind, seconds in spent_s.items() if seconds > 0}


def epoch_line(epoch: int, epochs: int, row: Row) -> str:
    """What is printed of an epoch."""
    found = [f"epoch {epoch + 1}/{epochs}: loss {row['loss']:.4f}"]
    if not math.isnan(row.get("train_accuracy", math.nan)):
        found.append(f"training accuracy {row['train_accuracy']:.2%}")
    if not math.isnan(row["test_accuracy"]):
        found.append(f"held-out accuracy {row['test_accuracy']:.2%}")
    elif not math.isnan(row.get("test_loss", math.nan)):
        found.append(f"held-out loss {row['test_loss']:.4f}")
    return ", ".join([*found, f"{row['seconds']:.2f} s"])


def is_best(rows: Sequence[Row]) -> bool:
    """Whether the last of these epochs is the best: by held-out accuracy, or else by its loss.

    Without held-out samples, by the training loss. Of equal epochs the first is the best.
    """
    for name, sign in (("test_accuracy", 1), ("test_loss", -1), ("loss", -1)):
        found = [sign * row.get(name, math.nan) for row in rows]
        if found and not math.isnan(found[-1]):
            return all(math.isnan(other) or other < found[-1] for other in found[:-1])
    return False


def _part(total: float, count: float) -> float:
    return total / count if count else math.nan


def _mean_over_ranks(comm: Comm, seconds: Seconds) -> Seconds:
    """The mean of all ranks' seconds by kind; a kind that a rank does not have counts as 0."""
    if comm.world_size == 1:
        return seconds
    # As text, since the kinds differ from rank to rank; the sum puts the texts side by side.
    text = json.dumps({kind[:_KIND]: round(s, 9) for kind, s in seconds.items()}).encode()
    texts = torch.zeros(comm.world_size, _TEXT, dtype=torch.uint8, device=comm.device)
    texts[comm.rank, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    ring_all_reduce(comm, texts)
    rows = [json.loads(bytes(row).rstrip(b"\0")) for row in texts.tolist()]
    kinds = sorted({kind for row in rows for kind in row})
    return {kind: sum(row.get(kind, 0.0) for row in rows) / len(rows) for kind in kinds}
