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
from labkit.runtime.between_hosts.reports import PLAIN
from labkit.runtime.prepare import allow_tf32
from labkit.strategies.base import Batch, OwnPaceStrategy, Strategy
from labkit.training.checkpoints import Checkpoints
from labkit.training.evaluation import Row, evaluated, row_of, summed_row, told
from labkit.training.logs import RunLogs, run_logs
from labkit.training.optimizer import optimizer_maker
from labkit.training.own import NOTHING, Own
from labkit.training.preemption import Preemption
from labkit.training.progress import Progress
from labkit.training.resume import facts_of
from labkit.training.state import checksum
from labkit.training.work import Work, start_equal, work_of
from labkit.workload.losses import CountedLoss
from labkit.workload.samples import on_device
from labkit.workload.sampling import batch_slices, epoch_order


@dataclass(frozen=True)
class RankReport:
    """The result of a training run on one rank.

    Attributes:
        epochs: by epoch, see ``evaluation.row_of``.
        messages, bytes_sent: by this rank while it trained; None if they are not counted.
        checksum: of the parameters and buffers.
        state: these parameters and buffers, on rank 0 only.
        notes: the strategy's.
        ends_s: where ranks do not wait for each other, in seconds of the trace, when the training
            began here and when each epoch ended here.
        peak_memory: of its steps, see ``TrainResult``.
    """

    epochs: list[Row]
    messages: int | None
    bytes_sent: int | None
    checksum: str
    state: dict[str, Tensor] | None
    notes: dict[str, Any] = field(default_factory=dict)
    peak_memory: PeakMemory | None = None
    ends_s: list[float] = field(default_factory=list)


PLAIN.append(RankReport)


@dataclass(frozen=True, eq=False)
class _Run:
    """What the functions of this module share."""

    config: RunConfig
    work: Work
    strategy: Strategy
    checkpoints: Checkpoints
    preemption: Preemption
    memory: Part
    logs: RunLogs
    verbose: bool

    def ends_after(self, progress: Progress) -> bool:
        """Whether the ranks have been told to end, and have agreed to do so at this step."""
        return self.preemption.ends_after(self.checkpoints.done(progress))

    def tell(self, rows: list[Row]) -> None:
        """Say and log what the last epoch has reported."""
        self.logs.add(rows)
        if self.verbose and self.strategy.comm.rank == 0:
            print(told(len(rows) - 1, self.config.epochs, rows[-1]))


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
    with run_logs(comm, config) as logs:
        return _fit(comm, config, strategy, verbose, own, start, logs)


def _fit(
    comm: Comm,
    config: RunConfig,
    strategy: Strategy,
    verbose: bool,
    own: Own,
    start: Path | None,
    logs: RunLogs,
) -> RankReport:
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
    in_step = not isinstance(strategy, OwnPaceStrategy)
    can_end = Preemption(comm, saves=in_step and config.checkpoint_dir is not None)
    with can_end as preemption, Checkpoints(config, strategy, facts) as checkpoints:
        run = _Run(config, work, strategy, checkpoints, preemption, memory, logs, verbose)
        progress = checkpoints.load(start, partial(_rehearse, run))
        preemption.begin(checkpoints.done(progress))
        ends_s: list[float] = []
        if isinstance(strategy, OwnPaceStrategy):
            ends_s = _at_own_pace(run, progress)
        else:
            _in_step(run, progress)
    state, notes = strategy.full_state(), strategy.notes()
    strategy.close()
    kept = state if comm.rank == 0 else None
    counts = progress.sent or (None, None)
    return RankReport(progress.rows, *counts, checksum(state), kept, notes, memory.peak, ends_s)


def _in_step(run: _Run, progress: Progress) -> None:
    """Train with all ranks on the same batch, from where the ``progress`` is to the end."""
    strategy = run.strategy
    while progress.epoch < run.config.epochs:
        with run.memory.counted():
            progress.start_clock(strategy)
            _train_epoch(run, progress)
            progress.stop_clock(strategy)
        # Evaluation is not part of the technique, so it is neither timed nor counted.
        sums = evaluated(run.work, strategy, *strategy.share())
        measured = progress.loss_sum, progress.seconds, progress.trained, sums, progress.spent_s
        progress.end_epoch(summed_row(strategy.comm, run.work, *measured))
        run.tell(progress.rows)
        ends = progress.epoch < run.config.epochs and run.ends_after(progress)
        run.checkpoints.after_epoch(progress, ends)
        if ends:
            run.checkpoints.end(progress, run.preemption.reason)


