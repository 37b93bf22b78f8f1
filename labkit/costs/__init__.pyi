from .async_run import AsyncRun as AsyncRun, simulate as simulate
from .ddp_step import (
    BucketTimes as BucketTimes,
    StepModel as StepModel,
    bucket_times as bucket_times,
    predict_step as predict_step,
)
from .hosts import (
    card_bytes as card_bytes,
    hierarchical_all_reduce_cost as hierarchical_all_reduce_cost,
    hosts_all_reduce_seconds as hosts_all_reduce_seconds,
)
from .link import Link as Link, fit_link as fit_link
from .makespan import makespan_s as makespan_s, pipeline_streams as pipeline_streams
from .pipeline_timeline import (
    Slot as Slot,
    bubble as bubble,
    bubble_formula as bubble_formula,
    predicted_slots as predicted_slots,
)
from .seconds import (
    all_reduce_seconds as all_reduce_seconds,
    crossover_bytes as crossover_bytes,
    parameter_server_seconds as parameter_server_seconds,
)
from .traffic import (
    Cost as Cost,
    all_gather_cost as all_gather_cost,
    all_to_all_cost as all_to_all_cost,
    barrier_cost as barrier_cost,
    broadcast_cost as broadcast_cost,
    compressed_cost as compressed_cost,
    data_parallel_cost as data_parallel_cost,
    gather_cost as gather_cost,
    model_parallel_cost as model_parallel_cost,
    naive_all_reduce_cost as naive_all_reduce_cost,
    parameter_server_cost as parameter_server_cost,
    reduce_cost as reduce_cost,
    reduce_scatter_cost as reduce_scatter_cost,
    ring_all_reduce_cost as ring_all_reduce_cost,
    scatter_cost as scatter_cost,
    share_only_cost as share_only_cost,
    share_reduce_cost as share_reduce_cost,
    tree_all_reduce_cost as tree_all_reduce_cost,
)
