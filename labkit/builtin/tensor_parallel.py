"""PyTorch's tensor parallelism, ``parallelize_module``: the same cuts, by DTensor.

A DTensor is a tensor of which each rank of a mesh has a part. Operations on DTensors find out for
themselves which collective they need: those of the ranks' process group, gloo on CPUs.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from labkit.builtin import check_dtensor
from labkit.strategies.saved_state import State
from labkit.strategies.tensor_cut import Cut, CutLoss
from labkit.strategies.tensor_parallel import TensorParallel
from labkit.workload.losses import Loss
from labkit.workload.transformer import Attention, Block

_BLOCK_PLAN: dict[str, Any] = {
    "attention.qkv": ColwiseParallel(),
    "attention.out": RowwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(),
}


@dataclass(eq=False)
class TorchTensorParallel(TensorParallel):
    """The counterpart of ``TensorParallel``; ``loss_parallel`` computes the loss.

    The optimizer gets each rank's shards as plain tensors, in the DTensors' memory, as it does not
    take both kinds. Right predictions on training samples are not counted: DTensor would gather
    all logits.
    """

    sequence_parallel: bool = field(default=False, init=False)
    traits = replace(TensorParallel.traits, through_comm=False)

    def check_model(self, model: nn.Module, loss: Loss, world_size: int) -> None:
        super().check_model(model, loss, world_size)
        for layer in model.modules():
            if isinstance(layer, Attention) and layer.num_heads % world_size:
                raise ValueError(
                    f"PyTorch's DTensor cuts {layer.num_heads} heads into equal parts, not over "
                    f"{world_size} ranks: use a world_size that divides it, or leave builtin out"
                )

    def cut(self, model: nn.Module) -> None:
        check_dtensor(self.group.comm)
        comm = self.group.comm
        self.local: dict[Tensor, nn.Parameter] = {}
        self.parallelize(model, init_device_mesh(comm.device.type, (comm.world_size,)))
        for name, p in model.named_parameters():
            if not isinstance(p, DTensor):
                continue
            shard = nn.Parameter(p.to_local(), p.requires_grad)
            self.local[p] = shard
            # (The biases of sums are replicated.)
            for placement in p.placements:
                if isinstance(placement, Shard):
                    blocks = 3 if "qkv" in name else 1
                    rows = torch.arange(p.shape[placement.dim]).chunk(comm.world_size)
                    sizes = [len(shard_rows) // blocks for shard_rows in rows]
                    self.group.cuts[shard] = Cut(placement.dim, sizes, blocks)

    @property
    def shards(self) -> State:
        return {name: self.local.get(p, p) for name, p in super().shards.items()}

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Cut the layers over the ranks of ``mesh``, in place; what is cut moves to its device."""
        embeddings, *blocks, head = model.children()
        for block in blocks:
            if isinstance(block, Block):
                block.attention.num_heads //= mesh.size()
                size = block.attention.qkv.in_features // mesh.size()
                by_head = Cut(0, [size] * mesh.size(), blocks=3)
                for p in block.attention.qkv.parameters():
                    # DTensor gives each rank rows that follow one another: those of its heads.
                    p.data = torch.cat([by_head.shard(p.data, n) for n in range(mesh.size())])
                parallelize_module(block, mesh, _BLOCK_PLAN)
        tokens = RowwiseParallel(input_layouts=Replicate())
        parallelize_module(embeddings, mesh, {"token": tokens})
        weight = embeddings.get_parameter("token.weight")
        head.weight = weight
        replicated = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate()
        )
        parallelize_module(head, mesh, replicated)
        self.loss = DTensorLoss(self.group.comm, len(weight), self.loss)

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        self.model.zero_grad()
        return super().step(inputs, targets, batch_size)

    def add_gradients(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        with loss_parallel():
            return super().add_gradients(inputs, targets, batch_size)

    def finish_backward(self) -> None:
        for p, shard in self.local.items():
            shard.grad = p.grad.to_local() if isinstance(p.grad, DTensor) else None

    def run(self, inputs: Tensor) -> Tensor:
        return self.model(inputs).full_tensor()


class DTensorLoss(CutLoss):
    """The sum of the cross-entropies of logits that are a DTensor."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses: Any = nn.functional.cross_entropy(
            outputs, targets, ignore_index=self.options.ignore_index, reduction="none"
        )
        losses = losses.to_local()
        if self.options.weight is not None:
            # Its own backward with weights (2.15) fails at an ignored target.
            losses = losses * self.options.weights(targets).to(losses)
        return self.as_share(losses.sum(), targets)
