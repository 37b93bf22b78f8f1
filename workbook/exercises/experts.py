"""Page 13: a router, a capacity, an all-to-all of uneven parts, a balance loss, and its bytes.

Symbols: n tokens of a rank with D features; E experts, k of a token; P ranks.
"""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from labkit.units import format_count
from labkit.workload.experts import route as reference_route
from workbook.exercises.grader import Case, Check, Target, Wrong, judged, solved
from workbook.exercises.grader.compare import agree, plain, short
from workbook.exercises.grader.exercise import random_tensor

_WIDTH = 3


def _logits_in_words(num_tokens: int, num_experts: int, k: int) -> str:
    return f"{format_count(num_tokens, 'token')}, {format_count(num_experts, 'expert')}, k={k}"


@judged(
    "logits, k",
    *((6, 4, 2), (5, 8, 3), (4, 3, 1), (1, 2, 2), (0, 4, 2)),
    in_words=_logits_in_words,
)
def route(fn: Callable, num_tokens: int, num_experts: int, k: int) -> Wrong | None:
    """Grade ``fn(logits, k)``: (experts [n, k] int64, weights [n, k]) of ``logits`` [n, E].

    The most probable comes first. The weights of a token's experts are their probabilities
    divided by their sum; of a single expert the weight is its probability.
    """
    logits = random_tensor(7 * num_experts + k, num_tokens, num_experts)
    # A clone of a leaf, which may be changed in place.
    result = fn(logits.clone().requires_grad_().clone(), k)
    returned = plain(result)
    if not isinstance(returned, list) or len(returned) != 2:
        return Wrong(f"it returned {short(returned)}, expected two tensors: experts, weights")
    experts, weights = returned
    for name, tensor in (("experts", experts), ("weights", weights)):
        if not isinstance(tensor, Tensor):
            return Wrong(f"{name} is {type(tensor).__name__}, expected a tensor")
        if list(tensor.shape) != [num_tokens, k]:
            return Wrong(f"{name} has shape {list(tensor.shape)}, expected {[num_tokens, k]}")
    if experts.dtype != torch.int64:
        return Wrong(f"experts is {experts.dtype}, expected torch.int64: they are indices")
    probabilities = logits.softmax(dim=1)
    top, expected = probabilities.topk(k)
    if not torch.equal(experts, expected):
        return Wrong(_wrong_experts(logits, k, experts, expected))
    weights = weights.to(top.dtype)
    right = top
    if k > 1:
        right = top / top.sum(dim=1, keepdim=True)
    if not torch.allclose(weights, right, atol=1e-6):
        token = int((weights - right).abs().amax(dim=1).argmax())
        return Wrong(
            f"the weights of token {token} are {short(weights[token].tolist())}, expected "
            f"{short(right[token].tolist())}{_weights_mistake(logits, weights, top)}"
        )
    has_gradient = not isinstance(result, (list, tuple)) or result[1].requires_grad
    if num_tokens and not has_gradient:
        return Wrong("the weights are right, but have no gradient: the router would not learn")
    return None


def _wrong_experts(logits: Tensor, k: int, experts: Tensor, expected: Tensor) -> str:
    """The first token with other experts, and why if a likely mistake explains all of them."""
    token = int((experts != expected).any(dim=1).nonzero()[0])
    chosen = experts[token].tolist()
    problem = f"the experts of token {token} are {chosen}, expected {expected[token].tolist()}"
    if torch.equal(experts, logits.softmax(dim=0).topk(k).indices):
        return f"{problem}\nthe softmax goes over the experts of a token (dim 1), not over tokens"
    if torch.equal(experts.sort(dim=1).values, expected.sort(dim=1).values):
        return f"{problem}\nthe right ones, but the most probable comes first"
    return problem


def _weights_mistake(logits: Tensor, weights: Tensor, top: Tensor) -> str:
    """Explain wrong weights, for likely mistakes; ``top``: the chosen probabilities."""
    highest = logits.topk(top.shape[1]).values
    mistakes = {
        "weights of 1, whatever the router says, give it no gradient": torch.ones_like(top),
        "divide by the sum of the chosen ones, so that they add up to 1": top,
        "these are logits, not probabilities": highest,
        "these are logits divided by their sum": highest / highest.sum(1)[:, None],
        "divide by the sum of the chosen probabilities, without another softmax": top.softmax(1),
    }
    for words, wrong in mistakes.items():
        if torch.allclose(weights, wrong, atol=1e-6):
            return f"\n{words}"
    return ""


def _choices(random: Random, num_choices: int, num_experts: int) -> list[int]:
    choices = []
    for _ in range(num_choices):
        # Low numbers are popular.
        choices.append(min(random.randrange(num_experts), random.randrange(num_experts)))
    return choices


def _more_choices(random: Random) -> list[tuple]:
    return [(_choices(random, 12, experts), experts, most) for experts, most in ((4, 3), (3, 1))]


def _keeps_the_last(solution: Callable, experts: list[int], num_experts: int, most: int) -> Any:
    kept = solution(experts[::-1], num_experts, most)
    return sorted(len(experts) - 1 - index for index in kept)


@solved(
    ([0, 1, 0, 0, 2, 1], 3, 2),
    ([2, 2, 2, 2], 3, 1),
    ([1, 0, 3, 2], 4, 1),
    ([], 2, 3),
    ([0, 0, 0], 1, 5),
    more=_more_choices,
    mistakes={
        "an expert takes the first tokens, and drops the later ones": _keeps_the_last,
        "an expert takes as many as its capacity, not one less": (
            lambda rule, experts, count, most: rule(experts, count, most - 1)
        ),
    },
)
def kept(experts: list[int], num_experts: int, most: int) -> list[int]:
    """Grade ``fn(experts, num_experts, most)``: the indices of the choices that are not dropped.

    ``experts[i]`` is the expert of choice i; each takes at most ``most``, the first ones.
    """
    num_taken = [0] * num_experts
    indices = []
    for index, expert in enumerate(experts):
        if num_taken[expert] < most:
            num_taken[expert] += 1
            indices.append(index)
    return indices


