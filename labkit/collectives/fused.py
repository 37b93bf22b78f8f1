"""What the negotiator's ranks ask for, whether it fits, and how it is carried out.

Many small all-reduces cost a latency each, so ``fuse`` puts those that are ready together into one
list, and ``carry_out`` copies their tensors into one buffer for each dtype, runs one ring on it,
and copies the results out. Everything here is the same on all ranks, or follows from the list.

Symbols: P ranks.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from labkit.collectives.common import check_root
from labkit.collectives.fast_ring import fast_ring_all_reduce
from labkit.collectives.pairwise import all_to_all
from labkit.collectives.reduction import Reduction
from labkit.collectives.ring import reduce_scatter, share_only
from labkit.collectives.rooted import broadcast
from labkit.comm.comm import Comm
from labkit.schedules.ring import owned_chunk

JOIN = "join"
# Zeros of a rank that has joined, or has no value, change nothing here.
_SUMS = ("sum", "mean")
_BY_ROWS = ("allgather", "alltoall")


@dataclass(frozen=True)
class Request:
    """What one rank wants done under a name; all but ``splits`` travels to be compared.

    Attributes:
        name: by which the ranks agree.
        kind: ``allreduce``, ``allgather``, ``broadcast``, ``alltoall``, ``reducescatter``,
            ``barrier`` or ``join``.
        dtypes, shapes: of its tensors, one or (grouped) several.
        op: of ``Reduction``, for allreduce and reducescatter.
        prescale, postscale: factors before and after the reduction.
        root: of a broadcast.
        splits: the rows for each rank, of an alltoall.
        has_value: whether this rank has a value; otherwise it contributes zeros, and if no rank
            has one the result is None.
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
    def of(cls, name: str, kind: str, tensors: Sequence[Tensor] = (), **options: Any) -> "Request":
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        return cls(name, kind, dtypes, [list(tensor.shape) for tensor in tensors], **options)

    def packed(self) -> list[Any]:
        return list(asdict(self).values())

    @classmethod
    def unpacked(cls, values: list[Any]) -> "Request":
        return cls(*values)

    def described(self) -> str:
        """``allreduce float32 [2, 3] (sum)``, for example."""
        parts = [self.kind, *(f"{d} {s}" for d, s in zip(self.dtypes[:4], self.shapes))]
        parts += [f"and {len(self.dtypes) - 4} more"] if len(self.dtypes) > 4 else []
        parts += [f"({self.op})"] if self.op else []
        if (self.prescale, self.postscale) != (1.0, 1.0):
            parts.append(f"scaled by {self.prescale:g} before and {self.postscale:g} after")
        return " ".join(parts + ([f"from rank {self.root}"] if self.root is not None else []))

    def common(self) -> tuple[Any, ...]:
        """What has to be equal on all ranks."""
        shapes = [shape[1:] if self.kind in _BY_ROWS else shape for shape in self.shapes]
        scales = self.prescale, self.postscale
        return self.kind, self.dtypes, shapes, self.op, scales, self.root


@dataclass(frozen=True)
class Decided:
    """What all ranks carry out together.

    Attributes:
        requests: one, or several all-reduces to be fused.
        error: why they cannot; empty if they can.
        rows: by rank, of an allgather how many rows each tensor has, of an alltoall the splits.
        last: of a join, the rank that came last.
    """

    requests: list[Request]
    error: str = ""
    rows: list[list[int]] = field(default_factory=list)
    last: int = 0

    def packed(self) -> list[Any]:
        return [[one.packed() for one in self.requests], self.error, self.rows, self.last]

    @classmethod
    def unpacked(cls, values: list[Any]) -> "Decided":
        return cls([Request.unpacked(one) for one in values[0]], *values[1:])


