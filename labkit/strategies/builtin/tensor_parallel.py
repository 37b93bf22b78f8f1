"""PyTorch's tensor parallelism, ``parallelize_module``: the same cuts, by DTensor.

A DTensor is a tensor of a mesh of ranks: each has a part, and a placement says which. Operations
on DTensors find out for themselves which collective they need. They are ``torch.distributed``'s,
on the ranks' process group: gloo on CPUs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from labkit.strategies.base import State
from labkit.strategies.tensor_cut import Cut
from labkit.strategies.tensor_parallel import OnCuts
from labkit.workload.layers import layers_of
from labkit.workload.losses import Loss
from labkit.workload.transformer import Attention, Block

_PLAN = {
    "attention.qkv": ColwiseParallel(),
    "attention.out": RowwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(),
}


@dataclass(eq=False)
class TorchTensorParallel(OnCuts):
    """The counterpart of ``TensorParallel``; ``loss_parallel`` computes the loss.

    Right predictions on training samples are not counted: DTensor would gather all logits. An
    optimizer cannot mix DTensors with tensors, and it gets each rank's part as a tensor, which
    shares the DTensor's memory.
    """

    through_comm = False

    def check_model(self, model: nn.Module, loss: Loss, world_size: int) -> None:
        super().check_model(model, loss, world_size)
        for layer in model.modules():
            if isinstance(layer, Attention) and layer.num_heads % world_size:
                raise ValueError(
                    f"PyTorch's DTensor cuts {layer.num_heads} heads into equal parts, which is "
                    f"impossible for {world_size} ranks: use a number that divides it, or leave "
                    "builtin out"
                )

    def cut(self, model: nn.Module) -> State:
        comm, layers = self.group.comm, layers_of(model)
        mesh, ranks = init_device_mesh(comm.device.type, (comm.world_size,)), range(comm.world_size)
        model.to(comm.device)
        for layer in layers:
            if isinstance(layer, Block):
                size = layer.attention.qkv.in_features // comm.world_size
                by_head = Cut(0, [size] * comm.world_size, blocks=3)
                for p in layer.attention.qkv.parameters():
                    # DTensor gives each rank rows that follow one another: its heads' rows.
                    p.data = torch.cat([by_head.part(p.data, rank) for rank in ranks])
                layer.attention.num_heads //= comm.world_size
                parallelize_module(layer, mesh, _PLAN)
        parallelize_module(layers[0], mesh, {"token": RowwiseParallel(input_layouts=Replicate())})
        layers[-1].weight = layers[0].token.weight
        inputs = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
        parallelize_module(layers[-1], mesh, inputs)
        self.loss, self.parts = _loss, dict[Tensor, nn.Parameter]()
        for name, p in model.named_parameters():
            if isinstance(p, DTensor):
                part = self.parts[p] = nn.Parameter(p.to_local(), p.requires_grad)
                (dim,) = (place.dim for place in p.placements)
                sizes = [len(rows) for rows in torch.arange(p.shape[dim]).chunk(comm.world_size)]
                blocks = 3 if "qkv" in name else 1
                self.group.cuts[part] = Cut(dim, [size // blocks for size in sizes], blocks)
        named = model.state_dict(keep_vars=True)
        return {name: self.parts.get(p, p) for name, p in named.items()}

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        self.model.zero_grad()
        return super().step(inputs, targets, batch_size)

    def add_gradients(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        with loss_parallel():
            return super().add_gradients(inputs, targets, batch_size)

    def sum_gradients(self) -> None:
        for p, part in self.parts.items():
            part.grad = None if p.grad is None else p.grad.to_local()

    def run(self, inputs: Tensor) -> Tensor:
        return self.model(inputs).full_tensor()


def _loss(outputs: DTensor, targets: Tensor) -> Tensor:
    """The sum over samples of the mean cross-entropy over positions."""
    mean = nn.functional.cross_entropy(outputs, targets)
    return (mean * len(targets)).to_local()
