"""PyTorch's DataParallel and DistributedDataParallel, in the loop and with the batches of ours."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.backend.group import sent as sent_on_our_backend
from labkit.engine.comm.comm import Comm
from labkit.strategies.base import MakeOptimizer
from labkit.strategies.on_shares import OnShares
from labkit.strategies.saved_state import SavedState
from labkit.strategies.traits import Traits

# PyTorch's bucket size where a script gives no ``bucket_cap_mb``.
DEFAULT_BUCKET_MB = 25


@dataclass(eq=False)
class TorchDataParallel(OnShares):
    """``torch.nn.DataParallel``, the counterpart of ``data_parallel``.

    nn.DataParallel replicates on GPUs alone. On the CPU the module itself is called with the whole
    batch, without replicas or threads, however many devices are named: the result is right, and
    the time is that of one device. ``notes`` says so. Batch statistics as in ``DataParallel``. The
    bytes that it moves are not counted.
    """

    devices: Sequence[Any] = ()
    traits = Traits(in_one_process=True, through_comm=False)

    def move_to_device(self, comm: Comm, model: nn.Module) -> None:
        super().move_to_device(comm, model)
        comm.session.time_on(self.devices)
        # On a machine with GPUs it refuses a module on the CPU.
        self.gpus = [device.index for device in self.devices if device.type == "cuda"]
        if self.gpus:
            self.module = nn.DataParallel(self.model, self.gpus)

    def notes(self) -> dict[str, Any]:
        notes: dict[str, Any] = {"replicas": max(1, len(self.gpus))}
        if not self.gpus:
            notes["note"] = (
                f"nn.DataParallel replicates on GPUs, and {len(self.devices)} devices of the CPU "
                "were named: this run called the module itself, without replicas or threads, in "
                "the time of one device"
            )
        return notes


class BucketOrder(SavedState):
    """As of any technique; DDP also remembers in which order gradients became ready."""

    def rehearse(self, inputs: Tensor, targets: Tensor, batch_size: int) -> None:
        # After its first backward DDP assigns the gradients to other buckets, in whose order it
        # adds up from then on.
        self.strategy.add_gradients(inputs, targets, batch_size)
        self.strategy.optimizer.zero_grad()


@dataclass(eq=False)
class TorchDDP(OnShares):
    """``torch.nn.parallel.DistributedDataParallel``, the counterpart of ring all-reduce and DDP.

    DDP divides the summed gradient by the number of ranks. Shares may differ in size, so each rank
    scales its loss by P / batch_size: the mean over ranks is then the mean over samples. DDP's
    traffic bypasses ``Comm``; only our backend counts it. ``backend`` is that of a new process
    group, ``auto`` uses the group that the ranks have already.

    With the default ``bucket_mb`` DDP is given no size, as in most scripts: its buckets hold 1,
    25, 25, ... MiB. Given one size, even 25, it makes no small first bucket. So for any other
    ``bucket_mb`` it is given a list of sizes.
    """

    sync_batch_norm: bool = False
    backend: str = "auto"
    bucket_mb: float = DEFAULT_BUCKET_MB
    saved_state_class = BucketOrder
    runs_empty = True

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.group: Any = None if self.backend == "auto" else dist.new_group(backend=self.backend)
        super().setup(comm, model, make_optimizer)
        devices = [comm.device] if comm.device.type == "cuda" else None
        sizes: dict[str, Any] = {}
        if self.bucket_mb != DEFAULT_BUCKET_MB:
            sizes["bucket_cap_mb_list"] = [min(1, self.bucket_mb), self.bucket_mb]
        self.module = DistributedDataParallel(
            self.model, device_ids=devices, process_group=self.group, **sizes
        )
        self.no_sync = self.module.no_sync
        # In fp16 a loss P times as large would overflow sooner than on one device.
        if not self.precision.scaler.enabled:
            self.loss_factor = comm.world_size

    def finish_backward(self) -> None:
        if self.precision.scaler.enabled:
            for parameter in self.trained:
                if parameter.grad is not None:
                    parameter.grad *= self.comm.world_size

    def sent(self) -> tuple[int, int] | None:
        if dist.get_backend(self.group) != "labkit":
            return None
        messages, num_bytes = sent_on_our_backend()
        # BatchNorm's messages are on ``comm``.
        return messages + self.comm.messages, num_bytes + self.comm.bytes_sent
