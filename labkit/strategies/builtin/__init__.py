"""PyTorch's counterparts of our techniques, under the same names, in the same training loop."""

import torch.distributed as dist

from labkit.comm.comm import Comm


def check_dtensor(comm: Comm) -> None:
    """ValueError where a DTensor's first collective would crash the process: on GPUs over gloo."""
    if comm.device.type == "cuda" and dist.get_backend() == "gloo":
        raise ValueError(
            "PyTorch's DTensor and fully_shard need NCCL on GPUs, and ranks that share one talk "
            "over gloo: use a GPU for each rank, device cpu, or leave builtin out"
        )
