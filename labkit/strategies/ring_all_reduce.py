"""Data parallelism with our ring: replicate, compute on a share, sum the gradients, update.

1. Every rank holds the whole model. 2. Each computes the gradient of its share's losses, divided
by the number of samples in the global batch. 3. All gradients, as one flat tensor [N], are summed
by ring all-reduce: share_reduce, then share_only. 4. Every rank makes the same update.

Losses are divided by the number of samples of all ranks, so that the update equals that of one
device even if the shares differ in size. Symbols: P ranks, N trainable parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from labkit.collectives.compressed import TopK, all_reduce_of
from labkit.engine.comm.comm import Comm
from labkit.strategies.base import MakeOptimizer
from labkit.strategies.flat_tensors import FlatGradients
from labkit.strategies.on_shares import OnShares
from labkit.strategies.saved_state import SavedState, State


class ResidualState(SavedState):
    """As of any technique, and the gradients that ``TopK`` has not sent yet."""

    def collect(self) -> State:
        state = super().collect()
        all_reduce = self.strategy.all_reduce
        if isinstance(all_reduce, TopK) and all_reduce.residual is not None:
            state["own/residual"] = all_reduce.residual
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(state)
        all_reduce = self.strategy.all_reduce
        if isinstance(all_reduce, TopK) and "own/residual" in state:
            all_reduce.residual = state["own/residual"].to(self.strategy.comm.device)


@dataclass(eq=False)
class RingAllReduce(OnShares):
    """Synchronous data parallelism over ``labkit.collectives.ring``.

    Args:
        compress: ``fp16``, ``bf16`` or ``topk``, see ``labkit.collectives.compressed``: replicas
            still agree, but the run no longer equals that of one device.
        hierarchical: sum inside each host first, then between hosts: see
            ``labkit.collectives.hierarchical``. What travels between hosts is compressed.
    """

    straggler: tuple[int, float] | None = None
    sync_batch_norm: bool = False
    compress: str | None = None
    hierarchical: bool = False
    saved_state_class = ResidualState

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compress == "topk" and self.amp == "fp16":
            raise ValueError(
                "topk keeps the values that it does not send for the next update, which fp16 may "
                "scale differently or skip: choose amp bf16, or compress fp16"
            )
        if self.compress == "topk" and self.hierarchical:
            raise ValueError("hierarchical compresses as fp16 or bf16, not as topk")
        self.all_reduce = all_reduce_of(self.compress, self.hierarchical)

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        super().setup(comm, model, make_optimizer)
        self.gradients = FlatGradients(self.trained)

    def finish_backward(self) -> None:
        """Step 3; a rank without a sample takes part, too."""
        with self.comm.span("update"):
            flat = self.gradients.collect()
        self.all_reduce(self.comm, flat)
        self.gradients.hand_back()
