"""Rules that runs execute: which rank does what at which step. No torch, no processes.

    ring               ring all-reduce and its halves: which chunk goes where at each step
    hierarchical       all-reduce over hosts: inside each host, between hosts, inside again
    tree               binomial trees, recursive doubling, pairwise exchange, dissemination
    servers            which worker meets which parameter server in which turn
    staleness          how many updates late a gradient is, and how a server bounds that
    bucket_assignment  which gradients DDP sends together (when: ``strategies.ddp.bucketed``)
    top_k              how many elements a sparse gradient keeps
    split_points       where a list of layers is cut into stages
    pipeline           GPipe and 1F1B: what each stage runs, and the messages in between
    learning_rate      the learning rate of each update: warm-up, then constant, step or cosine

Each schedule is written once: the real run executes it, the figures draw it, and the tests compare
it with the textbook.
"""

from labkit.schedules.bucket_assignment import assign_buckets as assign_buckets
from labkit.schedules.hierarchical import (
    HostStep as HostStep,
    hierarchical_all_reduce as hierarchical_all_reduce,
)
from labkit.schedules.learning_rate import (
    LrSchedule as LrSchedule,
    lr_factor as lr_factor,
    parse_lr_schedule as parse_lr_schedule,
)
from labkit.schedules.pipeline import (
    PIPELINES as PIPELINES,
    Action as Action,
    Hop as Hop,
    Message as Message,
    gpipe as gpipe,
    in_flight as in_flight,
    one_f_one_b as one_f_one_b,
    pipeline_schedule as pipeline_schedule,
    with_hops as with_hops,
)
from labkit.schedules.ring import (
    RingStep as RingStep,
    chunk_bounds as chunk_bounds,
    owned_chunk as owned_chunk,
    ring_all_reduce as ring_all_reduce,
    ring_contributions as ring_contributions,
    ring_share_only as ring_share_only,
    ring_share_reduce as ring_share_reduce,
)
from labkit.schedules.servers import server_turns as server_turns, worker_turns as worker_turns
from labkit.schedules.split_points import (
    as_split_points as as_split_points,
    check_split_points as check_split_points,
    stage_bounds as stage_bounds,
    stage_ends as stage_ends,
)
from labkit.schedules.staleness import (
    StalenessTracker as StalenessTracker,
    Update as Update,
    check_bound as check_bound,
    in_time as in_time,
)
from labkit.schedules.top_k import kept_elements as kept_elements
from labkit.schedules.tree import (
    Transfer as Transfer,
    binomial_broadcast as binomial_broadcast,
    binomial_reduce as binomial_reduce,
    dissemination as dissemination,
    pairwise_exchange as pairwise_exchange,
    recursive_doubling as recursive_doubling,
    recursive_doubling_return as recursive_doubling_return,
)
