"""Model parallelism in one process: layers on several devices, activations copied between them.

This is the simplest way for a script to use several GPUs. With one GPU,
``("cuda:0", "cpu")`` cuts the model between GPU and host, and a hop crosses the bus between them.

A copy between devices is queued on a stream and returns at once, so a clock around the call does
not measure the copy; and a CUDA event says nothing about another device's stream. PyTorch copies
on the current stream of the source device, or, from the host, of the target device. The events of
a hop are recorded on this stream, forward and backward separately.

What else the call does is not part of the hop. Between two GPUs, the copy first waits until the
target's stream is free: this wait is queued before the first event. Between a GPU and the host,
the bytes pass through pinned (page-locked) memory, which the bus reads and writes directly.

Source: the manual placement that PyTorch's tutorials call model parallelism.
"""

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from labkit.comm.comm import Comm
from labkit.schedules.split_points import as_split_points, check_devices, stage_bounds
from labkit.strategies.base import MakeOptimizer, Strategy
from labkit.strategies.stage import ONE_AT_A_TIME, on_several
from labkit.strategies.update import MixedPrecision
from labkit.units import check_integer
from labkit.workload.layers import layers_of
from labkit.workload.samples import on_device

_MOST_HOPS = 10_000


@dataclass(eq=False)
class ModelParallelOneProcess(Strategy):
    """Stage s of the model on device s, all in one process.

    Every layer sees the whole batch, so the result equals that of one device, BatchNorm included.
    ``notes`` has the bytes and seconds of the hops, except for the first step, which warms up.

    Args:
        split_points: layers that begin a stage, one fewer than there are devices.
        devices: one name per stage; each device once.
        accumulate, amp: see ``LocalGradients``.
    """

    split_points: Sequence[int] = ()
    devices: Sequence[Any] = ("cpu",)
    accumulate: int = 1
    amp: str | None = None
    in_one_process = True
    through_comm = False
    instead: ClassVar = ONE_AT_A_TIME

    def __post_init__(self) -> None:
        if twice := [name for name, count in Counter(self.devices).items() if count > 1]:
            raise ValueError(
                f"devices {', '.join(self.devices)}: {twice[0]} comes twice, and two stages on "
                "one device share its memory and its time: name each once, or leave devices out "
                "and give each stage its own process"
            )
        self.split_points = as_split_points(self.split_points)
        check_devices(len(self.devices), self.split_points)
        self.devices = [torch.device(name) for name in self.devices]
        check_integer("accumulate", self.accumulate)
        self.precision = MixedPrecision(self.amp)

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
        self.optimizer, self.scaler = make_optimizer(trained), self.precision.scaler
        self.update = self.update_of(trained)
        # (cut, direction), bytes, and the events between which they moved, with their timer.
        self.hops: deque[tuple[Any, ...]] = deque(maxlen=_MOST_HOPS)
        self.is_warm = False
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
        self.is_warm = True
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
        on_gpu = [device for device in (source, target) if device.type == "cuda"]
        crosses_bus = len(on_gpu) == 1
        landing = torch.empty_like(
            tensor, device=target, pin_memory=crosses_bus and target.type == "cpu"
        )
        leaving = tensor.pin_memory() if crosses_bus and source.type == "cpu" else tensor
        if len(on_gpu) == 2:
            torch.cuda.current_stream(source).wait_stream(torch.cuda.current_stream(target))
        timer = self.comm.session.timers.of(on_gpu[0] if on_gpu else source)
        start = timer.mark()
        landing.copy_(leaving, non_blocking=True)
        end = timer.mark()
        if crosses_bus and target.type == "cpu":
            # The host computes with it next.
            torch.cuda.current_stream(source).synchronize()
        if self.is_warm:
            self.hops.append(((cut, direction), tensor.nbytes, timer, start, end))
        return landing

    @torch.no_grad()
    def predict(self, inputs: Tensor) -> Tensor:
        self.model.eval()
        value = inputs
        for stage, device in zip(self.stages, self.devices):
            value = stage(value.to(device))
        self.model.train()
        return value.to(self.comm.device)

    def notes(self) -> dict[str, Any]:
        """The placement, and the hops' bytes and median seconds by cut and direction."""
        found, by_place = [], defaultdict(list)
        for place, *hop in self.hops:
            by_place[place].append(hop)
        for (cut, direction), hops in sorted(by_place.items(), key=lambda one: one[0][0]):
            # A last batch may be smaller.
            ((num_bytes, count),) = Counter(size for size, *_ in hops).most_common(1)
            seconds = [
                timer.seconds(end, origin=start)
                for size, timer, start, end in hops
                if size == num_bytes
            ]
            quartiles = statistics.quantiles(seconds, n=4)[::2] if count > 1 else seconds * 2
            hop = {"cut": cut, "direction": direction, "num_bytes": num_bytes, "count": count}
            found.append(hop | {"median_s": statistics.median(seconds), "quartiles_s": quartiles})
        names = [str(device) for device in self.devices]
        return {"split_points": list(self.split_points), "devices": names, "hops": found}


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
