from .bucket_assignment import assign_buckets as assign_buckets
from .hierarchical import (
    HostStep as HostStep,
    hierarchical_all_reduce as hierarchical_all_reduce,
)
from .learning_rate import (
    LrSchedule as LrSchedule,
    lr_factor as lr_factor,
    parse_lr_schedule as parse_lr_schedule,
)
from .pipeline import (
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
from .ring import (
    RingStep as RingStep,
    chunk_bounds as chunk_bounds,
    owned_chunk as owned_chunk,
    ring_all_reduce as ring_all_reduce,
    ring_contributions as ring_contributions,
    ring_share_only as ring_share_only,
    ring_share_reduce as ring_share_reduce,
)
from .servers import server_turns as server_turns, worker_turns as worker_turns
from .split_points import (
    as_split_points as as_split_points,
    check_split_points as check_split_points,
    stage_bounds as stage_bounds,
    stage_ends as stage_ends,
)
from .staleness import (
    StalenessTracker as StalenessTracker,
    Update as Update,
    check_bound as check_bound,
    in_time as in_time,
)
from .top_k import kept_elements as kept_elements
from .tree import (
    Transfer as Transfer,
    binomial_broadcast as binomial_broadcast,
    binomial_reduce as binomial_reduce,
    dissemination as dissemination,
    pairwise_exchange as pairwise_exchange,
    recursive_doubling as recursive_doubling,
    recursive_doubling_return as recursive_doubling_return,
)
