"""PyTorch's DataParallel, in the same loop and with the same batches as ours."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from labkit.comm.comm import Comm
from labkit.strategies.base import MakeOptimizer, OnShares
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
        loss = self.gradients.add(inputs, targets, divisor=batch_size)
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
