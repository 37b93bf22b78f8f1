"""What is trained on the two hosts, and by which contenders.

The main table needs devices that do not share this machine's cores. So the model computes asleep,
for a known time per sample, and has as many parameters as ResNet-18: gradients of that size are
really reduced, sent and added. The second table trains a real ResNet-18 on this machine's cores.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from labkit.schedules.ring import chunk_bounds
from labkit.workload.emulated_layer import EmulatedLayer

# ResNet-18 for 100 classes and images of 32 x 32 pixels, as the published run trained it.
PARAMETERS = 11_220_132
GRADIENT_BYTES = 4 * PARAMETERS
# Seconds per sample of a forward; a backward takes twice as long. The published GPUs took 142 ms
# for a step of one worker (128 samples), and 280 ms for one of four (64 samples each): 209 ms more
# than half of the first. In these a ring sends 3/2 x 44.9 MB, which makes 2.6 Gb/s. Here computing
# is 2.7 times as slow as there, so that at 1 Gb/s it stands to communication as it did there.
SAMPLE_S = 1e-3
# One worker's batch, and that of each of several: the published run divided a batch of 128 by the
# workers of a host, so that two hosts together had 256.
BATCHES = {1: 128, 2: 64, 4: 64}
REAL_BATCHES = {1: 16, 2: 8, 4: 8}
BUCKET_BYTES = 25 * 2**20
_BLOCKS = 10


class Weights(nn.Module):
    """So many parameters, which cost no computing to speak of, and have a gradient each.

    Shapes: [n, ...] to [n, ...].
    """

    def __init__(self, count: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count))

    def forward(self, value: Tensor) -> Tensor:
        return value + self.weight.square().mean()


def emulated_model(sample_s: float = SAMPLE_S, parameters: int = PARAMETERS) -> nn.Sequential:
    """Ten blocks of a tenth of the time and of the parameters each. [n, 10] to [n, 10]."""
    sizes = [end - start for start, end in chunk_bounds(parameters, _BLOCKS)]
    blocks = [nn.Sequential(EmulatedLayer(sample_s / _BLOCKS), Weights(size)) for size in sizes]
    return nn.Sequential(*blocks)


def block_bytes() -> list[int]:
    """The bytes of each block's gradient."""
    return [4 * (end - start) for start, end in chunk_bounds(PARAMETERS, _BLOCKS)]


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        world_size: workers, of which two share a host.
        strategy, options: see ``labkit train``.
        builtin: PyTorch's counterpart.
        dealt_out: ranks are dealt out to the hosts in turn, not host by host.
    """

    world_size: int
    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    builtin: bool = False
    dealt_out: bool = False


ALONE, ONE_HOST, FLAT = "one worker", "two on one host", "ring"
HIERARCHICAL, DEALT_OUT = "hierarchical", "ring, ranks dealt out"
# Ten epochs of 50,000 samples by DDP on TITAN RTX, in seconds; on one host with both of PyTorch's
# launchers. How fast the cable was is not known.
PUBLISHED_S: dict[str, tuple[float, ...]] = {
    ALONE: (555.08,),
    ONE_HOST: (302.00, 324.26),
    FLAT: (549.25,),
}
CONTENDERS = {
    ALONE: Contender(1, "ring_all_reduce"),
    ONE_HOST: Contender(2, "ring_all_reduce"),
    FLAT: Contender(4, "ring_all_reduce"),
    DEALT_OUT: Contender(4, "ring_all_reduce", dealt_out=True),
    HIERARCHICAL: Contender(4, "ring_all_reduce", {"hierarchical": True}),
    "ring, fp16": Contender(4, "ring_all_reduce", {"compress": "fp16"}),
    "hierarchical, fp16": Contender(
        4, "ring_all_reduce", {"compress": "fp16", "hierarchical": True}
    ),
    "ring, topk": Contender(4, "ring_all_reduce", {"compress": "topk"}),
    "DDP": Contender(4, "ddp"),
    "DDP, hierarchical": Contender(4, "ddp", {"hierarchical": True}),
    "PyTorch's DDP on gloo": Contender(4, "ddp", builtin=True),
    "PyTorch's DDP on labkit, hierarchical": Contender(
        4, "ddp", {"backend": "labkit", "hierarchical": True}, builtin=True
    ),
}

# How the lines of rank 0 begin that answer a turn.
ANSWER = "labkit two hosts: "
# What a rank does between its messages.
LOCAL = ("compute", "update", "compress")


def share(name: str) -> float:
    """How many times the samples of one worker's step this contender's step has."""
    workers = CONTENDERS[name].world_size
    return workers * BATCHES[workers] / BATCHES[1]


def published_speed_ups(name: str) -> list[float]:
    """One worker's published seconds / this contender's; empty if it was not published."""
    alone_s = PUBLISHED_S[ALONE][0]
    return [alone_s / seconds for seconds in PUBLISHED_S.get(name, ())]
