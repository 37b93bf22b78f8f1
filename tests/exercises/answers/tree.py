"""Answers to ``check.tree``."""

from graded import Answers

from labkit.costs import Link, crossover_bytes
from workbook import check


def by_crossover(num_bytes, world_size, alpha_s, beta_s_per_byte):
    limit = crossover_bytes(world_size, Link(alpha_s, beta_s_per_byte or 1e-300))
    return "tree" if num_bytes <= limit else "ring"


ANSWERS = [
    Answers(
        check.tree.choose,
        [by_crossover],
        [
            lambda *case: "ring" if by_crossover(*case) == "tree" else "tree",
            lambda size, world_size, alpha_s, beta: by_crossover(size, world_size, 0.0, beta),
            lambda size, *link: "tree" if size < 400_000 else "ring",
        ],
    ),
]
