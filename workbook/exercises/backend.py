"""Page 07: a backend for PyTorch's DDP, from the sum of a bucket to the process group.

Symbols: P ranks.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit.engine.comm.comm import Comm
from workbook.exercises.grader import Case, Check, Wrong
from workbook.exercises.grader.compare import agree, beside, kind_of, short
from workbook.exercises.grader.exercise import DRAWN, Found, random_tensor, with_parameters
from workbook.exercises.grader.judge_values import in_words, made_of
from workbook.exercises.ring import ring_target

# How long a future may take to complete.
_PATIENCE_S = 1.0


def _tensors(rank: int, case: Case) -> list[Tensor]:
    """[size], a transposed matrix [2, 3], and a tensor of no dimension."""
    key = 10 * rank
    return [case.random(key, case.size), case.random(key + 1, 3, 2).t(), case.random(key + 2)]


def _sums(rank: int, case: Case) -> list[Tensor]:
    tensors_by_rank = [_tensors(r, case) for r in range(case.world_size)]
    return [torch.stack(tensors).sum(0) for tensors in zip(*tensors_by_rank)]


def _without_transposed(rank: int, case: Case) -> list[Tensor]:
    """The sums, but for the transposed tensor, which is unchanged."""
    vector, _, number = _sums(rank, case)
    return [vector, _tensors(rank, case)[1], number]


bucket = Check(
    "backend.bucket",
    _sums,
    inputs=lambda rank, case: (_tensors(rank, case),),
    signature="comm, tensors",
    target=lambda rank, case: ring_target(7 + case.size, 4, rank, case),
    mistakes={
        "the transposed tensor is unchanged: flatten() and reshape() copy a tensor that is not "
        "contiguous, so the sum must be copied back": _without_transposed,
    },
    sizes=(9, 4),
    drawn_size=DRAWN,
)


def _wrong_future(work: Any, tensors: list[Tensor]) -> Found:
    """The fault of the future of a Work, whose value is ``tensors``."""
    future = work.get_future()
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
    """A rank's parameters after DDP's updates; not tried if any rank found a mistake."""
    group = fn(comm)
    if not isinstance(group, dist.ProcessGroup):
        return Wrong(f"the class must be derived from dist.ProcessGroup: {kind_of(group)}")
    problems = _wrong_collectives(group, comm.rank, case)
    # Not through comm, where a wrong method may have left a message.
    num_wrong_ranks = torch.tensor(int(len(problems) > 0))
    dist.all_reduce(num_wrong_ranks)
    if num_wrong_ranks:
        return Wrong(problems[0]) if problems else None
    if not hasattr(dist.Backend, "LEARNER"):
        dist.Backend.register_backend("learner", lambda *_: _groups[0], devices=["cpu"])
    _groups[:] = [group]
    # The ranks begin with different parameters: to make them equal is what broadcast is for.
    learners = dist.new_group(backend="learner")
    model = DistributedDataParallel(_network(comm.rank), process_group=learners)
    return _updated(model, [_inputs(comm.rank, step) for step in range(2)])


def _wrong_collectives(group: Any, rank: int, case: Case) -> list[str]:
    """The faults of a group's three collectives, each called once."""
    P = case.world_size
    first_by_rank = [case.random(100 + r, 5) for r in range(P)]
    second_by_rank = [case.random(200 + r, 5) for r in range(P)]
    sums = [torch.stack(first_by_rank).sum(0), torch.stack(second_by_rank).sum(0)]
    summed = [first_by_rank[rank].clone(), second_by_rank[rank].clone()]
    sent = [tensor.clone() for tensor in summed]
    gathered = [tensor.clone() for tensor in summed]
    from_last = dist.BroadcastOptions()
    from_last.rootRank = P - 1
    # There are other values in the outputs before the call.
    outputs = [torch.full((5,), -1.0) for _ in range(2 * P)]
    rows = [outputs[:P], outputs[P:]]
    to_all = dist.distributed_c10d.AllgatherOptions()
    problems: list[str] = []
    # All are called: on another rank the first may be right, and go on to the second.
    for name, args, tensors, expected in (
        ("allreduce", (summed, dist.AllreduceOptions()), summed[:], sums),
        ("broadcast", (sent, from_last), sent[:], [first_by_rank[-1], second_by_rank[-1]]),
        ("allgather", (rows, gathered, to_all), outputs, first_by_rank + second_by_rank),
    ):
        work = getattr(group, name)(*args)
        gathers = name == "allgather"
        if not isinstance(work, dist.Work):
            problems.append(f"{name} must return a Work, but it returned {kind_of(work)}")
            continue
        work.wait()
        for i, (tensor, expected_tensor) in enumerate(zip(tensors, expected)):
            if not agree(tensor, expected_tensor):
                element = f"outputs[{i // P}][{i % P}]" if gathers else f"tensors[{i}]"
                text = f"{element} after {name} is {beside(tensor, expected_tensor)}"
                factors = made_of(tensor, {"the expected values": expected_tensor})
                if gathers and bool((tensor == -1).all()):
                    text += "\nit has not changed: write into the tensors of outputs (copy_)"
                elif not gathers and agree(tensor, (first_by_rank, second_by_rank)[i][rank]):
                    text += "\nit has not changed"
                    if name == "broadcast":
                        text += f": the one to send is opts.rootRank, here rank {P - 1}"
                elif factors and set(factors.values()) != {1}:
                    text += f"\nit is {in_words(factors)}"
                problems.append(text)
        if problems:
            continue
        if fault := _wrong_future(work, tensors[:P] if gathers else tensors):
            problems.append(f"{name} returns a Work that DDP cannot use: {fault}")
    return problems


# The learner's group, which ``dist.new_group`` makes.
_groups: list = []


def _network(seed: int) -> nn.Sequential:
    return with_parameters(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), seed)


def _inputs(rank: int, step: int) -> Tensor:
    return random_tensor(50 * step + rank, 6, 4)


def _updated(model: nn.Module, inputs: list[Tensor]) -> Tensor:
    """The parameters, in one row, after an update on each of the inputs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in inputs:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _trained(case: Case, values: list[Tensor]) -> Found:
    if not all(torch.equal(value, values[0]) for value in values):
        return "after two updates by DDP the ranks hold different parameters"
    inputs = []
    for step in range(2):
        inputs.append(torch.cat([_inputs(rank, step) for rank in range(case.world_size)]))
    if not agree(values[0], _updated(_network(0), inputs)):
        return "two updates by DDP give other parameters than one device"
    return None


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
