"""Page 02: the parts of single-process data parallelism, on one real rank.

Symbols: P devices, n samples.
"""

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from workbook.exercises.grader import Case, Wrong, returns
from workbook.exercises.grader.compare import agree, plain, same, short
from workbook.exercises.grader.exercise import random_tensor, with_parameters

_MEET_S, _CLASSES = 1.0, 3
_graded = partial(returns, world_sizes=(1,), nouns=("", "sample"))


def _listed(found: Any) -> Any:
    """What a function returned as a list; a generator runs only now, and may raise only now."""
    many = isinstance(found, Iterable) and not isinstance(found, (Tensor, str, nn.Sequential))
    return list(found) if many else found


# By number of samples: the devices, and the shape of a sample. Integers stand for targets.
_BATCHES: dict[int, tuple[int, tuple[int, ...]]] = {
    6: (4, (2,)),
    7: (4, ()),
    2: (4, (2,)),
    1: (4, (2,)),
    8: (3, (2, 3)),
    3: (1, (2,)),
}


def scatter(fn: Callable) -> Any:
    """Grade ``fn(inputs, num_devices)``: a list of parts of ``inputs`` [n, ...], in order.

    There are as many parts as devices, or as samples if there are fewer; their sizes differ by one
    at most, and any of them may be the larger ones.
    """

    def call(fn: Callable, comm: Any, size: int) -> Wrong | None:
        devices, shape = _BATCHES[size]
        numbers = torch.arange(1, 1 + size * torch.Size(shape).numel()).view(size, *shape)
        inputs = numbers if len(shape) == 2 else numbers.float()
        parts, count = _listed(fn(inputs, devices)), min(devices, size)
        text = f"num_devices is {devices}: expected a list of {count} parts that are not empty"
        if not isinstance(parts, list):
            return Wrong(f"{text}, but the function returned {short(parts)}")
        parts = list(map(torch.as_tensor, parts))
        sizes = [len(part) if part.dim() else 1 for part in parts]
        text += f", of almost equal sizes; there are {len(parts)}, of {sizes} samples"
        if len(parts) != count or 0 in sizes or max(sizes) - min(sizes) > 1:
            return Wrong(text)
        if any(part.dtype != inputs.dtype or part.shape[1:] != inputs.shape[1:] for part in parts):
            return Wrong(f"the parts are not of the shape and type of the inputs, {inputs.dtype}")
        if 0 in [part.dim() for part in parts] or not torch.equal(torch.cat(parts), inputs):
            return Wrong(f"in a row the parts are {short(parts)}, not {short(inputs)}")
        return None

    return _graded(
        fn,
        name="data_parallel.scatter",
        inputs=lambda rank, case: (case.size,),
        signature="inputs, num_devices",
        call=call,
        sizes=tuple(_BATCHES),
    )


def replicate(fn: Callable) -> Any:
    """Grade ``fn(model, num_devices)``: a list of modules, the model and independent copies of it.

    The first is ``model`` itself. The others hold the same numbers, parameters and buffers, in
    memory of their own.
    """
    return _graded(
        fn,
        name="data_parallel.replicate",
        inputs=lambda rank, case: (case.size,),
        signature="model, num_devices",
        call=_wrong_replicas,
        sizes=(3, 2, 1, 4),
        nouns=("", "device"),
    )


