"""Formulas: steps, messages, bytes and seconds of each technique, on paper.

The counts are exact, so tests hold them to the byte. The seconds are a model: straight lines in
the number of bytes, fitted to this machine (``fit_link``).
"""

from labkit.costs.link import Link, fit_link
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
    "Cost",
    "Link",
    "all_gather_cost",
    "all_reduce_seconds",
    "all_to_all_cost",
    "async_parameter_server_cost",
    "barrier_cost",
    "broadcast_cost",
    "compressed_cost",
    "crossover_bytes",
    "data_parallel_cost",
    "ddp_update_cost",
    "fit_link",
    "gather_cost",
    "model_parallel_cost",
    "naive_all_reduce_cost",
    "parameter_server_cost",
    "parameter_server_seconds",
    "reduce_cost",
    "reduce_scatter_cost",
    "ring_all_reduce_cost",
    "scatter_cost",
    "share_only_cost",
    "share_reduce_cost",
    "tree_all_reduce_cost",
]
