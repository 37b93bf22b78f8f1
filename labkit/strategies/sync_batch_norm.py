"""SyncBatchNorm: BatchNorm with the mean and variance of the global batch, not of a rank's share.

Where ranks divide a batch between them, a layer sees only a share of it. Forward, by channel:

1. Each worker counts its values, n_r, and computes their mean m_r and M_r, the sum of the squared
   deviations from it. 2. All workers get these three numbers of all others (``share_only``, the
   literature's all-gather), as one row of 2 C + 1. 3. They combine them: n = sum n_r,
   m = sum n_r m_r / n, variance v = sum (M_r + n_r (m_r - m)^2) / n. A sum of squares minus the
   square of the sum would cancel where the mean is large. 4. y = (x - m) / sqrt(v + eps), and
   weight and bias.

Backward: m and v depend on every x of the batch, so the gradient of each x depends on all workers'
shares. 5. Autograd computes dL/dm and dL/dv from this worker's y. 6. All workers get these 2 C
numbers of all others and add them. 7. dL/dx = (dL/dm + 2 (x - m) dL/dv) / n, beside what comes
through step 4.

The rows travel as float64, and all workers combine them in the same order: their statistics and
running averages are equal to the bit.

Symbols: W workers, r one of them, C channels, n values per channel in the whole batch.
Sources: Ioffe and Szegedy, "Batch normalization" (2015), section 3; Chan, Golub and LeVeque,
"Algorithms for computing the sample variance" (1983), for step 3; Peng et al., "MegDet" (2018),
section 3.3, for the exchange; PyTorch's ``nn.SyncBatchNorm``, which runs on GPUs only.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from labkit.comm.comm import Comm
from labkit.comm.work import work_queue_of
from labkit.schedules.ring import owned_chunk, ring_share_only
from labkit.workload.sampling import share


class GlobalBatch:
    """What the workers that divide a batch tell each other about it.

    The ``model``'s layers synchronise while it is in training mode, as a whole. A global batch is
    cut into ``micro_batches`` before each is divided, so all workers have the same number of them.
    """

    def __init__(
        self, comm: Comm, model: nn.Module, workers: Sequence[int], micro_batches: int = 1
    ):
        self.comm, self.model, self.workers = comm, model, workers
        self.index, self.micro_batches = workers.index(comm.rank), micro_batches
        self.sits_out = False

    def gathered(self, mine: Tensor) -> Tensor:
        """All workers' rows [W, K], in their order, from this one's [K]; equal to the bit on all.

        Takes W - 1 steps and messages, and sends (W - 1) K elements.
        """
        count = len(self.workers)
        rows = mine.new_empty(count, len(mine))
        rows[owned_chunk(self.index, count)] = mine

        def share_rows(comm: Comm) -> None:
            # A rank that serves takes no part, and a collective is announced by all ranks.
            is_collective = count == comm.world_size
            name = "sync_batch_norm"
            with comm.collective(name, rows) if is_collective else contextlib.nullcontext():
                for step in ring_share_only(self.index, count):
                    dst, src = self.workers[step.dst], self.workers[step.src]
                    comm.exchange(rows[step.send_chunk], dst, rows[step.recv_chunk], src)

        # Not on comm itself: buckets of DDP may be under way, and messages must not mix.
        queue = work_queue_of(self.comm)
        queue.add("sync_batch_norm", share_rows, [mine], [rows], is_waited_for=True).wait()
        return rows.roll(-1, 0)

    def parts(self, batch: Tensor) -> list[Tensor]:
        """This worker's share of each micro-batch of a global batch [B, ...]; some may be empty.

        A micro-batch then has the same samples as on one device, and so the same statistics.
        """
        cut = batch.tensor_split(max(1, min(self.micro_batches, len(batch))))
        return [share(part, self.index, len(self.workers)) for part in cut]

    @contextlib.contextmanager
    def sitting_out(self) -> Iterator[None]:
        """A context in which this rank runs the model on anything, and its values do not count."""
        self.sits_out = True
        try:
            yield
        finally:
            self.sits_out = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "GlobalBatch":
        """A copy of a layer belongs to the same ranks; a comm cannot be copied."""
        return self


class Statistics(torch.autograd.Function):
    """Inputs [n, C, ...] -> mean [C] and variance [C] of the global batch, and their count n."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, batch: GlobalBatch) -> tuple[Tensor, Tensor, int]:
        channels = x.shape[1]
        row = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
        if x.numel() and not batch.sits_out:
            axes = [axis for axis in range(x.dim()) if axis != 1]
            variance, mean = torch.var_mean(x, axes, correction=0)
            row[:channels], row[-1] = mean, x.numel() // channels
            row[channels:-1] = variance.double() * row[-1]
        means, squares, counts = batch.gathered(row).split([channels, channels, 1], dim=1)
        count = int(counts.sum())
        mean = (counts * means).sum(0) / max(1, count)
        variance = (squares + counts * (means - mean) ** 2).sum(0) / max(1, count)
        ctx.save_for_backward(x, mean)
        ctx.batch, ctx.count, ctx.sits_out = batch, count, batch.sits_out
        return mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _of_inputs(ctx, *gradients), None


