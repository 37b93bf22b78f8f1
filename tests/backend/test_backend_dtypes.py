"""Every operation on every dtype that NCCL or gloo takes, next to a plain computation.

Programs that know the name "gloo" take NCCL's way with any other backend, so both are the measure.
"""

import torch
import torch.distributed as dist
from ranks import plain

RANKS = 2
# Those of ``ncclDataType`` in PyTorch's ProcessGroupNCCL.cpp.
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOATS_8 = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)
BITWISE = ("BAND", "BOR", "BXOR")
OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", *BITWISE, "PREMUL_SUM")
FACTOR = 0.5


def values(dtype, rank):
    """[6]: sums that wrap around in 8 bits, negative ones, one that P ranks do not divide."""
    numbers = torch.tensor([3, -4, 140, 0, 1, -1]) + rank * torch.tensor([2, -3, 17, 0, 0, 0])
    return numbers.to(dtype)


def expected(operation, dtype, tensors):
    """One device's result on P tensors; None where neither NCCL nor gloo has one."""
    stacked = torch.stack(tensors)
    whole = not dtype.is_floating_point
    if operation in BITWISE:
        if not whole:
            return None
        combine = getattr(
            torch, {"BAND": "bitwise_and", "BOR": "bitwise_or"}.get(operation, "bitwise_xor")
        )
        total = stacked[0]
        for tensor in stacked[1:]:
            total = combine(total, tensor)
        return total
    if operation in ("MIN", "MAX"):
        return stacked.amin(0) if operation == "MIN" else stacked.amax(0)
    if dtype == torch.bool:
        return {"SUM": stacked.any(0), "PRODUCT": stacked.all(0)}.get(operation)
    if operation == "SUM" and whole:
        return stacked.sum(0, dtype=dtype)
    if operation == "AVG" and whole:
        return stacked.sum(0, dtype=dtype).div(RANKS, rounding_mode="trunc")
    if operation == "PRODUCT" and whole:
        return stacked.prod(0, dtype=dtype)
    if operation == "PREMUL_SUM" and whole:
        return None
    wide = stacked.double()
    exact = {
        "SUM": wide.sum(0),
        "AVG": wide.mean(0),
        "PRODUCT": wide.prod(0),
        "PREMUL_SUM": wide.sum(0) * FACTOR,
    }
    return exact[operation].to(dtype)


def all_reduce(tensors, op, rank):
    dist.all_reduce(tensors[0], op)
    return tensors[:1]


def all_reduce_coalesced(tensors, op, rank):
    dist.all_reduce_coalesced(tensors, op)
    return tensors


def reduce(tensors, op, rank):
    before = tensors[0].clone()
    dist.reduce(tensors[0], 1, op)
    # The others keep what they have.
    assert rank == 1 or torch.equal(tensors[0], before)
    return tensors[:1] if rank == 1 else []


def reduce_scatter(tensors, op, rank):
    found = []
    for tensor in tensors:
        dist.reduce_scatter(share := torch.empty_like(tensor), [tensor] * RANKS, op)
        found.append(share)
    return found


def reduce_scatter_tensor(tensors, op, rank):
    whole = torch.cat([tensors[0]] * RANKS)
    dist.reduce_scatter_tensor(share := torch.empty_like(tensors[0]), whole, op)
    return [share]


CALLS = (all_reduce, all_reduce_coalesced, reduce, reduce_scatter, reduce_scatter_tensor)


def reduce_everything(rank):
    """By call, operation and dtype: the results, or the text of the refusal."""
    found = {}
    for operation in OPERATIONS:
        op = getattr(dist.ReduceOp, operation)
        if operation == "PREMUL_SUM":
            op = dist._make_nccl_premul_sum(FACTOR)
        for dtype in (*INTEGERS, torch.bool, *FLOATS, *FLOATS_8):
            for call in CALLS:
                tensors = [values(dtype, rank), values(dtype, rank + 1)[:2]]
                try:
                    result = call(tensors, op, rank)
                except ValueError as error:
                    result = str(error)
                found[call.__name__, operation, dtype] = result
    return found


def test_every_operation_on_every_dtype_is_right_or_refused(tmp_path):
    for rank, (code, found) in enumerate(plain(tmp_path, reduce_everything, RANKS)):
        assert code == 0, found
        for (call, operation, dtype), result in found.items():
            case = f"{call} {operation} {dtype} on rank {rank}"
            tensors = [
                [values(dtype, other) for other in range(RANKS)],
                [values(dtype, other + 1)[:2] for other in range(RANKS)],
            ]
            right = None
            if dtype not in FLOATS_8:
                right = [expected(operation, dtype, one) for one in tensors]
            if right is None or right[0] is None:
                assert isinstance(result, str), case
                assert str(dtype).removeprefix("torch.") in result, case
                continue
            assert not isinstance(result, str), (case, result)
            for tensor, one in zip(result, right):
                torch.testing.assert_close(tensor, one, msg=case)


def move_small_floats(rank):
    """Move float8 numbers with everything that only copies; returns what came, as bytes."""
    found = {}
    for dtype in FLOATS_8:
        mine = values(dtype, rank)
        broadcast = mine.clone()
        dist.broadcast(broadcast, 1)
        everyone = [torch.empty_like(mine) for _ in range(RANKS)]
        dist.all_gather(everyone, mine)
        swapped = [torch.empty_like(mine) for _ in range(RANKS)]
        dist.all_to_all(swapped, [mine] * RANKS)
        shares = [mine] * RANKS if rank == 0 else None
        dist.scatter(share := torch.empty_like(mine), shares, 0)
        sent = dist.isend(mine, (rank + 1) % RANKS)
        dist.recv(came := torch.empty_like(mine), (rank - 1) % RANKS)
        sent.wait()
        tensors = [broadcast, *everyone, *swapped, share, came]
        found[dtype] = [tensor.view(torch.uint8).tolist() for tensor in tensors]
    return found


def test_float8_numbers_travel_unchanged(tmp_path):
    for rank, (code, found) in enumerate(plain(tmp_path, move_small_floats, RANKS)):
        assert code == 0, found
        sources = [1, *range(RANKS), *range(RANKS), 0, (rank - 1) % RANKS]
        for dtype in FLOATS_8:
            assert found[dtype] == [
                values(dtype, source).view(torch.uint8).tolist() for source in sources
            ]
