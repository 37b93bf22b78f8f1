"""Model parallelism in one process: layers on several devices, activations moved by ``.to``.

This is the simplest way for a script to use several GPUs. With one GPU,
``("cuda:0", "cpu")`` cuts the model between GPU and host, and a hop crosses the bus between them.

A copy between devices is queued on a stream and returns at once, so a clock around the call does
not measure the copy; and a CUDA event says nothing about another device's stream. PyTorch copies
on the current stream of the source device, or, from the host, of the target device. The events of
a hop are recorded on this stream, forward and backward separately.

What else the call does is not part of the hop. Between two GPUs, the copy first waits until the
target's stream is free: this wait is queued before the first event. Between a GPU and the host,
the bytes pass through pinned (page-locked) memory, which the bus reads and writes directly;
otherwise the driver would copy them once more on the host, at the speed of its memory.

Source: the manual placement that PyTorch's tutorials call model parallelism.
"""

import statistics
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from labkit.comm.comm import Comm
from labkit.schedules.split_points import as_split_points, check_devices, stage_bounds
from labkit.strategies.base import MakeOptimizer, Strategy
from labkit.strategies.mixed_precision import MixedPrecision
from labkit.strategies.stage import StagedModel, on_several
from labkit.strategies.update import Update
from labkit.tracing import Timer
from labkit.units import check_integer
from labkit.workload.chain import layers_of
from labkit.workload.samples import on_device

_KEPT_HOPS = 10_000


