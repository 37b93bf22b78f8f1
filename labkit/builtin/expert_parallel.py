"""Expert parallelism on PyTorch's collectives: ``all_to_all_single`` with uneven splits.

PyTorch has no module for it, so the layers are ours; what travels goes through its collectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor

from labkit.engine.comm.comm import Comm
from labkit.strategies.expert_parallel import ExpertGroup, ExpertParallel
from labkit.strategies.tensor_cut import TensorGroup


class TorchExpertGroup(ExpertGroup):
    """The ranks of the default process group."""

    def all_counts(self, counts: Tensor) -> Tensor:
        # gloo (2.15) takes the concatenation alone, not the stack that is documented, too.
        of_all = counts.new_empty(self.comm.world_size * len(counts), *counts.shape[1:])
        dist.all_gather_into_tensor(of_all, counts.contiguous())
        return of_all.view(self.comm.world_size, *counts.shape)

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), [*received], [*sent])
        return arrived


@dataclass(eq=False)
class TorchExpertParallel(ExpertParallel):
    """The counterpart of ``ExpertParallel``."""

    traits = replace(ExpertParallel.traits, through_comm=False)

    def make_group(self, comm: Comm) -> TensorGroup:
        return TorchExpertGroup(comm)

    def all_reduce(self, flat: Tensor) -> None:
        dist.all_reduce(flat)
