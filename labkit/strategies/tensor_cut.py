"""Layers that are cut over ranks: each rank computes with its part of the weights.

Of a linear layer y = x A^T + b, with A [O, I], a rank may have

    some outputs: rows of A here, columns of the paper's (y = x A): it needs all of x, and gets
                  its part of y, without a message;
    some inputs:  columns of A here, rows of the paper's: it needs its part of x, and its product
                  is one term of y: the sum over the ranks is y.

So a layer of the first kind goes before one of the second: between them each rank works on its
own features, such as the heads of an attention, and one sum at the end puts them together.
Backward is the mirror image: of a gradient that came to all ranks each one computes the term that
passed through its own features, and the sum over the ranks is the gradient of x. So each end of a
cut has a conjugate pair of operations:

                                   forward         backward
    enter       ``Copied``         nothing         all-reduce
                ``Gathered``       share-only      share-reduce
    leave       ``Summed``         all-reduce      nothing
                ``Scattered``      share-reduce    share-only

The second of each pair is for sequence parallelism: outside the cuts, where norms and residuals
are, each rank holds only some of the T positions. The bytes are the same, as an all-reduce *is* a
share-reduce and a share-only; the memory of what lies outside falls by 1 / P.

Shapes: n samples, T positions, t of one rank; I inputs and O outputs of a layer; V entries in the
vocabulary, W of one rank; P ranks.
Sources: Shoeybi et al., "Megatron-LM" (2019), section 3, where ``Copied`` is f and ``Summed`` g;
Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022),
section 4.2.2, for sequence parallelism.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from labkit.collectives import fast_ring_all_reduce, share_only, share_reduce
from labkit.comm.comm import Comm
from labkit.schedules.ring import chunk_bounds
from labkit.workload.losses import CountedLoss
from labkit.workload.transformer import MLP, Attention, Embeddings, Head


class Copied(torch.autograd.Function):
    """All of x enters a cut on every rank; backward sums what each rank's part makes of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # A copy: autograd may hand the same gradient to another operation.
        return fast_ring_all_reduce(ctx.comm, gradient.clone()), None


