"""Tensor parallelism: each layer of a transformer is cut over all ranks, which work at once.

1. Every rank has its heads of each attention, its features of each MLP and its entries of the
vocabulary (``tensor_cut``); norms, positions and the biases of sums are on all ranks. 2. Every
rank gets the whole batch. In each block, two all-reduces of [n, T, D] add up the ranks' terms
going forward, and two going backward. 3. The loss is computed from logits that no rank has all of.
4. One more all-reduce lets all ranks agree on the gradients of what they all have, to the bit.
5. Every rank updates its own parts, and what all ranks have.

A rank holds 1 / P of most parameters, gradients and optimizer states, and of the activations
inside the cuts; with ``sequence_parallel`` also of those outside. The price is communication that
nothing hides: each all-reduce waits for a layer, and the next layer waits for it
(``costs.traffic.tensor_parallel_cost``).

Symbols: n samples, T positions, D features, P ranks. Source: Shoeybi et al., "Megatron-LM" (2019),
section 3.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.engine.comm.comm import Comm
from labkit.strategies.on_cuts import OnCuts
from labkit.strategies.tensor_cut import CutLoss, TensorGroup, gather_shards
from labkit.strategies.traits import Division, Traits
from labkit.workload.experts import Experts
from labkit.workload.layers import layers_of
from labkit.workload.losses import Loss, ShareLoss, named_function
from labkit.workload.transformer import Block, Embeddings, Head


def check_cut(model: nn.Module, loss: Loss, ranks: int, sequence_parallel: bool = False) -> None:
    """Raise ValueError unless ``ranks`` can cut each layer of ``model``, and the loss."""
    layers = layers_of(model) if isinstance(model, nn.Sequential) else [model]
    embeddings, *inner, head = layers[0], *layers[1:-1], layers[-1]
    are_blocks = all(isinstance(layer, Block | nn.LayerNorm) for layer in inner)
    has_experts = any(isinstance(module, Experts) for module in model.modules())
    if has_experts:
        raise ValueError(
            "tensor_parallel cuts MLPs, and this model has experts in their place: use model gpt, "
            "or strategy expert_parallel"
        )
    if not (isinstance(embeddings, Embeddings) and are_blocks and isinstance(head, Head)):
        names = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise ValueError(
            f"tensor_parallel cuts labkit's transformer, and the layers of this model are {names}"
            ": use model gpt, or another strategy"
        )
    options = None
    if isinstance(loss, ShareLoss) and named_function(loss.loss)[0] is functional.cross_entropy:
        options = loss.classes
    if options is None:
        raise ValueError(
            "tensor_parallel computes the cross-entropy of logits that no rank has all of, with "
            "targets that are classes: use loss cross_entropy, or another strategy"
        )
    if options.label_smoothing:
        raise ValueError(
            f"tensor_parallel has no label_smoothing, got {options.label_smoothing}: leave it "
            "out, or use another strategy"
        )
    blocks = [layer for layer in inner if isinstance(layer, Block)]
    counts = {
        "heads": min(block.attention.num_heads for block in blocks),
        "entries of the vocabulary": len(head.weight),
    }
    if sequence_parallel:
        counts["positions"] = len(embeddings.position.weight)
    for name, count in counts.items():
        if count < ranks:
            raise ValueError(f"{count} {name} cannot be cut over {ranks} ranks: use fewer ranks")


@dataclass(eq=False)
class TensorParallel(OnCuts):
    """Every rank computes the whole batch, with its part of each layer.

    Args:
        sequence_parallel: between the cuts, where each rank would otherwise hold all positions,
            it holds some of them.
    """

    sequence_parallel: bool = False
    traits = Traits(takes_whole_batch=True, division=Division.ROWS)

    def check_model(self, model: nn.Module, loss: Loss, world_size: int) -> None:
        check_cut(model, loss, world_size, self.sequence_parallel)

    def make_group(self, comm: Comm) -> TensorGroup:
        return TensorGroup(comm, self.sequence_parallel)

    def cut(self, model: nn.Module) -> None:
        super().cut(model)
        self.loss = CutLoss(self.group.comm, sum(self.group.classes), self.loss)

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        loss = super().step(inputs, targets, batch_size)
        # The loop adds up what the ranks return, and each has the loss of all samples.
        return loss if self.group.comm.rank == 0 else torch.zeros_like(loss)

    def finish_backward(self) -> None:
        self.group.reduce_shared_gradients(self.trained)

    def run(self, inputs: Tensor) -> Tensor:
        logits = self.model(inputs)
        return torch.cat(gather_shards(self.comm, logits, 1, self.group.classes), dim=1)

    def predict(self, inputs: Tensor) -> Tensor | None:
        outputs = super().predict(inputs)
        return outputs if self.group.comm.rank == 0 else None