def _wrong_replicas(fn: Callable, comm: Any, devices: int) -> Wrong | None:
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = with_parameters(layers, seed=5)
    # With buffers, a frozen parameter, and a gradient from an earlier step.
    model(random_tensor(6, 8, 3)).sum().backward()
    model[0].bias.requires_grad_(False)

    def tensors(module: nn.Module) -> dict[str, Tensor]:
        return dict(module.named_parameters()) | dict(module.named_buffers())

    def facts(module: nn.Module) -> dict[str, Any]:
        kinds = {name: (type(t), t.dtype, t.requires_grad) for name, t in tensors(module).items()}
        found = {name: (*kinds[name], t.tolist()) for name, t in tensors(module).items()}
        return found | {"its mode, train or eval": [m.training for m in module.modules()]}

    before = facts(model)
    replicas = _listed(fn(model, devices))
    modules = isinstance(replicas, list) and all(isinstance(r, nn.Module) for r in replicas)
    if not modules or len(replicas) != devices:
        return Wrong(
            f"expected a list of {devices} modules, one per device, got {short(replicas)}"
        )
    if replicas[0] is not model:
        return Wrong("device 0 has to keep the model itself, which the optimizer updates: no copy")
    places: dict[int, int] = {}
    for index, replica in enumerate(replicas):
        now = facts(replica)
        differ = [name for name in before.keys() | now.keys() if before.get(name) != now.get(name)]
        if differ:
            return Wrong(f"replica {index}: not as in the model: {', '.join(sorted(differ))}")
        for name, tensor in tensors(replica).items():
            if (other := places.setdefault(tensor.data_ptr(), index)) != index:
                why = "copy the tensors, too"
                return Wrong(f"replicas {other} and {index} share the memory of {name}: {why}")
    return None


def parallel_apply(fn: Callable) -> Any:
    """Grade ``fn(functions, inputs)``: ``functions[i](inputs[i])`` for all i, in threads.

    The threads have to run at the same time, with the caller's autograd mode. Expected are the
    results in the order of the functions, and the exception of a thread raised in the caller.
    """
    return _graded(
        fn,
        name="data_parallel.parallel_apply",
        signature="functions, inputs",
        call=lambda fn, comm: (
            _do_not_meet(fn, 3)
            or _do_not_meet(fn, 5)
            or _loses_error(fn, 1, KeyError)
            or _loses_error(fn, 0, RuntimeError)
            or _loses_error(fn, 2, ZeroDivisionError)
            or _changes_mode(fn)
        ),
        nouns=("", ""),
    )


def _do_not_meet(fn: Callable, count: int) -> Wrong | None:
    """Whether ``count`` functions run at the same time, and their results are in order."""
    meeting, expected = threading.Barrier(count, timeout=_MEET_S), [10 * i for i in range(count)]

    def part(number: int) -> int:
        meeting.wait()
        # The first thread ends last, so that results in the order of the ends are noticed.
        time.sleep(0.02 * (count - 1 - number))
        return 10 * number

    try:
        results = plain(_listed(fn([part] * count, list(range(count)))))
    except threading.BrokenBarrierError:
        results = None
    if same(results, expected):
        return None
    if meeting.broken:
        return Wrong(f"{count} functions do not run at the same time: start all threads first")
    return Wrong(f"the function returned {short(results)}, expected {expected}")


def _loses_error(fn: Callable, failing: int, kind: type[Exception]) -> Wrong | None:
    words = f"part {failing} has failed"

    def part(number: int) -> int:
        if number == failing:
            raise kind(words)
        return number

    before, threading.excepthook = threading.excepthook, lambda args: None
    try:
        got = short(_listed(fn([part] * 3, [0, 1, 2])))
    except Exception as error:
        if type(error) is kind and words in str(error):
            return None
        got = repr(error)
    finally:
        threading.excepthook = before
    return Wrong(f"functions[{failing}] raised {kind.__name__}({words!r}), the caller got {got}")


def _changes_mode(fn: Callable) -> Wrong | None:
    for mode in (False, True):
        with torch.set_grad_enabled(mode):
            found = _listed(fn([lambda _: torch.is_grad_enabled()] * 2, [0, 1]))
        if not same(found, [mode] * 2):
            return Wrong(f"is_grad_enabled() is {mode} in the caller, {found} in the threads")
    return None


# By number of samples: how many each device has.
_PARTS = {6: (1, 3, 2), 7: (4, 3), 4: (1, 1, 1, 1), 5: (5,)}


