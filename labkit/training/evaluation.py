"""What an epoch reports: progress counted, held-out samples judged, and where it is written."""

import csv
import io
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from labkit import gpus
from labkit.collectives import ring_all_reduce
from labkit.files import write_atomically
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
TABLE = "epochs.csv"
# Numbers by name, and ``phases_s``: this rank's seconds by kind of span.
Row = dict[str, Any]


@dataclass
class Progress:
    """How far a run is, on one rank.

    Attributes:
        sums: in the epoch under way, float64 [4]: this rank's losses, its right predictions and of
            how many, and after how many steps the losses' sum was finite.
        epoch, step: complete epochs, and steps of the one under way.
        rows: of the complete epochs, see ``row_of``.
        seconds, spent_s: of training in the epoch, and by kind of span.
        sent: messages and bytes by this rank while it trained; None if they are not counted.
    """

    sums: Tensor
    epoch: int = 0
    step: int = 0
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    spent_s: Counter[str] = field(default_factory=Counter)
    sent: tuple[int, int] | None = (0, 0)

    def start_clock(self, strategy: Strategy) -> None:
        """Count time, messages and bytes from now on."""
        self._before = _spent(strategy), strategy.sent(), now_s(strategy)

    def stop_clock(self, strategy: Strategy) -> None:
        """Add what was counted since ``start_clock``, and the right predictions."""
        spent_s, sent, since_s = self._before
        self.seconds += now_s(strategy) - since_s
        now = strategy.sent()
        self.sent = (
            self.sent
            and sent
            and now
            and (
                self.sent[0] + now[0] - sent[0],
                self.sent[1] + now[1] - sent[1],
            )
        )
        self.spent_s += _spent(strategy) - spent_s
        self.sums[1:3] += strategy.counted()

    def end_step(self, loss: Tensor) -> None:
        """Count a step; nothing waits for a GPU."""
        self.step += 1
        self.sums[0] += loss
        self.sums[3] += self.sums[0].isfinite()

    def end_epoch(self, row: Row) -> None:
        self.rows.append(row | {"phases_s": dict(self.spent_s)})
        self.epoch, self.step, self.seconds, self.spent_s = self.epoch + 1, 0, 0.0, Counter()
        self.sums.zero_()


def _spent(strategy: Strategy) -> Counter[str]:
    """This rank's seconds so far by kind of span; in one process those of its main thread."""
    session = strategy.comm.session
    assert session.sums is not None, "the run has started"
    # On a GPU it waits for the spans' ends: the host has waited for them already.
    session.recorder.settle()
    return Counter(session.sums.so_far(main_lane_only=strategy.in_one_process))


def now_s(strategy: Strategy) -> float:
    """The host's clock, when all that was queued on the strategy's devices has ended."""
    for device in {strategy.comm.device, *strategy.devices}:
        gpus.synchronize(device)
    return time.perf_counter()


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
        size = min(_BATCH, max(1, _MOST_VALUES // work.test.first(1)[0].numel()))
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

    ``loss`` and ``train_accuracy`` are means over the training samples, while they were trained
    on, ``seconds`` those of training, ``sums`` of all held-out samples, see ``evaluated``.
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


def summed_row(work: Work, strategy: Strategy, progress: Progress) -> tuple[Row, int]:
    """``row_of`` the epoch of all ranks, and after how many steps all their losses were finite."""
    comm, sums = strategy.comm, evaluated(work, strategy, *strategy.share())
    with comm.span("evaluate"):
        of_ranks = sums.new_zeros(comm.world_size)
        of_ranks[comm.rank] = progress.sums[3]
        everything = torch.cat([progress.sums[:3], sums, of_ranks])
        if comm.world_size > 1:
            ring_all_reduce(comm, everything)
    loss, right, judged = everything[:3].tolist()
    accuracy, loss = _part(right, judged), loss / len(work.train)
    row = row_of(work, loss, progress.seconds, accuracy, everything[3:8])
    return row, int(everything[8:].min())


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
    """Whether the last epoch is the best: by held-out accuracy, or its loss, or training's."""
    for name, sign in (("test_accuracy", 1), ("test_loss", -1), ("loss", -1)):
        found = [sign * row.get(name, math.nan) for row in rows]
        if found and not math.isnan(found[-1]):
            return all(math.isnan(other) or other < found[-1] for other in found[:-1])
    return False


def _part(total: float, count: float) -> float:
    return total / count if count else math.nan


class Logs:
    """``epochs.csv`` and TensorBoard's files in a run's ``log_dir``, on rank 0.

    A log that cannot be written does not end the training: that is said once.
    """

    def __init__(self, folder: str):
        self.folder = folder
        self._failed: set[str] = set()
        self._events: Any = None

    def add(self, rows: Sequence[Row]) -> None:
        """Take the last of all epochs so far, those before a resumption included."""
        flat = [
            {name: value for name, value in row.items() if name != "phases_s"}
            | {f"{kind}_s": s for kind, s in sorted(row.get("phases_s", {}).items())}
            for row in rows
        ]
        for name, write in ((TABLE, self._write_table), ("TensorBoard", self._write_events)):
            try:
                if name not in self._failed:
                    write(flat)
            except Exception as error:
                self._failed.add(name)
                print(f"no {name} in {self.folder}: {error}", file=sys.stderr)

    def _write_table(self, rows: list[Row]) -> None:
        columns = dict.fromkeys(name for row in rows for name in row)
        text = io.StringIO()
        table = csv.DictWriter(text, ["epoch", *columns], lineterminator="\n")
        table.writeheader()
        table.writerows({"epoch": number, **row} for number, row in enumerate(rows, start=1))
        # On another host there is no caller that has made it.
        os.makedirs(self.folder, exist_ok=True)
        write_atomically(f"{self.folder}/{TABLE}", text.getvalue())

    def _write_events(self, rows: list[Row]) -> None:
        # Not at the top: few runs need it. It takes a moment, and may not be installed.
        from torch.utils.tensorboard import SummaryWriter

        if self._events is None:
            # What an interrupted run wrote about later epochs is not shown any more.
            self._events = SummaryWriter(self.folder, purge_step=len(rows))
        for name, value in rows[-1].items():
            if math.isfinite(value):
                self._events.add_scalar(name, value, len(rows))
        self._events.flush()

    def close(self) -> None:
        # After an error its thread would never read what is still to be written.
        if self._events is not None and "TensorBoard" not in self._failed:
            self._events.close()
