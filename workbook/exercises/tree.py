"""Page 07: the choice between all-reduce by recursive doubling, the tree, and the ring.

Symbols: P ranks, S bytes of a rank's tensor.
"""

from collections.abc import Callable

from labkit.costs import Link, all_reduce_seconds
from workbook.exercises.grader import solved


def _with_half_a_ring(choose: Callable, n: int, P: int, alpha_s: float, beta: float) -> str:
    tree_s = all_reduce_seconds("tree", n, P, Link(alpha_s, beta))
    return (
        "tree" if 2 * tree_s <= all_reduce_seconds("ring", n, P, Link(alpha_s, beta)) else "ring"
    )


# S, P, alpha, beta: a tensor that a mistake decides wrongly, a link without a fixed price and one
# on which bytes are free, bytes that P does not divide, and what is drawn, near to a tie.
@solved(
    *((420_000, 4, 50e-6, 1e-9), (8, 8, 0.0, 1e-9), (1_000_000_000, 8, 1e-6, 0.0)),
    *((0, 16, 0.0, 1e-9), (3, 2, 1e-10, 1e-9)),
    more=lambda random: [
        *((int(10 ** random.uniform(3.5, 7)), 2**power, 50e-6, 1e-9) for power in range(1, 11)),
        *((int(10 ** random.uniform(3.5, 7)), 2**power, 1e-3, 1e-8) for power in range(1, 11)),
        *((int(50_000 * random.uniform(3, 20)), 4, 50e-6, 1e-9) for _ in range(20)),
    ],
    mistakes={
        # With S bytes in each message the tree would never take longer.
        "a message of the ring has S / P bytes, one of the tree S": lambda *_: "tree",
        "on a tie it is the tree": lambda choose, n, *rest: choose(n + 1e-9, *rest),
        "each message has its alpha": lambda choose, n, P, alpha, beta: choose(n, P, 0.0, beta),
        # Half of the ring's time, or twice the tree's: the answers are the same.
        "the ring takes 2 (P - 1) messages, the tree log2 P": _with_half_a_ring,
        "the one that takes less time": lambda choose, *case: (
            "ring" if choose(*case) == "tree" else "tree"
        ),
    },
)
def choose(num_bytes: int, world_size: int, alpha_s: float, beta_s_per_byte: float) -> str:
    """Grade ``fn(num_bytes, world_size, alpha_s, beta_s_per_byte)``: "tree" or "ring".

    The one that takes less time by the model of ``labkit.costs``; on a tie the tree.
    """
    link = Link(alpha_s, beta_s_per_byte)
    tree_s = all_reduce_seconds("tree", num_bytes, world_size, link)
    ring_s = all_reduce_seconds("ring", num_bytes, world_size, link)
    return "tree" if tree_s <= ring_s else "ring"
