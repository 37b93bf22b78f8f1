"""PyTorch's own sharding: ``ZeroRedundancyOptimizer`` with DDP, and FSDP2's ``fully_shard``."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from labkit.comm.comm import Comm
from labkit.strategies.base import MakeOptimizer, State
from labkit.strategies.builtin import check_dtensor
from labkit.strategies.builtin.ddp import TorchDDP
from labkit.units import check_integer
from labkit.workload.layers import layers_of
from labkit.workload.losses import Loss


@dataclass(eq=False)
class TorchSharded(TorchDDP):
    """The counterpart of ``Sharded``.

    Stage 1 is DDP with a ``ZeroRedundancyOptimizer``, which gives each rank whole parameters and
    broadcasts them after the update. Stages 2 and 3 are ``fully_shard`` of each layer, which cuts
    every parameter along its first dimension; in stage 2 what was gathered for forward stays for
    backward. Layers that share parameters form one unit, that of the model.
    """

    stage: int = 3
    predicts_together = True
    no_checkpoint = "PyTorch has divided the parameters in its own way (or leave builtin out)"

    def __post_init__(self) -> None:
        check_integer("stage", self.stage, least=1, most=3)

    def check_model(self, model: nn.Module, loss: Loss, world_size: int) -> None:
        layers_of(model)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 0 and self.stage > 1:
                raise ValueError(
                    f"PyTorch's fully_shard takes no scalar parameters, and {name} is one: give "
                    "it the shape [1], or leave builtin out"
                )

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        if self.stage == 1:
            zero: Any = ZeroRedundancyOptimizer
            super().setup(comm, model, lambda mine: zero(mine, make_optimizer, self.group))
            return
        check_dtensor(comm)
        self.group: Any = None if self.backend == "auto" else dist.new_group(backend=self.backend)
        self.place(comm, model)
        group: Any = self.group or dist.group.WORLD
        mesh = DeviceMesh.from_group(group, comm.device.type)
        layers = [layer for layer in layers_of(model) if [*layer.parameters()]]
        times = Counter(p for layer in layers for p in dict.fromkeys(layer.parameters()))
        alone = [layer for layer in layers if all(times[p] == 1 for p in layer.parameters())]
        # FSDP warns of outputs that are views.
        model.register_forward_hook(lambda layers, inputs, outputs: outputs.contiguous())
        for module in (*alone, model):
            shards = fully_shard(module, mesh=mesh, reshard_after_forward=self.stage == 3)
            # A sum over ranks, not their mean.
            shards.set_gradient_divide_factor(1.0)
            shards.set_force_sum_reduction_for_comms(True)
        self.runs_empty = True
        self.divided: list[Any] = [p for p in model.parameters() if p.requires_grad]
        # The same memory as plain tensors, which an optimizer updates more quickly.
        self.trained = [nn.Parameter(p.to_local()) for p in self.divided]
        self.optimizer, self.norm_ranks = make_optimizer(self.trained), range(comm.world_size)

    def sum_gradients(self) -> None:
        super().sum_gradients()
        for mine, parameter in zip(self.trained, self.divided) if self.stage > 1 else ():
            mine.grad = None if parameter.grad is None else parameter.grad.to_local()
            parameter.grad = None

    def full_state(self) -> State:
        state = self.model.state_dict()
        full = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state.items()}
        return {name: value.detach().cpu().clone() for name, value in full.items()}