def check(request: Request, tensors: Sequence[Tensor], comm: Comm) -> None:
    """Check what one rank can check alone, before it is submitted.

    Raises:
        ValueError: no dense tensor, a dtype that cannot be reduced, no first dimension, a root
            that is no rank, splits that do not add up.
    """
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise ValueError(f"{request.kind} needs a dense tensor, got {tensor.layout}")
        if request.op:
            Reduction.of("sum" if request.op == "mean" else request.op, tensor)
        if request.kind in (*_BY_ROWS, "reducescatter") and tensor.dim() == 0:
            raise ValueError(
                f"{request.kind} works along the first dimension, and {request.name!r} has none: "
                "use tensor.reshape(1)"
            )
    if request.root is not None:
        check_root(comm, request.root)
    if request.kind == "alltoall":
        splits, rows = request.splits, request.shapes[0][0]
        if len(splits) != comm.world_size or min(splits) < 0 or sum(splits) != rows:
            raise ValueError(
                f"alltoall of {rows} rows to {comm.world_size} ranks cannot be split as {splits}: "
                "give one number of rows for each rank, which add up to all rows"
            )


def agreed(of: Mapping[int, Request], joined: Iterable[int], world_size: int) -> Decided:
    """On rank 0: what to do about a name that all ranks but the joined ones have submitted."""
    first = next(iter(of.values()))
    if first.kind == JOIN:
        return Decided([first], last=list(of)[-1])
    if any(one.common() != first.common() for one in of.values()):
        lines = (f"  rank {rank} has {of[rank].described()}" for rank in sorted(of))
        return refused(
            first,
            f"the ranks do not agree on {first.name!r}:\n" + "\n".join(lines) + "\nNext step: "
            "give it the same kind, shape, dtype, reduction and root on all ranks, or other names",
        )
    gone = sorted(set(joined) - of.keys())
    if gone and (first.kind != "allreduce" or first.op not in _SUMS):
        return refused(
            first,
            f"{first.described()} {first.name!r} needs a value of every rank, and rank "
            f"{', '.join(map(str, gone))} has joined, and would contribute zeros: only sums and "
            "averages can go on after join()",
        )
    rows = [(o.splits or [shape[0] for shape in o.shapes]) for _, o in sorted(of.items())]
    has_value = any(one.has_value for one in of.values())
    by_rows = first.kind in _BY_ROWS
    return Decided([replace(first, has_value=has_value)], rows=rows if by_rows else [])


def refused(request: Request, why: str) -> Decided:
    return Decided([request], why)


def fuse(decided: list[Decided], most_bytes: int) -> list[list[Any]]:
    """Put all-reduces of one reduction together while they have at most ``most_bytes``."""
    fused, open_at = list[Decided](), dict[tuple[Any, ...], tuple[int, int]]()
    for one in decided:
        first = one.requests[0]
        if one.error or first.kind != "allreduce":
            fused.append(one)
            continue
        size = sum(_dtype(d).itemsize * math.prod(s) for d, s in zip(first.dtypes, first.shapes))
        key = first.op, first.prescale, first.postscale
        place, held = open_at.get(key, (-1, 0))
        if place < 0 or held + size > most_bytes:
            fused.append(one)
            open_at[key] = len(fused) - 1, size
        else:
            fused[place].requests.append(first)
            open_at[key] = place, held + size
    return [one.packed() for one in fused]


def carry_out(comm: Comm, decided: Decided, handles: Sequence[Any]) -> list[Any]:
    """Carry out what was decided; the results by request, None for one without.

    Args:
        handles: by request, with the ``tensors`` of this rank; None if it has not submitted it.
    """
    request, mine = decided.requests[0], handles[0]
    if request.kind == JOIN:
        return [decided.last]
    if request.kind == "barrier":
        return [None]
    for handle in filter(None, handles):
        for event in handle.ready:
            event.synchronize()
    if request.kind == "allreduce":
        return _all_reduce(comm, decided.requests, handles)
    values = [tensor.detach().cpu() for tensor in mine.tensors]
    results: Any
    if request.kind == "allgather":
        results = [
            _gather_rows(comm, v, [r[i] for r in decided.rows]) for i, v in enumerate(values)
        ]
    elif request.kind == "broadcast":
        assert request.root is not None
        results = [broadcast(comm, v.clone(), request.root) for v in values]
    elif request.kind == "alltoall":
        rows = [splits[comm.rank] for splits in decided.rows]
        out = [values[0].new_empty(n, *values[0].shape[1:]) for n in rows]
        all_to_all(comm, list(values[0].split(mine.request.splits)), out)
        return [[*_delivered(mine, [torch.cat(out)]), rows]]
    else:
        results = [_scatter_rows(comm, value, request) for value in values]
    return [_delivered(mine, results)]


