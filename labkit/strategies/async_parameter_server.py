"""An asynchronous parameter server: no worker waits for another.

Rank 0 holds the parameters, the other ranks compute gradients for them. 1. A worker computes the
gradient of its share of a batch. 2. It **pushes** the gradient to the server, which applies it at
once, while other workers are still computing. 3. It **pulls** the current parameters, and
continues with its share of the next batch. A slow worker does not delay the others. Its gradients
are stale; the staleness is counted and can be bounded: ``labkit.schedules.staleness``.

A push is the sum over the share's samples, divided by the samples of the whole batch. So W pushes,
one per worker, together move the parameters about as far as one synchronous step. Clipping
limits each of them to a W-th of ``clip_norm``, so that W pushes together stay within it.

Symbols: W workers, N trainable parameters, B numbers in the model's buffers.
Sources: Dean et al., "Large scale distributed deep networks" (2012), section 4.1 (Downpour SGD);
Recht et al., "Hogwild!" (2011).
"""

import contextlib
import time
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from labkit import gpus
from labkit.comm.comm import Comm
from labkit.errors import PeerLostError
from labkit.schedules.staleness import StalenessTracker, check_bound
from labkit.strategies.base import Batch, EpochEnd, MakeOptimizer, OwnPaceStrategy
from labkit.strategies.flat_parameters import flat_buffers, lay_end_to_end, load_flat_buffers
from labkit.strategies.kept import Kept, KeptElements, kept_model
from labkit.strategies.local_gradients import LocalGradients, check_straggler
from labkit.strategies.update import Update

