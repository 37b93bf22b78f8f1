"""Data parallelism in one process: one model, several devices, one thread per device.

    scatter     cut the batch into P parts, one per device
    replicate   copy the parameters and buffers from device 0 to all others
    forward     each thread runs its replica on its part
    gather      copy the outputs to device 0, where the loss and its gradient are computed
    backward    each thread runs its replica's backward pass from its part of that gradient
    reduce      add the replicas' gradients to those of device 0, in the order of the devices
    update      device 0 alone; the other replicas are overwritten in the next step

All threads share one interpreter, whose lock (the GIL) lets only one of them run Python at a time.

Symbols: P devices. Source: PyTorch's ``nn.DataParallel`` (Li et al. 2020, "PyTorch Distributed",
section 2.2), which runs the same steps; there autograd runs back through gather and replicate.
"""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.engine.comm.comm import Comm
from labkit.strategies.base import MakeOptimizer, Strategy, trained_parameters
from labkit.strategies.traits import Traits


@dataclass(eq=False)
class DataParallel(Strategy):
    """Synchronous data parallelism on several ``devices`` of one process, named as ("cpu", "cpu").

    Batch statistics (BatchNorm): each replica normalizes with the statistics of its own part.
    Device 0's running averages are kept, as in ``nn.DataParallel``. A batch of fewer samples than
    devices leaves the last devices idle. With ``amp`` outputs and their gradients move in the half
    dtype.
    """

    devices: Sequence[Any] = ()
    amp: str | None = None
    traits = Traits(in_one_process=True, through_comm=False)

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.comm = comm
        self.model = model.to(self.devices[0]).train()
        self.replicas = [self.model]
        for device in self.devices[1:]:
            self.replicas.append(copy.deepcopy(self.model).to(device))
        self.trained = trained_parameters(model)
        self.optimizer = make_optimizer(self.trained)
        self.bytes_moved: Counter[str] = Counter(scatter=0, replicate=0, gather=0, reduce=0)
        # The threads compute at the same time, and each would otherwise use all cores.
        cores = max(1, torch.get_num_threads() // len(self.devices))
        torch.set_num_threads(cores)
        # One thread per replica but the first, which has the calling thread.
        self.threads = []
        for _ in self.devices[1:]:
            thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(cores,))
            self.threads.append(thread)
        # The main thread's spans are those of device 0.
        comm.session.time_on(self.devices[:1])
        for device in self.devices:
            comm.session.timer_of(device)

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        parts = self.scatter(inputs)
        replicas = self.replicate(len(parts))
        outputs = self.parallel("forward", self.forward, replicas, parts)
        loss, gradients = self.gather(outputs, targets, batch_size)
        self.parallel("backward", torch.autograd.backward, outputs, gradients)
        self.reduce(replicas)
        factor = self.gradient_factor(batch_size)
        self.update(factor)
        return loss

    def scatter(self, inputs: Tensor) -> list[Tensor]:
        """Cut ``inputs`` [n, ...] into min(n, P) parts of almost equal size, one per device."""
        with self.comm.span("scatter"):
            parts = inputs.tensor_split(min(len(inputs), len(self.devices)))
            return [self._move("scatter", part, 0, index) for index, part in enumerate(parts)]

    @torch.no_grad()
    def replicate(self, count: int) -> list[nn.Module]:
        """Give the first ``count`` replicas the parameters and buffers of device 0."""
        with self.comm.span("replicate"):
            sources = [*self.model.parameters(), *self.model.buffers()]
            self.model.zero_grad()
            for index, replica in enumerate(self.replicas[1:count], start=1):
                replica.zero_grad()
                targets = [*replica.parameters(), *replica.buffers()]
                for target, source in zip(targets, sources):
                    target.data = self._move("replicate", source.detach(), 0, index)
        return self.replicas[:count]

    def forward(self, replica: nn.Module, part: Tensor) -> Tensor:
        with self.precision.autocast(part.device):
            return replica(part)

    def parallel(self, kind: str, fn: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
        """Call ``fn(*arguments[.., i])`` for all i at once, in thread i; the results, by i.

        ``kind`` is that of the spans: forward or backward.
        """
        first, *rest = zip(*arguments)
        futures = []
        for index, (thread, args) in enumerate(zip(self.threads, rest), start=1):
            futures.append(thread.submit(self._timed, kind, index, fn, *args))
        try:
            result = self._timed(kind, 0, fn, *first)
        finally:
            with self.comm.span("wait"):
                wait(futures)
        return [result, *(future.result() for future in futures)]

    def _timed(self, kind: str, index: int, fn: Callable[..., Any], *args: Any) -> Any:
        with self.comm.span(kind, self.devices[index] if index else None):
            return fn(*args)

    def gather(
        self, outputs: list[Tensor], targets: Tensor, batch_size: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute the loss of all outputs on device 0, and send its gradient back.

        Returns the sum of the losses, and d(mean loss)/d(output) by device, [n_i, classes].
        """
        with self.comm.span("gather"):
            moved = []
            for index, output in enumerate(outputs):
                moved.append(self._move("gather", output.detach(), index, 0))
            gathered = torch.cat(moved)
        with self.comm.span("forward"):
            loss = self.loss(self.precision.wide(gathered.requires_grad_()), targets)
            scaled = loss * (self.precision.scaler.scale / batch_size)
        with self.comm.span("backward"):
            (gradient,) = torch.autograd.grad(scaled, gathered)
        with self.comm.span("gather"):
            parts = gradient.split([len(output) for output in outputs])
            gradients = [self._move("gather", part, 0, i) for i, part in enumerate(parts)]
        return loss.detach(), gradients

    @torch.no_grad()
    def reduce(self, replicas: list[nn.Module]) -> None:
        """Add the replicas' gradients to device 0's, in the order of the devices."""
        with self.comm.span("reduce"):
            for index, replica in enumerate(replicas[1:], start=1):
                for target, source in zip(self.model.parameters(), replica.parameters()):
                    if source.grad is None:
                        continue
                    moved = self._move("reduce", source.grad.to_dense(), index, 0)
                    if target.grad is None:
                        target.grad = moved
                    else:
                        target.grad = target.grad.to_dense().add_(moved)

    def _move(self, phase: str, tensor: Tensor, start: int, end: int) -> Tensor:
        """Copy a tensor from device ``start`` to device ``end``, also if both are the CPU."""
        if start != end:
            self.bytes_moved[phase] += tensor.nbytes
        device = self.devices[end]
        return tensor.to(device, non_blocking=device.type == "cuda", copy=start != end)

    def notes(self) -> dict[str, Any]:
        """The devices, and the bytes moved between them by phase, which bypass ``comm``."""
        return {"devices": [str(d) for d in self.devices], "bytes_moved": dict(self.bytes_moved)}
