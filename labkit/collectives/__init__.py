"""Collectives as readable functions on ``Comm``, one algorithm a file.

Each takes tensors that every rank holds in the same shape and dtype. What changes a tensor does so
in place and returns it. Steps, messages and bytes stand in each docstring and in
``labkit.costs.traffic``.
"""

from labkit.collectives.barrier import dissemination_barrier
from labkit.collectives.fast_ring import fast_ring_all_reduce
from labkit.collectives.halves import all_gather, reduce_scatter
from labkit.collectives.naive import naive_all_reduce
from labkit.collectives.pairwise import all_to_all
from labkit.collectives.reduction import Reduction
from labkit.collectives.ring import ring_all_reduce, share_only, share_reduce
from labkit.collectives.rooted import broadcast, gather, reduce, scatter
from labkit.collectives.sparse import sparse_all_reduce
from labkit.collectives.tree import tree_all_reduce

__all__ = [
    "Reduction",
    "all_gather",
    "all_to_all",
    "broadcast",
    "dissemination_barrier",
    "fast_ring_all_reduce",
    "gather",
    "naive_all_reduce",
    "reduce",
    "reduce_scatter",
    "ring_all_reduce",
    "scatter",
    "share_only",
    "share_reduce",
    "sparse_all_reduce",
    "tree_all_reduce",
]
