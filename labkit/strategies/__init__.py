"""The techniques, one a file. They import neither each other nor the training loop."""

import importlib
from collections.abc import Callable

# name -> (ours, PyTorch's counterpart), each as module.class
_STRATEGIES = {
    "single": ("single.Single", "single.Single"),
    "data_parallel": ("data_parallel.DataParallel", "torch_builtin.TorchDataParallel"),
    "ddp": ("ddp.DDP", "torch_builtin.TorchDDP"),
    "parameter_server": ("parameter_server.ParameterServer", "torch_rpc.RpcParameterServer"),
    "async_parameter_server": (
        "async_parameter_server.AsyncParameterServer",
        "torch_rpc.RpcAsyncParameterServer",
    ),
    "model_parallel": ("model_parallel.ModelParallel", "torch_pipelining.TorchModelParallel"),
    "pipeline": ("pipeline.Pipeline", "torch_pipelining.TorchPipeline"),
    "ring_all_reduce": ("ring_all_reduce.RingAllReduce", "torch_builtin.TorchDDP"),
}
# Where devices are named, in one process instead of a rank for each.
_PLACED = {"model_parallel": "placed.PlacedModel"}
STRATEGIES = tuple(_STRATEGIES)


def check_name(name: str) -> None:
    """Raise ValueError, listing the known names, for an unknown one."""
    if name not in _STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}: choose one of {', '.join(STRATEGIES)}")


def get(name: str, *, builtin: bool = False, placed: bool = False) -> Callable:
    """The class that implements a technique, ours or PyTorch's counterpart.

    Args:
        name: of the technique.
        builtin: PyTorch's counterpart.
        placed: the variant of one process on several devices, where ours has one.

    Raises:
        ValueError: unknown name.
    """
    check_name(name)
    place = _STRATEGIES[name][builtin]
    if placed and not builtin:
        place = _PLACED.get(name, place)
    module, _, class_name = place.partition(".")
    return getattr(importlib.import_module(f"labkit.strategies.{module}"), class_name)
