"""Parts of all collectives: reductions, a flat tensor to work on, a step of a schedule, checks.

All collectives reduce through one class, so an operation that does not suit a dtype is refused in
the same words everywhere, before the first message.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from labkit.engine.comm.comm import Comm
from labkit.engine.comm.transport import check_tensor, check_writable, describe
from labkit.schedules.tree import Transfer
from labkit.units import check_choice

COMBINE = {
    "sum": torch.add,
    "mean": torch.add,
    "integer_mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
MEANS = ("mean", "integer_mean")


@dataclass(frozen=True)
class Reduction:
    """An operation that suits a dtype; make one with ``Reduction.of``.

    Attributes:
        op: "sum", "mean", "max", "min", "product", or bitwise "band" (and), "bor" (or), "bxor".
            "mean" is for floating-point and complex numbers; "integer_mean" rounds towards 0.
        accumulate_dtype: in which partial results travel and accumulate: for sum, mean and product
            of float16 and bfloat16 it is float32, as P - 1 roundings to 16 bits would add up;
            otherwise the tensor's dtype.
    """

    op: str
    accumulate_dtype: torch.dtype

    @classmethod
    def of(cls, op: str, tensor: Tensor) -> "Reduction":
        """Check ``op`` against the tensor; ValueError, the same on all ranks, if it cannot be."""
        check_choice("operation", op, COMBINE)
        check_tensor(tensor)
        return _reduction(op, tensor.dtype)

    @property
    def partial(self) -> str:
        """Return the operation on some of the ranks: a mean is a sum until all are in it."""
        return "sum" if self.op in MEANS else self.op

    def combine(self, values: Tensor, incoming: Tensor, out: Tensor) -> Tensor:
        """Write ``values`` op ``incoming`` to ``out``, which may be either of them.

        NaN, overflow and wrap-around behave as in PyTorch.
        """
        return COMBINE[self.op](values, incoming, out=out)

    def finish(self, total: Tensor, world_size: int) -> Tensor:
        """Turn ``total`` into the result, in place: the mean divides by P."""
        if self.op == "mean":
            total.div_(world_size)
        elif self.op == "integer_mean":
            total.div_(world_size, rounding_mode="trunc")
        return total


@cache
def _reduction(op: str, dtype: torch.dtype) -> Reduction:
    rounds = dtype in (torch.float16, torch.bfloat16) and op in ("sum", "mean", "product")
    reduction = Reduction(op, torch.float32 if rounds else dtype)
    try:
        trial = torch.zeros(1, dtype=reduction.accumulate_dtype)
        reduction.finish(reduction.combine(trial, trial, out=trial), 1)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"cannot take the {op} of {str(dtype).removeprefix('torch.')} over ranks ({error}): "
            "convert first, for example with .float(), or use another operation"
        ) from None
    return reduction


def mean_of(dtype: torch.dtype) -> str:
    """Name the mean that NCCL and Horovod take of a ``dtype``: "mean", or "integer_mean".

    A learner's own call with "mean" refuses integers, since a rounded mean is seldom meant. The
    clients of these two average counts and step numbers. (NCCL, ``FuncSumPostDiv``: the sum wraps
    around in the dtype, and its magnitude is divided. It refuses the mean of bool, as we do.)
    """
    is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    return "integer_mean" if is_integer else "mean"


@contextmanager
def in_place(tensor: Tensor) -> Iterator[Tensor]:
    """Lend ``tensor`` (any shape and strides, with or without gradients) as a flat tensor [N].

    It is a view, or a copy that is written back at the end. ValueError, on every rank and before
    any message, for a tensor that is not dense, or expanded.
    """
    check_tensor(tensor)
    check_writable(tensor)
    # The bytes of a lazily conjugated or negated tensor (tensor.conj()) are not its values.
    detached = tensor.detach()
    flat = detached.resolve_conj().resolve_neg().contiguous().view(-1)
    yield flat
    if flat.data_ptr() != detached.data_ptr():
        detached.copy_(flat.view(detached.shape))


@contextmanager
def collective_in_place(
    comm: Comm, name: str, tensor: Tensor, option: str, kind: str = "all_reduce"
) -> Iterator[Tensor]:
    """Lend ``tensor`` as ``in_place`` does, inside ``Comm.collective`` and a span ``kind``."""
    with in_place(tensor) as flat, comm.collective(name, tensor, option), comm.span(kind):
        yield flat


def transfer(comm: Comm, step: Transfer, outgoing: Tensor, incoming: Tensor) -> None:
    """Execute one step of a schedule: send ``outgoing``, fill ``incoming``, or both at once."""
    if step.dst is not None and step.src is not None:
        comm.exchange(outgoing, step.dst, incoming, step.src)
    elif step.dst is not None:
        comm.send(outgoing, step.dst)
    elif step.src is not None:
        comm.recv(incoming, step.src)


def new_like(tensor: Tensor) -> Tensor:
    """Make a tensor to receive into: shape and dtype of ``tensor``, contiguous, no gradient."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)


def check_root(comm: Comm, root: int) -> None:
    """Raise ValueError, the same on every rank, unless ``root`` is a rank."""
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < comm.world_size:
        raise ValueError(
            f"root {root!r} is not a rank: with world size {comm.world_size} the ranks are "
            f"0 to {comm.world_size - 1}"
        )


def check_one_per_rank(comm: Comm, tensors: list[Tensor], role: str) -> None:
    """Raise ValueError unless there are P tensors; ``role`` names them in the message."""
    if len(tensors) != comm.world_size:
        raise ValueError(
            f"{len(tensors)} {role} for world size {comm.world_size}: give one for each rank"
        )


def check_fits(tensor: Tensor, out: Tensor, role: str) -> None:
    """Raise ValueError unless shape and dtype are equal: a copy would convert and broadcast."""
    if describe(tensor) != describe(out):
        raise ValueError(
            f"{role} is {describe(tensor)}, but the output for it is {describe(out)}: "
            "give both the same shape and dtype"
        )
