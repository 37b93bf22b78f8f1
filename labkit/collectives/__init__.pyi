from .fast_hierarchical import (
    fast_hierarchical_all_reduce as fast_hierarchical_all_reduce,
)
from .fast_ring import fast_ring_all_reduce as fast_ring_all_reduce
from .hierarchical import hierarchical_all_reduce as hierarchical_all_reduce
from .naive import naive_all_reduce as naive_all_reduce
from .pairwise import all_to_all as all_to_all
from .reduction import Reduction as Reduction
from .ring import (
    all_gather as all_gather,
    reduce_scatter as reduce_scatter,
    ring_all_reduce as ring_all_reduce,
    share_only as share_only,
    share_reduce as share_reduce,
)
from .rooted import (
    broadcast as broadcast,
    gather as gather,
    reduce as reduce,
    scatter as scatter,
)
from .sparse import sparse_all_reduce as sparse_all_reduce
from .tree import (
    dissemination_barrier as dissemination_barrier,
    tree_all_reduce as tree_all_reduce,
)
