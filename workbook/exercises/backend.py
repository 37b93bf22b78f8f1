"""Page 07: a backend for PyTorch's DDP, from the sum of a bucket to the process group.

Symbols: P ranks.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.comm.comm import Comm
from workbook.exercises.grader import Case, Check, Wrong
from workbook.exercises.grader.compare import agree, beside, kind_of, short
from workbook.exercises.grader.exercise import DRAWN, Found, random_tensor, with_parameters
from workbook.exercises.ring import ring_target

# How long a future may take to complete.
_PATIENCE_S = 1.0


def _tensors(rank: int, case: Case) -> list[Tensor]:
    """[size], a transposed matrix [2, 3], and a tensor of no dimension."""
    shapes = enumerate(((case.size,), (3, 2), ()), start=10 * rank)
    one, matrix, number = (case.random(key, *shape) for key, shape in shapes)
    return [one, matrix.t(), number]


def _sums(rank: int, case: Case) -> list[Tensor]:
    by_rank = [_tensors(r, case) for r in range(case.world_size)]
    return [torch.stack(of_ranks).sum(0) for of_ranks in zip(*by_rank)]


bucket = Check(
    "backend.bucket",
    _sums,
    inputs=lambda rank, case: (_tensors(rank, case),),
    signature="comm, tensors",
    target=lambda rank, case: ring_target(7 + case.size, 4, rank, case),
    mistakes={
        "the transposed tensor is unchanged: flatten() and reshape() copy a tensor that is not "
        "contiguous, so the sum must be copied back": lambda rank, case: [
            own if own.dim() == 2 else total
            for own, total in zip(_tensors(rank, case), _sums(rank, case))
        ],
    },
    sizes=(9, 4),
    drawn_size=DRAWN,
)


def _wrong_future(made: Any, tensors: list[Tensor]) -> Found:
    """What is wrong with the future of a Work, whose value is ``tensors``."""
    future = made.get_future()
    if not isinstance(future, torch._C.Future):
        return f"get_future() must return a torch.futures.Future, it returned {kind_of(future)}"
    deadline_s = time.monotonic() + _PATIENCE_S
    while not future.done():
        if time.monotonic() > deadline_s:
            return "the future was not completed within a second: DDP would wait forever"
        time.sleep(0.001)
    try:
        value = future.wait()
    except Exception as error:
        return f"the future raises {type(error).__name__}"
    is_list = isinstance(value, list) and all(isinstance(entry, Tensor) for entry in value)
    if is_list and agree(value, tensors):
        return None
    return f"the future's value must be the list of tensors that was given; it is {short(value)}"


def _hosted(fn: Callable, comm: Comm, case: Case) -> Tensor | Wrong | None:
    """On a rank: the parameters after DDP's updates; not tried if any rank found a mistake."""
    made, P, rank = fn(comm), case.world_size, comm.rank
    if not isinstance(made, dist.ProcessGroup):
        return Wrong(f"the class must be derived from dist.ProcessGroup: {kind_of(made)}")
    by_rank = [[case.random(key + r, 5) for key in (100, 200)] for r in range(P)]
    sums = [torch.stack(of_ranks).sum(0) for of_ranks in zip(*by_rank)]
    summed, sent, own = ([one.clone() for one in by_rank[rank]] for _ in range(3))
    from_last = dist.BroadcastOptions()
    from_last.rootRank = P - 1
    # There are other values in the outputs before the call.
    outputs = [[torch.full((5,), -1.0) for _ in by_rank] for _ in own]
    gathered = [row[:] for row in outputs], own, dist.distributed_c10d.AllgatherOptions()
    wrong = None
    # All are called: on another rank the first may be right, and go on to the second.
    for name, args, tensors, expected in (
        ("allreduce", (summed, dist.AllreduceOptions()), summed[:], sums),
        ("broadcast", (sent, from_last), sent[:], by_rank[-1]),
        ("allgather", gathered, outputs[0] + outputs[1], [*itertools.chain(*zip(*by_rank))]),
    ):
        returned, gathers = getattr(made, name)(*args), name == "allgather"
        if not isinstance(returned, dist.Work):
            wrong = wrong or f"{name} must return a Work, but it returned {kind_of(returned)}"
            continue
        returned.wait()
        for i, (left, wanted) in enumerate(zip(tensors, expected)):
            if not agree(left, wanted):
                where = f"outputs[{i // P}][{i % P}]" if gathers else f"tensors[{i}]"
                text = f"{where} after {name} is {beside(left, wanted)}"
                wrong = wrong or text
        if not wrong and (found := _wrong_future(returned, tensors[:P] if gathers else tensors)):
            wrong = f"{name} returns a Work that DDP cannot use: {found}"
    # Not through comm, where a wrong method may have left a message.
    any_found = torch.tensor(int(wrong is not None))
    dist.all_reduce(any_found)
    if any_found:
        return Wrong(wrong) if wrong else None
    if not hasattr(dist.Backend, "LEARNER"):
        dist.Backend.register_backend("learner", lambda *_: _made[0], devices=["cpu"])
    _made[:] = [made]
    # The ranks begin with different parameters: to make them equal is what broadcast is for.
    learners = dist.new_group(backend="learner")
    model = DistributedDataParallel(_network(rank), process_group=learners)
    return _updated(model, [_inputs(rank, step) for step in range(2)])


# The learner's group, which ``dist.new_group`` makes.
_made: list = []


def _network(seed: int) -> nn.Sequential:
    return with_parameters(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), seed)


def _inputs(rank: int, step: int) -> Tensor:
    return random_tensor(50 * step + rank, 6, 4)


def _updated(model: nn.Module, inputs: list[Tensor]) -> Tensor:
    """The parameters, in one row, after an update on each of the inputs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for one in inputs:
        optimizer.zero_grad()
        model(one).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _trained(case: Case, values: list[Tensor]) -> Found:
    if not all(torch.equal(value, values[0]) for value in values):
        return "after two updates by DDP the ranks hold different parameters"
    inputs = [torch.cat([_inputs(r, s) for r in range(case.world_size)]) for s in range(2)]
    right = agree(values[0], _updated(_network(0), inputs))
    return None if right else "two updates by DDP give other parameters than one device"


# Its methods are called one by one; then DDP makes two updates on it.
group = Check(
    "backend.group",
    inputs=lambda rank, case: (case,),
    signature="comm",
    written=None,
    call=_hosted,
    judge=_trained,
    sizes=(),
)
