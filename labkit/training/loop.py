"""The training loop that all techniques share.

The loop owns the data, the epochs and the measurements; a strategy owns the model and synchronises
the ranks. So the runs of two techniques differ only in the technique.
"""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from labkit.collectives import broadcast, ring_all_reduce
from labkit.comm.comm import Comm
from labkit.comm.peak_memory import PeakMemory
from labkit.config import RunConfig
from labkit.errors import PreemptedError
from labkit.runtime.between_hosts.reports import PLAIN
from labkit.runtime.prepare import allow_tf32
from labkit.strategies.base import Batch, OwnPaceStrategy, Strategy
from labkit.training.evaluation import Row, epoch_line, evaluated, row_of, summed_row
from labkit.training.logs import RunLogs, run_logs
from labkit.training.optimizer import optimizer_maker
from labkit.training.own import NOTHING, Own
from labkit.training.progress import Progress, added
from labkit.training.resolve import Work, work_of
from labkit.training.resume import facts_of
from labkit.training.saving import Checkpoints
from labkit.training.state import checksum
from labkit.training.stop import Stop
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
        allow_tf32(config.tf32)
        work = work_of(config, own)
        strategy.loss, strategy.clip_norm = CountedLoss(work.loss), config.clip_norm
        memory = comm.session.memory_of_part(own.num_bytes)
        make_optimizer = optimizer_maker(config, own.optimizer, strategy, len(work.train))
        model = work.make_model()
        if own.model is not None:
            _make_equal(comm, model)
        facts = facts_of(config, own, work, model) if config.checkpoint_dir else None
        strategy.setup(comm, model, make_optimizer)
        # A strategy may keep only a part of the model, and the rest is freed.
        del model
        ends_s: list[float] = []
        with Stop(config.checkpoint_dir) as stop, Checkpoints(config, strategy, facts) as saved:
            run = _Run(config, work, strategy, saved, stop, logs, verbose)
            progress = saved.load(start, run.rehearse)
            if isinstance(strategy, OwnPaceStrategy):
                with memory.counted():
                    ends_s = run.train_at_own_pace(strategy, progress)
                run.measure(progress)
            while progress.epoch < config.epochs:
                with memory.counted():
                    progress.start_clock(strategy)
                    run.train_epoch(progress)
                    progress.stop_clock(strategy)
                run.end_epoch(progress)
        state, notes = strategy.full_state(), strategy.notes()
        strategy.close()
        mine = state if comm.rank == 0 else None
        counts = progress.sent or (None, None)
        digest = checksum(state)
        return RankReport(progress.rows, *counts, digest, mine, notes, memory.peak, ends_s)


def _make_equal(comm: Comm, model: nn.Module) -> None:
    """Give all ranks rank 0's parameters and buffers of a learner's own model.

    A function that makes a model may not be the same on all ranks, and under ``torchrun`` each
    rank has made its own model.
    """
    if comm.world_size > 1:
        model.to(comm.device)
        for tensor in (*model.parameters(), *model.buffers()):
            broadcast(comm, tensor.data)