def gather(fn: Callable) -> Any:
    """Grade ``fn(outputs, targets)``: the loss on device 0, and what goes back to the devices.

    ``outputs`` are [n_i, classes] by device, ``targets`` [n]. Expected is the mean cross-entropy
    over all n samples, and by device its gradient with respect to the outputs, [n_i, classes]. No
    gradient may run on into the replicas.
    """

    def outputs_and_targets(case: Case) -> tuple[list[Tensor], Tensor]:
        outputs = [case.random(i, n, _CLASSES) for i, n in enumerate(_PARTS[case.size])]
        return outputs, torch.arange(case.size) * 2 % _CLASSES

    def call(fn: Callable, comm: Any, case: Case) -> Any:
        outputs, targets = outputs_and_targets(case)
        # One number stands for the parameters of a replica.
        replicas = [torch.ones((), requires_grad=True) for _ in outputs]
        given = [output * replica for output, replica in zip(outputs, replicas)]
        found = _listed(fn(given, targets))
        if not isinstance(found, list) or len(found) != 2:
            return Wrong(f"expected the loss and a list of gradients, got {short(found)}")
        if any(replica.grad is not None for replica in replicas):
            return Wrong("a gradient has run on into the replicas: detach the outputs first")
        return [plain(_listed(one)) for one in found]

    def weighted(case: Case, weight: Callable[[int], float]) -> list:
        """The sum of the devices' own means, each times ``weight(samples)``."""
        outputs, targets = outputs_and_targets(case)
        outputs = [output.requires_grad_() for output in outputs]
        parts = zip(outputs, targets.split(_PARTS[case.size]))
        loss = sum(
            (weight(len(x)) * functional.cross_entropy(x, y) for x, y in parts), Tensor([0])
        )
        return [loss.item(), list(torch.autograd.grad(loss, outputs))]

    return _graded(
        fn,
        lambda rank, case: weighted(case, lambda n: n / case.size),
        name="data_parallel.gather",
        inputs=lambda rank, case: (case,),
        signature="outputs, targets",
        call=call,
        mistakes={
            "it is the mean of the devices' own means: gather first, then compute one loss": (
                lambda rank, case: weighted(case, lambda n: 1 / len(_PARTS[case.size]))
            ),
        },
        sizes=tuple(_PARTS),
    )


# By number of devices: whether each of them has a gradient, by parameter.
_THERE: dict[int, list[str]] = {
    3: ["yyy", "-yy", "yy-", "---", "--y", "yyy"],
    2: ["yy", "-y", "y-", "--", "--", "yy"],
    5: ["yyyyy", "-y-yy", "yy-yy", "-----", "---y-", "yyyyy"],
}
# The gradient of the last parameter is zero on all devices.
_SHAPES = ((4,), (4,), (2, 3), (4,), (), (1,))


def reduce(fn: Callable) -> Any:
    """Grade ``fn(gradients)``: by device, by parameter -> the sums over the devices, by parameter.

    A gradient of None counts as zero; if it is None on all devices, the sum is None. The gradients
    of devices 1 and up must not change.
    """

    def gradients(case: Case, p: int) -> list[Tensor | None]:
        """Those of parameter p, by device."""
        made = [case.random(7 * i + p, *_SHAPES[p]) * (p < 5) for i in range(case.size)]
        return [one if there == "y" else None for one, there in zip(made, _THERE[case.size][p])]

    def call(fn: Callable, comm: Any, case: Case) -> Wrong | None:
        columns = [gradients(case, p) for p in range(len(_SHAPES))]
        given = [list(of_device) for of_device in zip(*columns)]
        others = [list(of_device) for of_device in given[1:]]
        found = _listed(fn(given))
        if not isinstance(found, list) or len(found) != len(_SHAPES):
            return Wrong(f"expected a list of {len(_SHAPES)} sums, got {short(found)}")
        columns = [gradients(case, p) for p in range(len(_SHAPES))]
        if not agree(others, [list(of_device) for of_device in zip(*columns)][1:]):
            return Wrong("the gradients of other devices have changed: add into copies")
        for p, (one, column) in enumerate(zip(found, columns)):
            there = [gradient for gradient in column if gradient is not None]
            total = sum(there[1:], there[0]) if there else None
            if not same(one, total):
                text = (
                    f"parameter {p} has a gradient on devices {_THERE[case.size][p]}: its sum is"
                )
                return Wrong(f"{text} {short(one)}, expected {short(total)}")
        return None

    return _graded(
        fn,
        name="data_parallel.reduce",
        inputs=lambda rank, case: (case,),
        signature="gradients",
        call=call,
        sizes=tuple(_THERE),
        nouns=("", "device"),
    )
