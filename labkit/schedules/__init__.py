"""Rules that runs execute: who does what at which step. Pure Python, no torch, no processes.

    ring        ring all-reduce and its halves: which chunk goes where at each step
    tree        binomial trees, recursive doubling, pairwise exchange, dissemination
    servers     which worker meets which parameter server in which turn
    staleness   how many updates late a gradient is, and how a server bounds that
    buckets     which gradients DDP sends together
    top_k       how many elements a sparse gradient keeps
    stages      where split points cut a list of layers
    pipeline    GPipe and 1F1B: what each stage runs, and the messages in between

The real run executes a schedule, the figures draw it and the tests compare it with the textbook:
it is written once.
"""

from labkit.schedules.buckets import assign_buckets
from labkit.schedules.pipeline import (
    PIPELINES,
    Action,
    Hop,
    Message,
    check_micro_batches,
    gpipe,
    in_flight,
    one_f_one_b,
    pipeline_schedule,
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
from labkit.schedules.stages import as_split_points, check_split_points, stage_bounds, stage_ends
from labkit.schedules.staleness import StalenessTracker, Update, check_bound, in_time
from labkit.schedules.top_k import kept_elements
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
    "StalenessTracker",
    "Transfer",
    "Update",
    "as_split_points",
    "assign_buckets",
    "binomial_broadcast",
    "binomial_reduce",
    "check_bound",
    "check_micro_batches",
    "check_split_points",
    "chunk_bounds",
    "dissemination",
    "gpipe",
    "in_flight",
    "in_time",
    "kept_elements",
    "one_f_one_b",
    "owned_chunk",
    "pairwise_exchange",
    "pipeline_schedule",
    "recursive_doubling",
    "recursive_doubling_return",
    "ring_all_reduce",
    "ring_contributions",
    "ring_share_only",
    "ring_share_reduce",
    "server_turns",
    "stage_bounds",
    "stage_ends",
    "with_hops",
    "worker_turns",
]
