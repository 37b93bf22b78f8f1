"""The training loop that all techniques share.

The loop owns the data, the epochs and the measurements; a strategy owns the model and the way the
ranks are kept together. So two techniques differ in nothing but the technique.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from labkit.collectives import ring_all_reduce
from labkit.comm.comm import Comm
from labkit.config import RunConfig
from labkit.strategies.base import Batch, OwnPaceStrategy, Strategy
from labkit.training.state import checksum
from labkit.workload.datasets import Data, load_dataset
from labkit.workload.models import build_model
from labkit.workload.sampling import batch_slices, epoch_order, share

_EVALUATION_BATCH = 512


@dataclass(frozen=True)
class RankReport:
    """What one rank brings home from a training run. ``state`` is kept by rank 0 alone."""

    epochs: list[dict[str, float]]
    messages: int | None
    bytes_sent: int | None
    checksum: str
    state: dict[str, Tensor] | None
    notes: dict[str, Any] = field(default_factory=dict)


def fit(
    comm: Comm, config: RunConfig, make_strategy: Callable[[], Strategy], verbose: bool
) -> RankReport:
    """Train on this rank; the function that ``labkit.run`` calls on all of them."""
    if comm.device.type == "cuda":
        # TF32 rounds to 10 bits, and no run would equal another.
        torch.backends.cudnn.allow_tf32 = False
    dtype = getattr(torch, config.dtype)
    data = load_dataset(config.dataset, train_size=config.train_size, dtype=dtype)
    model = build_model(
        config.model,
        num_classes=data.num_classes,
        input_shape=data.input_shape,
        seed=config.seed,
        dtype=dtype,
    )
    strategy = make_strategy()
    strategy.setup(comm, model, lambda parameters: _sgd(parameters, config))
    del model  # a strategy may keep a part of it, and let the rest go
    go = _at_own_pace if hasattr(strategy, "train") else _in_step
    epochs, messages, bytes_sent = go(comm, config, data, strategy, verbose)
    state = strategy.full_state()
    notes = strategy.notes() if hasattr(strategy, "notes") else {}
    if hasattr(strategy, "close"):
        strategy.close()
    kept = state if comm.rank == 0 else None
    return RankReport(epochs, messages, bytes_sent, checksum(state), kept, notes)


def _in_step(comm: Comm, config: RunConfig, data: Data, strategy: Strategy, verbose: bool):
    """All ranks work on the same batch. Returns (rows of the epochs, messages, bytes)."""
    epochs, sent = [], (0, 0)
    for epoch in range(config.epochs):
        before = _sent(comm, strategy)
        start_s = time.perf_counter()
        loss_sum = _train_epoch(comm, config, data, strategy, epoch)
        seconds = time.perf_counter() - start_s
        # Evaluation stays outside the clock and the counters: it is not the technique's.
        sent = _added(sent, before, _sent(comm, strategy))
        correct = _correct(comm, data, strategy, *strategy.share())
        epochs.append(_row(comm, data, loss_sum, correct) | {"seconds": seconds})
        if verbose and comm.rank == 0:
            _print_epoch(epoch, config.epochs, epochs[-1])
    return epochs, *sent


def _sent(comm: Comm, strategy: Strategy) -> tuple[int, int] | None:
    """Messages and bytes of the technique so far."""
    if hasattr(strategy, "sent"):
        return strategy.sent()
    return comm.messages, comm.bytes_sent


def _added(total: tuple, before: tuple | None, after: tuple | None) -> tuple:
    """``total`` and what came between ``before`` and ``after``; Nones where nobody counts."""
    if before is None or after is None:
        return None, None
    return tuple(sum_ + end - start for sum_, start, end in zip(total, before, after))


def _at_own_pace(
    comm: Comm, config: RunConfig, data: Data, strategy: OwnPaceStrategy, verbose: bool
):
    """Every rank for itself. Returns what ``_in_step`` does.

    Held-out accuracy is measured afterwards, from the parameters that each epoch ended with: to
    stop for it would bring the ranks in step.
    """
    steps = len(batch_slices(data.train_targets, config.batch_size))
    batches = _endless_shares(comm, config, data, strategy.share())
    ends = [(*end, strategy.full_state()) for end in strategy.train(batches, steps, config.epochs)]
    messages, bytes_sent = comm.messages, comm.bytes_sent
    epochs, before_s = [], 0.0
    for epoch, (passed_s, loss, state) in enumerate(ends):
        strategy.load_state(state)
        accuracy = _correct(comm, data, strategy, 0, 1).item() / len(data.test_targets)
        seconds = passed_s - before_s
        row = {"loss": loss.item(), "test_accuracy": accuracy, "seconds": seconds}
        before_s = passed_s
        epochs.append(row)
        if verbose:
            _print_epoch(epoch, config.epochs, row)
    return epochs, messages, bytes_sent


def _sgd(parameters: Iterable[nn.Parameter], config: RunConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=float(config.lr), momentum=config.momentum)


def _train_epoch(
    comm: Comm, config: RunConfig, data: Data, strategy: Strategy, epoch: int
) -> Tensor:
    """One pass over the training samples; returns this rank's sum of losses, float64 [1]."""
    total = torch.zeros(1, dtype=torch.float64, device=comm.device)
    batches = _epoch_batches(config, data, epoch)
    for number, batch in enumerate(batches):
        total += strategy.step(*_load(comm, data, batch, strategy.share())).detach()
        done = epoch * len(batches) + number + 1
        comm.progress(done, config.epochs * len(batches), f"steps, epoch {epoch + 1}")
    strategy.end_epoch()
    return total


def _epoch_batches(config: RunConfig, data: Data, epoch: int) -> Sequence[Tensor]:
    order = epoch_order(len(data.train_targets), epoch=epoch, seed=config.seed)
    return batch_slices(order, config.batch_size)


def _load(comm: Comm, data: Data, batch: Tensor, part: tuple[int, int]) -> Batch:
    """This rank's samples of a global batch, on its device, and the size of that batch."""
    with comm.span("data"):
        mine = share(batch, *part)
        inputs = data.train_inputs[mine].to(comm.device)
        targets = data.train_targets[mine].to(comm.device)
    return inputs, targets, len(batch)


def _endless_shares(
    comm: Comm, config: RunConfig, data: Data, part: tuple[int, int]
) -> Iterator[Batch]:
    for epoch in itertools.count():
        for batch in _epoch_batches(config, data, epoch):
            yield _load(comm, data, batch, part)


def _correct(comm: Comm, data: Data, strategy: Strategy, index: int, count: int) -> Tensor:
    """How many of part ``index`` of ``count`` of the held-out samples are classified right, [1]"""
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
