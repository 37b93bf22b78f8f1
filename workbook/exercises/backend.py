"""Page 07: a backend for PyTorch's DDP, from the sum of a bucket to the process group.

Symbols: P ranks.
"""

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit import collectives
from labkit.comm.comm import Comm
from workbook.exercises.grader import WORLD_SIZES, Case, Verdict, Wrong, returns
from workbook.exercises.grader.compare import kind_of, plain, same, short
from workbook.exercises.grader.exercise import DRAWN, Found, random_tensor, with_parameters
from workbook.exercises.ring import ring_target

# How long a future may take to complete.
_PATIENCE_S = 1.0


def bucket(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensors)``: the sum over the ranks in each tensor of a list, in place.

    Some are not contiguous. Target per rank: 2 (P - 1) messages, one all-reduce for the list.
    """

    def tensors(rank: int, case: Case) -> list[Tensor]:
        """[size], a transposed matrix [2, 3], and a tensor of no dimension."""
        key = 10 * rank
        return [
            case.random(key, case.size),
            case.random(key + 1, 3, 2).t(),
            case.random(key + 2),
        ]

    def sums(rank: int, case: Case) -> list[Tensor]:
        by_rank = [tensors(r, case) for r in range(case.world_size)]
        return [torch.stack(of_ranks).sum(0) for of_ranks in zip(*by_rank)]

    def call(fn: Callable, comm: Comm, given: list[Tensor]) -> list[Tensor]:
        before = list(given)
        fn(comm, given)
        return before

    return returns(
        fn,
        sums,
        name="backend.bucket",
        inputs=lambda rank, case: (tensors(rank, case),),
        signature="comm, tensors",
        call=call,
        target=lambda rank, case: ring_target(7 + case.size, 4, rank, case),
        mistakes={
            "the transposed tensor is unchanged: flatten() and reshape() copy a tensor that is "
            "not contiguous, so the sum must be copied back": (
                lambda rank, case: [
                    sums(rank, case)[0],
                    tensors(rank, case)[1],
                    sums(rank, case)[2],
                ]
            ),
            "the sums must be in the tensors that the function was given": tensors,
            "only the first tensor of the list holds the sum": (
                lambda rank, case: sums(rank, case)[:1] + tensors(rank, case)[1:]
            ),
        },
        sizes=(9, 4),
        drawn_size=DRAWN,
        world_sizes=world_sizes,
    )


def work(fn: Callable) -> Verdict:
    """Grade ``fn(operation, tensors)``, a class: the ``dist.Work`` of ``operation()``.

    ``wait`` returns True, or raises the operation's error; ``get_future`` returns a future of
    ``tensors``, or of the error, in a way that PyTorch's C++ side notices. Runs in one process.
    """
    return returns(
        fn,
        name="backend.work",
        signature="operation, tensors",
        call=_wrong_work,
        judge=lambda case, values: values[0],
        world_sizes=(1,),
        nouns=("", ""),
    )


def _wrong_work(fn: Callable, comm: Comm) -> Found:
    """On the rank: what is wrong with a Work that goes well, then with one that fails."""
    tensors, calls = [torch.zeros(2), torch.zeros(3)], []

    def operation() -> None:
        calls.append(1)
        for tensor in tensors:
            tensor += 7

    for first in ("wait", "future"):
        calls.clear()
        for tensor in tensors:
            tensor.zero_()
        made = fn(operation, tensors)
        if not isinstance(made, dist.Work):
            return f"the class must be derived from dist.Work, but a call gave {kind_of(made)}"
        if first == "wait" and made.wait() is not True:
            return "wait() must return True once the operation is done"
        deadline_s = time.monotonic() + _PATIENCE_S
        while not calls and time.monotonic() < deadline_s:
            time.sleep(0.001)
        if not calls:
            return "the operation was not carried out before get_future() was called"
        if wrong := _wrong_future(made, tensors):
            return wrong
        if len(calls) != 1:
            return f"the operation was carried out {len(calls)} times, expected once"

    def fault() -> None:
        raise ConnectionError("the operation failed")

    known, python_only = torch.futures.Future.set_exception, []

    def noted(self: torch.futures.Future, result: Any) -> None:
        python_only.append(self)
        known(self, result)

    with mock.patch.object(torch.futures.Future, "set_exception", noted):
        try:
            made = fn(fault, tensors)
        except ConnectionError:
            return "the operation's error was raised while the Work was made: raise it in wait()"
        try:
            made.wait()
            return "the operation failed, but wait() did not raise its error"
        except ConnectionError:
            pass
        try:
            future = made.get_future()
        except ConnectionError:
            return None
    if future in python_only:
        return "set_exception is known to Python only: DDP's C++ code would not see the error"
    wrong = _wrong_future(made, tensors)
    if wrong is None:
        return "the operation failed, but the future does not: training would go on"
    return None if "the future raises" in wrong else wrong


def _wrong_future(made: Any, tensors: list[Tensor]) -> Found:
    """What is wrong with the future of a Work, whose value is ``tensors``."""
    try:
        future = made.get_future()
    except NotImplementedError:
        raise
    except Exception as error:
        return f"get_future() raised {short(error)}"
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
    if is_list and same(value, tensors):
        return None
    return f"the future's value must be the list of tensors that was given; it is {short(value)}"


def group(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm)``, a class: a ``dist.ProcessGroup`` that DDP can train on.

    Its methods ``allreduce``, ``broadcast`` and ``allgather`` are called one by one; then it is
    registered with ``torch.distributed``, and DDP makes two updates of a small network on it.
    """

    def trained(case: Case, values: list[list[Tensor]]) -> Found:
        for rank, value in enumerate(values):
            if not all(map(torch.equal, value, values[0])):
                return f"after two updates by DDP the parameters of ranks 0 and {rank} differ"
        inputs = [torch.cat([_inputs(r, s) for r in range(case.world_size)]) for s in range(2)]
        if same(values[0], _updated(_network(0), inputs)):
            return None
        return "two updates by DDP give other parameters than one device with all samples"

    return returns(
        fn,
        name="backend.group",
        inputs=lambda rank, case: (case,),
        call=_hosted,
        judge=trained,
        may_call=frozenset(dir(collectives)) | {"carried_out"},
        world_sizes=world_sizes,
    )


