"""Answers to ``check.tensor_parallel``."""

from functools import partial

import torch
from graded import Answers, ends
from torch.nn import functional

from labkit import collectives
from labkit.collectives import all_gather, ring_all_reduce
from labkit.strategies.ring_attention import attend_block
from workbook import check

# column(comm, x, weight, gradient), row(comm, x, weight, gradient)


def by_autograd(comm, x, weight, gradient, summed=("x",), reduce=ring_all_reduce):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = functional.linear(x, weight)
    y.backward(gradient)
    found = {"y": y.detach(), "x": x.grad, "weight": weight.grad}
    for name in summed:
        reduce(comm, found[name])
    return list(found.values())


in_products = partial(by_autograd, summed=("y",))
sums_nothing = partial(by_autograd, summed=())
sums_both = partial(by_autograd, summed=("x", "y"))
sums_through_rank_0 = partial(by_autograd, reduce=collectives.naive_all_reduce)


def gathers_terms(comm, x, weight, gradient):
    """The right values, with more bytes than a ring's."""
    terms = all_gather(comm, x @ weight.T)
    return sum(terms), gradient @ weight, gradient.T @ x


# heads(rank, world_size, qkv, out, num_heads)


def every_pth_head(rank, world_size, qkv, out, num_heads, of_out=True):
    width = len(out)
    rows = qkv.view(3, num_heads, -1, width)[:, rank::world_size].reshape(-1, width)
    columns = out.view(width, num_heads, -1)[:, rank::world_size].reshape(width, -1)
    return rows, columns if of_out else out.chunk(world_size, dim=1)[rank]


def cut_in_blocks(rank, world_size, qkv, out, num_heads):
    rows = [part.chunk(world_size)[rank] for part in qkv.chunk(3)]
    return [torch.cat(rows), out.chunk(world_size, dim=1)[rank]]


def rows_in_a_row(rank, world_size, qkv, out, num_heads):
    return qkv.chunk(world_size)[rank], out.chunk(world_size, dim=1)[rank]


# cross_entropy(comm, logits, targets, first)


def in_three_sums(comm, logits, targets, first, highest="of all"):
    top = logits.amax(1) if highest else torch.zeros(len(targets))
    if highest == "of all":
        top = ring_all_reduce(comm, top, "max")
    exps = (logits - top[:, None]).exp()
    total = ring_all_reduce(comm, exps.sum(1))
    here = functional.one_hot(targets, 1 + max(int(targets.max()), first + logits.shape[1]))
    here = here[:, first : first + logits.shape[1]]
    found = ring_all_reduce(comm, (logits * here).sum(1))
    loss = (top + total.log() - found).mean()
    return loss.item(), (exps / total[:, None] - here) / len(targets)


def counts_the_next_class(comm, logits, targets, first):
    """A target just behind the last class of a rank counts on two ranks."""
    loss, gradient = in_three_sums(comm, logits, targets, first)
    is_behind = (targets == first + logits.shape[1]).double()
    found = ring_all_reduce(comm, is_behind * logits[:, -1])
    return loss - found.mean().item(), gradient


def with_all_logits(comm, logits, targets, first):
    """The right loss, with all logits on all ranks."""
    most = ring_all_reduce(comm, torch.tensor(logits.shape[1]), "max").item()
    padded = functional.pad(logits, (0, most - logits.shape[1]), value=-torch.inf)
    whole = torch.cat(all_gather(comm, padded), dim=1)
    whole = whole[:, whole[0].isfinite()].requires_grad_()
    loss = functional.cross_entropy(whole, targets)
    (gradient,) = torch.autograd.grad(loss, whole)
    return loss, gradient[:, first : first + logits.shape[1]]


def of_its_own_classes(comm, logits, targets, first):
    own = (targets - first).clamp(0, logits.shape[1] - 1)
    loss = functional.cross_entropy(logits.requires_grad_(), own)
    return ring_all_reduce(comm, loss.detach()), torch.autograd.grad(loss, logits)[0]


# attend(running, q, k, v)


def one_after_another(running, q, k, v):
    for place in range(k.shape[1]):
        step = k[:, place : place + 1], v[:, place : place + 1]
        running = attend_block(running, q, *step, causal=False)
    return tuple(running)


def in_logarithms(running, q, k, v, scale=True, shrinks=True):
    scores = q @ k.mT / (q.shape[-1] ** 0.5 if scale else 1)
    top = torch.maximum(running[0], scores.max(-1, keepdim=True).values)
    old = torch.exp(running[0] - top) if shrinks else 1.0
    new = torch.exp(scores - top)
    return [top, running[1] * old + new.sum(-1, keepdim=True), running[2] * old + new @ v]


ANSWERS = [
    Answers(
        check.tensor_parallel.column,
        [by_autograd],
        [sums_nothing, ends(sums_both), sums_through_rank_0],
    ),
    Answers(
        check.tensor_parallel.row,
        [in_products],
        [sums_nothing, gathers_terms],
    ),
    Answers(
        check.tensor_parallel.heads,
        [every_pth_head, cut_in_blocks],
        [rows_in_a_row, partial(every_pth_head, of_out=False)],
    ),
    Answers(
        check.tensor_parallel.cross_entropy,
        [in_three_sums],
        [
            partial(in_three_sums, highest=""),
            partial(in_three_sums, highest="its own"),
            with_all_logits,
            of_its_own_classes,
            counts_the_next_class,
        ],
    ),
    Answers(
        check.tensor_parallel.block_bytes,
        [lambda n, t, d, p, size: sum(8 * n * t * d * size / p for _ in range(p - 1))],
        [lambda n, t, d, p, size: 4 * (p - 1) * n * t * d * size // p],
    ),
    Answers(
        check.tensor_parallel.attend,
        [one_after_another, in_logarithms],
        [partial(in_logarithms, scale=False), partial(in_logarithms, shrinks=False)],
    ),
]
