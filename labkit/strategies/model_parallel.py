"""Model parallelism by placement: the model is cut into stages, each on a device of its own.

The batch passes through the stages one after another, forward and then backward:

    stage 0   F . . . . B
    stage 1   . F . . B .
    stage 2   . . F B . .

A device needs memory only for its own stage: that is the purpose of the technique. While one stage
works, all others wait, so the technique is no faster than one device; ``pipeline`` improves on
that. **Naive** (``ModelParallelOneProcess``): one process, whose activations are copied between
the devices of one machine; with one GPU, ``("cuda:0", "cpu")`` cuts the model between GPU and
host. **Over ranks** (``ModelParallel``): a process for each stage, on any machine.

Source: the manual placement that PyTorch's tutorials call model parallelism.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.comm import Comm
from labkit.schedules.pipeline import Hop, Message
from labkit.schedules.split_points import check_devices, stage_bounds
from labkit.strategies.on_shares import OnShares
from labkit.strategies.stage import StagedModel
from labkit.workload.chain import layers_of

_MOST_HOPS = 10_000


@dataclass(eq=False)
class ModelParallelOneProcess(OnShares):
    """Stage s of the model on device s, all in one process.

    Every layer sees the whole batch, so the result equals that of one device, BatchNorm included.
    ``notes`` has the bytes and seconds of the hops, except for the first step, which warms up. A
    tied parameter can be on only one device.

    A copy between devices is queued on a stream and returns at once, so a clock around the call
    does not measure it. PyTorch copies on the current stream of the source device, or, from the
    host, of the target: the events of a hop are recorded there. Between two GPUs, the copy first
    waits until the target's stream is free: this wait is queued before the first event.

    Args:
        split_points: layers that begin a stage, one fewer than there are devices.
        devices: one name per stage.
        accumulate, amp: see ``OnShares``.
    """

    split_points: Sequence[int] = ()
    devices: Sequence[Any] = ("cpu",)
    in_one_process = True
    through_comm = False

    def __post_init__(self) -> None:
        check_devices(len(self.devices), self.split_points)
        self.devices = [torch.device(name) for name in self.devices]

    def place(self, comm: Comm, model: nn.Module) -> None:
        super().place(comm, model)
        layers, parts = layers_of(model), []
        bounds = stage_bounds(self.split_points, len(layers))
        for cut, ((start, end), device) in enumerate(zip(bounds, self.devices), start=-1):
            parts += [_Cut(self, cut)] if parts else []
            parts += [layer.to(device) for layer in layers[start:end]]
        self.module = nn.Sequential(*parts)
        # (cut, direction, bytes), and the events between which they moved, with their timer.
        self.hops: deque[tuple[Any, ...]] = deque(maxlen=_MOST_HOPS)
        self.is_warm = False
        comm.session.time_on(self.devices)

    def sum_gradients(self) -> None:
        self.is_warm = True

    def run(self, inputs: Tensor) -> Tensor:
        return self.module(inputs)

    def move(self, tensor: Tensor, cut: int, direction: str) -> Tensor:
        """Move ``tensor`` over a cut, ``forward`` or ``backward``, and time the hop."""
        ends = self.devices[cut : cut + 2]
        source, target = ends if direction == "forward" else reversed(ends)
        on_gpu = [device for device in (source, target) if device.type == "cuda"]
        if len(on_gpu) == 2:
            torch.cuda.current_stream(source).wait_stream(torch.cuda.current_stream(target))
        landing = torch.empty_like(tensor, device=target)
        timer = self.comm.session.timers.of(on_gpu[0] if on_gpu else source)
        start = timer.mark()
        landing.copy_(tensor, non_blocking=len(on_gpu) == 2)
        if self.is_warm and torch.is_grad_enabled():
            self.hops.append(((cut, direction, tensor.nbytes), timer, start, timer.mark()))
        return landing

    def notes(self) -> dict[str, Any]:
        """The placement; by cut, direction and bytes, how many hops there were and their time."""
        seconds = defaultdict(list)
        for place, timer, start, end in self.hops:
            seconds[place].append(timer.seconds(end, origin=start))
        hops = [
            dict(zip(("cut", "direction", "num_bytes"), place))
            | {"count": len(seconds[place]), "median_s": statistics.median(seconds[place])}
            for place in sorted(seconds)
        ]
        names = [str(device) for device in self.devices]
        return {"split_points": list(self.split_points), "devices": names, "hops": hops}


class _Cut(nn.Module):
    """Moves what passes over a cut, and in backward its gradient."""

    def __init__(self, strategy: ModelParallelOneProcess, cut: int):
        super().__init__()
        self.place = strategy, cut

    def forward(self, value: Tensor) -> Tensor:
        return _Crossing.apply(value, *self.place)


class _Crossing(torch.autograd.Function):
    """Forward moves the activation over a cut, backward moves its gradient back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, strategy: ModelParallelOneProcess, cut: int) -> Tensor:
        ctx.strategy, ctx.cut = strategy, cut
        return strategy.move(value, cut, "forward")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.strategy.move(gradients[0], ctx.cut, "backward"), None, None


@dataclass(eq=False)
class ModelParallel(StagedModel):
    """Rank s holds the layers from split point s to the next one.

    Every layer sees the whole batch, so the result equals that of one device, BatchNorm included.
    Parameters may be tied across stages. No gradient is sent to the first stages if they are
    frozen.

    Args:
        split_points: layers that begin a stage, one fewer than there are ranks.
        accumulate: micro-batches, each of which passes through all stages, forward and backward,
            before the next one begins; as ``OnShares`` on one device.
        amp: see ``StagedModel``.
    """

    accumulate: int = 1

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        before, behind = self.index - 1, self.index + 1
        for part in range(self.start(inputs, targets, batch_size, self.accumulate)):
            if not self.is_first:
                self.hop(Hop(None, Message("activation", part, before)))
            self.forward(part)
            if not self.is_last:
                self.hop(Hop(Message("activation", part, behind), None))
            if self.index >= self.first_trained:
                if not self.is_last:
                    self.hop(Hop(None, Message("gradient", part, behind)))
                self.backward(part)
                if self.index > self.first_trained:
                    self.hop(Hop(Message("gradient", part, before), None))
        self.update()
        return self.loss_sum
