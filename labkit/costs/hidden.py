"""The sizes from which on a block's computing is as long as its communication."""

import math

from labkit.costs.link import Link
from labkit.units import check_choice

# By technique: passes over a ring of all parameters, and products of a token with each parameter,
# in FLOPs, beside which they run.
_PASSES_BESIDE = {"ddp": (2, 4), "sharded": (3, 6)}


def tokens_that_hide(
    technique: str,
    width: int,
    world_size: int,
    link: Link,
    flops_per_s: float,
    element_bytes: int = 2,
) -> float:
    """Tokens per rank from which a transformer block computes as long as it communicates.

    A block of width D has N = 12 D^2 parameters of e bytes, and 6 N FLOPs per token, a third of
    them forward; attention's scores are left out. F FLOPs per second, n tokens, P ranks:

    ddp: an all-reduce of gradients beside backward, 2 (P - 1) (alpha + e N / P beta) <= 4 N n / F.
    sharded, stage 3: two all-gathers and a reduce-scatter, beside all of the block,
    3 (P - 1) (alpha + e N / P beta) <= 6 N n / F.
    tensor_parallel: four all-reduces of [n, D], with the same n tokens on all ranks,
    8 (P - 1) (alpha + n e D / P beta) <= 6 N n / (P F). Both sides grow with n: ``math.inf`` below
    the width (P - 1) e F beta / 9.
    """
    check_choice("technique", technique, (*_PASSES_BESIDE, "tensor_parallel"))
    parameters = 12 * width**2
    if technique == "tensor_parallel":
        messages = 8 * (world_size - 1)
        fixed_s = messages * link.alpha_s
        sent_s = messages * element_bytes * width / world_size * link.beta_s_per_byte
        computed_s = 6 * parameters / world_size / flops_per_s
    else:
        passes, products = _PASSES_BESIDE[technique]
        chunk_bytes = element_bytes * parameters / world_size
        fixed_s = passes * (world_size - 1) * link.message_seconds(chunk_bytes)
        sent_s = 0.0
        computed_s = products * parameters / flops_per_s
    if computed_s <= sent_s:
        return math.inf
    return fixed_s / (computed_s - sent_s)
