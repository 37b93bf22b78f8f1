"""Answers to ``check.tree``."""

from graded import Answers
from ranks import travel_by_value

from labkit.costs import Link, crossover_bytes
from workbook import check

travel_by_value(__name__)


# choose(num_bytes, world_size, alpha_s, beta_s_per_byte)


def chooses(num_bytes, world_size, alpha_s, beta_s_per_byte):
    doublings, steps = (world_size - 1).bit_length(), 2 * (world_size - 1)
    tree_s = doublings * (alpha_s + num_bytes * beta_s_per_byte)
    ring_s = steps * (alpha_s + num_bytes / world_size * beta_s_per_byte)
    return "tree" if tree_s <= ring_s else "ring"


def by_crossover(num_bytes, world_size, alpha_s, beta_s_per_byte):
    limit = crossover_bytes(world_size, Link(alpha_s, beta_s_per_byte or 1e-300))
    return "tree" if num_bytes <= limit else "ring"


def the_slower_one(*case):
    return "ring" if chooses(*case) == "tree" else "tree"


def by_bytes(num_bytes, world_size, alpha_s, beta_s_per_byte):
    return chooses(num_bytes, world_size, 0.0, beta_s_per_byte)


def by_a_size(num_bytes, world_size, alpha_s, beta_s_per_byte):
    return "tree" if num_bytes < 400_000 else "ring"


ANSWERS = [
    Answers(check.tree.choose, [by_crossover], [the_slower_one, by_bytes, by_a_size]),
]
