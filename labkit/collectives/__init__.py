"""Collectives as readable functions on ``Comm``.

Each takes this rank's ``comm``, and tensors of the same shape and dtype on every rank. A function
that changes a tensor does so in place, and returns it. P ranks, S bytes of one tensor; per rank:

    collective              file            steps               bytes sent
    naive_all_reduce        naive           2 (P - 1)           rank 0 (P - 1) S, the others S
    tree_all_reduce         tree            log2 P              log2 P x S
    halving_doubling_all_reduce             2 log2 P            2 (P - 1) / P x S
    ring_all_reduce         ring            2 (P - 1)           2 (P - 1) / P x S
    fast_ring_all_reduce    fast_ring       2 (P - 1)           2 (P - 1) / P x S
    direct_all_reduce       direct          1                   (P - 1) S
    SharedBucket.all_reduce shared_bucket   2                   2 (P - 1) / P x S
    hierarchical_all_reduce hierarchical    2 (m + H - 2)       2 (P - 1) / P x S, see below
    share_reduce            ring            P - 1               (P - 1) / P x S
    share_only              ring            P - 1               (P - 1) / P x S
    reduce_scatter          ring            P - 1               (P - 1) S
    all_gather              ring            P - 1               (P - 1) S
    all_to_all              tree            P - 1               (P - 1) S
    broadcast               tree            ceil(log2 P)        root ceil(log2 P) S
    broadcast_coalesced     tree            as broadcast        as broadcast, all tensors
    reduce                  tree            ceil(log2 P)        S, the root 0
    gather                  naive           P - 1               S, the root 0
    scatter                 naive           P - 1               root (P - 1) S, the others 0
    sparse_all_reduce       compressed      3 (P - 1)           (P - 1) x entries, padded

``fast_all_reduce`` takes the direct one for small tensors, else the fast ring. ``share_reduce`` is
reduce-scatter, and ``share_only`` all-gather, of the chunks of one tensor.

On H hosts of m ranks, ``hierarchical_all_reduce`` sends 2 (H - 1) / H x S bytes over the network
card of each host; ``fast_hierarchical_all_reduce`` overlaps its parts. The exact numbers are in
``labkit.costs.traffic``. The module ``compressed`` sends gradients in
half the bytes or fewer.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
