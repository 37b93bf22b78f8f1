"""The techniques; only the mesh imports others, and none of them the training loop.

A file has the name of its technique, but for a model that is cut into stages, with or without a
pipeline (``model_parallel``, on ``staged_model``), and for one device (``on_shares``).
"""

import importlib
from typing import TYPE_CHECKING

from labkit.units import check_choice

if TYPE_CHECKING:  # base imports torch, and checking a name should take no time
    from labkit.strategies.base import Strategy

# name -> module.class
TECHNIQUES = {
    "single": "on_shares.Single",
    "data_parallel": "data_parallel.DataParallel",
    "ddp": "ddp.DDP",
    "parameter_server": "parameter_server.ParameterServer",
    "async_parameter_server": "async_parameter_server.AsyncParameterServer",
    "model_parallel": "model_parallel.ModelParallel",
    "pipeline": "model_parallel.Pipeline",
    "mesh": "mesh.Mesh",
    "ring_all_reduce": "ring_all_reduce.RingAllReduce",
    "tensor_parallel": "tensor_parallel.TensorParallel",
    "expert_parallel": "expert_parallel.ExpertParallel",
    "sharded": "sharded.Sharded",
}
# The variants for runs that name devices: one process instead of one rank per device.
IN_ONE_PROCESS = {"model_parallel": "model_parallel.ModelParallelOneProcess"}
STRATEGIES = tuple(TECHNIQUES)


def get(name: str, *, in_one_process: bool = False) -> "type[Strategy]":
    """Return the class of a technique, or of its variant for devices in one process."""
    check_choice("strategy", name, STRATEGIES)
    path = TECHNIQUES[name]
    if in_one_process:
        path = IN_ONE_PROCESS.get(name, path)
    module, _, class_name = path.rpartition(".")
    return getattr(importlib.import_module(f"labkit.strategies.{module}"), class_name)
