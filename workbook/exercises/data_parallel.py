"""Page 02: the parts of single-process data parallelism.

Symbols: P devices, n samples.
"""

import copy
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from workbook.exercises.grader import Wrong, judged
from workbook.exercises.grader.compare import agree, beside, kind_of, other_kind, plain, short
from workbook.exercises.grader.exercise import random_tensor, with_parameters

_MEET_S = 0.4
_BATCHES = (6, 4, (2,)), (7, 4, ()), (2, 4, (2,)), (1, 4, (2,)), (8, 3, (2, 3)), (3, 1, (2,))


@judged("inputs, num_devices", *_BATCHES)
def scatter(fn: Callable, n: int, devices: int, shape: tuple[int, ...]) -> Wrong | None:
    """Grade ``fn(inputs, num_devices)``: a list of parts of ``inputs`` [n, ...], in order.

    None is empty, and their sizes differ by one at most; any of them may be the larger ones.
    """
    inputs = torch.arange(1, 1 + n * math.prod(shape)).view(n, *shape)
    # Integers stand for targets.
    inputs = inputs if len(shape) == 2 else inputs.float()
    even = [len(part) for part in inputs.tensor_split(min(devices, n))]
    text = f"expected parts of {even} samples, the larger ones anywhere"
    found = plain(fn(inputs, devices))
    if not isinstance(found, list):
        return Wrong(f"{text}, but the function returned {short(found)}")
    parts = list(map(torch.as_tensor, found))
    sizes = [len(part) if part.dim() else 0 for part in parts]
    if sorted(sizes) != sorted(even):
        return Wrong(f"{text}, but they have {sizes}")
    for part, expected in zip(parts, inputs.split(sizes)):
        if part.dtype != expected.dtype or part.tolist() != expected.tolist():
            text = f"{short(part)}, {part.dtype}, expected {short(expected)}, {expected.dtype}"
            return Wrong(f"a part is {text}")
    return None


def _facts(module: nn.Module) -> dict[str, Any]:
    """What a replica has in common with its model, by name."""
    tensors = module.state_dict(keep_vars=True).items()
    facts = {name: (type(t), t.dtype, t.requires_grad, t.tolist()) for name, t in tensors}
    return facts | {"its mode, train or eval": [m.training for m in module.modules()]}


@judged("model, num_devices", (3,), (2,), (1,), (4,))
def replicate(fn: Callable, num_devices: int) -> Wrong | None:
    """Grade ``fn(model, num_devices)``: a list of ``model`` itself and independent copies."""
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = with_parameters(layers, seed=5)
    # With buffers, a frozen parameter, and a gradient from an earlier step.
    model(random_tensor(6, 8, 3)).sum().backward()
    model[0].bias.requires_grad_(False)
    before, found = _facts(model), fn(model, num_devices)
    many = isinstance(found, Iterable) and not isinstance(found, nn.Sequential)
    replicas, places = list(found) if many else [found], dict[int, int]()
    if len(replicas) != num_devices or not all(isinstance(r, nn.Module) for r in replicas):
        return Wrong(f"expected a list of {num_devices} modules, got {kind_of(replicas)}")
    if replicas[0] is not model:
        return Wrong("device 0 has to keep the model itself, which the optimizer updates")
    for index, replica in enumerate(replicas):
        now = _facts(replica)
        differ = [name for name in before.keys() | now.keys() if before.get(name) != now.get(name)]
        if differ:
            return Wrong(f"replica {index}: not as in the model: {', '.join(sorted(differ))}")
        for name, tensor in replica.state_dict(keep_vars=True).items():
            if (other := places.setdefault(tensor.data_ptr(), index)) != index:
                return Wrong(f"replicas {other} and {index} share the memory of {name}")
    return None


_THREADS = ((3, True, -1), (5, False, -1), (3, True, 1), (3, False, 0), (3, True, 2))


