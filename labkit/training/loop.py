"""The training loop that all techniques share.

The loop owns the data, the epochs and the measurements; a strategy owns the model and synchronises
the ranks. So the runs of two techniques differ only in the technique.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from labkit.comm.comm import Comm
from labkit.comm.peak_memory import Part, PeakMemory
from labkit.config import RunConfig
from labkit.runtime.prepare import allow_tf32
from labkit.strategies.base import Batch, OwnPaceStrategy, Strategy
from labkit.training.checkpoints import Checkpoints
from labkit.training.evaluation import Row, evaluated, row_of, summed_row, told
from labkit.training.optimizer import optimizer_maker
from labkit.training.own import NOTHING, Own
from labkit.training.progress import Progress, Sent, added
from labkit.training.resume import facts_of
from labkit.training.state import checksum
from labkit.training.work import Work, start_equal, work_of
from labkit.workload.losses import CountedLoss
from labkit.workload.samples import on_device
from labkit.workload.sampling import batch_slices, epoch_order, share


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
    comm: Comm,
    config: RunConfig,
    strategy: Strategy,
    verbose: bool,
    own: Own = NOTHING,
    start: Path | None = None,
) -> RankReport:
    """Train on this rank; ``labkit.run`` calls this function on every rank.

    Args:
        comm: this rank's Comm.
        config: the settings of the run.
        strategy: the technique, not set up yet.
        verbose: whether rank 0 prints a line per epoch.
        own: the learner's own model, data set, loss and optimizer, where the config names none of
            labkit's.
        start: the checkpoint from which the run goes on; None to begin at the beginning.
    """
    allow_tf32(config.tf32)
    work = work_of(config, own)
    strategy.loss, strategy.clip_norm = CountedLoss(work.loss), config.clip_norm
    memory = comm.session.memory_of_part(own.num_bytes)
    make_optimizer = optimizer_maker(config, own.optimizer, strategy, len(work.train))
    model = start_equal(comm, work.make_model(), own)
    facts = facts_of(config, own, work, model) if config.checkpoint_dir else {}
    strategy.setup(comm, model, make_optimizer)
    # A strategy may keep only a part of the model, and the rest is freed.
    del model
    checkpoints = Checkpoints(config, strategy, facts)
    started_s = None
    if isinstance(strategy, OwnPaceStrategy):
        started_s = time.perf_counter() - comm.session.recorder.origin
        epochs, sent = _at_own_pace(config, work, strategy, memory, verbose)
    else:
        progress = checkpoints.load(start, partial(_rehearse, config, work, strategy))
        _in_step(config, work, strategy, checkpoints, progress, memory, verbose)
        epochs, sent = progress.rows, progress.sent
    checkpoints.close()
    state, notes = strategy.full_state(), strategy.notes()
    strategy.close()
    kept = state if comm.rank == 0 else None
    counts = sent or (None, None)
    return RankReport(epochs, *counts, checksum(state), kept, notes, memory.peak, started_s)


def _in_step(
    config: RunConfig,
    work: Work,
    strategy: Strategy,
    checkpoints: Checkpoints,
    progress: Progress,
    memory: Part,
    verbose: bool,
) -> None:
    """Train with all ranks on the same batch, from where the ``progress`` is to the end."""
    while progress.epoch < config.epochs:
        with memory.counted():
            progress.start_clock(strategy)
            _train_epoch(config, work, strategy, checkpoints, progress)
            progress.stop_clock(strategy)
        # Evaluation is not part of the technique, so it is neither timed nor counted.
        sums, comm = evaluated(work, strategy, *strategy.share()), strategy.comm
        measured = progress.loss_sum, progress.seconds, progress.trained, sums, progress.spent_s
        progress.end_epoch(summed_row(comm, work, *measured))
        if verbose and strategy.comm.rank == 0:
            print(told(progress.epoch - 1, config.epochs, progress.rows[-1]))
        checkpoints.after_epoch(progress)


def _train_epoch(
    config: RunConfig,
    work: Work,
    strategy: Strategy,
    checkpoints: Checkpoints,
    progress: Progress,
) -> None:
    """One pass over the training samples, or what is left of it."""
    batches = _epoch_batches(config, work, progress.epoch)
    steps = config.epochs * len(batches)
    left = batches[progress.step :]
    for batch in _shares(config, work, strategy, left, progress.epoch):
        loss, samples = strategy.step(*batch).detach(), len(batch[1])
        progress.loss_sum += loss
        progress.step += 1
        now = {"samples": samples, "loss": loss / max(1, samples)}
        done = progress.epoch * len(batches) + progress.step
        strategy.comm.progress(done, steps, f"steps, epoch {progress.epoch + 1}", **now)
        checkpoints.after_step(progress)
    strategy.end_epoch()


def _at_own_pace(
    config: RunConfig, work: Work, strategy: OwnPaceStrategy, memory: Part, verbose: bool
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
    sent = added((0, 0), before, strategy.sent())
    epochs: list[Row] = []
    before_s = 0.0
    for epoch, (passed_s, loss, accuracy, state) in enumerate(ends):
        strategy.load_state(state)
        sums = evaluated(work, strategy, 0, 1)
        seconds = passed_s - before_s
        epochs.append(row_of(work, loss.item(), seconds, float(accuracy), sums))
        before_s = passed_s
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
    mine = [share(batch, *strategy.share()) for batch in batches]
    pinned = strategy.uses_gpu
    loaded = work.train.batches(mine, config.num_workers, pinned=pinned, epoch=epoch)
    for batch in batches:
        with comm.span("data"):
            inputs, targets = on_device(next(loaded), comm.device)
        yield inputs, targets, len(batch)


def _rehearse(config: RunConfig, work: Work, strategy: Strategy) -> None:
    first = _epoch_batches(config, work, 0)[:1]
    strategy.rehearse(*next(_shares(config, work, strategy, first, 0)))


def _endless_shares(config: RunConfig, work: Work, strategy: Strategy) -> Iterator[Batch]:
    for epoch in itertools.count():
        batches = _epoch_batches(config, work, epoch)
        yield from _shares(config, work, strategy, batches, epoch)