class Summed(torch.autograd.Function):
    """The ranks' terms leave a cut as their sum, in place; every term has the sum's gradient."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, comm: Comm) -> Tensor:
        ctx.mark_dirty(term)
        return fast_ring_all_reduce(comm, term)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Gathered(torch.autograd.Function):
    """Each rank's positions [n, t, I] enter a cut as all of them, [n, T, I]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, sizes: list[int]) -> Tensor:
        ctx.comm, ctx.sizes = comm, sizes
        return torch.cat(gathered(comm, x, 1, sizes), dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return scattered(ctx.comm, gradient, 1, ctx.sizes), None, None


class Scattered(torch.autograd.Function):
    """The ranks' terms [n, T, O] leave a cut as their sum, of which a rank gets its positions."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, comm: Comm, sizes: list[int]) -> Tensor:
        ctx.comm, ctx.sizes = comm, sizes
        return scattered(comm, term, 1, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return torch.cat(gathered(ctx.comm, gradient, 1, ctx.sizes), dim=1), None, None


def gathered(comm: Comm, part: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
    """All ranks' parts, in their order, from this one's; rank r's has ``sizes[r]`` in ``dim``.

    P - 1 messages, and all bytes but this rank's neighbour's.
    """
    parts = [part.new_empty(*part.shape[:dim], size, *part.shape[dim + 1 :]) for size in sizes]
    parts[comm.rank] = part.detach().contiguous()
    share_only(comm, _by_chunk(parts))
    return parts


def scattered(comm: Comm, term: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's part of the sum of all ranks' terms, cut in ``dim`` by ``sizes``."""
    parts = [p.clone(memory_format=torch.contiguous_format) for p in term.split([*sizes], dim)]
    share_reduce(comm, _by_chunk(parts))
    return parts[comm.rank]


def _by_chunk(parts: list[Tensor]) -> list[Tensor]:
    """In the ring rank r owns chunk r + 1, see ``schedules.ring.owned_chunk``."""
    return [parts[-1], *parts[:-1]]


class Cut(NamedTuple):
    """How a parameter is divided: in ``dim``, into ``sizes`` by rank.

    ``blocks`` that lie one after another in ``dim`` are each cut so, as those of queries, keys and
    values: a head has rows in all three.
    """

    dim: int
    sizes: list[int]
    blocks: int = 1

    def part(self, whole: Tensor, rank: int) -> Tensor:
        blocks = whole.chunk(self.blocks, self.dim)
        return torch.cat([block.split(self.sizes, self.dim)[rank] for block in blocks], self.dim)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The reverse of ``part``."""
        by_block = zip(*(part.chunk(self.blocks, self.dim) for part in parts))
        return torch.cat([piece for block in by_block for piece in block], self.dim)


class TensorGroup:
    """The ranks of ``comm``, over which layers are cut.

    Attributes:
        cuts: how the parameters that were cut are divided; every rank has all of any other.
        length: with ``sequence_parallel``, T: how many positions the ranks' inputs have.
    """

    def __init__(self, comm: Comm, sequence_parallel: bool = False):
        self.comm, self.sequence_parallel, self.length = comm, sequence_parallel, 0
        self.cuts: dict[Tensor, Cut] = {}
        self._made: dict[nn.Parameter, nn.Parameter] = {}

    def sizes(self, total: int) -> list[int]:
        """``total`` by rank, as evenly as possible."""
        return [end - start for start, end in chunk_bounds(total, self.comm.world_size)]

    def enter(self, x: Tensor) -> Tensor:
        """What a layer that has some outputs computes with, [n, T, I]."""
        if self.sequence_parallel:
            return Gathered.apply(x, self.comm, self.sizes(self.length))
        return Copied.apply(x, self.comm)

    def leave(self, term: Tensor) -> Tensor:
        """What comes of the terms [n, T, O] of layers that have some inputs."""
        if self.sequence_parallel:
            return Scattered.apply(term, self.comm, self.sizes(self.length))
        return Summed.apply(term, self.comm)

    def parameter(self, whole: nn.Parameter, cut: Cut) -> nn.Parameter:
        """This rank's part as a parameter; of a tied one, the same again."""
        if whole not in self._made:
            part = cut.part(whole.detach(), self.comm.rank).clone()
            self._made[whole] = nn.Parameter(part, requires_grad=whole.requires_grad)
            self.cuts[self._made[whole]] = cut
        return self._made[whole]

    def cut(self, model: nn.Module) -> None:
        """Replace, in place, the layers of a transformer by this rank's parts of them."""
        for layer in [*model.modules()]:
            if isinstance(layer, Attention):
                heads = self.sizes(layer.num_heads)
                size = layer.out.in_features // layer.num_heads
                features = [size * count for count in heads]
                layer.qkv = ColumnLinear(self, layer.qkv, Cut(0, features, blocks=3))
                layer.out = RowLinear(self, layer.out, Cut(1, features))
                layer.num_heads = heads[self.comm.rank]
            elif isinstance(layer, MLP):
                hidden = self.sizes(layer.up.out_features)
                layer.up = ColumnLinear(self, layer.up, Cut(0, hidden))
                layer.down = RowLinear(self, layer.down, Cut(1, hidden))
            for name, child in layer.named_children():
                if isinstance(child, Embeddings):
                    setattr(layer, name, CutEmbeddings(self, child))
                elif isinstance(child, Head):
                    setattr(layer, name, CutHead(self, child))

    def replicated(self, model: nn.Module) -> list[nn.Parameter]:
        """The trained parameters that all ranks have."""
        return [p for p in model.parameters() if p.requires_grad and p not in self.cuts]

    def sum_replicated(self, model: nn.Module) -> None:
        """After backward with sequence parallelism: a rank's positions give a term of these."""
        gradients = [p.grad for p in self.replicated(model) if p.grad is not None]
        if self.sequence_parallel and gradients:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            fast_ring_all_reduce(self.comm, flat)
            for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients])):
                gradient.copy_(total.view_as(gradient))

    def whole(self, parameter: Tensor, part: Tensor) -> Tensor:
        """What all ranks hold of a parameter, or of an optimizer's state of it; collective."""
        cut = self.cuts.get(parameter)
        if cut is None or part.shape != parameter.shape:
            return part
        sizes = [size * cut.blocks for size in cut.sizes]
        return cut.whole(gathered(self.comm, part, cut.dim, sizes))

    def part(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """The reverse of ``whole``; not collective."""
        cut = self.cuts.get(parameter)
        if cut is None or whole.dim() != parameter.dim():
            return whole
        return cut.part(whole, self.comm.rank)


class ColumnLinear(nn.Module):
    """Some outputs of a linear layer: [n, T, I], or [n, t, I], to this rank's [n, T, O_r]."""

    def __init__(self, group: TensorGroup, layer: nn.Linear, cut: Cut):
        super().__init__()
        self.group, self.weight = group, group.parameter(layer.weight, cut)
        self.bias = None if layer.bias is None else group.parameter(layer.bias, cut)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.group.enter(x), self.weight, self.bias)


