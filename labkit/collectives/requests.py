"""What ranks ask for by name, and what they carry out together; both travel between them as JSON.

Symbols: P ranks.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import Tensor

from labkit.collectives.common import check_root, in_place
from labkit.collectives.reduction import Reduction
from labkit.comm.comm import Comm

JOIN = "join"
# Kinds whose tensors may differ in their first dimension.
BY_ROWS = ("allgather", "alltoall")
# How many tensors of a group an error shows.
_SHOWN = 4


@dataclass(frozen=True)
class Request:
    """What one rank wants done under a name.

    Attributes:
        name: by which the ranks agree.
        kind: ``allreduce``, ``allgather``, ``broadcast``, ``alltoall``, ``reducescatter``,
            ``barrier`` or ``join``.
        dtypes, shapes: of its tensors, one or (a group) several.
        op: of ``Reduction``, for allreduce and reducescatter.
        prescale, postscale: factors before and after the reduction.
        root: of a broadcast.
        splits: the rows for each rank, of an alltoall.
        has_value: whether this rank has a value for an allreduce. Otherwise it contributes zeros;
            if no rank has one, the result is None.
        in_place: whether the result goes into the tensors themselves.
    """

    name: str
    kind: str
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int | None = None
    splits: list[int] = field(default_factory=list)
    has_value: bool = True
    in_place: bool = False

    @classmethod
    def of(cls, name: str, kind: str, tensors: Sequence[Tensor] = (), **told: Any) -> "Request":
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        return cls(name, kind, dtypes, [list(tensor.shape) for tensor in tensors], **told)

    def common(self) -> tuple[Any, ...]:
        """What has to be equal on all ranks."""
        shapes = [shape[1:] if self.kind in BY_ROWS else shape for shape in self.shapes]
        scales = self.prescale, self.postscale
        return self.kind, self.dtypes, shapes, self.op, scales, self.root

    def described(self) -> str:
        """``allreduce float32 [2, 3] (sum)``, for example."""
        words = [self.kind]
        words += [f"{d} {shape}" for d, shape in list(zip(self.dtypes, self.shapes))[:_SHOWN]]
        words += [f"and {len(self.dtypes) - _SHOWN} more"] if len(self.dtypes) > _SHOWN else []
        words += [f"({self.op})"] if self.op else []
        words += [f"from rank {self.root}"] if self.root is not None else []
        if (self.prescale, self.postscale) != (1.0, 1.0):
            words.append(f"times {self.prescale:g} before and {self.postscale:g} after")
        return " ".join(words)

    def packed(self) -> tuple[Any, ...]:
        return astuple(self)


@dataclass(frozen=True)
class Decision:
    """What all ranks carry out together.

    Attributes:
        requests: one, or several all-reduces that are fused.
        error: why they cannot; empty if they can.
        rows: by rank, how many rows each tensor of an allgather has, or the splits of an alltoall.
        last: of a join, the rank that came last.
    """

    requests: list[Request]
    error: str = ""
    rows: list[list[int]] = field(default_factory=list)
    last: int = 0

    def packed(self) -> list[Any]:
        return [[one.packed() for one in self.requests], self.error, self.rows, self.last]

    @classmethod
    def unpacked(cls, values: list[Any]) -> "Decision":
        return cls([Request(*one) for one in values[0]], *values[1:])


def check(request: Request, tensors: Sequence[Tensor], comm: Comm) -> None:
    """Check what one rank can check alone, before anything is submitted.

    Raises:
        ValueError: not a dense tensor, a dtype that cannot be reduced, no first dimension,
            elements that share memory, a root that is not a rank, splits that do not add up.
    """
    for tensor in tensors:
        if tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(f"{request.kind} is for tensors on CPU or CUDA, not {tensor.device}")
        if request.in_place or tensor.layout != torch.strided:
            with in_place(tensor):
                pass
        if request.op:
            Reduction.of("sum" if request.op == "mean" else request.op, tensor)
        if request.kind in (*BY_ROWS, "reducescatter") and tensor.dim() == 0:
            raise ValueError(
                f"{request.kind} works along the first dimension, and {request.name!r} has none: "
                "use tensor.reshape(1)"
            )
    if request.kind == "broadcast":
        root: Any = request.root
        check_root(comm, root)
    if request.kind == "alltoall":
        splits, rows = request.splits, request.shapes[0][0]
        if len(splits) != comm.world_size or min(splits) < 0 or sum(splits) != rows:
            raise ValueError(
                f"alltoall of {rows} rows cannot be split as {splits}: give {comm.world_size} "
                "numbers, one for each rank, which add up to all rows"
            )


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name that another rank has sent."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of PyTorch")
    return found
