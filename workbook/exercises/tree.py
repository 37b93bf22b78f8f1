"""Page 06: the choice between all-reduce by recursive doubling, the tree, and the ring.

Symbols: P ranks, S bytes of a rank's tensor.
"""

from labkit.costs import Link, all_reduce_seconds
from workbook.exercises.grader import solved

# S, P, alpha, beta: small and large tensors, few and many ranks, a link without a fixed price and
# one on which bytes are free, and bytes that P does not divide.
_CHOICES = (
    *((size, 4, 50e-6, 1e-9) for size in (1_000, 380_000, 420_000, 10_000_000)),
    *((size, 64, 20e-6, 1e-10) for size in (1_000_000, 5_000_000, 20_000_000)),
    *((size, 8, 1e-3, 1e-8) for size in (100_000, 500_000, 1_000_000)),
    *((1_000_000_000, 2, 50e-6, 1e-9), (10_000_000, 1024, 50e-6, 1e-9), (8, 8, 0.0, 1e-9)),
    *((1_000_000_000, 8, 1e-6, 0.0), (0, 16, 0.0, 1e-9), (3, 2, 1e-10, 1e-9)),
)


@solved(*_CHOICES)
def choose(num_bytes: int, world_size: int, alpha_s: float, beta_s_per_byte: float) -> str:
    """Grade ``fn(num_bytes, world_size, alpha_s, beta_s_per_byte)``: "tree" or "ring".

    The one that takes less time by the model of ``labkit.costs``; on a tie the tree.
    """
    link = Link(alpha_s, beta_s_per_byte)
    tree_s, ring_s = (
        all_reduce_seconds(way, num_bytes, world_size, link) for way in ("tree", "ring")
    )
    return "tree" if tree_s <= ring_s else "ring"