def _all_reduce(comm: Comm, requests: list[Request], handles: Sequence[Any]) -> list[Any]:
    """One ring for the tensors of each dtype, in the order of the requests."""
    buffers, first = dict[str, list[Tensor]](), requests[0]
    for request, handle in zip(requests, handles):
        has_any = request.has_value
        is_here = handle is not None and handle.request.has_value
        for i, dtype in enumerate(request.dtypes if has_any else []):
            shape = request.shapes[i]
            value = handle.tensors[i] if is_here else torch.zeros(shape, dtype=_dtype(dtype))
            flat = value.detach().cpu().reshape(-1)
            buffers.setdefault(dtype, []).append(_scaled(flat, request.prescale))
    results = dict[str, Any]()
    for dtype, values in buffers.items():
        buffer = torch.cat(values)
        _reduce(comm, buffer, first)
        results[dtype] = iter(_scaled(buffer, first.postscale).split([len(v) for v in values]))
    found = list[Any]()
    for request, handle in zip(requests, handles):
        pairs = zip(request.dtypes, request.shapes) if request.has_value else []
        parts = [next(results[dtype]).view(shape) for dtype, shape in pairs]
        found.append(_delivered(handle, parts) if handle and parts else None)
    return found


def _reduce(comm: Comm, buffer: Tensor, request: Request) -> None:
    is_whole = not (buffer.is_floating_point() or buffer.is_complex())
    if request.op == "mean" and is_whole:
        fast_ring_all_reduce(comm, buffer, "sum")
        buffer.copy_(_scaled(buffer, 1 / comm.world_size))
    else:
        fast_ring_all_reduce(comm, buffer, request.op)


def _scaled(values: Tensor, factor: float) -> Tensor:
    """Times ``factor``, computed in float64 for integers (then rounded towards 0)."""
    if factor == 1:
        return values
    if values.is_floating_point() or values.is_complex():
        return values * factor
    return (values.double() * factor).to(values.dtype)


def _gather_rows(comm: Comm, mine: Tensor, rows: list[int]) -> Tensor:
    """All ranks' tensors one after another; they differ only in their number of rows."""
    out = mine.new_empty(sum(rows), *mine.shape[1:])
    parts, ranks = out.split(rows), range(comm.world_size)
    chunks = list(parts)
    for rank in ranks:
        chunks[owned_chunk(rank, comm.world_size)] = parts[rank]
    parts[comm.rank].copy_(mine)
    share_only(comm, chunks)
    return out


def _scatter_rows(comm: Comm, mine: Tensor, request: Request) -> Tensor:
    """This rank's rows of the reduced tensor; the first ranks have one more where it matters."""
    each, more = divmod(len(mine), comm.world_size)
    rows = [each + (rank < more) for rank in range(comm.world_size)]
    shares = [share.contiguous() for share in _scaled(mine, request.prescale).split(rows)]
    is_whole = not (mine.is_floating_point() or mine.is_complex())
    if request.op == "mean" and is_whole:
        total = _scaled(reduce_scatter(comm, shares, "sum"), 1 / comm.world_size)
    else:
        total = reduce_scatter(comm, shares, request.op)
    return _scaled(total, request.postscale)


def _delivered(handle: Any, values: list[Tensor]) -> list[Tensor]:
    """The results on the devices of the tensors, and in them if they are changed in place."""
    if handle.request.in_place:
        for tensor, value in zip(handle.tensors, values):
            tensor.detach().copy_(value)
        moved = handle.tensors
    else:
        moved = [v.to(t.device, copy=True) for v, t in zip(values, handle.tensors)]
    for device in {t.device for t in moved if t.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    return moved


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of PyTorch")
    return found