class _Run:
    """A run on one rank: its parts, and what is done with them in turn."""

    def __init__(
        self,
        config: RunConfig,
        work: Work,
        strategy: Strategy,
        checkpoints: Checkpoints,
        stop: Stop,
        logs: RunLogs,
        verbose: bool,
    ):
        self.config, self.work, self.strategy, self.comm = config, work, strategy, strategy.comm
        self.checkpoints, self.stop, self.logs, self.verbose = checkpoints, stop, logs, verbose
        # Of a technique without waits: what its epochs have ended with, not measured yet.
        self.ends: list[tuple[float, Tensor, float, dict[str, Tensor]]] = []

    def train_epoch(self, progress: Progress) -> None:
        """One pass over the training samples, or what is left of it."""
        strategy, batches = self.strategy, self.batches(progress.epoch)
        total = self.config.epochs * len(batches)
        for batch in self.shares(batches[progress.step :], progress.epoch):
            loss, samples = strategy.step(*batch).detach(), len(batch[1])
            progress.end_step(loss)
            now = {"samples": samples, "loss": loss / max(1, samples)}
            done = progress.epoch * len(batches) + progress.step
            self.comm.progress(done, total, f"steps, epoch {progress.epoch + 1}", **now)
            if progress.step < len(batches) and self.checkpoints.writer is not None:
                before = strategy.sent()
                is_end = self.agree(progress)
                # These messages are not the technique's.
                progress.sent = added(progress.sent, strategy.sent(), before)
                if is_end or self.checkpoints.is_due(progress):
                    progress.stop_clock(strategy)
                    self.checkpoints.save(progress)
                    progress.start_clock(strategy)
                if is_end:
                    self.end_early(progress)
        strategy.end_epoch()

    def end_epoch(self, progress: Progress) -> None:
        """Evaluate, which is not part of the technique, so it is neither timed nor counted."""
        sums = evaluated(self.work, self.strategy, *self.strategy.share())
        measured = progress.loss_sum, progress.finite, progress.trained, sums, progress.spent_s
        row, finite = summed_row(self.comm, self.work, progress.seconds, *measured)
        if not math.isfinite(row["loss"]):
            self.check_finite(progress.epoch, finite)
        is_end = self.agree(progress)
        progress.end_epoch(row)
        self.tell(progress.rows)
        is_end = is_end and progress.epoch < self.config.epochs
        if self.checkpoints.is_due(progress) or is_end:
            self.checkpoints.save(progress)
        if is_end:
            self.end_early(progress)

    def agree(self, progress: Progress) -> bool:
        """Whether a rank has been told to end.

        Raises:
            FloatingPointError: the loss of a rank is not finite.
        """
        if self.checkpoints.writer is None:
            return False
        words = [float(self.stop.is_told), progress.finite.item() < progress.step]
        flags = torch.tensor(words, dtype=torch.float64, device=self.comm.device)
        if self.comm.world_size > 1:
            ring_all_reduce(self.comm, flags)
        if flags[1]:
            self.check_finite(progress.epoch, progress.step - 1)
        return bool(flags[0])

    def check_finite(self, epoch: int, finite: int) -> None:
        """Refuse to go on after a loss that is not finite, unless fp16's scaler skips such steps.

        Args:
            epoch: the one under way.
            finite: its steps before that.
        """
        scaler = getattr(self.strategy, "scaler", None)
        if scaler is not None and scaler.is_enabled():
            return
        optimizer = self.strategy.optimizer
        rate = optimizer.param_groups[0].get("lr") if optimizer else self.config.lr
        raise FloatingPointError(
            f"the loss is not finite after step {finite + 1} of epoch {epoch + 1}, with learning "
            f"rate {rate}: try a smaller lr, a warm-up (warmup_epochs) or clip_norm 1"
        )

    def end_early(self, progress: Progress) -> None:
        """Raise PreemptedError on all ranks when what was saved last is whole."""
        assert self.checkpoints.writer is not None
        self.checkpoints.writer.wait()
        self.comm.barrier()
        steps = len(self.batches(0))
        done = progress.epoch * steps + progress.step
        raise PreemptedError(
            f"stopped by SIGTERM after {done} of {self.config.epochs * steps} steps, with a "
            "checkpoint: the same command goes on from there with resume"
        )

    def train_at_own_pace(self, strategy: OwnPaceStrategy, progress: Progress) -> list[float]:
        """Train so that no rank waits for the others; return ``RankReport.ends_s``."""
        origin_s, steps = self.comm.session.recorder.origin, len(self.batches(0))
        ends_s = [time.perf_counter() - origin_s]
        progress.start_clock(strategy)
        for end in strategy.train(self.endless_shares(), steps, self.config.epochs):
            ends_s.append(time.perf_counter() - origin_s)
            self.ends.append((*end, float(strategy.accuracy), strategy.full_state()))
            if not end[1].isfinite():
                self.check_finite(len(self.ends) - 1, steps - 1)
        progress.stop_clock(strategy)
        return ends_s

    def measure(self, progress: Progress) -> None:
        """After training at their own pace: evaluate the parameters with which epochs ended."""
        assert isinstance(self.strategy, OwnPaceStrategy)
        now = self.strategy.full_state()
        for passed_s, loss, accuracy, state in self.ends:
            self.strategy.load_full_state(state)
            sums = evaluated(self.work, self.strategy, 0, 1)
            seconds = passed_s - sum(row["seconds"] for row in progress.rows)
            progress.rows.append(row_of(self.work, loss.item(), seconds, accuracy, sums))
            self.tell(progress.rows)
        self.strategy.load_full_state(now)
        progress.epoch = self.config.epochs

    def tell(self, rows: list[Row]) -> None:
        """Say and log what the last epoch has reported."""
        self.logs.add(rows)
        if self.verbose and self.comm.rank == 0:
            print(epoch_line(len(rows) - 1, self.config.epochs, rows[-1]))

    def rehearse(self) -> None:
        """What a first step leaves behind, before a run is continued."""
        self.strategy.rehearse(*next(self.shares(self.batches(0)[:1], 0)))

    def batches(self, epoch: int) -> Sequence[Tensor]:
        order = epoch_order(len(self.work.train), epoch=epoch, seed=self.config.seed)
        return batch_slices(order, self.config.batch_size)

    def shares(self, batches: Sequence[Tensor], epoch: int) -> Iterator[Batch]:
        """This rank's samples of each global batch, on its device, and the size of that batch."""
        mine = [self.strategy.part_of(batch) for batch in batches]
        loaded = self.work.train.batches(mine, pinned=self.strategy.uses_gpu, epoch=epoch)
        for batch in batches:
            with self.comm.span("data"):
                inputs, targets = on_device(next(loaded), self.comm.device)
            yield inputs, targets, len(batch)

    def endless_shares(self) -> Iterator[Batch]:
        """This rank's share of one batch after another, from the first one on."""
        for epoch in itertools.count():
            yield from self.shares(self.batches(epoch), epoch)
