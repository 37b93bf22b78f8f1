"""Checks of all-reduce by recursive doubling, and of the choice between it and the ring.

Symbols: P ranks, S bytes of a rank's tensor.
"""

from collections.abc import Callable
from functools import partial

from labkit import collectives
from labkit.costs import Link, all_reduce_seconds
from labkit.costs.traffic import tree_all_reduce_cost
from workbook.exercises.grader import Case, Exercise, Target, Verdict, answers, grade
from workbook.exercises.grader.exercise import DRAWN
from workbook.exercises.ring import reduced

# On two and four ranks, going through the distances 1, 2, 3, ... looks like doubling them.
_WORLD_SIZES = (2, 8)


def all_reduce(
    fn: Callable, *, op: str = "sum", world_sizes: tuple[int, ...] = _WORLD_SIZES
) -> Verdict:
    """Grade ``fn(comm, tensor)``: the sum (or ``op="mean"``) over the ranks, in place.

    Target per rank, where P is a power of two: log2 P exchanges of S bytes, each with the rank
    whose number differs in one bit. For any other P only the result is judged.
    """
    exercise = Exercise(
        "tree.all_reduce",
        expected=partial(reduced, op),
        target=_target,
        same_bits=True,
        library=collectives.tree_all_reduce,
        drawn_size=DRAWN,
    )
    return grade(fn, exercise, world_sizes)


def _target(rank: int, case: Case) -> Target:
    rounds = case.world_size.bit_length() - 1
    if 2**rounds != case.world_size:
        return Target()
    peers = (rank ^ 2**k for k in range(rounds))
    return case.target(tree_all_reduce_cost, rank, peers=peers)


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
    tree. Runs in this process.
    """
    names = "num_bytes, world_size, alpha_s, beta_s_per_byte"
    expected = [(case, _faster(*case)) for case in _CHOICES]
    mistakes = {f"choose.{key}": wrong for key, wrong in _WRONG_CHOICES.items()}
    return answers(fn, expected, name="tree.choose", signature=names, mistakes=mistakes)


def _faster(size: int, ranks: int, alpha_s: float, beta_s: float) -> str:
    link = Link(alpha_s, beta_s)
    tree_s, ring_s = (all_reduce_seconds(name, size, ranks, link) for name in ("tree", "ring"))
    return _by(tree_s, ring_s)


def _by(tree_s: float, ring_s: float) -> str:
    return "tree" if tree_s <= ring_s else "ring"


def _other_ring(steps: Callable, chunk: Callable, size: int, p: int, a: float, b: float) -> str:
    doublings = p.bit_length() - 1
    return _by(doublings * (a + size * b), steps(p) * (a + chunk(size, p) * b))


_WRONG_CHOICES: dict[str, Callable[..., str]] = {
    "swapped": lambda *case: "ring" if _faster(*case) == "tree" else "tree",
    "half_a_ring": partial(_other_ring, lambda p: p - 1, lambda size, p: size / p),
    "always_tree": lambda size, p, a, b: _by(0.0, a + size * b),
    "bytes_alone": lambda size, p, a, b: _faster(size, p, 0.0, b),
    "tie": lambda size, p, a, b: _faster(size, p, a, b) if (a and b) or size else "ring",
    "tree_in_p_steps": lambda size, p, a, b: _by(
        (p - 1) * (a + size * b), 2 * (p - 1) * (a + size / p * b)
    ),
}
