"""Collectives as readable functions on ``Comm``."""

from .common import Reduction as Reduction
from .compressed import sparse_all_reduce as sparse_all_reduce
from .direct import (
    direct_all_reduce as direct_all_reduce,
    fast_all_reduce as fast_all_reduce,
)
from .fast_ring import fast_ring_all_reduce as fast_ring_all_reduce
from .halving_doubling import halving_doubling_all_reduce as halving_doubling_all_reduce
from .hierarchical import (
    fast_hierarchical_all_reduce as fast_hierarchical_all_reduce,
    hierarchical_all_reduce as hierarchical_all_reduce,
)
from .naive import (
    gather as gather,
    naive_all_reduce as naive_all_reduce,
    scatter as scatter,
)
from .ring import (
    all_gather as all_gather,
    reduce_scatter as reduce_scatter,
    ring_all_reduce as ring_all_reduce,
    share_only as share_only,
    share_reduce as share_reduce,
)
from .shared_bucket import SharedBucket as SharedBucket
from .tree import (
    all_to_all as all_to_all,
    broadcast as broadcast,
    broadcast_coalesced as broadcast_coalesced,
    reduce as reduce,
    tree_all_reduce as tree_all_reduce,
)
