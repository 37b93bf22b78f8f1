"""The training loop that all techniques share.

The loop owns the data, the epochs and the measurements; a strategy owns the model and synchronises
the ranks. So the runs of two techniques differ only in the technique.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from labkit import gpus
from labkit.comm.comm import Comm
from labkit.comm.peak_memory import Part, PeakMemory
from labkit.config import RunConfig
from labkit.runtime.prepare import allow_tf32
from labkit.strategies.base import Batch, OwnPaceStrategy, Strategy
from labkit.training.evaluation import Row, evaluated, row_of, spent_since, summed_row, told
from labkit.training.logs import RunLogs, run_logs
from labkit.training.optimizer import optimizer_maker
from labkit.training.own import NOTHING, Own
from labkit.training.state import checksum
from labkit.training.work import Work, start_equal, work_of
from labkit.workload.losses import CountedLoss
from labkit.workload.samples import on_device
from labkit.workload.sampling import batch_slices, epoch_order

# Messages and bytes; None if they are not counted.
Sent = tuple[int, int] | None


@dataclass(frozen=True)
class RankReport:
    """The result of a training run on one rank.

    Attributes:
        epochs: by epoch, see ``evaluation.row_of``.
        messages, bytes_sent: by this rank while it trained; None if they are not counted.
        checksum: of the parameters and buffers.
        state: these parameters and buffers, on rank 0 only.
        notes: the strategy's.
        started_s: where ranks do not wait for each other, when the training began, in seconds of
            the trace.
        peak_memory: of its steps, see ``TrainResult``.
    """

    epochs: list[Row]
    messages: int | None
    bytes_sent: int | None
    checksum: str
    state: dict[str, Tensor] | None
    notes: dict[str, Any] = field(default_factory=dict)
    peak_memory: PeakMemory | None = None
    started_s: float | None = None


def fit(
    comm: Comm, config: RunConfig, strategy: Strategy, verbose: bool, own: Own = NOTHING
) -> RankReport:
    """Train on this rank; ``labkit.run`` calls this function on every rank.

    Args:
        comm: this rank's Comm.
        config: the settings of the run.
        strategy: the technique, not set up yet.
        verbose: whether rank 0 prints a line per epoch.
        own: the learner's own model, data set, loss and optimizer, where the config names none of
            labkit's.
    """
    with run_logs(comm, config) as logs:
        return _fit(comm, config, strategy, verbose, own, logs)


def _fit(
    comm: Comm, config: RunConfig, strategy: Strategy, verbose: bool, own: Own, logs: RunLogs
) -> RankReport:
    allow_tf32(config.tf32)
    work = work_of(config, own)
    strategy.loss, strategy.clip_norm = CountedLoss(work.loss), config.clip_norm
    memory = comm.session.memory_of_part(own.num_bytes)
    make_optimizer = optimizer_maker(config, own.optimizer, strategy, len(work.train))
    # The model gets no name here: a strategy may keep only a part of it, and the rest is freed.
    strategy.setup(comm, start_equal(comm, work.make_model(), own), make_optimizer)
    started_s = None
    if isinstance(strategy, OwnPaceStrategy):
        started_s = time.perf_counter() - comm.session.recorder.origin
        epochs, sent = _at_own_pace(config, work, strategy, memory, verbose, logs)
    else:
        epochs, sent = _in_step(config, work, strategy, memory, verbose, logs)
    state, notes = strategy.full_state(), strategy.notes()
    strategy.close()
    kept = state if comm.rank == 0 else None
    counts = sent or (None, None)
    return RankReport(epochs, *counts, checksum(state), kept, notes, memory.peak, started_s)


def _in_step(
    config: RunConfig, work: Work, strategy: Strategy, memory: Part, verbose: bool, logs: RunLogs
) -> tuple[list[Row], Sent]:
    """Train with all ranks on the same batch; return the epochs and what this rank has sent."""
    epochs: list[Row] = []
    sent: Sent = (0, 0)
    for epoch in range(config.epochs):
        with memory.counted():
            spent_s = spent_since({}, strategy)
            before, start_s = strategy.sent(), _now_s(strategy)
            loss_sum = _train_epoch(config, work, strategy, epoch)
            seconds = _now_s(strategy) - start_s
        # Evaluation is not part of the technique, so it is neither timed nor counted.
        sent, spent_s = _added(sent, before, strategy.sent()), spent_since(spent_s, strategy)
        trained = strategy.counted()
        sums = evaluated(work, strategy, *strategy.share())
        comm = strategy.comm
        epochs.append(summed_row(comm, work, loss_sum, seconds, trained, sums, spent_s))
        logs.add(epochs)
        if verbose and strategy.comm.rank == 0:
            print(told(epoch, config.epochs, epochs[-1]))
    return epochs, sent


def _now_s(strategy: Strategy) -> float:
    """The host's clock, when all that was queued on the strategy's devices has ended."""
    for device in {strategy.comm.device, *strategy.devices}:
        gpus.synchronize(device)
    return time.perf_counter()


def _train_epoch(config: RunConfig, work: Work, strategy: Strategy, epoch: int) -> Tensor:
    """One pass over the training samples; returns this rank's sum of losses, float64 [1]."""
    total = torch.zeros(1, dtype=torch.float64, device=strategy.comm.device)
    batches = _epoch_batches(config, work, epoch)
    steps = config.epochs * len(batches)
    shares = _shares(config, work, strategy, batches, epoch)
    for number, batch in enumerate(shares, start=1):
        loss, samples = strategy.step(*batch).detach(), len(batch[1])
        total += loss
        now = {"samples": samples, "loss": loss / max(1, samples)}
        done = epoch * len(batches) + number
        strategy.comm.progress(done, steps, f"steps, epoch {epoch + 1}", **now)
    strategy.end_epoch()
    return total


