"""PyTorch's own sharding: ``ZeroRedundancyOptimizer`` with DDP, and FSDP2's ``fully_shard``."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from labkit.builtin import check_dtensor, check_no_scalars
from labkit.builtin.ddp import TorchDDP
from labkit.engine.comm.comm import Comm
from labkit.strategies.base import MakeOptimizer
from labkit.strategies.saved_state import State
from labkit.strategies.traits import Division, Traits
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
    traits = Traits(
        predicts_together=True,
        division=Division.ROWS,
        no_checkpoint="PyTorch has divided the parameters in its own way (or leave builtin out)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("stage", self.stage, least=1, most=3)
        if self.stage == 1:
            self.traits = replace(self.traits, division=Division.LAYERS)

    def check_model(self, model: nn.Module, loss: Loss, world_size: int) -> None:
        layers_of(model)
        if self.stage > 1:
            check_no_scalars(model)

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        if self.stage == 1:
            super().setup(comm, model, self._zero_optimizer(make_optimizer))
            return
        check_dtensor(comm)
        self.group: Any = None if self.backend == "auto" else dist.new_group(backend=self.backend)
        # Each layer moves to the device as it is cut: the whole model may not fit there.
        self.take(comm, model)
        group: Any = self.group or dist.group.WORLD
        mesh = DeviceMesh.from_group(group, comm.device.type)
        units = unshared_layers(model)
        # Nothing but the model may keep the parameters alive, which FSDP replaces by shards.
        self.trained = []
        shard_units(model, units, mesh=mesh, reshard_after_forward=self.stage == 3)
        self.divided: list[Any] = [p for p in model.parameters() if p.requires_grad]
        # The same memory as plain tensors, which an optimizer updates more quickly.
        self.trained = [nn.Parameter(p.to_local()) for p in self.divided]
        self.optimizer = make_optimizer(self.trained)
        self.norm_ranks = range(comm.world_size)

    def _zero_optimizer(self, make_optimizer: MakeOptimizer) -> MakeOptimizer:
        """Return a factory of ``ZeroRedundancyOptimizer``, which makes ours of its own share."""
        zero: Any = ZeroRedundancyOptimizer

        def make(groups: list[dict[str, Any]]) -> Any:
            # It hands on groups, and our optimizers are made of parameters.
            parameters: list[nn.Parameter] = []
            for group in groups:
                parameters += group["params"]
            optimizer = make_optimizer(parameters)
            if len(optimizer.param_groups) > 1:
                raise ValueError(
                    "PyTorch's ZeroRedundancyOptimizer wants one group of parameters, and this "
                    f"optimizer makes {len(optimizer.param_groups)}: use stage 2 or 3, or ddp"
                )
            return optimizer

        return lambda parameters: zero(parameters, make, self.group)

    def finish_backward(self) -> None:
        super().finish_backward()
        if self.stage == 1:
            return
        for shard, parameter in zip(self.trained, self.divided):
            shard.grad = None
            if parameter.grad is not None:
                shard.grad = parameter.grad.to_local()
            parameter.grad = None

    def full_state(self) -> State:
        state = State()
        for name, value in self.model.state_dict().items():
            if isinstance(value, DTensor):
                value = value.full_tensor()
            state[name] = value.detach().cpu().clone()
        return state


def shard_units(model: nn.Module, units: Sequence[nn.Module], **options: Any) -> None:
    """Apply ``fully_shard`` to each unit, and to the rest of the model."""
    # FSDP warns of outputs that are views.
    model.register_forward_hook(lambda layers, inputs, outputs: outputs.contiguous())
    for module in (*units, model):
        shards = fully_shard(module, **options)
        # A sum over ranks, not their mean.
        shards.set_gradient_divide_factor(1.0)
        shards.set_force_sum_reduction_for_comms(True)


def unshared_layers(model: nn.Module) -> list[nn.Module]:
    """The layers with parameters, none of which another layer has."""
    layers = layers_of(model)
    num_users: Counter[nn.Parameter] = Counter()
    for layer in layers:
        num_users.update(set(layer.parameters()))
    unshared = []
    for layer in layers:
        most = max((num_users[parameter] for parameter in layer.parameters()), default=0)
        if most == 1:
            unshared.append(layer)
    return unshared
