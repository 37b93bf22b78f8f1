"""An asynchronous parameter server: no worker waits for another.

Rank 0 holds the parameters, the other ranks compute gradients for them. 1. A worker computes the
gradient of its share of a batch. 2. It **pushes** the gradient to the server, which applies it at
once, while other workers are still computing. 3. It **pulls** the current parameters, and
continues with its share of the next batch. A slow worker does not delay the others. Its gradients
are stale; the staleness is counted and can be bounded: ``labkit.schedules.servers``.

A push is the sum over the share's samples, divided by the samples of the whole batch. So W pushes,
one per worker, together move the parameters about as far as one synchronous step. Clipping
limits each of them to a W-th of ``clip_norm``, so that W pushes together stay within it.

Symbols: W workers, N trainable parameters, B numbers in the model's buffers.
Sources: Dean et al., "Large scale distributed deep networks" (2012), section 4.1 (Downpour SGD);
Recht et al., "Hogwild!" (2011).
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit import gpus
from labkit.comm.comm import Comm
from labkit.errors import PeerLostError
from labkit.schedules.servers import StalenessTracker, check_bound
from labkit.strategies.base import Batch, EpochEnd, MakeOptimizer, OwnPaceStrategy
from labkit.strategies.flat_parameters import flat_buffers, lay_end_to_end, load_flat_buffers

_SERVER = 0


@dataclass(eq=False)
class AsyncParameterServer(OwnPaceStrategy):
    """Data parallelism in which every worker runs at its own pace.

    A push takes two messages (loss, right predictions, samples and buffers, [3 + B]; gradient,
    [N]), and so does a pull (parameters, [N]; whether to continue, and buffers, [1 + B]). A
    gradient that the bound holds back stays with its worker until its turn.

    With amp ``fp16`` the server decides on the scale of the loss: a push and a pull have it as one
    number more. A gradient that has overflowed makes no update, and the scale is halved unless it
    has changed since the worker pulled it.

    An epoch ends when the server has received as many shares as the epoch has, from any workers: a
    fast worker may be working on its shares of the next epoch by then. An empty share counts, but
    makes no update. The loss of an epoch is the mean over the samples pushed during it.

    Batch statistics (BatchNorm): each worker normalises with the statistics of its own share. The
    server takes the running averages and counters of the latest push as they are, and a pull
    returns them: they always come from one worker and are never mixed.

    A worker that dies is left out from then on, and so are its shares; if the last worker dies,
    the run fails. (``torchrun`` ends the run whenever a rank dies.)

    ``max_staleness`` is the most updates by other workers that a gradient may miss, W - 1 or more.
    """

    max_staleness: int | None = None
    optimizes = "elements"
    survives_lost_workers = True

    def check_ranks(self, world_size: int) -> None:
        super().check_ranks(world_size)
        check_bound(world_size - 1, self.max_staleness)

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.check_ranks(comm.world_size)
        if self.max_staleness is not None and not comm.can_choose:
            raise ValueError(
                "max_staleness lets some workers wait while others are served; for that all ranks "
                "have to be on one Linux machine: leave it out here"
            )
        self.place(comm, model)
        self.compute_with(self.model)
        self.parameters, self.gradient = lay_end_to_end(self.model)
        self.report = self._with_buffers(0, 0, 0)
        self.tracker = StalenessTracker(self.workers, self.max_staleness)
        self.updates = self.tracker.updates
        # By worker: the first message of its push, while the gradient waits or is applied.
        self.reports: dict[int, Tensor] = {}
        # Of this epoch so far: the sum of losses, right predictions, samples.
        self.sums = self.report.new_zeros(3, dtype=torch.double)
        if comm.rank == _SERVER:
            # SGD works element by element, so one flat parameter gives the same updates.
            flat = nn.Parameter(self.parameters)
            flat.grad = self.gradient
            self.optimizer = make_optimizer([flat])
            clip_norm = self.clip_norm and self.clip_norm / len(self.workers)
            self.apply = self.update_of([flat], clip_norm=clip_norm)

    def train(self, batches: Iterator[Batch], steps: int, epochs: int) -> Iterator[EpochEnd]:
        if self.comm.rank == _SERVER:
            yield from self.serve(steps * len(self.workers), epochs)
        else:
            self.work(batches)

    def work(self, batches: Iterator[Batch]) -> None:
        """On a worker: compute a gradient, push it, pull, until the server says to stop."""
        goes_on, done = True, 0
        while goes_on:
            inputs, targets, batch_size = next(batches)
            samples = len(targets)
            self.gradient.zero_()
            loss = self.gradients.add(inputs, targets, batch_size)
            with self.comm.span("push"):
                report = self._with_buffers(loss, self.right_of(samples), samples)
                self.comm.send(report, _SERVER)
                self.comm.send(self.gradient, _SERVER)
            with self.comm.span("pull"):
                self.comm.recv(self.parameters, _SERVER)
                answer = self.comm.recv(self.report[2:], _SERVER)
            scaled = self.scaler.is_enabled()
            load_flat_buffers(self.model, answer[1 + scaled :])
            if scaled:
                self.scaler.set_scale(answer[1].item())
            goes_on, done = bool(answer[0]), done + 1
            self.comm.progress(done, samples=samples, loss=loss / max(1, samples))

    def serve(self, shares: int, epochs: int) -> Iterator[EpochEnd]:
        """On the server: apply each push as it arrives, ``epochs`` x ``shares`` in all.

        Yields:
            After each epoch, the seconds since the start and the mean loss of its samples.
        """
        start_s, done, last = self.now_s(), 0, shares * epochs
        while done < last or self.tracker.pulled:
            # After the last update: receive the late pushes, answer with the final parameters.
            worker = self.tracker.next() if done < last else next(iter(self.tracker.held), None)
            if worker is None:
                self.hear()
                continue
            with self._may_be_lost():
                with self.comm.span("push"):
                    self.comm.recv(self.gradient, worker)
                if done < last:
                    self.update(worker)
                    done += 1
                    if done % shares == 0:
                        loss, self.accuracy, _ = self.sums / self.sums[2]
                        self.sums.zero_()
                        yield self.now_s() - start_s, loss
                self.answer(worker, goes_on=done < last)
            self.comm.progress(done, last, "shares of all workers")

    def now_s(self) -> float:
        """The host's clock, when all that was queued on this rank's device has ended."""
        gpus.synchronize(self.comm.device)
        return time.perf_counter()

    def hear(self) -> None:
        """Wait until a worker begins a push, and receive the push's first message."""
        if not self.tracker.pulled:
            raise RuntimeError(
                f"no worker is left after {self.tracker.version} updates: "
                + "; ".join(f"rank {worker}: {why}" for worker, why in self.lost.items())
            )
        with self._may_be_lost(), self.comm.span("push"):
            worker = self.comm.recv_any(
                self.report, self.tracker.pulled.keys() - self.tracker.held
            )
            self.reports[worker] = self.report.clone()
            self.tracker.push(worker)

    def update(self, worker: int) -> None:
        """Apply the gradient that was received; an empty share makes no update."""
        report, scaled = self.reports[worker], self.scaler.is_enabled()
        self.sums += report[:3]
        if int(report[2]):
            with self.comm.span("update"):
                is_made = self.apply(report[3].item() if scaled else None)
            load_flat_buffers(self.model, report[3 + scaled :])
            if is_made:
                self.tracker.apply(worker)

    def answer(self, worker: int, goes_on: bool) -> None:
        """Send ``worker`` the parameters that it pulls, and whether to go on."""
        with self.comm.span("pull"):
            self.comm.send(self.parameters, worker)
            self.comm.send(self._with_buffers(goes_on), worker)
        self.tracker.pull(worker) if goes_on else self.tracker.drop(worker)

    @contextlib.contextmanager
    def _may_be_lost(self) -> Iterator[None]:
        """A context that leaves a worker out from then on, if the worker dies in it."""
        try:
            yield
        except PeerLostError as error:
            if error.rank not in self.tracker.pulled:
                raise
            self.tracker.drop(error.rank)
            self.lost[error.rank] = str(error)
            print(
                f"rank {error.rank} is lost after {self.tracker.version} updates, going on with "
                f"workers {sorted(self.tracker.pulled)}: {error}"
            )

    @torch.no_grad()
    def _with_buffers(self, *numbers: float | Tensor) -> Tensor:
        """A short message: some numbers, the scale of the loss if it has one, and the buffers."""
        if self.scaler.is_enabled():
            numbers = *numbers, self.scaler.get_scale()
        # Filled in one by one: a GPU would wait for the copy of a list.
        head = self.parameters.new_empty(len(numbers))
        for place, number in zip(head, numbers):
            place.fill_(number)
        return torch.cat([head, flat_buffers(self.model)])