class RowLinear(nn.Module):
    """Some inputs of a linear layer: this rank's [n, T, I_r] to [n, T, O], or [n, t, O]."""

    def __init__(self, group: TensorGroup, layer: nn.Linear, cut: Cut):
        super().__init__()
        self.group, self.weight = group, group.parameter(layer.weight, cut)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        total = self.group.leave(functional.linear(x, self.weight))
        # Once, not in each term.
        return total if self.bias is None else total + self.bias


class VocabularyEmbedding(nn.Module):
    """The vectors of this rank's tokens: [n, T] int64 to [n, T, O], or [n, t, O]."""

    def __init__(self, group: TensorGroup, layer: nn.Embedding):
        super().__init__()
        sizes = group.sizes(layer.num_embeddings)
        self.group, self.start = group, sum(sizes[: group.comm.rank])
        self.weight = group.parameter(layer.weight, Cut(0, sizes))

    def forward(self, tokens: Tensor) -> Tensor:
        index, here = _own(tokens, self.start, len(self.weight))
        # The term of a token that another rank has is zero.
        found = functional.embedding(index, self.weight).masked_fill(~here.unsqueeze(-1), 0)
        return self.group.leave(found)


class CutEmbeddings(nn.Module):
    """``Embeddings`` with a cut vocabulary; the positions are on all ranks."""

    def __init__(self, group: TensorGroup, layer: Embeddings):
        super().__init__()
        self.group, self.token = group, VocabularyEmbedding(group, layer.token)
        self.position = layer.position

    def forward(self, tokens: Tensor) -> Tensor:
        self.group.length = tokens.shape[1]
        positions = self.position.weight[: self.group.length]
        if self.group.sequence_parallel:
            sizes = self.group.sizes(self.group.length)
            positions = positions.split(sizes)[self.group.comm.rank]
        return self.token(tokens) + positions


class CutHead(nn.Module):
    """The logits of this rank's entries of the vocabulary: [n, T, I], or [n, t, I], to [n, W, T].

    Its weight is that of the embedding, whose cut is also right for it.
    """

    def __init__(self, group: TensorGroup, layer: Head):
        super().__init__()
        sizes = group.sizes(len(layer.weight))
        self.group, self.weight = group, group.parameter(layer.weight, Cut(0, sizes))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.group.enter(x), self.weight).transpose(1, 2)


class CutCrossEntropy(torch.autograd.Function):
    """Logits [n, W, ...] of this rank's classes, targets [n, ...] -> losses, and which are right.

    No rank needs the others' logits. 1. The highest logit, so that no exponential overflows: an
    all-reduce of maxima. 2. The sum of the exponentials, and 3. the logit of the target, which
    one rank has: two sums. The loss is log(sum of exp) - logit of the target. Each all-reduce is
    of [n, ...]. Backward sends nothing: softmax - 1 at the target, of the rank's own classes.

    The target is right if its logit is the highest one.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, comm: Comm, start: int
    ) -> tuple[Tensor, Tensor]:
        highest = fast_ring_all_reduce(comm, logits.amax(dim=1), "max")
        exps = (logits - highest.unsqueeze(1)).exp_()
        total = fast_ring_all_reduce(comm, exps.sum(dim=1))
        index, here = _own(targets, start, logits.shape[1])
        found = logits.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill(~here, 0)
        of_target = fast_ring_all_reduce(comm, found)
        right = of_target == highest
        ctx.save_for_backward(exps, total, index, here)
        ctx.mark_non_differentiable(right)
        return total.log() + (highest - of_target), right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor, None, None, None]:
        exps, total, index, here = ctx.saved_tensors
        softmax = exps / total.unsqueeze(1)
        softmax.scatter_add_(1, index.unsqueeze(1), -here.to(softmax.dtype).unsqueeze(1))
        return softmax.mul_(gradient.unsqueeze(1)), None, None, None


class CutLoss(CountedLoss):
    """``CountedLoss`` of a cut vocabulary: the sum over samples, the same on all ranks.

    ``classes`` is V. The first rank of the group counts the right predictions.
    """

    def __init__(self, comm: Comm, classes: int):
        super().__init__(functional.cross_entropy)
        self.comm, self.start = comm, chunk_bounds(classes, comm.world_size)[comm.rank][0]

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses, right = CutCrossEntropy.apply(outputs, targets, self.comm, self.start)
        if self.comm.rank == 0:
            self._right += right.sum()
            self._judged += targets.numel()
        # A sample's loss is the mean over its positions.
        return losses.sum() * (len(targets) / targets.numel())


def _own(tokens: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Where tokens are among this rank's ``count`` (0 for others), and which of them are."""
    index = tokens - start
    here = (index >= 0) & (index < count)
    return index.where(here, 0), here