class ModelParallelOneProcess(Strategy):
    """Stage s of the model on device s, all in one process.

    Every layer sees the whole batch, so the result equals that of one device, BatchNorm included.
    ``notes`` has the bytes and seconds of the hops, except for the first step, which warms up.

    Args:
        split_points: layers that begin a stage, one fewer than there are devices.
        devices: one name per stage; each device once.
        accumulate, amp: see ``LocalGradients``.

    Raises:
        ValueError: a device is named twice, or there is not one per stage; in ``setup``, a tied
            parameter belongs to layers on two devices.
    """

    in_one_process = True
    through_comm = False
    instead: ClassVar = StagedModel.instead | {
        "micro_batches": "one micro-batch passes through the stages at a time, which is "
        "accumulate; strategy pipeline has several of them under way"
    }

    def __init__(
        self,
        split_points: Sequence[int] = (),
        devices: Sequence[str] = ("cpu",),
        accumulate: int = 1,
        amp: str | None = None,
    ):
        twice = [name for name, count in Counter(devices).items() if count > 1]
        if twice:
            raise ValueError(
                f"devices {', '.join(devices)}: {twice[0]} comes twice, and two stages on one "
                "device share its memory and its time: name each once, or leave devices out and "
                "give each stage its own process"
            )
        self.split_points = as_split_points(split_points)
        check_devices(len(devices), self.split_points)
        self.devices = [torch.device(name) for name in devices]
        check_integer("accumulate", accumulate)
        self.accumulate, self.precision = accumulate, MixedPrecision(amp)

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.comm, self.model = comm, model
        layers = layers_of(model)
        parts = [
            nn.ModuleList(layers[a:b]) for a, b in stage_bounds(self.split_points, len(layers))
        ]
        for tensor, (home, other, *_) in on_several(parts):
            raise ValueError(
                f"a tensor {list(tensor.shape)} belongs to layers on {self.devices[home]} and on "
                f"{self.devices[other]} (it is tied), and can be on only one device: move a split "
                "point, or give each stage its own process"
            )
        self.stages = [
            nn.Sequential(*part).to(device).train() for part, device in zip(parts, self.devices)
        ]
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(trained)
        self.scaler = self.precision.scaler
        self.update = Update(self.optimizer, trained, clip_norm=self.clip_norm, scaler=self.scaler)
        self.hops: deque[_Hop] = deque(maxlen=_KEPT_HOPS)
        self.steps = 0
        self.host_memory = ""
        comm.session.time_on(self.devices)

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        self.optimizer.zero_grad()
        count = max(1, min(self.accumulate, len(targets)))
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.devices[-1])
        for part, expected in zip(inputs.tensor_split(count), targets.tensor_split(count)):
            with self.comm.span("forward"):
                loss = self.forward(part, expected)
            with self.comm.span("backward"):
                self.scaler.scale(loss / batch_size).backward()
            loss_sum += loss.detach()
        with self.comm.span("update"):
            self.update()
        self.steps += 1
        return loss_sum.to(self.comm.device)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The sum of the losses of a micro-batch, which passes through all stages."""
        (value,) = on_device([inputs], self.devices[0])
        for cut, stage in enumerate(self.stages, start=-1):
            entering = value if cut < 0 else _Crossing.apply(value, self, cut)
            with self.precision.autocast(self.devices[cut + 1]):
                value = stage(entering)
        (targets,) = on_device([targets], self.devices[-1])
        return self.loss(self.precision.wide(value), targets)

    def move(self, tensor: Tensor, cut: int, direction: str) -> Tensor:
        """Move ``tensor`` over a cut, ``forward`` or ``backward``, and time the hop."""
        ends = self.devices[cut : cut + 2]
        source, target = ends if direction == "forward" else reversed(ends)
        gpu = next((device for device in (source, target) if device.type == "cuda"), None)
        timer = self.comm.session.timers.of(gpu or source)
        copied = self._prepared(tensor, source, target)
        start = timer.mark()
        moved = copied()
        end = timer.mark()
        if gpu and target.type == "cpu":
            # The host computes with it next.
            torch.cuda.current_stream(gpu).synchronize()
        self.hops.append(_Hop(self.steps, cut, direction, tensor.nbytes, timer, start, end))
        return moved

    def _prepared(
        self, tensor: Tensor, source: torch.device, target: torch.device
    ) -> Callable[[], Tensor]:
        """Do what is no part of the hop; return what is: the copy of ``tensor``."""
        kinds = source.type, target.type
        if kinds == ("cuda", "cuda"):
            torch.cuda.current_stream(source).wait_stream(torch.cuda.current_stream(target))
        elif "cuda" in kinds:
            try:
                return self._through_pinned_memory(tensor, source, target)
            except RuntimeError:
                # The system lets this process lock no more memory.
                self.host_memory = "pageable"
        return partial(tensor.to, target, copy=True)

    def _through_pinned_memory(
        self, tensor: Tensor, source: torch.device, target: torch.device
    ) -> Callable[[], Tensor]:
        # PyTorch keeps freed pinned memory, so only the first steps allocate it.
        with torch.cuda.device(source if source.type == "cuda" else target):
            if target.type == "cuda":
                copied = partial(tensor.pin_memory().to, target, non_blocking=True, copy=True)
            else:
                landing = torch.empty_like(tensor, device=target, pin_memory=True)
                copied = partial(landing.copy_, tensor, non_blocking=True)
        self.host_memory = self.host_memory or "pinned"
        return copied

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor:
        self.model.eval()
        value = inputs
        for stage, device in zip(self.stages, self.devices):
            value = stage(value.to(device))
        self.model.train()
        return value.to(self.comm.device)

    def notes(self) -> dict[str, Any]:
        """The placement, and the hops' bytes and median seconds by cut and direction.

        ``host_memory``, if a hop is between a GPU and the host: ``pinned``, so that the seconds
        are those of the bus, or ``pageable``, if the system has refused pinned memory.
        """
        edges = [(c, d) for c in range(len(self.devices) - 1) for d in ("forward", "backward")]
        summaries = (self._summary(cut, direction) for cut, direction in edges)
        notes = {
            "split_points": list(self.split_points),
            "devices": [str(device) for device in self.devices],
            "hops": [summary for summary in summaries if summary],
        }
        return notes | ({"host_memory": self.host_memory} if self.host_memory else {})

    def _summary(self, cut: int, direction: str) -> dict[str, Any] | None:
        """Statistics of the hops with the most frequent number of bytes; None if nothing moved."""
        hops = [h for h in self.hops if (h.cut, h.direction) == (cut, direction) and h.step > 0]
        if not hops:
            return None
        ((num_bytes, count),) = Counter(hop.num_bytes for hop in hops).most_common(1)
        seconds = [hop.seconds() for hop in hops if hop.num_bytes == num_bytes]
        return {
            "cut": cut,
            "direction": direction,
            "num_bytes": num_bytes,
            "count": count,
            "median_s": statistics.median(seconds),
            "quartiles_s": statistics.quantiles(seconds, n=4)[::2] if count > 1 else seconds * 2,
        }


class _Crossing(torch.autograd.Function):
    """Forward moves the activation over a cut, backward moves its gradient back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, strategy: ModelParallelOneProcess, cut: int) -> Tensor:
        ctx.strategy, ctx.cut = strategy, cut
        return strategy.move(value, cut, "forward")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return ctx.strategy.move(gradient, ctx.cut, "backward"), None, None


class _Hop(NamedTuple):
    """One tensor moved over a cut, in one direction."""

    step: int
    cut: int
    direction: str
    num_bytes: int
    timer: Timer
    start: Any
    end: Any

    def seconds(self) -> float:
        return self.timer.seconds(self.end, origin=self.start)
