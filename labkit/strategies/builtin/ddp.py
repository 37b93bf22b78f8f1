"""PyTorch's DataParallel and DistributedDataParallel, in the loop and with the batches of ours."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.backend.chosen import use
from labkit.backend.group import sent as sent_on_our_backend
from labkit.collectives import fast_hierarchical_all_reduce
from labkit.comm.comm import Comm
from labkit.strategies.base import MakeOptimizer, OnShares
from labkit.strategies.sync_batch_norm import GlobalBatch
from labkit.units import format_count


@dataclass(eq=False)
class TorchDataParallel(OnShares):
    """``torch.nn.DataParallel``, the counterpart of ``data_parallel``.

    nn.DataParallel replicates on GPUs alone. On the CPU the module itself is called with the whole
    batch, without replicas or threads, however many devices are named: the result is right, and
    the time is that of one device. ``notes`` says so. Batch statistics as in ``DataParallel``. The
    bytes that it moves are not counted.
    """

    devices: Sequence[Any] = ()
    in_one_process = True
    through_comm = False
    instead: ClassVar = {
        "sync_batch_norm": "PyTorch's layers for it refuse the replicas of nn.DataParallel; use "
        "ddp or ring_all_reduce, with a rank for each device"
    }

    def __post_init__(self) -> None:
        names, self.devices = self.devices, [torch.device(name) for name in self.devices]
        kinds = {device.type for device in self.devices}
        if "cuda" in kinds and (len(kinds) > 1 or len(set(names)) < len(names)):
            raise ValueError(
                f"nn.DataParallel takes each GPU once and nothing else, got {', '.join(names)}: "
                "give devices that differ, or run our own (without builtin)"
            )

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.comm, self.model = comm, model.to(self.devices[0]).train()
        comm.session.time_on(self.devices)
        gpus = [device.index for device in self.devices if device.type == "cuda"]
        self.num_replicas = max(1, len(gpus))
        # On a machine with GPUs it refuses a module on the CPU.
        self.compute_with(nn.DataParallel(self.model, gpus) if gpus else self.model)
        self.optimizer = make_optimizer(self.model.parameters())
        self.update = self.update_of(self.model.parameters())

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        self.optimizer.zero_grad()
        inputs, targets = inputs.to(self.devices[0]), targets.to(self.devices[0])
        loss = self.gradients.add(inputs, targets, batch_size)
        with self.comm.span("update"):
            self.update()
        return loss.to(self.comm.device)

    def notes(self) -> dict[str, Any]:
        notes: dict[str, Any] = {"replicas": self.num_replicas}
        if self.num_replicas < len(self.devices):
            count = format_count(len(self.devices), "device")
            notes["note"] = (
                f"nn.DataParallel replicates on GPUs, and {count} of the CPU were named: this run "
                "called the module itself, without replicas or threads, in the time of one device"
            )
        return notes


@dataclass(eq=False)
class TorchDDP(OnShares):
    """``torch.nn.parallel.DistributedDataParallel``, the counterpart of ring all-reduce and DDP.

    DDP divides the summed gradient by the number of ranks. Shares may differ in size, so each
    rank scales its loss by P / batch_size: the mean over ranks is then the mean over samples. In
    fp16 a loss P times as large would overflow sooner than on one device, so there the summed
    gradients are multiplied by P instead.
    Batch statistics (BatchNorm): each rank normalises with the statistics of its own share, and
    all ranks get rank 0's running averages before every forward pass, here also at the end of an
    epoch.
    DDP's traffic bypasses ``Comm``; only our backend counts it.

    DDP's ``bucket_cap_mb`` is ``bucket_mb``. ``backend`` is that of a new process group, ``auto``
    uses the group that the ranks have already; with ``hierarchical`` our backend sums inside each
    host first. ``sync_batch_norm`` is done over NCCL by ``nn.SyncBatchNorm``, which refuses the
    CPU, elsewhere by labkit's layers over ``Comm``; ``notes`` say which.
    """

    straggler: tuple[int, float] | None = None
    sync_batch_norm: bool = False
    backend: str = "auto"
    bucket_mb: float = 25
    hierarchical: bool = False
    replaces_buffers = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hierarchical and self.backend != "labkit":
            raise ValueError(
                f"hierarchical is an all-reduce of the labkit backend, and backend "
                f"{self.backend!r} chooses its own: use backend 'labkit', or no builtin"
            )

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.group: Any = None
        if self.backend != "auto":
            self.group = dist.new_group(backend=self.backend)
        if self.hierarchical:
            self.used_before = use(fast_hierarchical_all_reduce)
        by_torch = self.sync_batch_norm and dist.get_backend(self.group) == "nccl"
        if by_torch:
            self.synchronised_by, self.sync_batch_norm = "torch", False
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model, self.group)
        self.place(comm, model)
        devices = [comm.device] if comm.device.type == "cuda" else None
        self.replica = DistributedDataParallel(
            self.model, device_ids=devices, process_group=self.group, bucket_cap_mb=self.bucket_mb
        )
        self.compute_with(self.replica)
        if by_torch:
            # So that all ranks have as many micro-batches; PyTorch's layers take empty ones.
            self.global_batch = GlobalBatch(comm, self.model, self.workers, self.accumulate)
            self.gradients.global_batch, self.gradients.takes_empty = self.global_batch, True
            self.sync_batch_norm = True
        self.optimizer = make_optimizer(self.replica.parameters())
        self.update = self.update_of(self.model.parameters())

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        self.optimizer.zero_grad()
        ranks, no_sync = self.comm.world_size, self.replica.no_sync
        divisor = batch_size if self.scaler.is_enabled() else batch_size / ranks
        loss = self.gradients.add(inputs, targets, batch_size, divisor, no_sync, True)
        with self.comm.span("update"):
            if self.scaler.is_enabled():
                for parameter in self.update.parameters:
                    if parameter.grad is not None:
                        parameter.grad *= ranks
            self.update()
        return loss

    def rehearse(self, inputs: Tensor, targets: Tensor, batch_size: int) -> None:
        # After its first backward DDP assigns the gradients to other buckets, in whose order it
        # adds up from then on.
        self.gradients.add(inputs, targets, batch_size, even_if_empty=True)
        self.optimizer.zero_grad()

    def end_epoch(self) -> None:
        # DDP broadcasts buffers in the next forward pass, but no pass follows the last step.
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0, group=self.group)

    def sent(self) -> tuple[int, int] | None:
        if dist.get_backend(self.group) != "labkit":
            return None
        messages, num_bytes = sent_on_our_backend()
        # The statistics of BatchNorm.
        return messages + self.comm.messages, num_bytes + self.comm.bytes_sent

    def close(self) -> None:
        if self.hierarchical:
            use(self.used_before)
