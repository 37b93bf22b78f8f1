"""The training loop that all techniques share, and what an epoch reports.

The loop owns the data, the epochs and the measurements; a strategy owns the model and synchronizes
the ranks. So the runs of two techniques differ only in the technique.
"""

import itertools
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from labkit.collectives import broadcast, ring_all_reduce
from labkit.engine import gpus
from labkit.engine.comm.comm import Comm
from labkit.engine.comm.peak_memory import Part, PeakMemory
from labkit.engine.errors import PreemptedError
from labkit.engine.runtime.worker import allow_tf32
from labkit.strategies.async_parameter_server import AsyncParameterServer
from labkit.strategies.base import Batch, Strategy
from labkit.training.checkpoint import Checkpoints, Progress, Row, identity, on_sigterm
from labkit.training.config import RunConfig
from labkit.training.optimizers import optimizer_maker
from labkit.training.result import checksum
from labkit.training.run_record import RunRecord
from labkit.training.same_data import Sketch, check_same, sketch
from labkit.training.work import NOTHING, Own, Work, work_of
from labkit.workload.losses import CountedLoss, count_right
from labkit.workload.samples import batch_slices, epoch_order, on_device, share

# Held-out samples judged at once; fewer where they have more values in all, as large images have.
_BATCH = 512
_MOST_VALUES = 2**21


@dataclass(frozen=True)
class RankReport:
    """The result of a training run on one rank, see ``TrainResult``; ``state`` is on rank 0."""

    epochs: list[Row]
    messages: int | None
    bytes_sent: int | None
    checksum: str
    state: dict[str, Tensor] | None
    notes: dict[str, Any]
    peak_memory: PeakMemory | None


# Ranks of other hosts may return it: it only holds data.
torch.serialization.add_safe_globals([RankReport])


def fit(
    comm: Comm,
    config: RunConfig,
    strategy: Strategy,
    verbose: bool,
    own_parts: Own = NOTHING,
    start: Path | None = None,
    data: Sketch | None = None,
) -> RankReport:
    """Train on this rank; ``labkit.run`` calls this function on every rank.

    ``strategy`` is not set up yet; ``start`` is the checkpoint from which the run goes on, and
    ``data`` a sketch of the data set with which the run began: ValueError if this rank's differs.
    """
    allow_tf32(config.amp == "tf32")
    work = work_of(config, own_parts)
    if data is not None and comm.world_size > 1:
        check_same(comm.rank, sketch(work.train, work.test, config.seed), data)
    strategy.loss = CountedLoss(work.loss)
    strategy.clip_norm = config.clip_norm
    if isinstance(work.loss.loss, nn.Module):
        # Its weights are buffers.
        work.loss.loss.to(comm.device)
    model = work.make_model()
    # What the model takes counts, whether it was made here or has arrived with the call.
    memory = Part(comm.session.memory, sum(t.nbytes for t in model.state_dict().values()))
    if own_parts.model is not None and comm.world_size > 1:
        # A function may not make the same on all ranks, and under torchrun each has its own.
        _broadcast_model(comm, model)
    run_identity = identity(config, own_parts, work, model)
    make_optimizer = optimizer_maker(config, own_parts.optimizer, strategy, len(work.train))
    strategy.setup(comm, model, make_optimizer)
    # A strategy may keep only a part of the model, and the rest is freed.
    del model
    run = _Run(config, work, strategy, run_identity, start, verbose and comm.rank == 0)
    progress = run.progress
    end_early = run.stop.set if run.checkpoints else None
    with on_sigterm(end_early):
        if isinstance(strategy, AsyncParameterServer):
            run.train_at_own_pace(strategy, memory)
        while progress.epoch < config.epochs:
            with memory.counted():
                run.start_clock()
                run.train_epoch()
                run.stop_clock()
            run.end_epoch()
    run.close_files()
    state = strategy.full_state()
    notes = strategy.notes()
    strategy.close()
    messages, bytes_sent = progress.sent or (None, None)
    return RankReport(
        epochs=progress.rows,
        messages=messages,
        bytes_sent=bytes_sent,
        checksum=checksum(state),
        state=state if comm.rank == 0 else None,
        notes=notes,
        peak_memory=memory.peak,
    )