@judged("functions, inputs", *_THREADS)
def parallel_apply(fn: Callable, count: int, grad_mode: bool, failing: int) -> Wrong | None:
    """Grade ``fn(functions, inputs)``: ``functions[i](inputs[i])`` for all i, in threads.

    They run at the same time, with the caller's autograd mode. Expected are the results in the
    order of the functions; the exception of a thread is raised in the caller.
    """
    error = (RuntimeError, KeyError, ZeroDivisionError)[failing]
    meeting, words = threading.Barrier(count, timeout=_MEET_S), f"part {failing} has failed"
    modes, expected = [], [10 * number for number in range(count)]

    def part(number: int) -> int:
        modes.append(torch.is_grad_enabled())
        meeting.wait()
        # The first thread ends last, so that results in the order of the ends are noticed.
        time.sleep(0.02 * (count - 1 - number))
        if number == failing:
            raise error(words)
        return 10 * number

    try:
        with torch.set_grad_enabled(grad_mode), mock.patch.object(threading, "excepthook"):
            found = plain(fn([part] * count, list(range(count))))
    except Exception as raised:
        if failing < 0 and not meeting.broken:
            raise
        found = raised
    if meeting.broken:
        return Wrong(f"{count} functions do not run at the same time: start all threads first")
    if failing >= 0:
        text = f"functions[{failing}] raised {error(words)!r}, the caller got {short(found)}"
        return None if type(found) is error and words in str(found) else Wrong(text)
    if not agree(found, expected):
        return Wrong(f"the function returned {beside(found, expected)}")
    text = f"is_grad_enabled() is {grad_mode} in the caller, {modes} in the threads"
    return None if modes == [grad_mode] * count else Wrong(text)


@judged("outputs, targets", ([1, 3, 2],), ([4, 3],), ([1, 1, 1, 1],), ([5],))
def gather(fn: Callable, samples: list[int]) -> Wrong | None:
    """Grade ``fn(outputs, targets)``: the loss on device 0, and what goes back to the devices.

    ``outputs`` are [n_i, classes] by device, ``targets`` [n]. Expected are the mean cross-entropy
    over all n samples and, by device, its gradient. None may run on into the replicas.
    """
    leaves = [torch.randn(n, 3, requires_grad=True) for n in samples]
    targets = torch.arange(sum(samples)) * 2 % 3
    # One number stands for the parameters of a replica.
    replicas = [torch.ones((), requires_grad=True) for _ in samples]
    outputs = [leaf.detach() * replica for leaf, replica in zip(leaves, replicas)]
    found = plain(fn(outputs, targets.clone()))
    if not isinstance(found, list) or len(found) != 2:
        return Wrong(f"expected the loss and a list of gradients, got {short(found)}")
    if any(replica.grad is not None for replica in replicas):
        return Wrong("a gradient has run on into the replicas: detach the outputs first")
    own = torch.stack([*map(functional.cross_entropy, leaves, targets.split(samples))])
    losses = functional.cross_entropy(torch.cat(leaves), targets), own.mean()
    expected, of_means = ([x.item(), *torch.autograd.grad(x, leaves)] for x in losses)
    found = [found[0], *found[1]] if isinstance(found[1], list) else found
    if kind := other_kind(found[1:], expected[1:]):
        return Wrong(f"what the function returns beside the loss: {kind}")
    for place, (one, right, mean) in enumerate(zip(found, expected, of_means)):
        if not agree(one, right):
            what = f"the gradient of device {place - 1}" if place else "the loss"
            like = "; it belongs to the mean of the devices' own means" if agree(one, mean) else ""
            difference = f"it is {beside(one, right)}{like}"
            return Wrong(f"{what}: {other_kind(one, right) or difference}")
    return None


# The gradient of the last parameter is zero on all devices.
_SHAPES = ((4,), (4,), (2, 3), (4,), (), (1,))


@judged(
    "gradients",
    *(("yyy -yy yy- --- --y yyy",), ("yy -y y- -- -- yy",)),
    ("yyyyy -y-yy yy-yy ----- ---y- yyyyy",),
)
def reduce(fn: Callable, there: str) -> Wrong | None:
    """Grade ``fn(gradients)``: by device, by parameter -> the sums over the devices, by parameter.

    If it is None on all devices, so is the sum. The gradients of devices 1 and up must not change.
    ``there`` says by parameter which devices have a gradient.
    """
    rows = there.split()
    columns = [
        [torch.randn(shape) * (p < 5) if has == "y" else None for has in row]
        for p, (shape, row) in enumerate(zip(_SHAPES, rows))
    ]
    given = [list(of_device) for of_device in zip(*copy.deepcopy(columns))]
    others = [list(of_device) for of_device in given[1:]]
    found = plain(fn(given))
    if not isinstance(found, list) or len(found) != len(rows):
        return Wrong(f"expected a list of {len(rows)} sums, got {short(found)}")
    if not agree(others, [list(of_device) for of_device in zip(*columns)][1:]):
        return Wrong("the gradients of other devices have changed: add into copies")
    for p, (one, column, row) in enumerate(zip(found, columns, rows)):
        own = [gradient for gradient in column if gradient is not None]
        total = torch.stack(own).sum(0) if own else None
        if not agree(one, total):
            text = f"parameter {p} has a gradient on devices {row}: its sum is "
            return Wrong(text + beside(one, total))
    return None
