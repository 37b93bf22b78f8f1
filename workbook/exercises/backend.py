"""Checks of page 07: a backend for PyTorch's DDP, from the sum of a bucket to the process group.

Symbols: P ranks.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from labkit import collectives
from labkit.comm.comm import Comm
from workbook.exercises.grader import WORLD_SIZES, Case, Mistake, Verdict, returns
from workbook.exercises.grader.compare import plain, same, short
from workbook.exercises.grader.exercise import DRAWN, no_arguments, random_tensor, with_parameters
from workbook.exercises.ring import ring_target

# How long a future may take to complete.
_PATIENCE_S = 1.0
_FAULT = "the operation failed"


def bucket(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensors)``: the sum over the ranks in each tensor of a list, in place.

    Some are not contiguous. Target per rank: 2 (P - 1) messages, one all-reduce for the list.
    """
    return returns(
        fn,
        lambda rank, case: _sums(case),
        name="backend.bucket",
        inputs=lambda rank, case: (_tensors(rank, case),),
        signature="comm, tensors",
        call=_given_tensors,
        target=lambda rank, case: ring_target(7 + case.size, 4, rank, case),
        any_chunks=True,
        mistakes={
            "bucket.mean": lambda r, c: [total / c.world_size for total in _sums(c)],
            "bucket.unchanged": _tensors,
            "bucket.not_contiguous": lambda r, c: _one_unchanged(1, r, c),
            "bucket.first_only": lambda r, c: _sums(c)[:1] + _tensors(r, c)[1:],
        },
        sizes=(9, 4),
        drawn_size=DRAWN,
        world_sizes=world_sizes,
    )


def _given_tensors(fn: Callable, comm: Comm, tensors: list[Tensor]) -> list[Tensor]:
    kept = list(tensors)
    fn(comm, tensors)
    return kept


def _tensors(rank: int, case: Case) -> list[Tensor]:
    """[size], a transposed matrix [2, 3], and a tensor of no dimension."""
    return [
        case.random(10 * rank, case.size),
        case.random(10 * rank + 1, 3, 2).t(),
        case.random(10 * rank + 2),
    ]


def _sums(case: Case) -> list[Tensor]:
    by_rank = [_tensors(rank, case) for rank in range(case.world_size)]
    return [torch.stack(of_ranks).sum(0) for of_ranks in zip(*by_rank)]


def _one_unchanged(place: int, rank: int, case: Case) -> list[Tensor]:
    found = _sums(case)
    found[place] = _tensors(rank, case)[place]
    return found


# A Work


def work(fn: Callable) -> Verdict:
    """Grade ``fn(operation, tensors)``, a class: the ``dist.Work`` of ``operation()``.

    ``wait`` returns True, or raises the operation's error; ``get_future`` returns a future of
    ``tensors``, or of the error, in a way that PyTorch's C++ side notices. Runs in one process.
    """
    return returns(
        fn,
        name="backend.work",
        signature="operation, tensors",
        call=_work_problem,
        inputs=no_arguments,
        world_sizes=(1,),
        nouns=("", ""),
    )


def _work_problem(fn: Callable, comm: Comm) -> Mistake | None:
    tensors, calls = [torch.zeros(2), torch.zeros(3)], []

    def operation() -> None:
        calls.append(1)
        for tensor in tensors:
            tensor += 7

    for way in (_after_wait, _after_future):
        calls.clear()
        for tensor in tensors:
            tensor.zero_()
        made = fn(operation, tensors)
        if not isinstance(made, dist.Work):
            return Mistake("work.kind", kind=type(made).__name__)
        if found := way(made, tensors):
            return found
        if len(calls) != 1:
            return Mistake("work.calls", count=len(calls))
    return _after_a_fault(fn, tensors)


def _after_wait(made: Any, tensors: list[Tensor]) -> Mistake | None:
    if made.wait() is not True:
        return Mistake("work.wait_not_true")
    return _after_future(made, tensors)