def _broadcast_model(comm: Comm, model: nn.Module) -> None:
    # One tensor after the other: the device may not hold the whole model.
    for tensor in (*model.parameters(), *model.buffers()):
        values = tensor.detach().to(comm.device)
        broadcast(comm, values)
        tensor.data.copy_(values)


@dataclass
class _Run:
    """A run on one rank: its parts, how far it is, and the steps and epochs that it makes."""

    config: RunConfig
    work: Work
    strategy: Strategy
    identity: dict[str, Any]
    start: Path | None
    verbose: bool
    checkpoints: Checkpoints | None = None
    events: Any = None
    record: RunRecord | None = None

    def __post_init__(self) -> None:
        config = self.config
        strategy = self.strategy
        self.comm = strategy.comm
        self.stop = threading.Event()
        devices = [self.comm.device, *strategy.devices]
        self.uses_gpu = any(device.type == "cuda" for device in devices)
        sums = torch.zeros(5, dtype=torch.float64, device=self.comm.device)
        self.progress = Progress(sums, math.ceil(len(self.work.train) / config.batch_size))
        if config.checkpoint_dir is not None:
            self.checkpoints = Checkpoints(
                config, strategy, self.identity, self.progress, self.work
            )
            if self.start is not None:
                # A first step leaves more behind than its update.
                first_share = next(self.shares(self.batches(0)[:1], 0))
                self.checkpoints.saved_state.rehearse(*first_share)
                self.checkpoints.load(self.start)
        if config.log_dir is not None and self.comm.rank == 0:
            # Not at the top: few runs need it, and it takes a moment.
            from torch.utils.tensorboard import SummaryWriter

            # Later epochs that an interrupted run wrote are not shown any more.
            self.events = SummaryWriter(config.log_dir, purge_step=len(self.progress.rows) + 1)
        if config.record is not None:
            self.record = RunRecord(config, strategy)

    def close_files(self) -> None:
        """End the files beside the checkpoints."""
        if self.events is not None:
            self.events.close()
        if self.record is not None:
            self.record.end()

    def start_clock(self) -> None:
        """Count time, messages and bytes from now on."""
        self._sent_before = self.strategy.sent() or (0, 0)
        self._since_s = self.now_s()

    def stop_clock(self) -> None:
        """Add what was counted since ``start_clock``, and the right predictions."""
        progress = self.progress
        progress.seconds += self.now_s() - self._since_s
        sent = self.strategy.sent()
        if sent is not None:
            messages, num_bytes = progress.sent or (0, 0)
            messages += sent[0] - self._sent_before[0]
            num_bytes += sent[1] - self._sent_before[1]
            progress.sent = [messages, num_bytes]
        loss = self.strategy.loss
        if isinstance(loss, CountedLoss):
            right, judged = loss.take()
            counts: dict[int, Any] = {progress.RIGHT: right, progress.JUDGED: judged}
            counts[progress.WEIGHT] = loss.take_weight()
            for number, count in counts.items():
                # It is on the device of the outputs, which need not be the rank's.
                progress.sums[number] += torch.as_tensor(count).to(progress.sums)

    def now_s(self) -> float:
        """Read the host's clock when all that was queued on the strategy's devices has ended."""
        for device in {self.comm.device, *self.strategy.devices}:
            gpus.synchronize(device)
        return time.perf_counter()

    def train_epoch(self) -> None:
        """Make one pass over the training samples, or what is left of it."""
        strategy = self.strategy
        progress = self.progress
        all_steps = progress.epoch_steps * self.config.epochs
        label = f"steps, epoch {progress.epoch + 1}"
        batches = self.batches(progress.epoch)[progress.step :]
        for batch in self.shares(batches, progress.epoch):
            loss = strategy.step(*batch).detach()
            # Nothing waits for a GPU.
            progress.step += 1
            progress.sums[progress.LOSS] += loss
            progress.sums[progress.FINITE_STEPS] += progress.sums[progress.LOSS].isfinite()
            samples = len(batch[1])
            weight = samples if strategy.step_weight is None else strategy.step_weight
            mean_loss = loss / (weight + (weight == 0))
            self.comm.progress(progress.done, all_steps, label, samples=samples, loss=mean_loss)
            if self.record is not None:
                weight_before = progress.sums[progress.WEIGHT].clone()
                self.stop_clock()
                weight = progress.sums[progress.WEIGHT] - weight_before
                self.record.write_step(progress.done, loss, weight)
                self.start_clock()
            if self.checkpoints is not None and progress.step < progress.epoch_steps:
                # Its messages and seconds are not the technique's.
                self.stop_clock()
                self.save_and_end(self.agree())
                self.start_clock()
        strategy.end_epoch()

    def end_epoch(self) -> None:
        """Evaluate, which is not part of the technique, so it is neither timed nor counted."""
        comm = self.comm
        progress = self.progress
        tested = self.evaluated(*self.strategy.share_index())
        with comm.span("evaluate"):
            finite_steps = tested.new_zeros(comm.world_size)
            finite_steps[comm.rank] = progress.sums[progress.FINITE_STEPS]
            sums = torch.cat([progress.sums, tested, finite_steps])
            if comm.world_size > 1:
                ring_all_reduce(comm, sums)
        trained, tested, finite_steps = sums.split([5, 4, comm.world_size])
        loss, right, judged, _, weight = trained.tolist()
        if not math.isfinite(loss):
            self.check_finite(int(finite_steps.min()))
        is_end = self.agree()
        accuracy = _ratio(right, judged)
        self.report(_ratio(loss, weight), accuracy, progress.seconds, tested)
        progress.epoch += 1
        progress.step = 0
        progress.seconds = 0.0
        progress.sums.zero_()
        self.save_and_end(is_end and progress.epoch < self.config.epochs)

    def agree(self) -> bool:
        """True if a rank was sent SIGTERM; all ranks end if the loss of one is not finite."""
        if self.checkpoints is None:
            return False
        progress = self.progress
        has_nan = bool(progress.sums[progress.FINITE_STEPS] < progress.step)
        flags = torch.tensor(
            [self.stop.is_set(), has_nan], dtype=torch.float64, device=self.comm.device
        )
        if self.comm.world_size > 1:
            ring_all_reduce(self.comm, flags)
        if flags[1]:
            self.check_finite(progress.step - 1)
        return bool(flags[0])

    def save_and_end(self, is_end: bool) -> None:
        """Save a checkpoint if it is time; raise PreemptedError on all ranks after the last."""
        if self.checkpoints is not None and (is_end or self.checkpoints.is_due()):
            self.checkpoints.save()
        if is_end:
            self.comm.barrier()
            all_steps = self.config.epochs * self.progress.epoch_steps
            raise PreemptedError(
                f"stopped by SIGTERM after {self.progress.done} of {all_steps} steps, "
                "with a checkpoint: the same command goes on from there with resume"
            )

    def check_finite(self, finite: int) -> None:
        """Refuse to go on after ``finite`` steps of an epoch, unless fp16's scaler skips them."""
        if self.config.amp == "fp16":
            return
        optimizer = self.strategy.optimizer
        rate = optimizer.param_groups[0].get("lr") if optimizer else self.config.lr
        raise FloatingPointError(
            f"the loss is not finite after step {finite + 1} of epoch {self.progress.epoch + 1}, "
            f"with learning rate {rate}: try a smaller lr, a warm-up (warmup_epochs), or "
            "clip_norm 1; if it is the first step, look for NaN in the data"
        )

    def train_at_own_pace(self, strategy: AsyncParameterServer, memory: Part) -> None:
        """Train so that no rank waits for the others, and evaluate the epochs afterwards."""
        progress = self.progress
        epochs = self.config.epochs
        ends = []
        with memory.counted():
            self.start_clock()
            shares = self.endless_shares()
            for passed_s, loss in strategy.train(shares, progress.epoch_steps, epochs):
                if not loss.isfinite():
                    self.check_finite(progress.epoch_steps - 1)
                ends.append((loss.item(), passed_s, strategy.full_state()))
                progress.epoch += 1
            self.stop_clock()
        last_state = strategy.full_state()
        before_s = 0.0
        for loss, passed_s, state in ends:
            strategy.model.load_state_dict(state)
            self.report(loss, math.nan, passed_s - before_s, self.evaluated(0, 1))
            before_s = passed_s
        strategy.model.load_state_dict(last_state)
        progress.epoch = epochs

    def endless_shares(self) -> Iterator[Batch]:
        """This rank's samples of each batch of one epoch after the other, without an end."""
        for epoch in itertools.count():
            yield from self.shares(self.batches(epoch), epoch)

    def batches(self, epoch: int) -> Sequence[Tensor]:
        order = epoch_order(len(self.work.train), epoch=epoch, seed=self.config.seed)
        return batch_slices(order, self.config.batch_size)

    def shares(self, batches: Sequence[Tensor], epoch: int) -> Iterator[Batch]:
        """This rank's samples of each global batch, on its device, and the size of that batch."""
        parts = [self.strategy.part_of(batch) for batch in batches]
        loaded = self.work.train.batches(parts, pinned=self.uses_gpu, epoch=epoch)
        for batch in batches:
            with self.comm.span("data"):
                inputs, targets = on_device(next(loaded), self.comm.device)
            yield inputs, targets, len(batch)

    def evaluated(self, index: int, count: int) -> Tensor:
        """Judge part ``index`` of ``count`` of the held-out samples.

        Returns float64 [4]: correct predictions, targets that are a class, losses, their weight.
        """
        comm = self.comm
        test = self.work.test
        strategy = self.strategy
        sums = torch.zeros(4, dtype=torch.float64, device=comm.device)
        if test is None:
            return sums
        with comm.span("evaluate"):
            size = min(_BATCH, max(1, _MOST_VALUES // test.first(1)[0].numel()))
            batches = torch.arange(len(test)).split(size)
            parts = [share(batch, index, count) for batch in batches]
            # Not every model takes an empty batch.
            parts = [part for part in parts if len(part) or strategy.traits.predicts_together]
            for batch in test.batches(parts, pinned=self.uses_gpu):
                inputs, targets = on_device(batch, comm.device)
                outputs = strategy.predict(inputs)
                if outputs is None:
                    continue
                loss, weight = self.work.loss(outputs, targets)
                sums[2] += loss
                sums[3] += weight
                counts = count_right(outputs, targets, self.work.loss.ignore_index)
                if counts is not None:
                    sums[0] += counts[0]
                    sums[1] += counts[1]
        return sums

    def report(self, loss: float, accuracy: float, seconds: float, tested: Tensor) -> None:
        """Add, print and log an epoch's numbers: means over its samples, and held-out sums."""
        right, judged, losses, weight = tested.tolist()
        test_accuracy = _ratio(right, judged)
        row = {"loss": loss, "test_accuracy": test_accuracy, "seconds": seconds}
        row |= {"train_accuracy": accuracy, "test_loss": _ratio(losses, weight)}
        rows = self.progress.rows
        rows.append(row)
        if self.events is not None:
            for name, value in row.items():
                if math.isfinite(value):
                    self.events.add_scalar(name, value, len(rows))
            self.events.flush()
        if self.verbose:
            line = f"epoch {len(rows)}/{self.config.epochs}: loss {loss:.4f}, "
            if not math.isnan(accuracy):
                line += f"training accuracy {accuracy:.2%}, "
            if not math.isnan(test_accuracy):
                line += f"held-out accuracy {test_accuracy:.2%}, "
            print(f"{line}{seconds:.2f} s")


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan
