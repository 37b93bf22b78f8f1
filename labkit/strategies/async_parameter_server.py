"""An asynchronous parameter server: no worker waits for another.

Rank 0 holds the parameters, the other ranks compute gradients for them. 1. A worker computes the
gradient of its share of a batch. 2. It **pushes** the gradient to the server, which applies it at
once. 3. It **pulls** the current parameters, and continues with its share of the next batch. Its
gradients are stale; the staleness is counted and can be bounded: ``labkit.schedules.staleness``.

A push is the sum over the share's samples, divided by the samples of the whole batch, so that W
pushes together move the parameters about as far as one synchronous step. (If a loss has another
weight, that of the batch is estimated from the share's.) Clipping limits each push to a W-th of
``clip_norm``.

Symbols: W workers, N trainable parameters, B floats in the model's buffers.
Sources: Dean et al., "Large scale distributed deep networks" (2012), section 4.1 (Downpour SGD);
Recht et al., "Hogwild!" (2011).
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.engine import gpus
from labkit.engine.comm.comm import Comm
from labkit.engine.errors import PeerLostError
from labkit.schedules.staleness import StalenessTracker, check_bound
from labkit.strategies.base import Batch, MakeOptimizer
from labkit.strategies.flat_tensors import lay_end_to_end
from labkit.strategies.on_shares import OnShares
from labkit.strategies.precision import LossScaler
from labkit.strategies.traits import Traits
from labkit.workload.losses import CountedLoss, Weighing

# Seconds since the start, and the mean loss of the epoch's samples.
EpochEnd = tuple[float, Tensor]


@dataclass(eq=False)
class AsyncParameterServer(OnShares):
    """Data parallelism in which every worker runs at its own pace: ``train`` replaces ``step``.

    A push takes two messages (losses, weight: [2]; gradient and buffers, [N + B]), and so does a
    pull (parameters and buffers, [N + B]; whether to continue, [1]). With amp ``fp16`` each worker
    has its own scale; a gradient that has overflowed counts as one of no samples.

    An epoch ends when the server has received as many shares as the epoch has, from any workers.
    A share that is empty, or ignored as a whole, counts, but makes no update. The loss of an epoch
    is the mean over the samples pushed during it. Each worker normalizes (BatchNorm) with the
    statistics of its own share; the server takes the running averages of the latest push as they
    are.

    A worker that dies is left out from then on, and so are its shares; if the last worker dies,
    the run fails. Workers never stop together, so there are no checkpoints.

    Args:
        straggler: see ``OnShares``.
        max_staleness: the most updates by other workers that a gradient may miss, W - 1 or more.
    """

    straggler: tuple[int, float] | None = None
    max_staleness: int | None = None
    servers = 1
    traits = Traits(
        survives_lost_workers=True,
        no_checkpoint="the workers of an asynchronous server never stop together",
    )

    def check_ranks(self, world_size: int) -> None:
        if world_size < 2:
            raise ValueError(
                "an asynchronous parameter server needs a server and at least one worker, got "
                f"world_size {world_size}: use world_size 2 or more, or strategy single"
            )
        check_bound(world_size - 1, self.max_staleness)

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.check_ranks(comm.world_size)
        self.move_to_device(comm, model)
        buffers = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        self.values, self.gradient = lay_end_to_end([*self.trained, *buffers])
        num_buffers = sum(buffer.numel() for buffer in buffers)
        self.buffer_slice = slice(len(self.values) - num_buffers, None)
        self.tracker = StalenessTracker(self.workers, self.max_staleness)
        # By worker, the first message of its push, while the gradient waits or is applied.
        self.reports: dict[int, Tensor] = {}
        if comm.rank == 0:
            self.optimizer = make_optimizer(self.trained)
            if self.clip_norm is not None:
                self.clip_norm /= len(self.workers)
            # Workers have unscaled what they push.
            self.precision.scaler = LossScaler(False)

    def updates_of(self, samples: int, world_size: int) -> int:
        # One for each worker's share, unless it is empty.
        return min(samples, world_size - 1)

    def train(self, batches: Iterator[Batch], steps: int, epochs: int) -> Iterator[EpochEnd]:
        """Train until the workers together have processed as many shares as all epochs have.

        ``batches`` are this rank's shares without end, ``steps`` of them an epoch. Yields on the
        server alone, when an epoch is complete; the caller then reads ``full_state``.
        """
        if self.comm.rank == 0:
            yield from self.serve(steps * len(self.workers), epochs)
        else:
            self.work(batches)

    def work(self, batches: Iterator[Batch]) -> None:
        """Compute a gradient as a worker, push it, pull, until the server says to stop."""
        goes_on = True
        done = 0
        # Integer buffers, such as BatchNorm's counts, do not travel, and end as they began.
        counters = [(b, b.clone()) for b in self.model.buffers() if not b.is_floating_point()]
        while goes_on:
            inputs, targets, batch_size = next(batches)
            samples = len(targets)
            self.gradient.zero_()
            loss = self.add_gradients(inputs, targets, batch_size)
            weight = self.weight_of_share(samples, batch_size)
            # Sums and counts are float64: bfloat16 is exact for integers only up to 256.
            report = torch.stack([loss.double(), weight.to(loss.device)])
            if self.precision.scaler.enabled:
                self.precision.scaler.unscale([self.gradient])
                overflowed = not bool(self.gradient.isfinite().all())
                self.precision.scaler.update(overflowed)
                if overflowed:
                    report.zero_()
            self.gradient[self.buffer_slice] = self.values[self.buffer_slice]
            goes_on = bool(self.push_and_pull(report))
            done += 1
            self.comm.progress(done, samples=samples, loss=loss / max(1, samples))
        for counter, start in counters:
            counter.copy_(start)

    def weight_of_share(self, samples: int, batch_size: int) -> Tensor:
        """Return the weight of a worker's losses; divide their gradient by that of the batch.

        The batch's weight per sample is taken to be the share's, since nobody waits for others.
        """
        weight = torch.tensor(samples, dtype=torch.float64)
        if self.weighing is Weighing.NOTHING:
            self.gradient *= batch_size
        elif self.weighing is Weighing.DATA and isinstance(self.loss, CountedLoss):
            weight = torch.as_tensor(self.loss.take_step(), dtype=torch.float64)
            self.gradient *= torch.where(weight > 0, samples / weight, 0).to(self.gradient)
        return weight

    def push_and_pull(self, report: Tensor) -> Tensor:
        """Send a worker's gradient and receive the parameters; returns whether to go on."""
        with self.comm.span("push"):
            self.comm.send(report, 0)
            self.comm.send(self.gradient, 0)
        with self.comm.span("pull"):
            self.comm.recv(self.values, 0)
            return self.comm.recv(self.values.new_empty(1), 0)

    def serve(self, shares: int, epochs: int) -> Iterator[EpochEnd]:
        """Apply each push as it arrives at the server, ``epochs`` x ``shares`` in all."""
        start_s = time.perf_counter()
        done = 0
        last = shares * epochs
        # The sum of this epoch's losses so far, and their weight.
        sums = self.values.new_zeros(2, dtype=torch.double)
        while done < last or self.tracker.pulled:
            # After the last update: receive the late pushes, answer with the final parameters.
            worker = self.tracker.next_worker()
            if done == last:
                worker = next(iter(self.tracker.waiting), None)
            with self.may_be_lost(done < last):
                if worker is None:
                    self.tracker.push(self.recv_report())
                    continue
                self.receive(worker)
                if done < last:
                    self.apply(worker)
                    sums += self.reports[worker]
                    done += 1
                    if done % shares == 0:
                        gpus.synchronize(self.comm.device)
                        yield time.perf_counter() - start_s, sums[0] / sums[1]
                        sums.zero_()
                self.answer(worker, self.values.new_full((1,), done < last))
                if done < last:
                    self.tracker.pull(worker)
                else:
                    self.tracker.drop(worker)
            self.comm.progress(done, last, "shares of all workers")

    def recv_report(self) -> int:
        """Wait until a worker begins a push, and receive the push's first message."""
        report = self.values.new_empty(2, dtype=torch.double)
        with self.comm.span("push"):
            idle = self.tracker.pulled.keys() - self.tracker.waiting
            worker = self.comm.recv_any(report, idle)
        self.reports[worker] = report
        return worker

    def receive(self, worker: int) -> None:
        """Receive the gradient of a push."""
        with self.comm.span("push"):
            self.comm.recv(self.gradient, worker)

    def apply(self, worker: int) -> None:
        """Apply the gradient that was received; an empty share makes no update."""
        if self.reports[worker][1] > 0:
            self.update()
            self.values[self.buffer_slice] = self.gradient[self.buffer_slice]
            self.tracker.apply(worker)

    def answer(self, worker: int, goes_on: Tensor) -> None:
        """Send ``worker`` the parameters that it pulls, and whether to go on."""
        with self.comm.span("pull"):
            self.comm.send(self.values, worker)
            self.comm.send(goes_on, worker)

    @contextlib.contextmanager
    def may_be_lost(self, is_needed: bool) -> Iterator[None]:
        """A context that leaves a worker out if it dies; the last one may only die at the end."""
        try:
            yield
        except PeerLostError as error:
            is_last = len(self.tracker.pulled) == 1
            if error.rank not in self.tracker.pulled or (is_last and is_needed):
                raise
            self.tracker.drop(error.rank)
            print(
                f"rank {error.rank} is lost after {self.tracker.version} updates, going on with "
                f"workers {sorted(self.tracker.pulled)}: {error}"
            )

    def notes(self) -> dict[str, Any]:
        """``staleness`` is [worker, staleness] of each update."""
        updates = [list(update) for update in self.tracker.updates]
        workers = [worker for worker, _ in updates]
        counts = [workers.count(rank) for rank in range(self.comm.world_size)]
        return {"staleness": updates, "updates_by_rank": counts}