def _after_future(made: Any, tensors: list[Tensor]) -> Mistake | None:
    """What is wrong with the future of a Work that goes well, whose value is ``tensors``."""
    future = _future_of(made)
    if isinstance(future, Mistake):
        return future
    try:
        value = future.wait()
    except Exception as error:
        return Mistake("work.future_raises", error=_first_line(error))
    is_list = isinstance(value, list) and all(isinstance(entry, Tensor) for entry in value)
    if not is_list or not same(value, tensors):
        return Mistake("work.future_value", value=short(plain(value))[:80])
    return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _future_of(made: Any) -> Any:
    """The completed future of a Work, or the mistake."""
    try:
        future = made.get_future()
    except NotImplementedError:
        raise
    except Exception as error:
        return Mistake("work.no_future", found=f"it raised {_first_line(error)}")
    if not isinstance(future, torch._C.Future):
        return Mistake("work.no_future", found=f"it returned {type(future).__name__}")
    until_s = time.monotonic() + _PATIENCE_S
    while not future.done():
        if time.monotonic() > until_s:
            return Mistake("work.future_open")
        time.sleep(0.001)
    return future


def _after_a_fault(fn: Callable, tensors: list[Tensor]) -> Mistake | None:
    def operation() -> None:
        raise ConnectionError(_FAULT)

    with _python_only() as futures:
        try:
            made = fn(operation, tensors)
        except ConnectionError:
            return Mistake("work.raised_at_once")
        try:
            made.wait()
            return Mistake("work.error_lost")
        except ConnectionError:
            pass
        try:
            future = made.get_future()
        except ConnectionError:
            return None
    if future in futures:
        return Mistake("work.set_exception")
    found = _after_future(made, tensors)
    return Mistake("work.future_error_lost") if found is None else _unless_raised(found)


def _unless_raised(found: Mistake) -> Mistake | None:
    return None if found.id == "work.future_raises" else found


@contextmanager
def _python_only() -> Iterator[list[torch.futures.Future]]:
    """The futures that get an exception by set_exception, which C++ code does not see."""
    found: list[torch.futures.Future] = []
    known = torch.futures.Future.set_exception

    def noted(self: torch.futures.Future, result: Any) -> None:
        found.append(self)
        known(self, result)

    with mock.patch.object(torch.futures.Future, "set_exception", noted):
        yield found


# The process group


def group(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm)``, a class: a ``dist.ProcessGroup`` that DDP can train on.

    Its methods ``allreduce``, ``broadcast`` and ``allgather`` are called one by one; then it is
    registered with ``torch.distributed``, and DDP makes two updates of a small network on it.
    """
    return returns(
        fn,
        name="backend.group",
        inputs=lambda rank, case: (case,),
        call=_hosted,
        judge=_trained,
        may_call=frozenset(dir(collectives)) | {"carried_out"},
        world_sizes=world_sizes,
    )


def _hosted(fn: Callable, comm: Comm, case: Case) -> list[Tensor] | Mistake | None:
    """On a rank: the parameters after DDP's updates; not tried if any rank found a mistake."""
    made = fn(comm)
    if not isinstance(made, dist.ProcessGroup):
        return Mistake("group.kind", kind=type(made).__name__)
    # All are called: on another rank the first may be right, and go on to the second.
    found = next(filter(None, [ask(made, comm.rank, case) for ask in _METHODS]), None)
    # Not through comm, where a wrong method may have left a message.
    any_found = torch.tensor(int(found is not None))
    dist.all_reduce(any_found)
    return found if any_found else _updated_by_ddp(made, comm.rank, case)


def _method_problem(
    made: Any, name: str, args: tuple, tensors: list[Tensor], due: list[Tensor], wrong: dict
) -> Mistake | None:
    """What is wrong after ``made.name(*args)``, which should leave ``due`` in ``tensors``."""
    returned = getattr(made, name)(*args)
    if not isinstance(returned, dist.Work):
        return Mistake("group.no_work", method=name, kind=short_kind(returned))
    returned.wait()
    if not same(tensors, due):
        known = (Mistake(key) for key, value in wrong.items() if same(tensors, value))
        why = next(known, None) or f"it holds {short(tensors)}, expected {short(due)}"
        return Mistake("group.values", why, method=name)
    if found := _after_future(returned, tensors):
        return Mistake("group.future", found, method=name)
    return None


