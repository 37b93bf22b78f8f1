"""Layers that are cut over ranks: each rank computes with its part of the weights.

Of a linear layer y = A x + b, A [O, I], a rank has either

    some outputs: rows of A, the columns of the paper's y = x A. It needs all of x, and gets its
                  part of y without a message; or
    some inputs:  columns of A, the paper's rows. It makes one term of y from its part of x, and
                  the sum of all ranks' terms is y.

The first kind goes before the second: between them each rank works on its own features, such as
the heads of an attention, and one sum at the end puts them together. Backward is the mirror image:
each rank computes what of x's gradient passed through its own features, one term of a sum. So the
two ends of a cut have conjugate operations, ``Conjugate`` in ``enter`` and in ``leave``:

                                   forward         backward
    enter                          nothing         all-reduce
    leave                          all-reduce      nothing
    enter, sequence parallel       share-only      share-reduce
    leave, sequence parallel       share-reduce    share-only

In sequence parallelism each rank holds only some of the T positions outside the cuts, where norms
and residuals are. An all-reduce *is* a share-reduce and a share-only, so the bytes are the same,
and the memory outside falls as 1 / P.

Shapes: n samples, T positions, t of one rank; I inputs and O outputs of a layer; V entries in the
vocabulary, W of one rank; P ranks.
Sources: Shoeybi et al., "Megatron-LM" (2019), section 3, where enter is f and leave is g;
Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022),
section 4.2.2, for sequence parallelism.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.collectives import fast_ring_all_reduce, share_only, share_reduce
from labkit.engine.comm.comm import Comm
from labkit.schedules.ring import chunk_bounds
from labkit.strategies.flat_tensors import FlatGradients
from labkit.strategies.saved_state import State
from labkit.workload.losses import ClassOptions, CountedLoss, Loss, ShareLoss, Weighing
from labkit.workload.transformer import MLP, Attention, Embeddings, Head

Operation = Callable[[Tensor], Tensor]


class Conjugate(torch.autograd.Function):
    """Applies ``forward_fn`` to an activation, and ``backward_fn`` to its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_fn: Operation, backward_fn: Operation) -> Tensor:
        ctx.backward_fn = backward_fn
        return forward_fn(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_fn(gradients[0]), None, None


def gather_shards(comm: Comm, shard: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
    """All ranks' shards, in their order, from this one's; rank r's has ``sizes[r]`` in ``dim``.

    Messages P - 1, bytes about (P - 1) / P of all shards.
    """
    before, after = shard.shape[:dim], shard.shape[dim + 1 :]
    shards = [shard.new_empty(*before, size, *after) for size in sizes]
    shards[comm.rank] = shard.detach().contiguous()
    share_only(comm, _by_chunk(shards))
    return shards


def reduce_scatter_term(comm: Comm, term: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's shard of the sum of all ranks' terms; sends as much as ``gather_shards``."""
    pieces = term.split([*sizes], dim)
    shards = [piece.clone(memory_format=torch.contiguous_format) for piece in pieces]
    share_reduce(comm, _by_chunk(shards))
    return shards[comm.rank]


def _by_chunk(shards: list[Tensor]) -> list[Tensor]:
    """Put the ranks' shards in the order of chunks: rank r of a ring owns chunk r + 1."""
    return [shards[-1], *shards[:-1]]


class Cut(NamedTuple):
    """The way in which a parameter is divided: in ``dim``, into ``sizes`` by rank.

    ``blocks`` that follow one another in ``dim`` are each divided so, such as those of queries,
    keys and values: a head has rows in all three.
    """

    dim: int
    sizes: list[int]
    blocks: int = 1

    def shard(self, tensor: Tensor, rank: int) -> Tensor:
        """The shard of ``rank``."""
        blocks = tensor.chunk(self.blocks, self.dim)
        return torch.cat([block.split(self.sizes, self.dim)[rank] for block in blocks], self.dim)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole tensor, from the shards of all ranks."""
        pieces_by_rank = [shard.chunk(self.blocks, self.dim) for shard in shards]
        blocks = [torch.cat(pieces, self.dim) for pieces in zip(*pieces_by_rank)]
        return torch.cat(blocks, self.dim)


class TensorGroup:
    """The ranks of ``comm``, over which layers are cut.

    Attributes:
        cuts: by parameter that was cut, how it is divided; all ranks have all of any other.
        length: T of the inputs; the embeddings, once cut, set it in each forward.
        classes: by rank, of how many classes the cut head computes the logits.
    """

    def __init__(self, comm: Comm, sequence_parallel: bool = False):
        self.comm = comm
        self.sequence_parallel = sequence_parallel
        self.length = 0
        self.classes: list[int] = []
        self.cuts: dict[Tensor, Cut] = {}
        self._shards: dict[Tensor, nn.Parameter] = {}

    def sizes(self, total: int) -> list[int]:
        """``total`` by rank, as evenly as possible."""
        return [end - start for start, end in chunk_bounds(total, self.comm.world_size)]

    def enter(self, x: Tensor) -> Tensor:
        """All of x [n, T, I], with which a layer with some outputs computes."""
        gather, reduce = self._ends()
        return Conjugate.apply(x, gather, reduce)

    def leave(self, term: Tensor) -> Tensor:
        """The sum of the terms [n, T, O] of layers with some inputs, or this rank's part of it."""
        gather, reduce = self._ends()
        return Conjugate.apply(term, reduce, gather)

    def _ends(self) -> tuple[Operation, Operation]:
        """The operation that makes x whole at an entrance, and the one that sums at an exit."""
        if not self.sequence_parallel:
            return (
                # A view: what a Function returns must not be its input.
                lambda x: x.view_as(x),
                lambda term: fast_ring_all_reduce(self.comm, term.clone()),
            )
        sizes = self.sizes(self.length)
        return (
            lambda x: torch.cat(gather_shards(self.comm, x, 1, sizes), dim=1),
            lambda term: reduce_scatter_term(self.comm, term, 1, sizes),
        )

    def cut(self, model: nn.Module) -> None:
        """Replace the layers of a transformer by this rank's shards of them, in place."""
        for layer in model.modules():
            if isinstance(layer, Attention):
                head_size = layer.out.in_features // layer.num_heads
                heads = self.sizes(layer.num_heads)
                features = [head_size * count for count in heads]
                rows = Cut(0, features, blocks=3)
                self.cut_layer(layer.qkv, ColumnLinear, weight=rows, bias=rows)
                self.cut_layer(layer.out, RowLinear, weight=Cut(1, features))
                layer.num_heads = heads[self.comm.rank]
            elif isinstance(layer, MLP):
                hidden = self.sizes(layer.up.out_features)
                self.cut_layer(layer.up, ColumnLinear, weight=Cut(0, hidden), bias=Cut(0, hidden))
                self.cut_layer(layer.down, RowLinear, weight=Cut(1, hidden))
            elif isinstance(layer, Embeddings):
                entries = Cut(0, self.sizes(len(layer.token.weight)))
                self.cut_layer(layer, CutEmbeddings)
                layer.token.weight = self._make_shard(layer.get_parameter("token.weight"), entries)
            elif isinstance(layer, Head):
                self.classes = self.sizes(len(layer.weight))
                self.cut_layer(layer, CutHead, weight=Cut(0, self.classes))

    def cut_layer(self, layer: nn.Module, cut_class: type[nn.Module], **cuts: Cut) -> None:
        """Leave this rank's shard of the parameters in ``cuts``, and the forward of ``cut_class``.

        The layer stays the same object, so that its place in the model and its hooks stay. So
        ``cut_class`` is a subclass of the layer's class, and numbers such as ``out_features`` are
        still those of the whole layer. Another kind of layer also needs a branch in ``cut``, and
        one in ``tensor_parallel.check_cut``. A bias that is None stays None.
        """
        layer.__class__ = cut_class
        layer.__dict__["group"] = self  # not as a submodule
        for name, cut in cuts.items():
            if getattr(layer, name) is not None:
                setattr(layer, name, self._make_shard(layer.get_parameter(name), cut))

    def _make_shard(self, parameter: nn.Parameter, cut: Cut) -> nn.Parameter:
        """Cut out this rank's shard; the same one again if layers share the parameter."""
        if parameter not in self._shards:
            values = cut.shard(parameter.detach(), self.comm.rank).clone()
            shard = nn.Parameter(values, parameter.requires_grad)
            self._shards[parameter] = shard
            self.cuts[shard] = cut
        return self._shards[parameter]

    def reduce_shared_gradients(self, trained: Sequence[nn.Parameter]) -> None:
        """After a backward, give the parameters that all ranks have the same gradients.

        With sequence parallelism each rank has the terms of its own positions. Otherwise all have
        computed the same, but a sum is rounded otherwise on another number of threads.
        """
        shared = [p for p in trained if p not in self.cuts and p.grad is not None]
        if shared:
            gradients = FlatGradients(shared)
            op = "sum" if self.sequence_parallel else "mean"
            fast_ring_all_reduce(self.comm, gradients.collect(), op)
            gradients.hand_back()

    def unshard(self, parameter: Tensor, shard: Tensor) -> Tensor:
        """The whole of a parameter, or of an optimizer's state of it; a collective call."""
        cut = self.cuts.get(parameter)
        if cut is None or shard.shape != parameter.shape:
            return shard
        sizes = [size * cut.blocks for size in cut.sizes]
        return cut.unshard(gather_shards(self.comm, shard, cut.dim, sizes))

    def shard_of(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """The reverse of ``unshard``; not collective."""
        cut = self.cuts.get(parameter)
        if cut is None or tensor.dim() != parameter.dim():
            return tensor
        return cut.shard(tensor, self.comm.rank)

    def unshard_state(self, state: State, held: Mapping[str, Tensor]) -> State:
        """Whole tensors of a checkpoint from this rank's; ``held`` has its parameters by name."""
        whole = State()
        for key, shard in state.items():
            name = key.split("/")[1]
            whole[key] = self.unshard(held[name], shard)
        return whole

    def shard_state(self, state: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> State:
        """This rank's shards of a checkpoint's tensors, those that it has ``held``."""
        shards = State()
        for key, tensor in state.items():
            name = key.split("/")[1]
            if name in held:
                shards[key] = self.shard_of(held[name], tensor)
        return shards


class ColumnLinear(nn.Linear):
    """Some outputs of a linear layer: [n, T, I], or [n, t, I], to this rank's [n, T, O_r]."""

    group: TensorGroup

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(self.group.enter(input), self.weight, self.bias)


class RowLinear(nn.Linear):
    """Some inputs of a linear layer: this rank's [n, T, I_r] to [n, T, O], or [n, t, O]."""

    group: TensorGroup

    def forward(self, input: Tensor) -> Tensor:
        outputs = self.group.leave(functional.linear(input, self.weight))
        # The bias once, not in each term.
        return outputs if self.bias is None else outputs + self.bias


class CutEmbeddings(Embeddings):
    """This rank's entries of the vocabulary, and all positions: [n, T] int64 to [n, T or t, O]."""

    group: TensorGroup

    def forward(self, tokens: Tensor) -> Tensor:
        group = self.group
        weight = self.token.weight
        index, is_owned = own_entries(tokens, group.cuts[weight].sizes, group.comm.rank)
        # The term of a token that another rank has is zero.
        term = functional.embedding(index, weight).masked_fill(~is_owned.unsqueeze(-1), 0)
        group.length = tokens.shape[1]
        positions = self.position.weight[: group.length]
        if group.sequence_parallel:
            positions = positions.split(group.sizes(group.length))[group.comm.rank]
        return group.leave(term) + positions


class CutHead(Head):
    """The logits of this rank's entries of the vocabulary: [n, T or t, I] to [n, W, T]."""

    group: TensorGroup

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.group.enter(x))


class CutCrossEntropy(torch.autograd.Function):
    """Logits [n, W, ...] of this rank's classes, targets [n, ...] -> losses, and which are right.

    No rank needs the others' logits, but three all-reduces of [n, ...]: 1. the target's logit,
    which one rank has; 2. the highest logit, so that no exponential overflows; 3. the sum of the
    exponentials. The loss is log(3.) + 2. - 1.; a target is right if 1. equals 2. Backward sends
    nothing: the gradient is the softmax, less 1 at the target.

    Of equal logits the first class is predicted, as by ``argmax``: a rank with a class before the
    target and an equal logit gives a slightly higher one to 2. The loss of a target that is
    ``ignore_index`` is zero, and so is its gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        comm: Comm,
        sizes: list[int],
        ignore_index: int = -100,
    ) -> tuple[Tensor, Tensor]:
        counts = targets != ignore_index
        index, is_owned = own_entries(targets.where(counts, 0), sizes, comm.rank)
        is_owned &= counts
        target_logit = logits.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill(~is_owned, 0)
        target_logit = fast_ring_all_reduce(comm, target_logit)
        highest, first = logits.max(dim=1)
        is_beaten = (highest == target_logit) & (first + sum(sizes[: comm.rank]) < targets)
        infinity = torch.full_like(highest, torch.inf)
        highest = highest.where(~is_beaten, highest.nextafter(infinity))
        highest = fast_ring_all_reduce(comm, highest, "max")
        exps = (logits - highest.unsqueeze(1)).exp_()
        total = fast_ring_all_reduce(comm, exps.sum(dim=1))
        right = (target_logit == highest) & counts
        ctx.save_for_backward(exps, total, index, is_owned, counts)
        ctx.mark_non_differentiable(right)
        return (total.log() + (highest - target_logit)).masked_fill(~counts, 0), right

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        exps, total, index, is_owned, counts = ctx.saved_tensors
        softmax = exps / total.unsqueeze(1)
        softmax.scatter_add_(1, index.unsqueeze(1), -is_owned.to(softmax.dtype).unsqueeze(1))
        gradient = gradients[0].masked_fill(~counts, 0)
        return softmax.mul_(gradient.unsqueeze(1)), None, None, None, None


class CutLoss(CountedLoss):
    """The sum of the cross-entropies of a cut vocabulary, the same on all ranks.

    ``classes`` is V. The first rank of the group counts weights and right predictions.
    """

    def __init__(self, comm: Comm, classes: int, loss: Loss = functional.cross_entropy):
        if isinstance(loss, CountedLoss):
            super().__init__(loss.loss)
        else:
            super().__init__(ShareLoss.of(loss))
        self.comm = comm
        self.sizes = TensorGroup(comm).sizes(classes)
        self.options = self.loss.classes or ClassOptions()

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses, right = CutCrossEntropy.apply(
            outputs, targets, self.comm, self.sizes, self.options.ignore_index
        )
        if self.options.weight is not None:
            losses = losses * self.options.weights(targets).to(losses)
        if self.comm.rank == 0:
            self.right = self.right + right.sum()
            self.judged = self.judged + (targets != self.options.ignore_index).sum()
        return self.as_share(losses.sum(), targets)

    def as_share(self, total: Tensor, targets: Tensor) -> Tensor:
        """Count the weight of the targets, whose losses add up to ``total``; returns the sum."""
        weight = len(targets)
        if self.loss.weighing is Weighing.DATA:
            weight = self.options.weights(targets).sum()
        if self.comm.rank == 0:
            self.count_weight(weight)
        if self.loss.weighing is Weighing.SAMPLES:
            # A sample's loss is the mean over its positions.
            return total * (len(targets) / targets.numel())
        return total


def own_entries(tokens: Tensor, sizes: list[int], rank: int) -> tuple[Tensor, Tensor]:
    """The tokens' indices among the entries of ``rank`` (0 for others'), and whether it owns them.

    ValueError for tokens that no rank has; on a GPU an assertion there: the host need not wait.
    """
    is_known = ((tokens >= 0) & (tokens < sum(sizes))).all()
    if tokens.is_cuda:
        torch._assert_async(is_known)
    elif not is_known:
        raise ValueError(
            f"tokens or targets go from {tokens.min()} to {tokens.max()}, and the vocabulary of "
            f"the model from 0 to {sum(sizes) - 1}"
        )
    index = tokens - sum(sizes[:rank])
    is_owned = (index >= 0) & (index < sizes[rank])
    return index.where(is_owned, 0), is_owned