@once_differentiable
def _of_inputs(ctx: Any, of_mean: Tensor, of_variance: Tensor, *_: Tensor) -> Tensor:
    x, mean = ctx.saved_tensors
    sums = ctx.batch.gathered(torch.cat([of_mean, of_variance])).sum(0)
    if ctx.sits_out:
        return torch.zeros_like(x)
    mean, of_mean, of_variance = (
        numbers.to(x.dtype).view(1, -1, *[1] * (x.dim() - 2))
        for numbers in (mean, *(sums / max(1, ctx.count)).chunk(2))
    )
    return torch.addcmul(of_mean, x - mean, of_variance, value=2)


class SyncBatchNorm(_BatchNorm):
    """What ``convert`` makes of BatchNorm1d, 2d and 3d: another class, the same object.

    Parameters, buffers, names and hooks stay. In evaluation mode it is the layer that it was.
    16-bit inputs are computed in float32.
    """

    global_batch: GlobalBatch

    def forward(self, input: Tensor) -> Tensor:
        has_averages = self.running_mean is not None or self.running_var is not None
        if (has_averages and not self.training) or not self.global_batch.model.training:
            return super().forward(input)
        self._check_input_dim(input)
        with torch.autocast(input.device.type, enabled=False):
            x = input.float() if input.dtype.itemsize < 4 else input
            mean, variance, count = Statistics.apply(x, self.global_batch)
            if count == 1:
                size = torch.Size([1, *input.shape[1:]])
                raise ValueError(
                    f"Expected more than 1 value per channel when training, got input size {size}"
                )
            if self.training and self.track_running_stats:
                self.track(mean.detach(), variance.detach(), count)
            scale = (variance + self.eps).rsqrt()
            if self.weight is not None:
                scale = scale * self.weight
            shape = 1, -1, *[1] * (input.dim() - 2)
            mean, scale = mean.to(x.dtype).view(shape), scale.to(x.dtype).view(shape)
            if self.bias is None:
                return ((x - mean) * scale).to(input.dtype)
            bias = self.bias.to(x.dtype).view(shape)
            return torch.addcmul(bias, x - mean, scale).to(input.dtype)

    def track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Move the running averages towards these; an empty batch has none."""
        factor = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1 / float(self.num_batches_tracked)
        unbiased = variance * (count / max(1, count - 1))
        for average, now in ((self.running_mean, mean), (self.running_var, unbiased)):
            if average is not None and count:
                average.mul_(1 - factor).add_(now.to(average.dtype), alpha=factor)


def convert(
    model: nn.Module, comm: Comm, workers: Sequence[int], micro_batches: int = 1
) -> GlobalBatch | None:
    """Let every BatchNorm in ``model`` use the statistics of the global batch from now on.

    In place, at any depth; parameters and buffers stay the same tensors with the same names. All
    workers have to run the same layers in the same order, also those without samples: see
    ``LocalGradients``. With gradient checkpointing a layer runs twice in a step and its running
    averages are updated twice, on one device as well.

    Returns:
        The batch that the layers share; None if there is one worker, which sees all of it.

    Raises:
        ValueError: a layer with a forward of its own, or that does not know its channels yet.
    """
    if len(workers) < 2:
        return None
    batch = GlobalBatch(comm, model, workers, micro_batches)
    known = _BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward
    for name, layer in batch_norms(model):
        is_lazy = isinstance(layer, nn.modules.lazy.LazyModuleMixin)
        if is_lazy or type(layer).forward not in known:
            why = "does not know its channels yet" if is_lazy else "has a forward of its own"
            raise ValueError(
                f"{name} is a {type(layer).__name__} that {why}, so sync_batch_norm cannot give "
                "it the statistics of the global batch: use BatchNorm1d, 2d or 3d, or leave it out"
            )
        if not isinstance(layer, SyncBatchNorm):
            layer.__class__ = _synchronised(type(layer))
        layer.__dict__["global_batch"] = batch
    return batch


def batch_norms(model: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """The BatchNorm layers of a model by name, each once."""
    found = model.named_modules()
    return [(name or "model", layer) for name, layer in found if isinstance(layer, _BatchNorm)]


@functools.cache
def _synchronised(kind: type[_BatchNorm]) -> type[_BatchNorm]:
    """A subclass of ``kind`` with our forward in place of BatchNorm's."""
    name = f"Sync{kind.__name__.removeprefix('Sync')}"
    return type(name, (SyncBatchNorm, kind), {})
