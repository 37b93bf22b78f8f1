"""The part of a training step that needs no other rank: forward and backward of a share.

It may run in micro-batches (gradient accumulation: the activations of one micro-batch at a time,
the gradients of all of them), in mixed precision (``labkit.strategies.update``), and
slowed down, as a straggler.
"""

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from labkit import gpus
from labkit.comm.comm import Comm
from labkit.strategies.sync_batch_norm import GlobalBatch
from labkit.strategies.update import MixedPrecision
from labkit.workload.losses import Loss, sum_cross_entropy


class LocalGradients:
    """Forward and backward of one rank's share of a batch.

    Args:
        model: on ``comm.device``, in training mode; parameters keep their dtype.
        loss: (outputs, targets) -> the sum over the samples.
        accumulate: micro-batches that a share is cut into, as evenly as possible. The gradient is
            that of the whole share, unless layers combine samples, as BatchNorm does.
        amp: ``bf16`` or ``fp16``: matrix products and convolutions in that dtype. With fp16 the
            loss is scaled up: see ``LossScaler``.
        straggler: (rank, factor): that rank takes ``factor`` times as long to compute, except for
            its first micro-batch. The messages of ``global_batch`` count as computing.
        global_batch: that the model's BatchNorm layers share; a rank without samples runs them,
            too, since the others wait for its statistics.
    """

    def __init__(
        self,
        comm: Comm,
        model: nn.Module,
        *,
        loss: Loss = sum_cross_entropy,
        accumulate: int = 1,
        amp: str | None = None,
        straggler: tuple[int, float] | None = None,
        global_batch: GlobalBatch | None = None,
    ):
        self.comm, self.model, self.loss = comm, model, loss
        self.global_batch, self.accumulate = global_batch, accumulate
        self.takes_empty = False  # whether layers that share statistics take an empty batch
        self.precision = MixedPrecision(amp)
        self.scaler = self.precision.scaler
        slow, factor = straggler or (None, 1.0)
        self.slowdown = factor if comm.rank == slow else 1.0
        # Seconds per sample of the last micro-batches, without the first, which takes many times
        # as long: PyTorch initialises itself in it.
        self._paces: deque[float] = deque(maxlen=9)
        self._is_initialised = False

    def add(
        self,
        inputs: Tensor,
        targets: Tensor,
        batch_size: int,
        divisor: float | None = None,
        no_sync: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        even_if_empty: bool = False,
    ) -> Tensor:
        """Add the gradient of (sum of losses) / ``divisor`` to the parameters' ``grad``.

        Args:
            inputs, targets: [n, ...] and [n], this rank's share; n may be 0.
            batch_size: samples of the global batch.
            divisor: by default ``batch_size``, for the gradient of the mean loss.
            no_sync: a context in which every micro-batch except the last one runs.
            even_if_empty: run the model on an empty share, too, for hooks that rely on it.

        Returns:
            The sum of the losses, a scalar, detached and not scaled.
        """
        if self.global_batch is not None:
            # As many micro-batches as on all other ranks; some may be empty.
            parts = self.global_batch.parts(torch.arange(batch_size))
            sizes = [len(part) for part in parts]
            micro_batches = list(zip(inputs.split(sizes), targets.split(sizes)))
        elif len(targets) or even_if_empty:
            count = max(1, min(self.accumulate, len(targets)))
            micro_batches = list(zip(inputs.tensor_split(count), targets.tensor_split(count)))
        else:
            micro_batches = []
        total = targets.new_zeros((), dtype=torch.float64)
        for number, micro_batch in enumerate(micro_batches, start=1):
            quietly = no_sync if number < len(micro_batches) else contextlib.nullcontext
            with self.comm.span("compute"), quietly():
                if self.global_batch and not len(micro_batch[1]) and not self.takes_empty:
                    self._sit_out(micro_batch[0], self.global_batch)
                else:
                    total += self._forward_backward(micro_batch, divisor or batch_size)
        return total

    def _forward_backward(self, part: tuple[Tensor, Tensor], divisor: float) -> Tensor:
        inputs, targets = part
        if self.slowdown > 1:
            # What was queued before is not this rank's computing, and must not be slowed down.
            gpus.synchronize(self.comm.device)
        start_s = time.perf_counter()
        with self.precision.autocast(inputs.device):
            logits = self.precision.wide(self.model(inputs))
        if self.slowdown > 1:
            # DDP waits for other ranks at the end of backward, and waiting must not be slowed
            # down. This callback is queued when backward starts, so it runs before DDP's.
            queue = Variable._execution_engine.queue_callback
            logits.register_hook(lambda _: queue(lambda: self._fall_behind(start_s, len(logits))))
        loss = self.loss(logits, targets)
        self.scaler.scale(loss / divisor).backward()
        return loss.detach()

    def _sit_out(self, inputs: Tensor, global_batch: GlobalBatch) -> None:
        """Forward and backward for the messages in them, on a rank without samples, [0, ...]."""
        # On a sample that does not count: many a model does not take an empty batch, as in
        # x.view(len(x), -1). It is no constant, which some layers would divide by zero.
        shape = inputs.shape[1:]
        ramp = torch.linspace(0, 1, math.prod(shape), device=inputs.device)
        with global_batch.sitting_out():
            with self.precision.autocast(inputs.device):
                outputs = self.model(ramp.view(1, *shape).to(inputs.dtype))
            outputs.backward(torch.zeros_like(outputs))

    def _fall_behind(self, start_s: float, num_samples: int) -> None:
        gpus.synchronize(self.comm.device)
        if self._is_initialised and num_samples:
            # By the median: a slower device would not make a pause of the system any longer.
            self._paces.append((time.perf_counter() - start_s) / num_samples)
            time.sleep((self.slowdown - 1) * statistics.median(self._paces) * num_samples)
        self._is_initialised = True
