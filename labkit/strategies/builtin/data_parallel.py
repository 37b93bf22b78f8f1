"""PyTorch's DataParallel, in the same loop and with the same batches as ours."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from labkit.comm.comm import Comm
from labkit.strategies.base import MakeOptimizer, Strategy
from labkit.strategies.local_gradients import LocalGradients
from labkit.strategies.update import Update
from labkit.units import format_count


class TorchDataParallel(Strategy):
    """``torch.nn.DataParallel``, the counterpart of ``data_parallel``.

    nn.DataParallel replicates on GPUs alone. On a machine without them it calls the module itself,
    on the CPU, with the whole batch, without replicas or threads, however many devices are named;
    on a machine with GPUs it refuses a module on the CPU, which is then called without it. The
    result is right, and the time is that of one device. ``notes`` says so.
    Batch statistics as in ``DataParallel``. The bytes that it moves are not counted.

    Args:
        devices: different GPUs, or ``cpu`` any number of times.
        accumulate, amp: see ``LocalGradients``.

    Raises:
        ValueError: a GPU that is named twice, or GPUs together with ``cpu``.
    """

    in_one_process = True
    through_comm = False
    instead: ClassVar = {
        "sync_batch_norm": "PyTorch's layers for it refuse the replicas of nn.DataParallel; use "
        "ddp or ring_all_reduce, with a rank for each device"
    }

    def __init__(self, devices: Sequence[str], accumulate: int = 1, amp: str | None = None):
        self.devices = [torch.device(name) for name in devices]
        self.settings = {"accumulate": accumulate, "amp": amp}
        kinds = {device.type for device in self.devices}
        if "cuda" in kinds and (len(kinds) > 1 or len(set(devices)) < len(devices)):
            raise ValueError(
                f"nn.DataParallel takes each GPU once and nothing else, got {', '.join(devices)}: "
                "give devices that differ, or run our own (without builtin)"
            )

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.model = model.to(self.devices[0]).train()
        gpus = [device.index for device in self.devices if device.type == "cuda"]
        # As nn.DataParallel itself asks; with GPUs it would refuse a module on the CPU.
        self.without = not gpus and torch.cuda.is_available()
        self.replicas = self.model if self.without else nn.DataParallel(self.model, gpus or None)
        self.comm = comm
        comm.session.time_on(self.devices)
        self.num_replicas = max(1, len(gpus))
        self.gradients = LocalGradients(comm, self.replicas, loss=self.loss, **self.settings)
        self.optimizer = make_optimizer(self.model.parameters())
        self.scaler = self.gradients.scaler
        self.update = Update(
            self.optimizer, self.model.parameters(), clip_norm=self.clip_norm, scaler=self.scaler
        )

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        self.optimizer.zero_grad()
        inputs, targets = inputs.to(self.devices[0]), targets.to(self.devices[0])
        loss = self.gradients.add(inputs, targets, divisor=batch_size)
        with self.comm.span("update"):
            self.update()
        return loss.to(self.comm.device)

    def notes(self) -> dict[str, Any]:
        if self.num_replicas == len(self.devices):
            return {"replicas": self.num_replicas}
        count = format_count(len(self.devices), "device")
        cause = f"nn.DataParallel found no GPU among {count} and"
        if self.without:
            cause = (
                f"nn.DataParallel would refuse the CPU on this machine with GPUs, and {count} of "
                "the CPU were named, so this run"
            )
        told = (
            f"{cause} called the module itself on the CPU: no replicas, no threads, the time of "
            "one device"
        )
        return {"replicas": 1, "note": told}
