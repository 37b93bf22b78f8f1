"""Timetables as data: who does what at which step. Pure generators, no torch and no processes.

The real run executes a schedule, the figures draw it, the tests compare it with the textbook, so
it is written once.
"""

from labkit.schedules.buckets import assign_buckets
from labkit.schedules.pipeline import (
    PIPELINES,
    Action,
    Hop,
    Message,
    gpipe,
    in_flight,
    one_f_one_b,
    with_hops,
)
from labkit.schedules.ring import (
    RingStep,
    chunk_bounds,
    owned_chunk,
    ring_all_reduce,
    ring_contributions,
    ring_share_only,
    ring_share_reduce,
)
from labkit.schedules.servers import server_turns, worker_turns
from labkit.schedules.stages import check_split_points, stage_bounds
from labkit.schedules.tree import (
    Transfer,
    binomial_broadcast,
    binomial_reduce,
    dissemination,
    pairwise_exchange,
    recursive_doubling,
    recursive_doubling_return,
)

__all__ = [
    "PIPELINES",
    "Action",
    "Hop",
    "Message",
    "RingStep",
    "Transfer",
    "assign_buckets",
    "binomial_broadcast",
    "binomial_reduce",
    "check_split_points",
    "chunk_bounds",
    "dissemination",
    "gpipe",
    "in_flight",
    "one_f_one_b",
    "owned_chunk",
    "pairwise_exchange",
    "recursive_doubling",
    "recursive_doubling_return",
    "ring_all_reduce",
    "ring_contributions",
    "ring_share_only",
    "ring_share_reduce",
    "server_turns",
    "stage_bounds",
    "with_hops",
    "worker_turns",
]
