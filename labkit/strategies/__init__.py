"""The techniques, one per file or folder. They do not import each other or the training loop."""

import importlib
from typing import TYPE_CHECKING

from labkit.units import check_choice

if TYPE_CHECKING:  # base imports torch, and checking a name should take no time
    from labkit.strategies.base import Strategy

# name -> (ours, PyTorch's counterpart), each as module.class
TECHNIQUES = {
    "single": ("single.Single", "single.Single"),
    "data_parallel": ("data_parallel.DataParallel", "builtin.ddp.TorchDataParallel"),
    "ddp": ("ddp.DDP", "builtin.ddp.TorchDDP"),
    "parameter_server": ("parameter_server.ParameterServer", "builtin.rpc.RpcParameterServer"),
    "async_parameter_server": (
        "async_parameter_server.AsyncParameterServer",
        "builtin.rpc.RpcAsyncParameterServer",
    ),
    "model_parallel": ("model_parallel.ModelParallel", "builtin.pipeline.TorchModelParallel"),
    "pipeline": ("pipeline.Pipeline", "builtin.pipeline.TorchPipeline"),
    "ring_all_reduce": ("ring_all_reduce.RingAllReduce", "builtin.ddp.TorchDDP"),
}
# The variants for runs that name devices: one process instead of one rank per device.
IN_ONE_PROCESS = {"model_parallel": "model_parallel.ModelParallelOneProcess"}
STRATEGIES = tuple(TECHNIQUES)


def check_name(name: str) -> None:
    """Raise ValueError, listing the known names, for an unknown one."""
    check_choice("strategy", name, STRATEGIES)


def get(name: str, *, builtin: bool = False, in_one_process: bool = False) -> "type[Strategy]":
    """The class that implements a technique, ours or PyTorch's counterpart.

    Args:
        name: one of ``STRATEGIES``.
        builtin: return PyTorch's counterpart.
        in_one_process: return our variant for several devices in one process, if there is one.

    Raises:
        ValueError: unknown name.
    """
    check_name(name)
    place = TECHNIQUES[name][builtin]
    if in_one_process and not builtin:
        place = IN_ONE_PROCESS.get(name, place)
    module, _, class_name = place.rpartition(".")
    return getattr(importlib.import_module(f"labkit.strategies.{module}"), class_name)
