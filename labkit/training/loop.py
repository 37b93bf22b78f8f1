"""The training loop that all techniques share.

The loop owns the data, the epochs and the measurements; a strategy owns the model and synchronises
the ranks. So the runs of two techniques differ only in the technique.
"""

import itertools
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labkit.collectives import broadcast, ring_all_reduce
from labkit.comm.comm import Comm
from labkit.comm.peak_memory import Part, PeakMemory
from labkit.config import RunConfig
from labkit.errors import PreemptedError
from labkit.runtime.prepare import allow_tf32
from labkit.strategies.async_parameter_server import AsyncParameterServer
from labkit.strategies.base import Batch, Strategy
from labkit.training.evaluation import (
    Logs,
    Progress,
    Row,
    epoch_line,
    evaluated,
    row_of,
    summed_row,
)
from labkit.training.optimizer import optimizer_maker
from labkit.training.own import NOTHING, Own
from labkit.training.resolve import Work, work_of
from labkit.training.resume import Checkpoints, identity, on_sigterm
from labkit.training.state import checksum
from labkit.workload.losses import CountedLoss
from labkit.workload.samples import on_device
from labkit.workload.sampling import batch_slices, epoch_order


@dataclass(frozen=True)
class RankReport:
    """The result of a training run on one rank, see ``TrainResult``.

    ``state`` is on rank 0 only. Where ranks do not wait for each other, ``ends_s`` says when the
    training began here and when each epoch ended here, in seconds of the trace.
    """

    epochs: list[Row]
    messages: int | None
    bytes_sent: int | None
    checksum: str
    state: dict[str, Tensor] | None
    notes: dict[str, Any] = field(default_factory=dict)
    peak_memory: PeakMemory | None = None
    ends_s: list[float] = field(default_factory=list)


# Ranks of other hosts may return it: it only holds data.
torch.serialization.add_safe_globals([RankReport])


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
    model = work.make_model()
    if own.model is not None and comm.world_size > 1:
        # A function may not make the same on all ranks, and under torchrun each has its own.
        model.to(comm.device)
        for tensor in (*model.parameters(), *model.buffers()):
            broadcast(comm, tensor.data)
    facts = identity(config, own, work, model) if config.checkpoint_dir else {}
    strategy.setup(comm, model, optimizer_maker(config, own.optimizer, strategy, len(work.train)))
    # A strategy may keep only a part of the model, and the rest is freed.
    del model
    run = _Run(config, work, strategy, facts, verbose)
    progress, ends_s = run.progress, []
    with on_sigterm(run.stop.set if run.checkpoints else None):
        if start is not None and run.checkpoints:
            run.checkpoints.load(start, progress, run.rehearse)
        if isinstance(strategy, AsyncParameterServer):
            ends_s = run.train_at_own_pace(strategy, memory)
        while progress.epoch < config.epochs:
            with memory.counted():
                progress.start_clock(strategy)
                run.train_epoch()
                progress.stop_clock(strategy)
            run.end_epoch()
    if run.logs is not None:
        run.logs.close()
    state, notes = strategy.full_state(), strategy.notes()
    strategy.close()
    counts = progress.sent or (None, None)
    mine = state if comm.rank == 0 else None
    return RankReport(progress.rows, *counts, checksum(state), mine, notes, memory.peak, ends_s)


