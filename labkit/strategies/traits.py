"""Facts about a technique that a training run needs before it starts."""

import enum
from dataclasses import dataclass


class Division(enum.Flag):
    """The way in which ranks divide the trained tensors: what the optimizer of one of them has."""

    NONE = 0  # all parameters
    LAYERS = enum.auto()  # some layers' parameters
    ROWS = enum.auto()  # some rows of parameters
    ELEMENTS = enum.auto()  # a flat tensor of a part of all parameters


@dataclass(frozen=True)
class Traits:
    """The traits of a technique; its options may decide some of them.

    Attributes:
        in_one_process: whether world size N means N ``devices`` in one process, not N ranks.
        survives_lost_workers: whether the run continues when a rank other than 0 dies.
        takes_whole_batch: whether each rank needs all of a batch, not a share.
        through_comm: whether all traffic passes through ``comm``, which counts it.
        no_checkpoint: the reason why its runs have no checkpoints; empty if they may have.
        predicts_together: whether all ranks call ``predict`` equally often, some with no samples.
        balances_experts: whether it computes the balance loss of experts over a whole batch.
        division: how ranks divide the trained tensors among their optimizers.
    """

    in_one_process: bool = False
    survives_lost_workers: bool = False
    takes_whole_batch: bool = False
    through_comm: bool = True
    no_checkpoint: str = ""
    predicts_together: bool = False
    balances_experts: bool = False
    division: Division = Division.NONE