_SERVER = 0
# What the server tells a worker with the parameters that it pulls.
_STOP, _GO_ON, _SAVE_AND_GO_ON, _SAVE_AND_STOP = range(4)


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

    For a checkpoint, the server applies one more push of each worker and answers them together:
    all shares that were computed are counted, and every worker has the same parameters. So a run
    goes on from there without a share left out or repeated. With one worker it ends equal to the
    bit to one that was not interrupted; with several no two runs are equal.

    Args:
        accumulate, amp, straggler: see ``LocalGradients``.
        max_staleness: the most updates by other workers that a gradient may miss, W - 1 or more;
            None for no limit.

    Raises:
        ValueError: the straggler would be the server; in ``setup``, a bound on several machines.
    """

    optimizes = "elements"
    survives_lost_workers = True

    def __init__(
        self,
        accumulate: int = 1,
        amp: str | None = None,
        straggler: tuple[int, float] | None = None,
        max_staleness: int | None = None,
    ):
        check_straggler(straggler)
        self.settings = {"accumulate": accumulate, "amp": amp, "straggler": straggler}
        self.max_staleness = max_staleness

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
        self.comm = comm
        self.model = model.to(comm.device).train()
        self.gradients = LocalGradients(comm, self.model, loss=self.loss, **self.settings)
        self.scaler = self.gradients.scaler
        self.parameters, self.gradient = lay_end_to_end(self.model)
        self.report = self._with_buffers(0, 0, 0)
        self.tracker = StalenessTracker(range(1, comm.world_size), self.max_staleness)
        self.updates = self.tracker.updates
        # By worker, what it adds to a checkpoint.
        self.told_own: dict[int, Tensor] = {}
        # By worker: the first message of its push, while the gradient waits or is applied.
        self.reports: dict[int, Tensor] = {}
        self.lost: dict[int, str] = {}
        # Of this epoch so far: samples, how many of them were predicted right, and their loss.
        self.samples, self.right = 0, self.report.new_zeros((), dtype=torch.double)
        self.loss_sum = torch.zeros_like(self.right)
        # By rank, the shares that were counted, and the seconds that it took.
        self.shares, self.passed_s = [0] * comm.world_size, 0.0
        if comm.rank == _SERVER:
            # SGD works element by element, so one flat parameter gives the same updates.
            flat = nn.Parameter(self.parameters)
            flat.grad = self.gradient
            self.optimizer = make_optimizer([flat])
            self.apply = Update(
                self.optimizer,
                [flat],
                clip_norm=self.clip_norm and self.clip_norm / len(self.workers),
                scaler=self.scaler,
                sizes=[p.numel() for p in self.model.parameters() if p.requires_grad],
            )

    def train(self, batches: Iterator[Batch], steps: int, epochs: int) -> Iterator[EpochEnd]:
        if self.comm.rank == _SERVER:
            for passed_s, loss in self.serve(steps * (self.comm.world_size - 1), epochs):
                # Shares differ in size, and any workers' shares fill an epoch: count the samples.
                self.accuracy = self.right / self.samples
                yield passed_s, loss / self.samples
                self.samples, self.right = 0, torch.zeros_like(self.right)
        else:
            self.work(batches)

    def work(self, batches: Iterator[Batch]) -> None:
        """On a worker: compute a gradient, push it, pull, until the server says to stop."""
        go_on, done = True, 0
        while go_on:
            inputs, targets, batch_size = next(batches)
            self.gradient.zero_()
            loss = self.gradients.add(inputs, targets, divisor=batch_size)
            with self.comm.span("push"):
                samples = len(targets)
                told = loss, self.right_of(samples), samples
                self.comm.send(self._with_buffers(*told), _SERVER)
                self.comm.send(self.gradient, _SERVER)
            with self.comm.span("pull"):
                self.comm.recv(self.parameters, _SERVER)
                answer = self.comm.recv(self.report[2:], _SERVER)
            scaled = self.scaler.is_enabled()
            load_flat_buffers(self.model, answer[1 + scaled :])
            if scaled:
                self.scaler.set_scale(answer[1].item())
            word, done = int(answer[0]), done + 1
            go_on = word in (_GO_ON, _SAVE_AND_GO_ON)
            if word in (_SAVE_AND_GO_ON, _SAVE_AND_STOP):
                self._tell_own()
            loss = loss / max(1, len(targets))
            self.comm.progress(done, samples=len(targets), loss=loss)

    def serve(self, shares: int, epochs: int) -> Iterator[EpochEnd]:
        """On the server: apply each push as it arrives, ``epochs`` x ``shares`` in all.

        Yields:
            After each epoch, the seconds since the start and the sum of the epoch's losses.
        """
        start_s, done = self.now_s() - self.passed_s, sum(self.shares)
        before, is_due, answered_later = done, False, set[int]()
        while done < shares * epochs:
            answered_later &= self.tracker.pulled.keys()
            if answered_later and answered_later == self.tracker.pulled.keys():
                self.passed_s = self.now_s() - start_s
                self._save(done, answered_later)
                start_s, is_due, answered_later = self.now_s() - self.passed_s, False, set()
            if (worker := self.tracker.next()) is None:
                self.hear()
                continue
            with self._may_be_lost():
                with self.comm.span("push"):
                    self.comm.recv(self.gradient, worker)
                self.loss_sum += self.update(worker)
                self.shares[worker] += 1
                done += 1
                if done % shares == 0:
                    self.passed_s = self.now_s() - start_s
                    yield self.passed_s, self.loss_sum.clone()
                    self.loss_sum.zero_()
                is_due = is_due or (self.saves is not None and self.saves.are_due(done))
                if is_due and done < shares * epochs:
                    self.tracker.pull(worker)
                    answered_later.add(worker)
                else:
                    self.answer(worker, _GO_ON if done < shares * epochs else self._last_word)
            self.comm.progress(done, shares * epochs, "shares of all workers")
        self.passed_s = self.now_s() - start_s
        self.dismiss(answered_later, done if done > before else None)

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

    def update(self, worker: int) -> Tensor:
        """Apply the gradient that was received; returns the share's sum of losses."""
        loss, right, samples = self.reports[worker][:3]
        num_samples = int(samples)
        self.samples += num_samples
        self.right += right
        if num_samples:
            more, scaled = self.reports[worker][3:], self.scaler.is_enabled()
            with self.comm.span("update"):
                is_made = self.apply(more[0].item() if scaled else None)
            load_flat_buffers(self.model, more[scaled:])
            if is_made:
                self.tracker.apply(worker)
        return loss

    def answer(self, worker: int, word: float) -> None:
        """Send ``worker`` the parameters that it pulls, and whether to go on."""
        with self.comm.span("pull"):
            self.comm.send(self.parameters, worker)
            self.comm.send(self._with_buffers(word), worker)
        if word in (_SAVE_AND_GO_ON, _SAVE_AND_STOP):
            self.told_own[worker] = self._hear_own(worker)
        goes_on = word in (_GO_ON, _SAVE_AND_GO_ON)
        self.tracker.pull(worker) if goes_on else self.tracker.drop(worker)

    def dismiss(self, waiting: set[int], done: int | None) -> None:
        """After the last update: receive all late pushes, answer with the final parameters.

        Args:
            waiting: workers that have not been answered yet.
            done: the shares after which a checkpoint is saved; None for none.
        """
        for worker in sorted(waiting & self.tracker.pulled.keys()):
            with self._may_be_lost():
                self.answer(worker, self._last_word)
        while self.tracker.pulled:
            if not self.tracker.held:
                self.hear()
                continue
            with self._may_be_lost():
                worker = self.tracker.held[0]
                self.comm.recv(self.gradient, worker)
                self.answer(worker, self._last_word)
        if self.saves is not None and done is not None:
            self.saves.save(done, self.told_own)

    @property
    def _last_word(self) -> float:
        return _STOP if self.saves is None else _SAVE_AND_STOP

    def _save(self, done: int, waiting: set[int]) -> None:
        """Answer the workers, all of which wait, and save a checkpoint."""
        assert self.saves is not None
        self.told_own = {}
        for worker in sorted(waiting):
            with self._may_be_lost():
                self.answer(worker, _SAVE_AND_GO_ON)
        self.saves.save(done, self.told_own)

    def _tell_own(self) -> None:
        """On a worker: send what it adds to a checkpoint."""
        assert self.saves is not None
        with self.saves.of_worker() as own:
            mine = own.to(self.comm.device)
            self.comm.send(torch.tensor([len(mine)], device=self.comm.device), _SERVER)
            self.comm.send(mine, _SERVER)

    def _hear_own(self, worker: int) -> Tensor:
        """On the server: what a worker adds to a checkpoint."""
        length = torch.zeros(1, dtype=torch.int64, device=self.comm.device)
        own = torch.empty(int(self.comm.recv(length, worker)), dtype=torch.uint8)
        return self.comm.recv(own.to(self.comm.device), worker).cpu()

    def kept(self) -> Kept:
        serves = self.comm.rank == _SERVER
        kept = kept_model(self.model, self.optimizer, is_current=serves)
        whole = KeptElements(kept, self.comm, [(0, self.parameters.numel())])
        sums = [self.samples, float(self.right), float(self.loss_sum), self.passed_s]
        whole.own = {
            "shares": torch.tensor(self.shares),
            "sums": torch.tensor(sums, dtype=torch.float64),
            "updates": torch.tensor(self.updates, dtype=torch.int64).reshape(-1, 2),
        }
        return whole

    def continued(self, own: Mapping[str, Tensor]) -> None:
        """Every rank gets the server's own."""
        self.shares = own["shares"].tolist()
        self.samples, right, loss_sum, self.passed_s = own["sums"].tolist()
        self.right.fill_(right)
        self.loss_sum.fill_(loss_sum)
        self.tracker.go_on_from(own["updates"].tolist())

    def first_share(self) -> int:
        return self.shares[self.comm.rank]

    @contextlib.contextmanager
    def _may_be_lost(self) -> Iterator[None]:
        """A context that leaves a worker out from then on, if the worker dies in it."""
        try:
            yield
        except PeerLostError as error:
            if error.rank not in self.tracker.pulled:
                raise
            self.tracker.drop(error.rank)
            self.told_own.pop(error.rank, None)
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
