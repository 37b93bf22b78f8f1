"""PyTorch's mesh of ranks: DTensor along one side of a ``DeviceMesh``, FSDP2 along the other."""

import copy
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from labkit.builtin import check_dtensor, check_no_scalars
from labkit.builtin.sharded import shard_units
from labkit.builtin.tensor_parallel import TorchTensorParallel
from labkit.engine.comm.comm import Comm, SubComm
from labkit.strategies.base import MakeOptimizer
from labkit.strategies.mesh import check_sides, describe_groups
from labkit.strategies.saved_state import State
from labkit.strategies.tensor_cut import Cut
from labkit.strategies.traits import Division, Traits
from labkit.workload.losses import Loss
from labkit.workload.transformer import Block


@dataclass(eq=False)
class TorchMesh(TorchTensorParallel):
    """The counterpart of ``Mesh`` with ``pp`` = 1.

    ``parallelize_module`` cuts the layers over ``tp`` ranks, and ``fully_shard`` divides each part
    over ``dp`` ranks, since DDP takes no DTensors.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    traits = Traits(
        takes_whole_batch=True,
        through_comm=False,
        predicts_together=True,
        division=Division.ROWS,
        no_checkpoint="PyTorch has divided the parameters in its own way (or leave builtin out)",
    )
    runs_empty = True

    def check_ranks(self, world_size: int) -> None:
        if self.pp > 1:
            raise ValueError(
                f"PyTorch's mesh has no pipeline here, got pp {self.pp}: leave out pp, or builtin"
            )
        check_sides(self.dp, self.pp, self.tp, world_size)

    def check_model(self, model: nn.Module, loss: Loss, world_size: int) -> None:
        check_no_scalars(model)
        if self.tp > 1:
            super().check_model(model, loss, self.tp)

    def start_note(self) -> str:
        return describe_groups(self.dp, self.pp, self.tp)

    def share_index(self) -> tuple[int, int]:
        return self.comm.rank // self.tp, self.dp

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        check_dtensor(comm)
        self.mesh = init_device_mesh(
            comm.device.type, (self.dp, self.tp), mesh_dim_names=("dp", "tp")
        )
        tensor_comm = SubComm(comm, self.mesh["tp"].mesh.tolist())
        super().setup(tensor_comm, model, make_optimizer)
        self.comm = comm
        self.norm_ranks = range(comm.world_size)
        if tensor_comm.rank > 0:
            local = self.local.items()
            self.counted_elsewhere = {shard for p, shard in local if p not in self.cut_over_tp}

    def cut(self, model: nn.Module) -> None:
        if self.tp > 1:
            self.parallelize(model, self.mesh["tp"])
        names = []
        for name, p in model.named_parameters():
            if isinstance(p, DTensor) and p.placements[0].is_shard():
                names.append(name)
        blocks = [layer for layer in model.modules() if isinstance(layer, Block)]
        shard_units(model, blocks, mesh=self.mesh["dp"])
        state = model.state_dict(keep_vars=True)
        self.cut_over_tp = {state[name] for name in names}
        self.local = {p: nn.Parameter(p.to_local(), p.requires_grad) for p in state.values()}

    def _forward_backward(self, inputs: Tensor, targets: Tensor, weight: float) -> Tensor:
        if len(targets) or self.tp == 1:
            return super()._forward_backward(inputs, targets, weight)
        # DTensor's loss takes no empty batch, and FSDP waits: a sample that weighs nothing.
        inputs = inputs.new_zeros(1, *inputs.shape[1:])
        targets = targets.new_zeros(1, *targets.shape[1:])
        counted_loss = self.loss
        self.loss = copy.copy(counted_loss)
        loss = super()._forward_backward(inputs, targets, 0.0) * 0
        self.loss = counted_loss
        return loss

    def run(self, inputs: Tensor) -> Tensor:
        outputs = self.model(inputs)
        return outputs.full_tensor() if isinstance(outputs, DTensor) else outputs

    def full_state(self) -> State:
        state = State()
        by_head = Cut(0, [0] * self.tp, blocks=3)
        for name, p in self.model.state_dict().items():
            # One side after the other: both at once are two gathers, too, and a warning.
            tensor = p.redistribute(placements=[Replicate(), *p.placements[1:]]).full_tensor()
            if "qkv" in name and self.tp > 1:
                tensor = by_head.unshard(tensor.chunk(self.tp))
            state[name] = tensor.cpu()
        return state
