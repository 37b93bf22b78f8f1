"""The training loop that all techniques share.

The loop owns the data, the epochs and the measurements; a strategy owns the model and synchronises
the ranks. So the runs of two techniques differ only in the technique.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.collectives import ring_all_reduce
from labkit.comm.comm import Comm
from labkit.config import RunConfig
from labkit.strategies.base import Batch, OwnPaceStrategy, Strategy
from labkit.training.state import checksum
from labkit.workload.datasets import Data, load_dataset
from labkit.workload.models import build_model
from labkit.workload.sampling import batch_slices, epoch_order, share

_EVALUATION_BATCH = 512

Row = dict[str, float]
# Messages and bytes; None if they are not counted.
Sent = tuple[int, int] | None


@dataclass(frozen=True)
class RankReport:
    """The result of a training run on one rank.

    Attributes:
        epochs: by epoch, ``loss``, ``test_accuracy`` and the ``seconds`` of training.
        messages, bytes_sent: by this rank while it trained; None if they are not counted.
        checksum: of the parameters and buffers.
        state: these parameters and buffers, on rank 0 only.
        notes: the strategy's.
    """

    epochs: list[Row]
    messages: int | None
    bytes_sent: int | None
    checksum: str
    state: dict[str, Tensor] | None
    notes: dict[str, Any] = field(default_factory=dict)


def fit(comm: Comm, config: RunConfig, strategy: Strategy, verbose: bool) -> RankReport:
    """Train on this rank; ``labkit.run`` calls this function on every rank.

    Args:
        comm: this rank's Comm.
        config: the settings of the run.
        strategy: the technique, not set up yet.
        verbose: whether rank 0 prints a line per epoch.
    """
    if comm.device.type == "cuda":
        # TF32 rounds to 10 bits, too few for the runs of two techniques to agree.
        torch.backends.cudnn.allow_tf32 = False
    dtype = getattr(torch, config.dtype)
    data = load_dataset(config.dataset, train_size=config.train_size, dtype=dtype)
    sizes = {"num_classes": data.num_classes, "input_shape": data.input_shape}
    # The model gets no name here: a strategy may keep only a part of it, and the rest is freed.
    strategy.setup(
        comm,
        build_model(config.model, **sizes, seed=config.seed, dtype=dtype),
        partial(torch.optim.SGD, lr=float(config.lr), momentum=config.momentum),
    )
    if isinstance(strategy, OwnPaceStrategy):
        epochs, sent = _at_own_pace(config, data, strategy, verbose)
    else:
        epochs, sent = _in_step(config, data, strategy, verbose)
    state, notes = strategy.full_state(), strategy.notes()
    strategy.close()
    kept = state if comm.rank == 0 else None
    return RankReport(epochs, *(sent or (None, None)), checksum(state), kept, notes)


def _in_step(
    config: RunConfig, data: Data, strategy: Strategy, verbose: bool
) -> tuple[list[Row], Sent]:
    """Train with all ranks on the same batch; return the epochs and what this rank has sent."""
    epochs: list[Row] = []
    sent: Sent = (0, 0)
    for epoch in range(config.epochs):
        before, start_s = strategy.sent(), time.perf_counter()
        loss_sum = _train_epoch(config, data, strategy, epoch)
        seconds = time.perf_counter() - start_s
        # Evaluation is not part of the technique, so it is neither timed nor counted.
        sent = _added(sent, before, strategy.sent())
        correct = _correct(data, strategy, *strategy.share())
        epochs.append(_row(strategy.comm, data, loss_sum, correct) | {"seconds": seconds})
        if verbose and strategy.comm.rank == 0:
            _print_epoch(epoch, config.epochs, epochs[-1])
    return epochs, sent


def _train_epoch(config: RunConfig, data: Data, strategy: Strategy, epoch: int) -> Tensor:
    """One pass over the training samples; returns this rank's sum of losses, float64 [1]."""
    total = torch.zeros(1, dtype=torch.float64, device=strategy.comm.device)
    batches = _epoch_batches(config, data, epoch)
    for number, batch in enumerate(batches):
        inputs, targets, batch_size = _load(data, batch, strategy)
        loss = strategy.step(inputs, targets, batch_size).detach()
        total += loss
        now = {"samples": len(targets), "loss": loss / max(1, len(targets))}
        done, steps = epoch * len(batches) + number + 1, config.epochs * len(batches)
        strategy.comm.progress(done, steps, f"steps, epoch {epoch + 1}", **now)
    strategy.end_epoch()
    return total


