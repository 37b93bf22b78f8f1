"""Reductions, which combine the values of two ranks: sum, mean, product, max, min, bitwise.

All collectives reduce through this one class, so an operation that does not suit a dtype is
refused in the same words everywhere, before the first message.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.units import check_choice

COMBINE = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
# These operations round, so sums of 16-bit floats are accumulated in more bits.
ROUNDED = {"sum", "mean", "product"}
BITWISE = {"band", "bor", "bxor"}

# PyTorch stores more dtypes than it can add: float8, uint16 to uint64 and quantised ones are
# missing here. 16-bit floats are added in 32 bits: P - 1 roundings to 16 bits would add up.
WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
ADDABLE = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *WIDE}
ADDABLE |= {torch.float32, torch.float64, torch.complex64, torch.complex128}


@dataclass(frozen=True)
class Reduction:
    """An operation that suits a dtype; make one with ``Reduction.of``.

    Attributes:
        op: "sum", "mean", "max", "min", "product", or bitwise "band" (and), "bor" (or), "bxor".
        wide: the dtype in which partial results travel and accumulate: for sum, mean and product
            of float16 and bfloat16 float32, of complex32 complex64; otherwise the tensor's dtype.
    """

    op: str
    wide: torch.dtype

    @classmethod
    def of(cls, op: str, tensor: Tensor) -> "Reduction":
        """Check ``op`` against the tensor's layout and dtype.

        Raises:
            ValueError: unknown operation, a sparse tensor, or a dtype that cannot be reduced that
                way. The message is the same on all ranks.
        """
        check_choice("operation", op, COMBINE)
        if not isinstance(tensor, Tensor):
            raise ValueError(f"a tensor is needed to take the {op} of, got {tensor!r:.60}")
        if tensor.layout != torch.strided:
            raise ValueError(
                f"the {op} over ranks needs a dense tensor, got {tensor.layout}: use .to_dense()"
            )
        problem = _problem(op, tensor.dtype)
        if problem:
            name = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"cannot take the {op} of {name} over ranks: {problem}")
        wide = WIDE.get(tensor.dtype, tensor.dtype) if op in ROUNDED else tensor.dtype
        return cls(op, wide)

    @property
    def partial(self) -> str:
        """The operation on some of the ranks: a mean is a sum until all are in it."""
        return "sum" if self.op == "mean" else self.op

    def combine(self, mine: Tensor, incoming: Tensor, out: Tensor) -> Tensor:
        """Write ``mine`` op ``incoming`` to ``out``, which may be either of them.

        NaN, overflow and wrap-around behave as in PyTorch.
        """
        return COMBINE[self.op](mine, incoming, out=out)

    def finish(self, total: Tensor, world_size: int) -> Tensor:
        """Turn ``total`` into the result, in place: the mean divides by P."""
        return total.div_(world_size) if self.op == "mean" else total


def _problem(op: str, dtype: torch.dtype) -> str | None:
    """Why PyTorch cannot do this, and what to do instead; None where it can."""
    if dtype not in ADDABLE:
        return "PyTorch does no arithmetic in it; convert first, for example with .float()"
    if op in ("max", "min") and dtype.is_complex:
        return "complex numbers have no order; reduce .abs(), or torch.view_as_real(tensor)"
    if op in BITWISE and (dtype.is_floating_point or dtype.is_complex):
        return "only integers and bool have bits to combine; use sum, product, max or min"
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        return "a mean is not an integer; take the sum, or convert first with .float()"
    return None
