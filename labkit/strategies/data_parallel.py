"""Data parallelism in one process: one model, several devices, one thread per device.

Every step:

    scatter     cut the batch into P parts, one per device
    replicate   copy the parameters and buffers from device 0 to all others
    forward     each thread runs its replica on its part
    gather      copy the outputs to device 0, where the loss and its gradient are computed
    backward    each thread runs its replica's backward pass from its part of that gradient
    reduce      add the replicas' gradients to those of device 0, in the order of the devices
    update      device 0 alone; the other replicas are overwritten in the next step

So device 0 holds what every device holds, and in addition the whole batch, all outputs, the
summed gradients and the optimizer's state. All threads share one interpreter, whose lock (the
GIL) lets only one of them run Python at a time.

Symbols: P devices. Source: PyTorch's ``nn.DataParallel`` (Li et al. 2020, "PyTorch Distributed",
section 2.2), which runs the same steps; there autograd runs back through gather and replicate.
"""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from labkit.comm.comm import Comm
from labkit.strategies.base import MakeOptimizer, Strategy
from labkit.strategies.update import MixedPrecision
from labkit.units import check_integer


@dataclass(eq=False)
class DataParallel(Strategy):
    """Synchronous data parallelism on several devices of one process.

    Batch statistics (BatchNorm): each replica normalises with the statistics of its own part.
    Device 0's running averages are kept, as in ``nn.DataParallel``; the others are overwritten. A
    batch of fewer samples than devices leaves the last devices idle. Parameters of several dtypes
    are copied in the widest of these dtypes.

    Args:
        devices: one name per replica, as in ``("cpu", "cpu")``; a name may occur several times.
        accumulate: micro-batches that the batch is cut into, each of which is scattered; the
            gradients are reduced once, after the last one.
        amp: see ``LocalGradients``; outputs and their gradients move in the half dtype.
    """

    devices: Sequence[Any] = ()
    accumulate: int = 1
    amp: str | None = None
    in_one_process = True
    through_comm = False
    instead: ClassVar = {
        "sync_batch_norm": "its replicas are threads of one process, and labkit's layers share "
        "their statistics between ranks; use ddp or ring_all_reduce, with a rank for each device"
    }

    def __post_init__(self) -> None:
        self.devices = [torch.device(name) for name in self.devices]
        check_integer("accumulate", self.accumulate)
        self.precision = MixedPrecision(self.amp)

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.comm = comm
        self.model = model.to(self.devices[0]).train()
        others = [copy.deepcopy(self.model).to(device) for device in self.devices[1:]]
        self.replicas = [self.model, *others]
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer, self.scaler = make_optimizer(self.trained), self.precision.scaler
        self.update = self.update_of(self.trained)
        self.bytes_moved: Counter[str] = Counter(scatter=0, replicate=0, gather=0, reduce=0)
        # The threads compute at the same time, and each would otherwise use all cores.
        torch.set_num_threads(max(1, torch.get_num_threads() // len(self.devices)))
        # One pool of one thread per replica, so that a replica keeps its thread. Device 0 uses
        # the calling thread.
        self.threads = [ThreadPoolExecutor(max_workers=1) for _ in others]
        # The main thread's spans are those of device 0.
        comm.session.time_on(self.devices[:1])
        for device in self.devices:
            comm.session.timers.of(device)

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        loss = self.forward_backward(inputs, targets, batch_size)
        with self.comm.span("update"):
            self.update()
        return loss

    def rehearse(self, inputs: Tensor, targets: Tensor, batch_size: int) -> None:
        # In its first product a new thread uses all cores, which rounds in another way.
        self.forward_backward(inputs, targets, batch_size)
        self.bytes_moved = Counter(dict.fromkeys(self.bytes_moved, 0))

    def forward_backward(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        """A step without its update; returns the sum of the losses."""

        def outputs_of(replica: nn.Module, part: Tensor) -> Tensor:
            with self.precision.autocast(part.device):
                return replica(part)

        count = max(1, min(self.accumulate, len(targets)))
        total, replicas = torch.zeros((), dtype=torch.float64, device=self.devices[0]), []
        for batch, expected in zip(inputs.tensor_split(count), targets.tensor_split(count)):
            parts = self.scatter(batch)
            # The first micro-batch is the largest, and no parameter changes before the update.
            replicas = replicas or self.replicate(len(parts))
            outputs = self.parallel(outputs_of, replicas[: len(parts)], parts)
            loss, gradients = self.loss_on_device_0(outputs, expected, batch_size)
            self.parallel(torch.autograd.backward, outputs, gradients)
            total += loss
        self.reduce(replicas)
        return total.to(self.comm.device)

    def scatter(self, inputs: Tensor) -> list[Tensor]:
        """Cut ``inputs`` [n, ...] into min(n, P) parts of almost equal size, one per device."""
        with self.comm.span("scatter"):
            count = max(1, min(len(inputs), len(self.devices)))
            parts = inputs.tensor_split(count)
            return [self._send("scatter", part, index) for index, part in enumerate(parts)]

    @torch.no_grad()
    def replicate(self, count: int) -> list[nn.Module]:
        """Give the first ``count`` replicas the parameters and buffers of device 0."""
        with self.comm.span("replicate"):
            # One copy per device, not one per parameter, because every copy has a fixed cost.
            flat = torch.cat([parameter.flatten() for parameter in self.model.parameters()])
            sizes = [parameter.numel() for parameter in self.model.parameters()]
            for index, replica in enumerate(self.replicas[1:count], start=1):
                pieces = self._send("replicate", flat, index).split(sizes)
                for theirs, piece in zip(replica.parameters(), pieces):
                    theirs.data = piece.view_as(theirs).to(theirs.dtype)
                for theirs, buffer in zip(replica.buffers(), self.model.buffers()):
                    theirs.copy_(self._send("replicate", buffer, index))
            for replica in self.replicas:
                replica.zero_grad()
        return self.replicas[:count]

    def parallel(self, fn: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
        """Call ``fn(*arguments[.., i])`` for all i at once, in thread i; return the results by i.

        An exception in a thread is raised here, after all threads have ended.
        """
        first, *rest = zip(*arguments)
        futures = [
            thread.submit(self._compute, index, fn, *args)
            for index, (thread, args) in enumerate(zip(self.threads, rest), start=1)
        ]
        try:
            result = self._compute(0, fn, *first)
        finally:
            with self.comm.span("wait"):
                wait(futures)
                # What device 0 does next needs their results; the host need not wait for a GPU's.
                first_device, *others = self.devices[: len(futures) + 1]
                for device in others:
                    if device.type == first_device.type == "cuda":
                        waiting = torch.cuda.current_stream(first_device)
                        waiting.wait_stream(torch.cuda.current_stream(device))
                    elif device.type == "cuda":
                        torch.cuda.current_stream(device).synchronize()
        return [result, *(future.result() for future in futures)]

    def _compute(self, index: int, fn: Callable[..., Any], *args: Any) -> Any:
        device = self.devices[index]
        with (
            torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
            self.comm.span("compute", device if index else None),
        ):
            return fn(*args)

    def loss_on_device_0(
        self, outputs: list[Tensor], targets: Tensor, batch_size: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Gather the outputs on device 0, compute the loss there, and send its gradient back.

        Returns the sum of the losses, and d(mean loss)/d(output) by device, [n_i, classes].
        """
        with self.comm.span("gather"):
            gathered = torch.cat(
                [self._fetch("gather", o.detach(), i) for i, o in enumerate(outputs)]
            )
        with self.comm.span("compute"):
            gathered.requires_grad_()
            targets = targets.to(gathered.device)
            loss = self.loss(self.precision.wide(gathered), targets)
            (gradient,) = torch.autograd.grad(self.scaler.scale(loss / batch_size), gathered)
        with self.comm.span("gather"):
            parts = gradient.split([len(output) for output in outputs])
            return loss.detach(), [self._send("gather", p, i) for i, p in enumerate(parts)]

    @torch.no_grad()
    def reduce(self, replicas: list[nn.Module]) -> None:
        """Add the replicas' gradients to device 0's, in the order of the devices."""
        with self.comm.span("reduce"):
            total = _gradients(replicas[0])
            for index, replica in enumerate(replicas[1:], start=1):
                total += self._fetch("reduce", _gradients(replica), index)
            pieces = total.split([p.numel() for p in self.trained])
            for piece, parameter in zip(pieces, self.trained):
                parameter.grad = piece.view_as(parameter).to(parameter.dtype)

    def _send(self, phase: str, tensor: Tensor, index: int) -> Tensor:
        """Copy ``tensor`` from device 0 to device ``index``, also if both are the CPU."""
        self.bytes_moved[phase] += tensor.nbytes if index else 0
        device = self.devices[index]
        return tensor.to(device, non_blocking=device.type == "cuda", copy=index > 0)

    def _fetch(self, phase: str, tensor: Tensor, index: int) -> Tensor:
        """Move ``tensor`` from device ``index`` to device 0."""
        self.bytes_moved[phase] += tensor.nbytes if index else 0
        return tensor.to(self.devices[0], non_blocking=self.devices[0].type == "cuda")

    def notes(self) -> dict[str, Any]:
        """The devices, and the bytes moved between them by phase, which bypass ``comm``."""
        return {"devices": [str(d) for d in self.devices], "bytes_moved": dict(self.bytes_moved)}


def _gradients(model: nn.Module) -> Tensor:
    """The gradients of all trained parameters as one tensor [N]; zeros for a missing gradient."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in trained]
    )