class _Run:
    """A run on one rank: its parts, how far it is, and what is done in turn."""

    def __init__(
        self,
        config: RunConfig,
        work: Work,
        strategy: Strategy,
        facts: dict[str, Any],
        verbose: bool,
    ):
        self.config, self.work, self.strategy, self.comm = config, work, strategy, strategy.comm
        self.steps = math.ceil(len(work.train) / config.batch_size)
        sums = torch.zeros(4, dtype=torch.float64, device=self.comm.device)
        self.progress, self.stop = Progress(sums), threading.Event()
        self.checkpoints = self.logs = None
        if config.checkpoint_dir is not None:
            self.checkpoints = Checkpoints(config, strategy, facts, self.steps)
        self.tells = self.comm.rank == 0 and verbose
        if config.log_dir is not None and self.comm.rank == 0:
            self.logs = Logs(config.log_dir)

    def train_epoch(self) -> None:
        """One pass over the training samples, or what is left of it."""
        strategy, progress = self.strategy, self.progress
        batches = self.batches(progress.epoch)[progress.step :]
        for batch in self.shares(batches, progress.epoch):
            loss, samples = strategy.step(*batch).detach(), len(batch[1])
            progress.end_step(loss)
            done, total = progress.epoch * self.steps + progress.step, self.steps
            now = {"samples": samples, "loss": loss / max(1, samples)}
            label = f"steps, epoch {progress.epoch + 1}"
            self.comm.progress(done, total * self.config.epochs, label, **now)
            if self.checkpoints is not None and progress.step < self.steps:
                # Its messages and seconds are not the technique's.
                progress.stop_clock(strategy)
                self.save_and_end(self.agree())
                progress.start_clock(strategy)
        strategy.end_epoch()

    def end_epoch(self) -> None:
        """Evaluate, which is not part of the technique, so it is neither timed nor counted."""
        progress = self.progress
        row, finite = summed_row(self.work, self.strategy, progress)
        if not math.isfinite(row["loss"]):
            self.check_finite(progress.epoch, finite)
        is_end = self.agree()
        progress.end_epoch(row)
        self.tell()
        self.save_and_end(is_end and progress.epoch < self.config.epochs)

    def agree(self) -> bool:
        """Whether a rank has been told to end.

        Raises:
            FloatingPointError: the loss of a rank is not finite.
        """
        progress = self.progress
        if self.checkpoints is None:
            return False
        words = [float(self.stop.is_set()), bool(progress.sums[3] < progress.step)]
        flags = torch.tensor(words, dtype=torch.float64, device=self.comm.device)
        if self.comm.world_size > 1:
            ring_all_reduce(self.comm, flags)
        if flags[1]:
            self.check_finite(progress.epoch, progress.step - 1)
        return bool(flags[0])

    def save_and_end(self, is_end: bool) -> None:
        """Save a checkpoint if one is due; raise PreemptedError on all ranks after the last."""
        if self.checkpoints is not None and (is_end or self.checkpoints.is_due(self.progress)):
            self.checkpoints.save(self.progress)
        if is_end:
            self.comm.barrier()
            done = self.progress.epoch * self.steps + self.progress.step
            total = self.config.epochs * self.steps
            raise PreemptedError(
                f"stopped by SIGTERM after {done} of {total} steps, with a checkpoint: the same "
                "command goes on from there with resume"
            )

    def check_finite(self, epoch: int, finite: int) -> None:
        """Refuse to go on after ``finite`` steps of an epoch, unless fp16's scaler skips them."""
        scaler = getattr(self.strategy, "scaler", None)
        if scaler is not None and scaler.enabled:
            return
        optimizer = self.strategy.optimizer
        rate = optimizer.param_groups[0].get("lr") if optimizer else self.config.lr
        raise FloatingPointError(
            f"the loss is not finite after step {finite + 1} of epoch {epoch + 1}, with learning "
            f"rate {rate}: try a smaller lr, a warm-up (warmup_epochs) or clip_norm 1"
        )

    def train_at_own_pace(self, strategy: AsyncParameterServer, memory: Part) -> list[float]:
        """Train so that no rank waits for the others; return ``RankReport.ends_s``.

        What the epochs have ended with is evaluated afterwards.
        """
        progress, origin_s = self.progress, self.comm.session.recorder.origin
        endless = (self.shares(self.batches(epoch), epoch) for epoch in itertools.count())
        batches = itertools.chain.from_iterable(endless)
        ends, ends_s = [], [time.perf_counter() - origin_s]
        with memory.counted():
            progress.start_clock(strategy)
            for passed_s, loss in strategy.train(batches, self.steps, self.config.epochs):
                ends_s.append(time.perf_counter() - origin_s)
                ends.append((passed_s, loss, strategy.full_state()))
                if not loss.isfinite():
                    self.check_finite(len(ends) - 1, self.steps - 1)
            progress.stop_clock(strategy)
        last = strategy.full_state()
        for passed_s, loss, state in ends:
            strategy.model.load_state_dict(state)
            sums = evaluated(self.work, strategy, 0, 1)
            seconds = passed_s - sum(row["seconds"] for row in progress.rows)
            progress.rows.append(row_of(self.work, loss.item(), seconds, math.nan, sums))
            self.tell()
        strategy.model.load_state_dict(last)
        progress.epoch = self.config.epochs
        return ends_s

    def tell(self) -> None:
        """Say and log what the last epoch has reported."""
        rows = self.progress.rows
        if self.logs is not None:
            self.logs.add(rows)
        if self.tells:
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
