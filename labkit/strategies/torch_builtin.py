"""PyTorch's own counterparts, run on the same loop, data and batches as ours."""

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from labkit.comm import Comm
from labkit.models import logits_of, state_of


class TorchDDP:
    """``torch.nn.parallel.DistributedDataParallel``, the counterpart of ring all-reduce and DDP.

    DDP divides the summed gradient by the number of ranks. Shares may differ in size, so each
    rank scales its loss by P / batch_size: the mean over ranks is then the mean over samples.
    Its traffic goes past ``Comm``, so it is not counted.

    Args:
        backend: of a process group of its own, ``gloo``, ``nccl`` or ``labkit``; ``auto`` takes
            the one that the ranks have met in.
    """

    def __init__(self, backend: str = "auto"):
        self.backend = backend

    def setup(self, comm: Comm, model: nn.Module, make_optimizer) -> None:
        self.comm = comm
        devices = [comm.device] if comm.device.type == "cuda" else None
        group = None if self.backend == "auto" else dist.new_group(backend=self.backend)
        self.model = DistributedDataParallel(
            model.to(comm.device).train(), device_ids=devices, process_group=group
        )
        self.optimizer = make_optimizer(self.model.parameters())

    def share(self) -> tuple[int, int]:
        return self.comm.rank, self.comm.world_size

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        with self.comm.span("compute"):
            self.optimizer.zero_grad()
            loss = functional.cross_entropy(self.model(inputs), targets, reduction="sum")
            (loss * self.comm.world_size / batch_size).backward()
        with self.comm.span("update"):
            self.optimizer.step()
        return loss

    def predict(self, inputs: Tensor) -> Tensor:
        return logits_of(self.model.module, inputs)

    def end_epoch(self) -> None:
        pass

    def full_state(self) -> dict[str, Tensor]:
        return state_of(self.model.module)