def short_kind(value: Any) -> str:
    return "nothing (None)" if value is None else f"something of type {type(value).__name__}"


def _ask_allreduce(made: Any, rank: int, case: Case) -> Mistake | None:
    def tensors(of: int) -> list[Tensor]:
        return [case.random(100 + of, 5), case.random(200 + of, 2, 3)]

    mine = tensors(rank)
    due = [case.over_ranks(lambda r, i=i: tensors(r)[i]) for i in range(2)]
    wrong = {
        "group.divided": [total / case.world_size for total in due],
        "group.first_only": [due[0], tensors(rank)[1]],
        "group.unchanged": tensors(rank),
    }
    args = (mine, dist.AllreduceOptions())
    return _method_problem(made, "allreduce", args, mine, due, wrong)


def _ask_broadcast(made: Any, rank: int, case: Case) -> Mistake | None:
    def tensor(of: int) -> Tensor:
        return case.random(300 + of, 5)

    opts = dist.BroadcastOptions()
    opts.rootRank = case.world_size - 1
    mine = [tensor(rank)]
    # Rank 0 cannot tell a broadcast from rank 0 from none.
    wrong = {"group.not_from_root": mine}
    return _method_problem(made, "broadcast", (mine, opts), mine, [tensor(opts.rootRank)], wrong)


def _ask_allgather(made: Any, rank: int, case: Case) -> Mistake | None:
    def tensor(of: int) -> Tensor:
        return torch.arange(3) + 10 * of + case.integer(1, 0, 9)

    outputs = [torch.full((3,), -1) for _ in range(case.world_size)]
    kept, due = list(outputs), [tensor(r) for r in range(case.world_size)]
    wrong = {
        "group.new_outputs": [torch.full((3,), -1)] * case.world_size,
        "group.own_only": [tensor(rank)] * case.world_size,
        "group.order": [due[(rank + step) % len(due)] for step in range(len(due))],
    }
    args = ([outputs], [tensor(rank)], dist.distributed_c10d.AllgatherOptions())
    return _method_problem(made, "allgather", args, kept, due, wrong)


_METHODS = (_ask_allreduce, _ask_broadcast, _ask_allgather)
_FEATURES, _SAMPLES = 4, 6


def _network(seed: int) -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(_FEATURES, 3), nn.Tanh(), nn.Linear(3, 2))
    return with_parameters(layers, seed)


def _inputs(rank: int, step: int) -> Tensor:
    return random_tensor(50 * step + rank, _SAMPLES, _FEATURES)


def _update(model: nn.Module, loss: Callable[[nn.Module, int], Tensor]) -> list[Tensor]:
    """The parameters after two updates."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _updated_by_ddp(made: Any, rank: int, case: Case) -> list[Tensor]:
    # The ranks begin with different parameters: to make them equal is what broadcast is for.
    model = DistributedDataParallel(_network(rank), process_group=_registered(made))
    return _update(model, lambda model, step: model(_inputs(rank, step)).square().mean())


def _registered(made: Any) -> Any:
    """``made`` as a group that ``dist.new_group`` has made."""
    _made[:] = [made]
    if not hasattr(dist.Backend, "LEARNER"):
        dist.Backend.register_backend("learner", lambda *_: _made[0], devices=["cpu"])
    return dist.new_group(backend="learner")


_made: list = []


@cache
def _updated_by_one_device(world_size: int) -> list[Tensor]:
    def loss(model: nn.Module, step: int) -> Tensor:
        everything = torch.cat([_inputs(rank, step) for rank in range(world_size)])
        return model(everything).square().mean()

    return _update(_network(0), loss)


def _trained(case: Case, values: list[list[Tensor]]) -> Mistake | None:
    for rank, value in enumerate(values):
        if not all(torch.equal(one, other) for one, other in zip(value, values[0])):
            return Mistake("group.replicas_differ", rank=rank)
    alike = same(values[0], _updated_by_one_device(case.world_size))
    return None if alike else Mistake("group.other_training")