def _added(total: Sent, before: Sent, after: Sent) -> Sent:
    """``total`` plus what was sent between ``before`` and ``after``."""
    if total is None or before is None or after is None:
        return None
    return total[0] + after[0] - before[0], total[1] + after[1] - before[1]


def _at_own_pace(
    config: RunConfig, data: Data, strategy: OwnPaceStrategy, verbose: bool
) -> tuple[list[Row], Sent]:
    """Train so that no rank waits for the others; return the epochs and what this rank has sent.

    Held-out accuracy is measured afterwards, from the parameters at the end of each epoch: during
    the training, the measurement would make the ranks wait for each other.
    """
    steps = len(_epoch_batches(config, data, 0))
    batches = _endless_shares(config, data, strategy)
    ends = [(*end, strategy.full_state()) for end in strategy.train(batches, steps, config.epochs)]
    sent = strategy.sent()
    epochs: list[Row] = []
    before_s = 0.0
    for epoch, (passed_s, loss, state) in enumerate(ends):
        strategy.load_state(state)
        accuracy = _correct(data, strategy, 0, 1).item() / len(data.test_targets)
        seconds = passed_s - before_s
        before_s = passed_s
        epochs.append({"loss": loss.item(), "test_accuracy": accuracy, "seconds": seconds})
        if verbose:
            _print_epoch(epoch, config.epochs, epochs[-1])
    return epochs, sent


def _epoch_batches(config: RunConfig, data: Data, epoch: int) -> Sequence[Tensor]:
    order = epoch_order(len(data.train_targets), epoch=epoch, seed=config.seed)
    return batch_slices(order, config.batch_size)


def _load(data: Data, batch: Tensor, strategy: Strategy) -> Batch:
    """This rank's samples of a global batch, on its device, and the size of that batch."""
    comm = strategy.comm
    with comm.span("data"):
        mine = share(batch, *strategy.share())
        inputs = data.train_inputs[mine].to(comm.device)
        targets = data.train_targets[mine].to(comm.device)
    return inputs, targets, len(batch)


def _endless_shares(config: RunConfig, data: Data, strategy: Strategy) -> Iterator[Batch]:
    for epoch in itertools.count():
        for batch in _epoch_batches(config, data, epoch):
            yield _load(data, batch, strategy)


def _correct(data: Data, strategy: Strategy, index: int, count: int) -> Tensor:
    """Count the correct predictions on part ``index`` of ``count`` of the held-out set, [1]."""
    comm = strategy.comm
    correct = torch.zeros(1, dtype=torch.float64, device=comm.device)
    with comm.span("evaluate"):
        for batch in torch.arange(len(data.test_targets)).split(_EVALUATION_BATCH):
            mine = share(batch, index, count)
            logits = strategy.predict(data.test_inputs[mine].to(comm.device))
            if logits is not None:
                targets = data.test_targets[mine].to(comm.device)
                correct += (logits.argmax(dim=1) == targets).sum()
    return correct


def _row(comm: Comm, data: Data, loss_sum: Tensor, correct: Tensor) -> dict[str, float]:
    """Mean training loss of the epoch and accuracy on the held-out part, over all ranks."""
    with comm.span("evaluate"):
        sums = torch.cat([loss_sum, correct])
        if comm.world_size > 1:
            ring_all_reduce(comm, sums)
    total_loss, total_correct = sums.tolist()
    return {
        "loss": total_loss / len(data.train_targets),
        "test_accuracy": total_correct / len(data.test_targets),
    }


def _print_epoch(epoch: int, epochs: int, row: dict[str, float]) -> None:
    print(
        f"epoch {epoch + 1}/{epochs}: loss {row['loss']:.4f}, "
        f"held-out accuracy {row['test_accuracy']:.2%}, {row['seconds']:.2f} s"
    )
