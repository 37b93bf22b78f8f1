"""PyTorch's counterparts of our techniques, under the same names, in the same training loop."""

import importlib

import torch.distributed as dist
from torch import nn

from labkit.engine.comm.comm import Comm
from labkit.strategies.base import Strategy

# The technique, and the module.class of PyTorch's counterpart.
TECHNIQUES = {
    "data_parallel": "ddp.TorchDataParallel",
    "ddp": "ddp.TorchDDP",
    "parameter_server": "rpc.RpcParameterServer",
    "async_parameter_server": "rpc.RpcAsyncParameterServer",
    "model_parallel": "pipeline.TorchModelParallel",
    "pipeline": "pipeline.TorchPipeline",
    "mesh": "mesh.TorchMesh",
    "ring_all_reduce": "ddp.TorchDDP",
    "tensor_parallel": "tensor_parallel.TorchTensorParallel",
    "expert_parallel": "expert_parallel.TorchExpertParallel",
    "sharded": "sharded.TorchSharded",
}


def get(name: str) -> type[Strategy]:
    """Return the class of PyTorch's counterpart of a technique."""
    module, _, class_name = TECHNIQUES[name].rpartition(".")
    return getattr(importlib.import_module(f"labkit.builtin.{module}"), class_name)


def check_dtensor(comm: Comm) -> None:
    """Raise ValueError on GPUs over gloo, where a DTensor's first collective would crash."""
    if comm.device.type == "cuda" and dist.get_backend() == "gloo":
        raise ValueError(
            "PyTorch's DTensor and fully_shard need NCCL on GPUs, and ranks that share one talk "
            "over gloo: use a GPU for each rank, device cpu, or leave builtin out"
        )


def check_no_scalars(model: nn.Module) -> None:
    """Raise ValueError for parameters of no dimension, which ``fully_shard`` refuses to cut."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ValueError(
                f"PyTorch's fully_shard cuts no scalars, and parameter {name} is one: give it "
                "shape [1], or leave builtin out"
            )
