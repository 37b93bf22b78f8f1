"""Collectives as readable functions on ``Comm``, one algorithm a file.

Each takes a tensor that every rank holds in the same shape and dtype, works in place, and returns
it; steps, messages and bytes stand in its docstring and in ``labkit.costs``.
"""

from labkit.collectives.naive import naive_all_reduce
from labkit.collectives.ring import ring_all_reduce, share_only, share_reduce

__all__ = ["naive_all_reduce", "ring_all_reduce", "share_only", "share_reduce"]