def _train_epoch(run: _Run, progress: Progress) -> None:
    """One pass over the training samples, or what is left of it."""
    strategy, batches = run.strategy, _epoch_batches(run, progress.epoch)
    steps = run.config.epochs * len(batches)
    for batch in _shares(run, batches[progress.step :], progress.epoch):
        loss, samples = strategy.step(*batch).detach(), len(batch[1])
        progress.loss_sum += loss
        progress.step += 1
        now = {"samples": samples, "loss": loss / max(1, samples)}
        done = progress.epoch * len(batches) + progress.step
        strategy.comm.progress(done, steps, f"steps, epoch {progress.epoch + 1}", **now)
        ends = progress.step < len(batches) and run.ends_after(progress)
        run.checkpoints.after_step(progress, ends)
        if ends:
            run.checkpoints.end(progress, run.preemption.reason)
    strategy.end_epoch()


def _at_own_pace(run: _Run, progress: Progress) -> list[float]:
    """Train so that no rank waits for the others; return ``RankReport.ends_s``.

    What an epoch reports is measured from the parameters at its end, but not then: the ranks would
    have to wait for each other. It is measured when they wait anyway, for a checkpoint, or after
    the training.
    """
    strategy, ends = run.strategy, []
    assert isinstance(strategy, OwnPaceStrategy)

    def measure() -> None:
        if not ends:
            return
        now = strategy.full_state()
        for passed_s, loss, accuracy, state in ends:
            strategy.load_state(state)
            sums = evaluated(run.work, strategy, 0, 1)
            seconds = passed_s - sum(row["seconds"] for row in progress.rows)
            row = row_of(run.work, loss.item(), seconds, float(accuracy), sums)
            progress.end_epoch(row)
            run.tell(progress.rows)
        strategy.load_state(now)
        ends.clear()

    steps = len(_epoch_batches(run, 0))
    run.checkpoints.at_own_pace(progress, measure)
    origin_s = strategy.comm.session.recorder.origin
    ends_s = [time.perf_counter() - origin_s]
    with run.memory.counted():
        progress.start_clock(strategy)
        batches = _endless_shares(run, strategy.first_share())
        for end in strategy.train(batches, steps, run.config.epochs):
            ends_s.append(time.perf_counter() - origin_s)
            ends.append((*end, strategy.accuracy, strategy.full_state()))
        progress.stop_clock(strategy)
    measure()
    return ends_s


def _epoch_batches(run: _Run, epoch: int) -> Sequence[Tensor]:
    order = epoch_order(len(run.work.train), epoch=epoch, seed=run.config.seed)
    return batch_slices(order, run.config.batch_size)


def _shares(run: _Run, batches: Sequence[Tensor], epoch: int) -> Iterator[Batch]:
    """This rank's samples of each global batch, on its device, and the size of that batch."""
    strategy, workers = run.strategy, run.config.num_workers
    mine = [strategy.part_of(batch) for batch in batches]
    pinned = strategy.uses_gpu
    loaded = run.work.train.batches(mine, workers, pinned=pinned, epoch=epoch)
    for batch in batches:
        with strategy.comm.span("data"):
            inputs, targets = on_device(next(loaded), strategy.comm.device)
        yield inputs, targets, len(batch)


def _endless_shares(run: _Run, first: int) -> Iterator[Batch]:
    """This rank's share of one batch after another, from the one with the number ``first`` on."""
    begun, step = divmod(first, len(_epoch_batches(run, 0)))
    for epoch in itertools.count(begun):
        yield from _shares(run, _epoch_batches(run, epoch)[step:], epoch)
        step = 0


def _rehearse(run: _Run) -> None:
    run.strategy.rehearse(*next(_shares(run, _epoch_batches(run, 0)[:1], 0)))
