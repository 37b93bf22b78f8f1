"""Expert parallelism: each rank has some of the experts, and tokens travel to theirs.

1. Every rank has a share of the batch, E / P of the experts of each layer, and all of everything
else. 2. In a layer of experts each rank routes its own tokens. 3. All ranks tell all how many they
will send to each expert. 4. **All-to-all**: each choice of a token travels to the rank that has
the expert. 5. Every rank computes what has arrived. 6. **All-to-all** back, and each token's
outputs are added up where it came from. Backward goes the same ways in reverse: the gradient of a
sending is a sending back.

7. The gradient of an expert is complete at its owner, as all tokens were there. Those of all else
are summed over the ranks, as in data parallelism. 8. Each rank updates what it has.

A rank holds 1 / P of the experts, but what it sends and computes is decided by the router: the
rank with a popular expert gets most tokens, and all others wait for it.

In each layer a rank sends 5 (P - 1) messages per step: its counts, and four times rows of D
features, forward there and back, backward there and back. Were the choices spread evenly, these
would be 4 k n (P - 1) / P rows (``costs.traffic.expert_parallel_cost``).

Symbols: E experts, of which k compute a token; P ranks; n tokens of a rank; D features.
Source: Lepikhin et al., "GShard" (2020), section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from labkit.collectives import all_to_all, fast_ring_all_reduce
from labkit.engine.comm.comm import Comm
from labkit.strategies.flat_tensors import FlatGradients
from labkit.strategies.on_cuts import OnCuts
from labkit.strategies.tensor_cut import Conjugate, Cut, TensorGroup, gather_shards
from labkit.strategies.traits import Division, Traits
from labkit.workload.experts import Experts, Routing
from labkit.workload.losses import Loss


class ExpertGroup(TensorGroup):
    """The ranks of ``comm``, over which the experts of each layer are divided."""

    def cut(self, model: nn.Module) -> None:
        """Leave this rank's experts in each layer of experts, in place."""
        for layer in model.modules():
            if isinstance(layer, Experts):
                own = Cut(0, self.sizes(len(layer.up)))
                self.cut_layer(layer, CutExperts, up=own, up_bias=own, down=own, down_bias=own)

    def all_counts(self, counts: Tensor) -> Tensor:
        """All ranks' ``counts`` [...] int64, as [P, ...]."""
        rows = gather_shards(self.comm, counts.unsqueeze(0), 0, [1] * self.comm.world_size)
        return torch.cat(rows)

    def swap(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """All-to-all: the first ``sent[0]`` of ``rows`` go to rank 0, and so on.

        Returns what has arrived, the first ``received[0]`` rows from rank 0. It has a gradient.
        """
        forward_fn = partial(self.all_to_all, sent=sent, received=received)
        backward_fn = partial(self.all_to_all, sent=received, received=sent)
        return Conjugate.apply(rows, forward_fn, backward_fn)

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        arrived = rows.new_empty(sum(received), rows.shape[1])
        outgoing = list(rows.contiguous().split([*sent]))
        all_to_all(self.comm, outgoing, list(arrived.split([*received])))
        return arrived


class CutExperts(Experts):
    """This rank's experts of a layer: [..., D] to [..., D]."""

    group: ExpertGroup

    def compute(self, rows: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        group = self.group
        sizes = group.cuts[self.up].sizes
        # [P, 2, E]
        of_all = group.all_counts(torch.stack([routing.counts, routing.chosen]))
        counts, chosen = of_all.unbind(1)
        # [P, own]: the rows from each rank for each expert of this one.
        arriving = counts.split(sizes, dim=1)[group.comm.rank]
        sent = [int(part.sum()) for part in routing.counts.split(sizes)]
        received = arriving.sum(dim=1).tolist()
        arrived = group.swap(rows, sent, received)
        # They are in the order of ranks, and of experts for each; an expert takes all of its own.
        num_own = arriving.shape[1]
        expert_of_pair = torch.arange(num_own, device=rows.device).repeat(group.comm.world_size)
        by_expert = expert_of_pair.repeat_interleave(arriving.flatten()).argsort(stable=True)
        outputs = self.mlp(arrived[by_expert], arriving.sum(dim=0))
        as_arrived = torch.empty_like(by_expert)
        as_arrived[by_expert] = torch.arange(len(by_expert), device=rows.device)
        return group.swap(outputs[as_arrived], received, sent), chosen.sum(dim=0)


@dataclass(eq=False)
class ExpertParallel(OnCuts):
    """Every rank computes its share of the batch, and the tokens of all for its experts.

    Args:
        capacity: c: from each rank an expert takes at most ceil(c k n / E) tokens, and drops the
            others. Then the run is not that of one device, where the tokens of all ranks compete.
    """

    capacity: float | None = None
    traits = Traits(predicts_together=True, balances_experts=True, division=Division.ROWS)
    # A rank without samples computes those of the others.
    runs_empty = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.capacity is not None and not self.capacity > 0:
            raise ValueError(f"capacity {self.capacity} would drop all tokens: give it above 0")

    def check_model(self, model: nn.Module, loss: Loss, world_size: int) -> None:
        layers = [module for module in model.modules() if isinstance(module, Experts)]
        if not layers:
            raise ValueError(
                "expert_parallel divides experts, and this model has no "
                "labkit.workload.experts.Experts: use model moe_gpt, or another strategy"
            )
        fewest = min(len(layer.up) for layer in layers)
        if fewest < world_size:
            raise ValueError(
                f"{fewest} experts cannot be divided over {world_size} ranks: use fewer ranks"
            )

    def make_group(self, comm: Comm) -> TensorGroup:
        return ExpertGroup(comm)

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: Any) -> None:
        super().setup(comm, model, make_optimizer)
        for layer in self.expert_layers:
            layer.capacity = self.capacity

    def finish_backward(self) -> None:
        shared = [p for p in self.trained if p not in self.group.cuts]
        if shared:
            gradients = FlatGradients(shared)
            self.all_reduce(gradients.collect())
            gradients.hand_back()

    def all_reduce(self, flat: Tensor) -> None:
        fast_ring_all_reduce(self.comm, flat)

    def notes(self) -> dict[str, Any]:
        """The choices by rank that owns the expert, and those dropped, added up over layers."""
        by_rank = torch.zeros(self.comm.world_size, dtype=torch.int64)
        dropped = 0
        for layer in self.expert_layers:
            load = torch.as_tensor(layer.load).cpu()
            for rank, part in enumerate(load.split(self.group.cuts[layer.up].sizes)):
                by_rank[rank] += part.sum()
            dropped += int(layer.dropped)
        return {"choices_by_rank": by_rank.tolist(), "dropped": dropped}
