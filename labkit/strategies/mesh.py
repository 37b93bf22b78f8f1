"""A mesh of ranks: replicas of a pipeline of cut layers, each kind of division along its own side.

D x S x T ranks, for example 2 x 1 x 2 and 1 x 2 x 2:

             tensor                     tensor
    data     rank 0  rank 1    stage 0  rank 0  rank 1
             rank 2  rank 3    stage 1  rank 2  rank 3

1. **Tensor**: each layer is cut over T ranks. They talk in every layer, so they are neighbors:
rank = (d S + s) T + t. 2. **Pipeline**: the layers form S stages, between which activations
travel. 3. **Data**: D replicas of all this have a share of the batch each. Their gradients are
summed, in buckets, once per update: these ranks may be furthest apart.

So a rank is in one group along each side, a ``SubComm``. Along a side it sends what it would send
in that technique alone, of the part that the other two leave it.

Sources: Narayanan et al., "Efficient large-scale language model training on GPU clusters using
Megatron-LM" (2021), section 3; Shoeybi et al., "Megatron-LM" (2019), figure 8, for two sides.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from labkit.collectives import broadcast_coalesced
from labkit.engine.comm.comm import Comm, SubComm
from labkit.strategies.base import MakeOptimizer, make_dense
from labkit.strategies.ddp import make_buckets
from labkit.strategies.model_parallel import Pipeline
from labkit.strategies.saved_state import State
from labkit.strategies.staged_model import StagedState
from labkit.strategies.tensor_cut import CutLoss, TensorGroup, gather_shards
from labkit.strategies.tensor_parallel import check_cut
from labkit.strategies.traits import Division
from labkit.workload.losses import Loss


def check_sides(dp: int, pp: int, tp: int, world_size: int) -> None:
    """Raise ValueError unless the sides multiply to the number of ranks."""
    if dp * pp * tp != world_size:
        raise ValueError(
            f"dp {dp} x pp {pp} x tp {tp} is a mesh of {dp * pp * tp} ranks, and world_size is "
            f"{world_size}: make them agree"
        )


def describe_groups(dp: int, pp: int, tp: int) -> str:
    """Return one line that says which ranks do what together; "" for a single rank."""
    ranks = torch.arange(dp * pp * tp).view(dp, pp, tp)
    sides = (
        ("sum activations", ranks.reshape(-1, tp)),
        ("pass activations on", ranks.transpose(1, 2).reshape(-1, pp)),
        ("sum gradients", ranks.permute(1, 2, 0).reshape(-1, dp)),
    )
    parts = []
    for action, groups in sides:
        if groups.shape[1] > 1:
            names = [f"({_shorten(group)})" for group in groups.tolist()]
            parts.append(f"{_shorten(names)} {action}")
    if not parts:
        return ""
    return f"mesh dp {dp} x pp {pp} x tp {tp}: ranks {', '.join(parts)}"


def _shorten(items: list[Any]) -> str:
    if len(items) > 4:
        items = [*items[:2], "...", items[-1]]
    return " ".join(map(str, items))


class MeshState(StagedState):
    """Whole tensors, each from one rank: a run of another arrangement can go on from them."""

    def collect(self) -> State:
        mesh = self.strategy
        state = mesh.group.unshard_state(super().collect(), mesh.tensors | mesh.parameters)
        return state if mesh.data.rank == mesh.tensor.rank == 0 else State()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        mesh = self.strategy
        super().restore(mesh.group.shard_state(state, mesh.tensors | mesh.parameters))


@dataclass(eq=False)
class Mesh(Pipeline):
    """Data, pipeline and tensor parallelism, each over its own groups of ranks.

    Args:
        dp, pp, tp: D, S and T; a side of 1 is a technique left out.
        micro_batches: by default 4 in a pipeline, else 1.
        bucket_mb: MiB of gradients that replicas sum together.

    Attributes:
        data, stage_comm, tensor: this rank's groups.
        group: cuts the layers over ``tensor``, and puts them together again.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    bucket_mb: float = 25
    micro_batches: int | None = None  # type: ignore[assignment]
    saved_state_class = MeshState

    def __post_init__(self) -> None:
        super().__post_init__()
        self.micro_batches = self.micro_batches or (4 if self.pp > 1 else 1)
        if self.tp > 1 and self.pipelining.hops_beside:
            raise ValueError(
                f"schedule {self.schedule} sends beside the work, and tp {self.tp} in it, on one "
                "connection: use gpipe or 1f1b, or tp 1"
            )
        division = Division.NONE
        if self.tp > 1:
            division |= Division.ROWS
        if self.pp > 1:
            division |= Division.LAYERS
        self.traits = replace(self.traits, division=division)

    def check_ranks(self, world_size: int) -> None:
        check_sides(self.dp, self.pp, self.tp, world_size)
        super().check_ranks(self.pp)

    def check_model(self, model: nn.Module, loss: Loss, world_size: int) -> None:
        if self.tp > 1:
            check_cut(model, loss, self.tp)

    def lay_out(self, comm: Comm, model: nn.Module) -> Comm:
        ranks = torch.arange(comm.world_size).view(self.dp, self.pp, self.tp)
        d, s, t = (ranks == comm.rank).nonzero().flatten().tolist()
        self.data = _group(comm, ranks[:, s, t].tolist())
        self.tensor = _group(comm, ranks[d, s].tolist())
        self.group = TensorGroup(self.tensor)
        if self.tp > 1:
            self.group.cut(model)
            self.loss = CutLoss(self.tensor, sum(self.group.classes), self.loss)
        return _group(comm, ranks[d, :, t].tolist())

    def unshard(self, tensor: Tensor) -> Tensor:
        return self.group.unshard(tensor, tensor.detach())

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        super().setup(comm, model, make_optimizer)
        # When the replicas have equal gradients, each clips by itself.
        first = self.data.rank * self.pp * self.tp
        self.norm_ranks = range(first, first + self.pp * self.tp)
        if self.tensor.rank > 0:
            uncut = {p for p in self.trained if p not in self.group.cuts}
            self.counted_elsewhere = uncut.union(self.counted_elsewhere)
        self.buckets = []
        if self.dp > 1:
            self.buckets = make_buckets(self.data, self.trained, self.bucket_mb)

    def share_index(self) -> tuple[int, int]:
        return self.data.rank, self.dp

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        loss = super().step(inputs, targets, batch_size)
        # The loop adds up what the ranks return, and all of ``tensor`` have computed this loss.
        return loss if self.tensor.rank == 0 else torch.zeros_like(loss)

    def finish_backward(self) -> None:
        if self.tp > 1:
            self.group.reduce_shared_gradients(self.trained)
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                make_dense(parameter)
                bucket.take(parameter)
            bucket.all_reduce(self.data)

    def end_epoch(self) -> None:
        broadcast_coalesced(self.data, self.module.buffers())

    def predict(self, inputs: Tensor) -> Tensor | None:
        outputs = super().predict(inputs)
        if outputs is not None and self.tp > 1:
            outputs = torch.cat(gather_shards(self.tensor, outputs, 1, self.group.classes), dim=1)
        return outputs if self.tensor.rank == 0 else None

    def start_note(self) -> str:
        return describe_groups(self.dp, self.pp, self.tp)

    def notes(self) -> dict[str, Any]:
        return super().notes() | {"mesh": [self.dp, self.pp, self.tp]}


def _group(comm: Comm, ranks: list[int]) -> Comm:
    return SubComm(comm, ranks) if len(ranks) < comm.world_size else comm