def _counts(rank: int, case: Case) -> list[int]:
    """Numbers of rows that ``rank`` sends to each rank; some are 0, and some are all its rows."""
    counts = []
    for peer in range(case.world_size):
        key = 100 * rank + peer
        counts.append(case.integer(key, 0, case.size) * (case.integer(key + 50, 0, 3) > 0))
    return counts


def _rows(rank: int, case: Case) -> Tensor:
    return case.random(1000 + rank, sum(_counts(rank, case)), _WIDTH)


def _arrived(rank: int, case: Case, senders: Callable | None = None) -> Tensor:
    """Rows that ``rank`` gets from the ``senders(rank, P)``, by default from all, rank 0 first."""
    parts = [case.random(0, 0, _WIDTH)]
    for sender in senders(rank, case.world_size) if senders else range(case.world_size):
        parts.append(_rows(sender, case).split(_counts(sender, case))[rank])
    return torch.cat(parts)


def _others(rank: int, world_size: int) -> list[int]:
    return [sender for sender in range(world_size) if sender != rank]


def _in_order_of_arrival(rank: int, world_size: int) -> list[int]:
    return [(rank - step) % world_size for step in range(world_size)]


def _exchange_target(rank: int, case: Case) -> Target:
    """Twice P - 1 messages: a number of 8 bytes, and rows."""
    counts = _counts(rank, case)
    rows = sum(counts) - counts[rank]
    peers = case.world_size - 1
    return Target(2 * peers, peers * 8 + rows * _WIDTH * 4)


# fn(comm, rows, counts) -> rows [m', D]; counts[r] rows of rows [m, D] are for rank r, in order.
exchange = Check(
    "experts.exchange",
    _arrived,
    inputs=lambda rank, case: (_rows(rank, case), _counts(rank, case)),
    signature="comm, rows, counts",
    written=None,
    keeps=("rows",),
    parts=lambda case: {},
    mistakes={
        "the rows that a rank has for itself are missing": partial(_arrived, senders=_others),
        "the rows of rank 0 come first, in whatever order they arrive": (
            partial(_arrived, senders=_in_order_of_arrival)
        ),
    },
    target=_exchange_target,
    sizes=(3, 8, 1, 0),
    nouns=("rank", ""),
    special=lambda case: f"at most {format_count(case.size, 'row')} for a rank",
)


def _probabilities(seed: int, num_tokens: int, num_experts: int) -> Tensor:
    return (2 * random_tensor(seed, num_tokens, num_experts)).softmax(dim=1)


# In the last case no token chooses the last experts.
@judged(
    "probabilities, experts",
    *((1, 6, 4, 2), (2, 5, 3, 1), (3, 9, 5, 3), (3, 2, 8, 1)),
    in_words=lambda seed, *case: _logits_in_words(*case),
)
def balance(fn: Callable, seed: int, num_tokens: int, num_experts: int, k: int) -> Wrong | None:
    """Grade ``fn(probabilities, experts)``: E (sum of f_e p_e), of [n, E] and [n, k] int64."""
    probabilities = _probabilities(seed, num_tokens, num_experts).requires_grad_()
    routing = reference_route(probabilities.log(), k)
    fractions = routing.chosen / routing.chosen.sum()
    means = probabilities.mean(dim=0)
    expected = num_experts * (fractions * means).sum()
    experts = probabilities.topk(k).indices
    returned = fn(probabilities, experts)
    if not isinstance(returned, Tensor) or returned.dim():
        return Wrong(f"it returned {short(plain(returned))}, expected a scalar tensor")
    mistakes = {
        "without the factor E": expected / num_experts,
        "f_e is a fraction of the choices, not their number: divide by k n": (
            num_tokens * k * expected
        ),
        "f_e counts choices, not tokens: divide by k n": k * expected,
        "f_e is a fraction of the choices, not p_e again": num_experts * means.square().sum(),
        "p_e is a mean of probabilities, not f_e again": num_experts * fractions.square().sum(),
    }
    if not agree(returned.detach(), expected.detach()):
        for words, value in mistakes.items():
            if agree(returned.detach(), value.detach()) and not agree(value, expected):
                return Wrong(
                    f"it is {returned.item():.4g}, expected {expected.item():.4g}\n{words}"
                )
        return Wrong(f"it is {returned.item():.4g}, expected {expected.item():.4g}")
    if not returned.requires_grad:
        return Wrong("the value is right, and has no gradient: do not take p_e out of the graph")
    return None


# n, k, D, P, bytes of an element
@solved(
    *((64, 2, 96, 4, 4), (8, 1, 16, 2, 8), (12, 3, 10, 3, 4), (6, 2, 4, 1, 2)),
    mistakes={
        "there and back, forward and backward: four times": lambda rule, *case: rule(*case) // 2,
    },
)
def layer_bytes(tokens: int, k: int, features: int, world_size: int, element_bytes: int) -> int:
    """Grade ``fn(tokens, k, features, world_size, element_bytes)``.

    The bytes of rows that a rank with so many tokens sends for one layer, forward and backward,
    if each rank gets as many choices as any other.
    """
    rows = k * tokens * (world_size - 1) // world_size
    return 4 * rows * features * element_bytes