def _hosted(fn: Callable, comm: Comm, case: Case) -> list[Tensor] | Wrong | None:
    """On a rank: the parameters after DDP's updates; not tried if any rank found a mistake."""
    made, P, rank = fn(comm), case.world_size, comm.rank
    if not isinstance(made, dist.ProcessGroup):
        return Wrong(f"the class must be derived from dist.ProcessGroup: {kind_of(made)}")
    # In ``outputs`` there are other values before the call.
    sums = [case.over_ranks(lambda r, k=k: case.random(k + r, 5)) for k in (100, 200)]
    mine = [case.random(100 + rank, 5), case.random(200 + rank, 5)]
    from_root = dist.BroadcastOptions()
    from_root.rootRank = P - 1
    sent = [case.random(300 + rank, 5)]
    outputs = [torch.full((3,), -1) for _ in range(P)]
    numbers = [torch.arange(3) + 10 * r + case.integer(1, 0, 9) for r in range(P)]
    gathered = [outputs], [numbers[rank]], dist.distributed_c10d.AllgatherOptions()
    wrong = None
    # All are called: on another rank the first may be right, and go on to the second.
    for name, args, tensors, expected in (
        ("allreduce", (mine, dist.AllreduceOptions()), list(mine), sums),
        ("broadcast", (sent, from_root), list(sent), [case.random(300 + P - 1, 5)]),
        ("allgather", gathered, list(outputs), numbers),
    ):
        returned = getattr(made, name)(*args)
        if not isinstance(returned, dist.Work):
            wrong = wrong or f"{name} must return a Work, but it returned {kind_of(returned)}"
            continue
        returned.wait()
        if not same(tensors, expected):
            wrong = wrong or f"{name} leaves {short(plain(tensors))}, expected {short(expected)}"
        elif found := _wrong_future(returned, tensors):
            wrong = wrong or f"{name} returns a Work that DDP cannot use: {found}"
    # Not through comm, where a wrong method may have left a message.
    any_found = torch.tensor(int(wrong is not None))
    dist.all_reduce(any_found)
    if any_found:
        return Wrong(wrong) if wrong else None
    if not hasattr(dist.Backend, "LEARNER"):
        dist.Backend.register_backend("learner", lambda *_: _made[0], devices=["cpu"])
    _made[:] = [made]
    # The ranks begin with different parameters: to make them equal is what broadcast is for.
    model = DistributedDataParallel(
        _network(rank), process_group=dist.new_group(backend="learner")
    )
    return _updated(model, [_inputs(rank, step) for step in range(2)])


# The learner's group, which ``dist.new_group`` makes.
_made: list = []


def _network(seed: int) -> nn.Sequential:
    return with_parameters(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), seed)


def _inputs(rank: int, step: int) -> Tensor:
    return random_tensor(50 * step + rank, 6, 4)


def _updated(model: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """The parameters after an update on each of the inputs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for one in inputs:
        optimizer.zero_grad()
        model(one).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]
