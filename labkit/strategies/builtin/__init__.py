"""PyTorch's counterparts of our techniques, under the same names, in the same training loop."""

import torch.distributed as dist
from torch import nn

from labkit.comm.comm import Comm


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
