"""Page 06: the choice between all-reduce by recursive doubling, the tree, and the ring.

Symbols: P ranks, S bytes of a rank's tensor.
"""

from collections.abc import Callable

from labkit.costs import Link, all_reduce_seconds
from workbook.exercises.grader import Verdict, answers

# S, P, alpha, beta: small and large tensors, few and many ranks, a link without a fixed price and
# one on which bytes are free.
_CHOICES = [
    *((size, 4, 50e-6, 1e-9) for size in (1_000, 380_000, 420_000, 10_000_000)),
    *((size, 64, 20e-6, 1e-10) for size in (1_000_000, 5_000_000, 20_000_000)),
    *((size, 8, 1e-3, 1e-8) for size in (100_000, 500_000, 1_000_000)),
    (1_000_000_000, 2, 50e-6, 1e-9),
    (10_000_000, 1024, 50e-6, 1e-9),
    (8, 8, 0.0, 1e-9),
    (1_000_000_000, 8, 1e-6, 0.0),
    (0, 16, 0.0, 1e-9),
]


def choose(fn: Callable) -> Verdict:
    """Grade ``fn(num_bytes, world_size, alpha_s, beta_s_per_byte)``: "tree" or "ring".

    The one that takes less time by the model of ``labkit.costs``, P a power of two; on a tie the
    tree. Runs in another process.
    """

    def faster(size: int, ranks: int, alpha_s: float, beta_s: float) -> str:
        link = Link(alpha_s, beta_s)
        tree_s, ring_s = (all_reduce_seconds(one, size, ranks, link) for one in ("tree", "ring"))
        return "tree" if tree_s <= ring_s else "ring"

    def half_a_ring(size: int, p: int, alpha_s: float, beta_s: float) -> str:
        tree_s = (p.bit_length() - 1) * (alpha_s + size * beta_s)
        return "tree" if tree_s <= (p - 1) * (alpha_s + size / p * beta_s) else "ring"

    return answers(
        fn,
        [(case, faster(*case)) for case in _CHOICES],
        name="tree.choose",
        signature="num_bytes, world_size, alpha_s, beta_s_per_byte",
        mistakes={
            "the ring is counted with P - 1 messages: it has two halves": half_a_ring,
            "every answer is the slower one of the two": (
                lambda *case: "ring" if faster(*case) == "tree" else "tree"
            ),
            "the fixed price of a message does not count": (
                lambda size, p, alpha_s, beta_s: faster(size, p, 0.0, beta_s)
            ),
        },
    )
