"""Page 02: the parts of single-process data parallelism, on one real rank.

Symbols: P devices, n samples.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from workbook.exercises.grader import Case, Wrong, returns
from workbook.exercises.grader.compare import plain, same, short
from workbook.exercises.grader.exercise import Found, random_tensor, with_parameters

_MEET_S, _CLASSES = 1.0, 3
_graded = partial(returns, world_sizes=(1,), nouns=("", "sample"))


def _listed(found: Any) -> Any:
    """What a function returned as a list; a generator runs only now, and may raise only now."""
    many = isinstance(found, Iterable) and not isinstance(found, (Tensor, str, nn.Sequential))
    return list(found) if many else found


# By number of samples: the devices, and the shape of a sample.
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

    def samples(size: int) -> Tensor:
        _, shape = _BATCHES[size]
        numbers = torch.arange(1, 1 + size * torch.Size(shape).numel()).view(size, *shape)
        # Targets are integers, and are scattered, too.
        return numbers if len(shape) == 2 else numbers.float()

    def call(fn: Callable, comm: Any, size: int) -> Any:
        parts = _listed(fn(samples(size), _BATCHES[size][0]))
        return list(map(torch.as_tensor, parts)) if isinstance(parts, list) else parts

    def judge(case: Case, values: list[Any]) -> Found:
        (parts,), inputs, devices = values, samples(case.size), _BATCHES[case.size][0]
        count = min(devices, case.size)
        text = f"num_devices is {devices}: "
        if not isinstance(parts, list):
            return f"{text}expected a list of {count}, but the function returned {short(parts)}"
        sizes = [len(part) if part.dim() else 1 for part in parts]
        text += f"there are {len(parts)} parts of {sizes} samples"
        if len(parts) != count or 0 in sizes:
            why = "one per device, or one per sample if there are fewer samples"
            return f"{text}, expected {count} that are not empty: {why}"
        if not all(part.shape[1:] == inputs.shape[1:] and part.dim() for part in parts):
            return f"{text}, and the parts are not of the shape of the inputs"
        if not torch.equal(torch.cat(parts), inputs):
            return f"{text}; in a row they are {short(torch.cat(parts))}, not {short(inputs)}"
        if parts[0].dtype != inputs.dtype:
            return f"the parts are {parts[0].dtype}, the inputs {inputs.dtype}"
        uneven = max(sizes) - min(sizes) > 1
        return f"{text}: their sizes may differ by one at most" if uneven else None

    return _graded(
        fn,
        name="data_parallel.scatter",
        inputs=lambda rank, case: (case.size,),
        signature="inputs, num_devices",
        judge=judge,
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
        signature="model, num_devices",
        judge=lambda case, values: next(filter(None, values[0]), None),
        call=lambda fn, comm: [_wrong_replicas(fn, devices) for devices in (3, 2, 1, 4)],
        nouns=("", ""),
    )


def _wrong_replicas(fn: Callable, devices: int) -> Found:
    """On the rank: try ``fn``, and return what is wrong with it."""
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = with_parameters(layers, seed=5)
    # With buffers, a frozen parameter, and a gradient from an earlier step.
    model(random_tensor(6, 8, 3)).sum().backward()
    model[0].bias.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    replicas = _listed(fn(model, devices))
    if not isinstance(replicas, list) or not all(isinstance(r, nn.Module) for r in replicas):
        return f"expected a list of {devices} modules, but the function returned {short(replicas)}"
    if len(replicas) != devices:
        return f"expected a list of {devices} modules, one per device, found {len(replicas)}"
    if replicas[0] is not model:
        why = "device 0 has to keep the model itself, which the optimizer updates"
        return f"the first entry is a copy: {why}"
    tensors = [dict(r.named_parameters()) | dict(r.named_buffers()) for r in replicas]
    for (a, one), (b, other) in itertools.combinations(enumerate(tensors), 2):
        if replicas[a] is replicas[b]:
            return f"entries {a} and {b} are one and the same module"
        places = {tensor.data_ptr() for tensor in other.values() if tensor.numel()}
        if shared := [name for name, tensor in one.items() if tensor.data_ptr() in places]:
            return f"replicas {a} and {b} share the memory of {shared[0]}: copy the tensors, too"
    for index, replica in enumerate(replicas):
        state, named = replica.state_dict(), dict(replica.named_parameters())
        if named.keys() != dict(model.named_parameters()).keys():
            return f"replica {index}: its parameters are {', '.join(named) or 'none'}"
        for name, tensor in before.items():
            if name not in state or not torch.equal(state[name], tensor):
                return f"replica {index}: {name} is not the model's (a model also has buffers)"
        for name, parameter in model.named_parameters():
            if parameter.requires_grad != named[name].requires_grad:
                return f"replica {index}: {name} is frozen in one of the two only"
        if [m.training for m in replica.modules()] != [m.training for m in layers.modules()]:
            return f"replica {index} is in another mode (train or eval) than the model"
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
        judge=lambda case, values: values[0],
        call=lambda fn, comm: _wrong_threads(fn),
        nouns=("", ""),
    )


def _wrong_threads(fn: Callable) -> Found:
    """On the rank: try ``fn``, and return what is wrong with it."""
    for count in (3, 5):
        if wrong := _do_not_meet(fn, count):
            return wrong
    for failing, kind in ((1, KeyError), (0, RuntimeError), (2, ZeroDivisionError)):
        if wrong := _loses_error(fn, failing, kind):
            return wrong

    def records(_: int) -> bool:
        return torch.is_grad_enabled()

    with torch.no_grad():
        if any(fn([records] * 2, [0, 1])):
            return "the caller is under torch.no_grad(), but the threads still record"
    if not all(fn([records] * 2, [0, 1])):
        return "autograd was enabled in the caller, but is disabled in the threads"
    return None


def _do_not_meet(fn: Callable, count: int) -> Found:
    """Whether ``count`` functions run at the same time, and their results are in order."""
    meeting, seen = threading.Barrier(count, timeout=_MEET_S), set()

    def part(number: int) -> int:
        seen.add(threading.get_ident())
        meeting.wait()
        # The first thread ends last, so that results in the order of the ends are noticed.
        time.sleep(0.02 * (count - 1 - number))
        return 10 * number

    try:
        results = plain(_listed(fn([part] * count, list(range(count)))))
    except threading.BrokenBarrierError:
        results = None
    expected = [10 * number for number in range(count)]
    if same(results, expected):
        return None
    if meeting.broken or 0 < len(seen) < count:
        own = " (in the caller's thread)" if seen == {threading.get_ident()} else ""
        return f"{count} functions do not run at the same time{own}: start all threads first"
    return f"the function returned {short(results)}, expected {expected}"


def _loses_error(fn: Callable, failing: int, kind: type[Exception]) -> Found:
    words = f"part {failing} has failed"

    def part(number: int) -> int:
        if number == failing:
            raise kind(words)
        return number

    text = f"functions[{failing}] raised {kind.__name__}({words!r}), but the caller got "
    before, threading.excepthook = threading.excepthook, lambda args: None
    try:
        results = _listed(fn([part] * 3, [0, 1, 2]))
    except Exception as error:
        return None if type(error) is kind and words in str(error) else f"{text}{error!r}"
    finally:
        threading.excepthook = before
    return f"{text}{short(results)}: the exception was lost"


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

    def expected(rank: int, case: Case) -> list:
        outputs, targets = outputs_and_targets(case)
        gathered = torch.cat(outputs).requires_grad_()
        loss = functional.cross_entropy(gathered, targets)
        (gradient,) = torch.autograd.grad(loss, gathered)
        return [loss.item(), list(gradient.split(_PARTS[case.size]))]

    def mean_of_means(rank: int, case: Case) -> list:
        outputs, targets = outputs_and_targets(case)
        outputs = [output.requires_grad_() for output in outputs]
        parts = zip(outputs, targets.split(_PARTS[case.size]))
        loss = torch.stack([functional.cross_entropy(*part) for part in parts]).mean()
        return [loss.item(), list(torch.autograd.grad(loss, outputs))]

    def own_means(rank: int, case: Case) -> list:
        loss, gradients = expected(rank, case)
        return [loss, [case.size / len(part) * part for part in gradients]]

    return _graded(
        fn,
        expected,
        name="data_parallel.gather",
        inputs=lambda rank, case: (case,),
        signature="outputs, targets",
        call=call,
        mistakes={
            "it is the mean of the devices' own means: gather first, then compute one loss": (
                mean_of_means
            ),
            "the gradients are those of each device's own mean": own_means,
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

    def gradients(case: Case) -> list[list[Tensor | None]]:
        return [
            [
                case.random(7 * device + p, *shape) * (p < len(_SHAPES) - 1)
                if there[device] == "y"
                else None
                for p, (there, shape) in enumerate(zip(_THERE[case.size], _SHAPES))
            ]
            for device in range(case.size)
        ]

    def call(fn: Callable, comm: Any, case: Case) -> Any:
        given = gradients(case)
        others = [list(of_device) for of_device in given[1:]]
        found = _listed(fn(given))
        if not isinstance(found, list) or len(found) != len(_SHAPES):
            return Wrong(f"expected a list of {len(_SHAPES)} sums, got {short(found)}")
        if not same(others, gradients(case)[1:], gaps=False):
            return Wrong("the gradients of other devices have changed: add into copies")
        return found

    def judge(case: Case, values: list[Any]) -> Found:
        for p, (found, column) in enumerate(zip(values[0], zip(*gradients(case)))):
            there = [gradient for gradient in column if gradient is not None]
            total = sum(there[1:], there[0]) if there else None
            if not same(found, total):
                have = [device for device, one in enumerate(column) if one is not None]
                text = f"the sum of parameter {p}, for which devices {have} have a gradient, is "
                return f"{text}{short(found)}, expected {short(total)}"
        return None

    return _graded(
        fn,
        name="data_parallel.reduce",
        inputs=lambda rank, case: (case,),
        signature="gradients",
        judge=judge,
        call=call,
        sizes=tuple(_THERE),
        nouns=("", "device"),
    )
