"""A mixture of experts in place of a transformer's MLP: of E MLPs, each token is computed by k.

1. **Route.** A linear layer gives each token E probabilities, and the k most probable experts
compute it. 2. **Dispatch.** The tokens are put in the order of their experts. 3. Each expert
computes its tokens. 4. **Combine.** A token's output is the sum of its experts' outputs, each
times its probability.

With a **capacity** c, an expert takes at most C = ceil(c k n / E) of n tokens, and the later ones
are dropped: it adds nothing to them, and only the residual connection carries them on. By default
none is dropped.

Left alone, routers send most tokens to few experts, which then learn most. The **balance loss**
works against that. Over all tokens of a batch, f_e is the fraction of choices that fell on expert
e, and p_e the mean of its probabilities: the loss is b E (sum of f_e p_e over e). That is b where
all are equal, and b E / k where all tokens have the same experts. Only p_e has a gradient.

Shapes: n tokens, D features, E experts, k experts of a token, m choices (k n, less the dropped).

Sources: Shazeer et al., "Outrageously large neural networks: the sparsely-gated
mixture-of-experts layer" (2017), section 2; Lepikhin et al., "GShard" (2020), section 2.2, for the
capacity; Fedus et al., "Switch transformers" (2021), section 2.2, for the balance loss.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class Routing(NamedTuple):
    """The choices of the tokens, in the order of their experts, and there in that of the tokens.

    Attributes:
        tokens: [m] int64, the token of each choice.
        weights: [m], what its expert's output is multiplied with.
        counts: [E] int64, the choices of each expert.
        chosen: [E] int64, the same before any were dropped.
        probabilities: [n, E], of the router.
    """

    tokens: Tensor
    weights: Tensor
    counts: Tensor
    chosen: Tensor
    probabilities: Tensor


def route(logits: Tensor, per_token: int, capacity: float | None = None) -> Routing:
    """Choose the experts of n tokens by their ``logits`` [n, E].

    The weights of a token's experts are their probabilities divided by their sum; of a single one
    it is the probability itself, since a weight of 1 would give the router no gradient.
    """
    num_tokens, num_experts = logits.shape
    probabilities = logits.softmax(dim=-1)
    weights, experts = probabilities.topk(per_token, dim=-1)
    if per_token > 1:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    by_expert = experts.flatten().argsort(stable=True)
    chosen = torch.bincount(experts.flatten(), minlength=num_experts)
    counts = chosen
    if capacity is not None:
        most = math.ceil(capacity * per_token * num_tokens / num_experts)
        starts = chosen.cumsum(0) - chosen
        places = torch.arange(len(by_expert), device=logits.device)
        places = places - starts.repeat_interleave(chosen)
        by_expert = by_expert[places < most]
        counts = chosen.clamp(max=most)
    tokens = by_expert // per_token
    return Routing(tokens, weights.flatten()[by_expert], counts, chosen, probabilities)


class Experts(nn.Module):
    """E experts, each two linear layers with 4 D features between them. [..., D] to [..., D].

    The parameters of all experts are stacked, [E, ...].

    Args:
        width, num_experts, per_token: D, E and k.
        balance: b, the weight of the balance loss.
        capacity: c; None drops no token.

    Attributes:
        balance_loss: of the last forward in training, a scalar: b E (sum of f_e p_e), times the
            number of samples, as the losses of samples are added up.
        dropped: the number of choices that were dropped since the start.
        load: [E] int64, the choices that fell on each expert in training since the start.
    """

    def __init__(
        self,
        width: int,
        num_experts: int,
        per_token: int = 2,
        *,
        balance: float = 0.01,
        capacity: float | None = None,
    ):
        super().__init__()
        if not 1 <= per_token <= num_experts:
            raise ValueError(
                f"a token cannot be computed by {per_token} of {num_experts} experts: give 1 to "
                f"{num_experts}"
            )
        self.per_token = per_token
        self.balance = balance
        self.capacity = capacity
        self.router = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.empty(num_experts, 4 * width, width))
        self.up_bias = nn.Parameter(torch.zeros(num_experts, 4 * width))
        self.down = nn.Parameter(torch.empty(num_experts, width, 4 * width))
        self.down_bias = nn.Parameter(torch.zeros(num_experts, width))
        nn.init.normal_(self.up, std=width**-0.5)
        nn.init.normal_(self.down, std=(4 * width) ** -0.5)
        self.balance_loss: Tensor | float = 0.0
        self.dropped: Tensor | int = 0
        self.load: Tensor | int = 0

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        routing = route(self.router(tokens), self.per_token, self.capacity)
        outputs, chosen = self.compute(tokens[routing.tokens], routing)
        weighted = outputs * routing.weights.unsqueeze(1)
        combined = torch.zeros_like(tokens, dtype=weighted.dtype)
        combined = combined.index_add(0, routing.tokens, weighted)
        if self.training:
            fractions = chosen / chosen.sum().clamp(min=1)
            self.balance_loss = (
                self.balance
                * len(chosen)
                * (fractions.to(routing.probabilities) @ routing.probabilities.sum(dim=0))
            )
            # The sum over tokens becomes one over samples: [samples, positions, D].
            self.balance_loss = self.balance_loss * (len(x) / max(1, len(tokens)))
            self.dropped = self.dropped + (routing.chosen - routing.counts).sum()
            self.load = self.load + routing.chosen
        return combined.view_as(x)

    def compute(self, rows: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Each expert's outputs [m, D] of its ``rows`` [m, D], and the ``chosen`` of all ranks."""
        return self.mlp(rows, routing.counts), routing.chosen

    def mlp(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Each expert's outputs, together [m, D], of its ``counts`` of the ``rows`` [m, D]."""
        parts = []
        for expert, part in enumerate(rows.split(counts.tolist())):
            hidden = functional.linear(part, self.up[expert], self.up_bias[expert])
            hidden = functional.gelu(hidden)
            parts.append(functional.linear(hidden, self.down[expert], self.down_bias[expert]))
        return torch.cat(parts)
