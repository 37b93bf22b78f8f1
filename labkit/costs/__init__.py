"""Formulas: the steps, messages, bytes and seconds of each technique, on paper.

    traffic             what every collective and technique sends, exact to the byte
    link                the alpha-beta model of a link, fitted to measured messages
    seconds             an all-reduce, a parameter server
    ddp_step            a step of DDP: backward, and its buckets beside it
    async_run           a run of an asynchronous parameter server
    pipeline_timeline   a step of a pipeline, action by action (makespan: its length alone)

Nothing that counts a real run's messages imports this room, so the two can disagree.
"""

from labkit.costs.async_run import AsyncRun, simulate
from labkit.costs.ddp_step import BucketTimes, StepModel, bucket_times, predict_step
from labkit.costs.link import Link, fit_link
from labkit.costs.makespan import makespan_s, pipeline_streams
from labkit.costs.pipeline_timeline import Slot, bubble, bubble_formula, predicted_slots
from labkit.costs.seconds import all_reduce_seconds, crossover_bytes, parameter_server_seconds
from labkit.costs.traffic import (
    Cost,
    all_gather_cost,
    all_to_all_cost,
    async_parameter_server_cost,
    barrier_cost,
    broadcast_cost,
    compressed_cost,
    data_parallel_cost,
    ddp_update_cost,
    gather_cost,
    model_parallel_cost,
    naive_all_reduce_cost,
    parameter_server_cost,
    reduce_cost,
    reduce_scatter_cost,
    ring_all_reduce_cost,
    scatter_cost,
    share_only_cost,
    share_reduce_cost,
    tree_all_reduce_cost,
)

__all__ = [
    "AsyncRun",
    "BucketTimes",
    "Cost",
    "Link",
    "Slot",
    "StepModel",
    "all_gather_cost",
    "all_reduce_seconds",
    "all_to_all_cost",
    "async_parameter_server_cost",
    "barrier_cost",
    "broadcast_cost",
    "bubble",
    "bubble_formula",
    "bucket_times",
    "compressed_cost",
    "crossover_bytes",
    "data_parallel_cost",
    "ddp_update_cost",
    "fit_link",
    "gather_cost",
    "makespan_s",
    "model_parallel_cost",
    "naive_all_reduce_cost",
    "parameter_server_cost",
    "parameter_server_seconds",
    "pipeline_streams",
    "predict_step",
    "predicted_slots",
    "reduce_cost",
    "reduce_scatter_cost",
    "ring_all_reduce_cost",
    "scatter_cost",
    "share_only_cost",
    "share_reduce_cost",
    "simulate",
    "tree_all_reduce_cost",
]
