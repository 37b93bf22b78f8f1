"""The techniques, one per file or folder; only the mesh imports others, none the training loop."""

import importlib
from typing import TYPE_CHECKING

from labkit.units import check_choice

if TYPE_CHECKING:  # base imports torch, and checking a name should take no time
    from labkit.strategies.base import Strategy

# name -> (ours, PyTorch's counterpart), each as module.class
TECHNIQUES = {
    "single": ("on_shares.Single", "on_shares.Single"),
    "data_parallel": ("data_parallel.DataParallel", "builtin.ddp.TorchDataParallel"),
    "ddp": ("ddp.DDP", "builtin.ddp.TorchDDP"),
    "parameter_server": ("parameter_server.ParameterServer", "builtin.rpc.RpcParameterServer"),
    "async_parameter_server": (
        "async_parameter_server.AsyncParameterServer",
        "builtin.rpc.RpcAsyncParameterServer",
    ),
    "model_parallel": ("model_parallel.ModelParallel", "builtin.pipeline.TorchModelParallel"),
    "pipeline": ("model_parallel.Pipeline", "builtin.pipeline.TorchPipeline"),
    "mesh": ("mesh.Mesh", "builtin.mesh.TorchMesh"),
    "ring_all_reduce": ("ring_all_reduce.RingAllReduce", "builtin.ddp.TorchDDP"),
    "tensor_parallel": (
        "tensor_parallel.TensorParallel",
        "builtin.tensor_parallel.TorchTensorParallel",
    ),
    "expert_parallel": (
        "expert_parallel.ExpertParallel",
        "builtin.expert_parallel.TorchExpertParallel",
    ),
    "sharded": ("sharded.Sharded", "builtin.sharded.TorchSharded"),
}
# The variants for runs that name devices: one process instead of one rank per device.
IN_ONE_PROCESS = {"model_parallel": "model_parallel.ModelParallelOneProcess"}
STRATEGIES = tuple(TECHNIQUES)


def get(name: str, *, builtin: bool = False, in_one_process: bool = False) -> "type[Strategy]":
    """Return the class of a technique: ours, PyTorch's, or ours for devices in one process."""
    check_choice("strategy", name, STRATEGIES)
    path = TECHNIQUES[name][builtin]
    if in_one_process and not builtin:
        path = IN_ONE_PROCESS.get(name, path)
    module, _, class_name = path.rpartition(".")
    return getattr(importlib.import_module(f"labkit.strategies.{module}"), class_name)
