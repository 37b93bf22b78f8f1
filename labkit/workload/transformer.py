"""A small decoder-only transformer, as a flat list of layers: embeddings, blocks, norm, head.

Flat, like the other models: a stage is a slice of it, a unit of sharding is a layer of it, and
each block holds the two pairs of linear layers that tensor parallelism cuts.

Shapes: n samples, T tokens, D features, h heads, V tokens in the vocabulary.

Sources: Vaswani et al., "Attention is all you need" (2017), section 3; Radford et al., "Language
models are unsupervised multitask learners" (2019), section 2.3, for the place of the norms; Press
and Wolf, "Using the output embedding to improve language models" (2017), for the tied head.
"""

import math
from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional

from labkit.workload.experts import Experts

# 12 heads, so that 1 to 4 ranks can cut them.
WIDTH, HEADS, BLOCKS = 96, 12, 4


class Embeddings(nn.Module):
    """Tokens [n, T] int64 to features [n, T, D]: each token's vector plus its position's."""

    def __init__(self, vocabulary: int, length: int, width: int):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


class Attention(nn.Module):
    """Causal self-attention: token t looks at tokens 0 to t. [n, T, D] to [n, T, D].

    The rows of ``qkv`` are those of all queries, then of all keys, then of all values.
    """

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # [n, T, h, D / h] to [n, h, T, D / h]
        heads = []
        for part in self.qkv(x).chunk(3, dim=-1):
            heads.append(part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2))
        queries, keys, values = heads
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with 4 D features between them. [n, T, D] to [n, T, D]."""

    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    """Attention, then the MLP (or experts), each of a normalized input and added to it."""

    def __init__(self, width: int, num_heads: int, num_experts: int = 0):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Experts(width, num_experts) if num_experts else MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    """Features [n, T, D] to logits [n, V, T], in the order that ``cross_entropy`` takes.

    ``weight`` [V, D] is the parameter of the token embedding (a tied head).
    """

    def __init__(self, embeddings: Embeddings):
        super().__init__()
        self.weight: Tensor = embeddings.token.weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight).transpose(1, 2)


def gpt(
    input_shape: tuple[int],
    num_classes: int,
    *,
    width: int = WIDTH,
    num_heads: int = HEADS,
    num_blocks: int = BLOCKS,
    num_experts: int = 0,
) -> Iterator[nn.Module]:
    """The layers for tokens [n, T] and a vocabulary of ``num_classes``; ``input_shape`` is (T,).

    With the defaults 461,376 parameters on ``text``. With ``num_experts`` each block has so many
    in place of its MLP.
    """
    (length,) = input_shape
    embeddings = Embeddings(num_classes, length, width)
    blocks = [Block(width, num_heads, num_experts) for _ in range(num_blocks)]
    layers = [embeddings, *blocks, nn.LayerNorm(width), Head(embeddings)]
    for module in nn.Sequential(*layers).modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    for block in blocks:
        # Each block adds two terms: their sum keeps its variance (Radford et al., section 2.3).
        ends = [block.attention.out.weight]
        if isinstance(block.mlp, Experts):
            nn.init.normal_(block.mlp.up, std=0.02)
            ends.append(block.mlp.down)
        else:
            ends.append(block.mlp.down.weight)
        for end in ends:
            nn.init.normal_(end, std=0.02 / math.sqrt(2 * num_blocks))
    yield from layers
