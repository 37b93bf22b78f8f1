"""Data parallelism with our ring: replicate, compute on a share, sum the gradients, update.

1. Every rank holds the whole model. 2. Each computes the gradient of the summed loss of its share
of the batch. 3. All gradients, as one flat tensor [N], are summed by ring all-reduce:
share_reduce, then share_only. 4. The sum is divided by the number of samples in the global batch,
and every rank makes the same update.

The sum is divided by the number of samples, not of ranks, so that the update equals that of one
device even if the shares differ in size. Symbols: P ranks, N trainable parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.collectives.compressed import CompressedBetween, TopK, all_reduce_of
from labkit.comm.comm import Comm
from labkit.strategies.base import MakeOptimizer, OnShares
from labkit.strategies.flat_parameters import average_buffers
from labkit.strategies.state import State

# These have values that they have not sent yet.
_WITH_RESIDUAL = TopK | CompressedBetween


@dataclass(eq=False)
class RingAllReduce(OnShares):
    """Synchronous data parallelism over ``labkit.collectives.ring``.

    Batch statistics (BatchNorm): each rank normalises with the statistics of its own share, as in
    DDP. At the end of an epoch the running averages are averaged over the ranks, and the counters
    are taken from rank 0, so that replicas agree. With ``sync_batch_norm`` they are equal anyway.

    Args:
        accumulate, amp, straggler, sync_batch_norm: see ``OnShares``.
        compress: ``fp16``, ``bf16`` or ``topk``, see ``labkit.collectives.compressed``: replicas
            still agree, but the run no longer equals that of one device.
        hierarchical: sum inside each host first, then between hosts: see
            ``labkit.collectives.hierarchical``. What travels between hosts is compressed.

    Raises:
        ValueError: ``topk`` together with amp ``fp16``.
    """

    straggler: tuple[int, float] | None = None
    sync_batch_norm: bool = False
    compress: str | None = None
    hierarchical: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compress == "topk" and self.amp == "fp16":
            raise ValueError(
                "topk keeps the values that it does not send for the next update, which fp16 may "
                "scale differently or skip: choose amp bf16, or compress fp16"
            )
        self.all_reduce = all_reduce_of(self.compress, self.hierarchical)

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.place(comm, model)
        self.compute_with(self.model)
        # parameters() lists a tied parameter once.
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.trained)
        self.update = self.update_of(self.trained)
        self.flat = torch.cat([torch.zeros_like(p).flatten() for p in self.trained])
        self.slices = self.flat.split([p.numel() for p in self.trained])

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        self.optimizer.zero_grad()
        # In fp16 a sum over the batch would overflow sooner than the mean.
        divisor = batch_size if self.scaler.is_enabled() else 1
        # A rank without a sample still takes part in the ring.
        loss = self.gradients.add(inputs, targets, batch_size, divisor)
        self.average_gradients(batch_size // divisor)
        with self.comm.span("update"):
            self.update()
        return loss

    @torch.no_grad()
    def average_gradients(self, batch_size: int) -> None:
        """Replace each rank's gradient sums by the mean over the global batch."""
        with self.comm.span("update"):
            for piece, parameter in zip(self.slices, self.trained):
                if parameter.grad is None:
                    piece.zero_()
                else:
                    piece.copy_(parameter.grad.flatten())
        self.all_reduce(self.comm, self.flat)
        with self.comm.span("update"):
            self.flat /= batch_size
            for piece, parameter in zip(self.slices, self.trained):
                # Gradients of several dtypes were summed in the widest of these dtypes.
                parameter.grad = piece.view_as(parameter).to(parameter.dtype)

    def state(self) -> State:
        state = super().state()
        if isinstance(self.all_reduce, _WITH_RESIDUAL) and self.all_reduce.residual is not None:
            state["own/residual"] = self.all_reduce.residual
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        super().load_state(state)
        if isinstance(self.all_reduce, _WITH_RESIDUAL) and "own/residual" in state:
            self.all_reduce.residual = state["own/residual"].to(self.comm.device)

    def end_epoch(self) -> None:
        average_buffers(self.comm, self.model, self.workers, self.sync_batch_norm)