def _added(total: Sent, before: Sent, after: Sent) -> Sent:
    """``total`` plus what was sent between ``before`` and ``after``."""
    if total is None or before is None or after is None:
        return None
    return total[0] + after[0] - before[0], total[1] + after[1] - before[1]


def _at_own_pace(
    config: RunConfig,
    work: Work,
    strategy: OwnPaceStrategy,
    memory: Part,
    verbose: bool,
    logs: RunLogs,
) -> tuple[list[Row], Sent]:
    """Train so that no rank waits for the others; return the epochs and what this rank has sent.

    What an epoch reports is measured afterwards, from the parameters at the end of each epoch:
    during the training, the measurement would make the ranks wait for each other.
    """
    before = strategy.sent()
    steps = len(_epoch_batches(config, work, 0))
    batches = _endless_shares(config, work, strategy)
    with memory.counted():
        trained = strategy.train(batches, steps, config.epochs)
        ends = [(*end, strategy.accuracy, strategy.full_state()) for end in trained]
    sent = _added((0, 0), before, strategy.sent())
    epochs: list[Row] = []
    before_s = 0.0
    for epoch, (passed_s, loss, accuracy, state) in enumerate(ends):
        strategy.load_state(state)
        sums = evaluated(work, strategy, 0, 1)
        seconds = passed_s - before_s
        epochs.append(row_of(work, loss.item(), seconds, float(accuracy), sums))
        before_s = passed_s
        logs.add(epochs)
        if verbose:
            print(told(epoch, config.epochs, epochs[-1]))
    return epochs, sent


def _epoch_batches(config: RunConfig, work: Work, epoch: int) -> Sequence[Tensor]:
    order = epoch_order(len(work.train), epoch=epoch, seed=config.seed)
    return batch_slices(order, config.batch_size)


def _shares(
    config: RunConfig, work: Work, strategy: Strategy, batches: Sequence[Tensor], epoch: int
) -> Iterator[Batch]:
    """This rank's samples of each global batch, on its device, and the size of that batch."""
    comm = strategy.comm
    mine = [strategy.part_of(batch) for batch in batches]
    pinned = strategy.uses_gpu
    loaded = work.train.batches(mine, config.num_workers, pinned=pinned, epoch=epoch)
    for batch in batches:
        with comm.span("data"):
            inputs, targets = on_device(next(loaded), comm.device)
        yield inputs, targets, len(batch)


def _endless_shares(config: RunConfig, work: Work, strategy: Strategy) -> Iterator[Batch]:
    for epoch in itertools.count():
        batches = _epoch_batches(config, work, epoch)
        yield from _shares(config, work, strategy, batches, epoch)
