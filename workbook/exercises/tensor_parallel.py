"""Page 10: linear layers by outputs and by inputs, heads, a cut vocabulary, bytes, a ring's step.

Symbols: P ranks, n samples, T positions, D features; I inputs and O outputs of a layer.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from labkit.schedules.ring import chunk_bounds
from labkit.strategies.ring_attention import Running, attend_block
from workbook.exercises.grader import Case, Check, Target, Wrong, judged, solved
from workbook.exercises.grader.compare import agree, plain, short
from workbook.exercises.grader.exercise import random_tensor
from workbook.exercises.ring import ring_target

# Features of the tensors that all ranks have, and of one rank's part: rank 1 has more than others.
_WHOLE = 6
_PARTS = (2, 3, 2, 2)
_SAMPLES = (6, 5, 1)


def _layer(case: Case, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[n, whole] that all ranks have, twice; this rank's weight [part, whole]; [n, part]."""
    n = case.size
    part = _PARTS[rank]
    return (
        case.random(1, n, _WHOLE),
        case.random(2, n, _WHOLE),
        case.random(10 + rank, part, _WHOLE),
        case.random(20 + rank, n, part),
    )


def _inputs(by_outputs: bool, rank: int, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, and the gradient of y."""
    x, gradient, weight, part = _layer(case, rank)
    if by_outputs:
        return (x, weight, part)
    return (part, weight.T.contiguous(), gradient)


def _terms(by_outputs: bool, case: Case) -> list[Tensor]:
    """Each rank's product, which has to be summed."""
    tensors = [_inputs(by_outputs, rank, case) for rank in range(case.world_size)]
    if by_outputs:
        return [gradient @ weight for _, weight, gradient in tensors]
    return [x @ weight.T for x, weight, _ in tensors]


def _results(by_outputs: bool, rank: int, case: Case) -> list[Tensor]:
    x, weight, gradient = _inputs(by_outputs, rank, case)
    total = torch.stack(_terms(by_outputs, case)).sum(0)
    if by_outputs:
        return [x @ weight.T, total, gradient.T @ x]
    return [total, gradient @ weight, gradient.T @ x]


def _linear(name: str, by_outputs: bool) -> Check:
    """A check of fn(comm, x, weight, gradient) -> (y, gradient of x, gradient of weight)."""
    return Check(
        f"tensor_parallel.{name}",
        partial(_results, by_outputs),
        inputs=partial(_inputs, by_outputs),
        signature="comm, x, weight, gradient",
        written=None,
        keeps=("x", "weight", "gradient"),
        parts=lambda case: {
            f"rank {rank}'s term": term for rank, term in enumerate(_terms(by_outputs, case))
        },
        target=lambda rank, case: ring_target(case.size * _WHOLE, 4, rank, case),
        sizes=_SAMPLES,
        nouns=("rank", "sample"),
    )


# x [n, I] on all ranks, weight [O_r, I], gradient [n, O_r].
column = _linear("column", True)
# x [n, I_r], weight [O, I_r], gradient [n, O] on all ranks.
row = _linear("row", False)


def _attention(x: Tensor, qkv: Tensor, out: Tensor, num_heads: int) -> Tensor:
    q, k, v = (p.unflatten(-1, (num_heads, -1)).transpose(0, 1) for p in (x @ qkv.T).chunk(3, -1))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(0, 1).flatten(1) @ out.T


@judged("rank, world_size, qkv, out, num_heads", (4, 3, 2), (6, 2, 3), (4, 2, 4), (3, 4, 1))
def heads(fn: Callable, num_heads: int, size: int, world_size: int) -> Wrong | None:
    """Grade ``fn(rank, world_size, qkv, out, num_heads)``: the parts of an attention's weights.

    ``qkv`` [3 D, D], ``out`` [D, D]; of a rank [3 D / P, D] and [D, D / P]. Any heads will do, if
    each is on one rank.
    """
    width = num_heads * size
    part = width // world_size
    x = random_tensor(5, 5, width)
    qkv = random_tensor(3 * width, 3 * width, width)
    out = random_tensor(width, width, width)
    terms = []
    for rank in range(world_size):
        weights = plain(fn(rank, world_size, qkv.clone(), out.clone(), num_heads))
        shapes = [[3 * part, width], [width, part]]
        if shapes_of(weights) != shapes:
            return Wrong(f"rank {rank} got {shapes_of(weights)}, expected tensors {shapes}")
        if world_size > 1 and agree(weights[0], qkv.chunk(world_size)[rank]):
            return Wrong(
                f"rank {rank} got rows of qkv that follow one another: then the first ranks have "
                "the queries, and the last ones the values"
            )
        terms.append(_attention(x, weights[0], weights[1], num_heads // world_size))
    if torch.allclose(torch.stack(terms).sum(0), _attention(x, qkv, out, num_heads), atol=1e-4):
        return None
    return Wrong("the ranks' terms do not add up: are rows and columns of the same heads?")


def shapes_of(value: Any) -> list[list[int]] | str:
    """Return the shapes of a list of tensors; anything else in words."""
    if not isinstance(value, list):
        return short(value)
    shapes = []
    for number, entry in enumerate(value):
        if not isinstance(entry, Tensor):
            return f"{type(entry).__name__} as entry {number} of {len(value)}"
        shapes.append(list(entry.shape))
    return shapes


def _classes(case: Case, rank: int | None = None) -> tuple[int, int]:
    num_classes = 9 * case.world_size + 1
    if rank is None:
        return 0, num_classes
    return chunk_bounds(num_classes, case.world_size)[rank]


def _logits(case: Case) -> tuple[Tensor, Tensor]:
    n = case.size
    _, classes = _classes(case)
    # The exponentials of the second size would be infinite.
    logits = case.random(1, n, classes).double() * (1000 if n == _SAMPLES[1] else 2)
    targets = torch.tensor([case.integer(key, 0, classes - 1) for key in range(n)])
    # Also the first and the last class of each rank, as far as there are samples.
    bounds = [_classes(case, rank) for rank in range(case.world_size)]
    borders = [start for start, _ in bounds] + [end - 1 for _, end in bounds]
    targets[: len(borders)] = torch.tensor(borders)[:n]
    return logits, targets


def _own_logits(rank: int, case: Case) -> tuple[Tensor, Tensor, int]:
    logits, targets = _logits(case)
    start, end = _classes(case, rank)
    return logits[:, start:end].contiguous(), targets, start


def _loss(rank: int, case: Case, own_maximum: bool = False) -> list[Any]:
    """The mean loss, and its gradient by the rank's logits; or what a rank's own maximum gives."""
    logits, targets = _logits(case)
    start, end = _classes(case, rank)
    highest = torch.zeros_like(logits)
    for peer in range(case.world_size if own_maximum else 0):
        part = slice(*_classes(case, peer))
        highest[:, part] = logits[:, part].amax(dim=1, keepdim=True)
    shifted = (logits - highest).requires_grad_()
    loss = functional.cross_entropy(shifted, targets)
    (gradient,) = torch.autograd.grad(loss, shifted)
    loss = loss + (highest[:, [start]] - highest.gather(1, targets[:, None])).mean()
    return [loss.item(), gradient[:, start:end]]


def _three_sums(rank: int, case: Case) -> Target:
    per_sum = ring_target(case.size, 8, rank, case)
    return Target(3 * (per_sum.messages or 0), 3 * (per_sum.num_bytes or 0))


# fn(comm, logits, targets, first) -> (mean loss, gradient [n, W]); logits [n, W] from class
# ``first`` on, targets [n] of all classes.
cross_entropy = Check(
    "tensor_parallel.cross_entropy",
    _loss,
    inputs=_own_logits,
    signature="comm, logits, targets, first",
    written=None,
    keeps=("logits", "targets"),
    parts=lambda case: {},
    mistakes={
        "subtract the highest logit of all ranks: with others the sums do not fit together": (
            partial(_loss, own_maximum=True)
        ),
    },
    target=_three_sums,
    sizes=_SAMPLES,
    nouns=("rank", "sample"),
    special=lambda case: "logits of thousands" if case.size == _SAMPLES[1] else "",
)


# n, T, D, P, bytes of an element
@solved(
    *((2, 8, 6, 2, 4), (32, 64, 96, 4, 4), (1, 5, 12, 3, 8), (3, 4, 10, 1, 2)),
)
def block_bytes(
    samples: int, positions: int, features: int, world_size: int, element_bytes: int
) -> int:
    """Grade ``fn(samples, positions, features, world_size, element_bytes)``.

    The bytes that each rank sends for one block, forward and backward.
    """
    size_bytes = samples * positions * features * element_bytes
    return 4 * 2 * (world_size - 1) * size_bytes // world_size


@judged(
    "running, q, k, v",
    *((1.0, (4,)), (1.0, (3, 2, 4)), (200.0, (2, 5, 1))),
    in_words=lambda scale, lengths: (
        f"q times {scale:g}, blocks of {', '.join(map(str, lengths))} keys"
    ),
)
def attend(fn: Callable, scale: float, lengths: Sequence[int]) -> Wrong | None:
    """Grade ``fn(running, q, k, v)``: the running softmax after one more block of keys.

    ``running`` is (highest [h, t, 1], total [h, t, 1], output [h, t, d]); ``q`` [h, t, d], ``k``
    and ``v`` [h, u, d]. Expected are the three after the block; no position is hidden.
    """
    q = scale * random_tensor(1, 2, 3, 4)
    nothing = torch.zeros(2, 3, 1)
    expected = running = Running(nothing - math.inf, nothing, torch.zeros_like(q))
    for number, length in enumerate(lengths):
        k = random_tensor(10 * number + 2, 2, length, 4)
        v = random_tensor(10 * number + 3, 2, length, 4)
        expected = attend_block(expected, q, k, v, causal=False)
        returned = plain(fn(Running(*map(torch.clone, running)), q, k, v))
        shapes = shapes_of([*expected])
        if shapes_of(returned) != shapes:
            return Wrong(f"it returned {shapes_of(returned)}, expected tensors {shapes}")
        for name, value, right, before in zip("mlo", returned, expected, running):
            is_wrong = ~torch.isclose(value, right, rtol=1e-4, atol=1e-5)
            if is_wrong.any():
                index = tuple(is_wrong.nonzero()[0].tolist())
                pair = f"{short(value[index])}, expected {short(right[index])}"
                text = f"after block {number} {name}{list(index)} is {pair}"
                rescaled = (running[0] - expected[0]).exp() * before
                mistakes = {
                    "divide the scores by the root of d": right * math.sqrt(q.shape[-1]),
                    f"the old {name} has to be multiplied by exp(old m - new m)": (
                        right - rescaled + before
                    ),
                    "divide o by l after the last block only": right / expected[1],
                }
                for words, wrong in mistakes.items():
                    if torch.allclose(value, wrong, rtol=1e-4, atol=1e-5):
                        return Wrong(f"{text}\n{words}")
                return Wrong(text)
        running = Running(*returned)
    return None
