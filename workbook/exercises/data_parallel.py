"""Page 02: the parts of single-process data parallelism.

Symbols: P devices, n samples.
"""

import copy
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


def _facts(module: nn.Module) -> dict[str, Any]:
    """The facts that a replica has in common with its model, by name."""
    facts: dict[str, Any] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        facts[name] = (type(tensor), tensor.dtype, tensor.tolist())
        facts[f"the requires_grad of {name}"] = tensor.requires_grad
    facts["its mode, train or eval"] = [layer.training for layer in module.modules()]
    return facts


@judged("model, num_devices", (3,), (2,), (1,), (4,))
def replicate(fn: Callable, num_devices: int) -> Wrong | None:
    """Grade ``fn(model, num_devices)``: a list of ``model`` itself and independent copies."""
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = with_parameters(layers, seed=5)
    # With buffers, a frozen parameter, a layer in eval mode, and a gradient of an earlier step.
    model(random_tensor(6, 8, 3)).sum().backward()
    model[0].bias.requires_grad_(False)
    model[1].eval()
    before = _facts(model)
    returned = fn(model, num_devices)
    replicas = [returned]
    if isinstance(returned, Iterable) and not isinstance(returned, nn.Sequential):
        replicas = list(returned)
    if len(replicas) != num_devices or not all(isinstance(r, nn.Module) for r in replicas):
        return Wrong(f"expected a list of {num_devices} modules, got {kind_of(replicas)}")
    if replicas[0] is not model:
        return Wrong("device 0 has to keep the model itself, which the optimizer updates")
    owners: dict[int, int] = {}  # by address, the first replica with a tensor there
    for index, replica in enumerate(replicas):
        facts = _facts(replica)
        names = sorted(before.keys() | facts.keys())
        if differing := [name for name in names if before.get(name) != facts.get(name)]:
            return Wrong(f"replica {index}: not as in the model: {', '.join(differing)}")
        for name, tensor in replica.state_dict(keep_vars=True).items():
            owner = owners.setdefault(tensor.data_ptr(), index)
            if owner != index:
                return Wrong(f"replicas {owner} and {index} share the memory of {name}")
    return None


_THREADS = ((3, True, -1), (5, False, -1), (3, True, 1), (3, False, 0), (3, True, 2))


def _threads_in_words(count: int, grad_mode: bool, failing: int) -> str:
    mode = "on" if grad_mode else "off"
    text = f"{count} functions, autograd {mode} in the caller"
    if failing >= 0:
        text += f", and functions[{failing}] raising an error"
    return text


@judged("functions, inputs", *_THREADS, in_words=_threads_in_words)
def parallel_apply(fn: Callable, count: int, grad_mode: bool, failing: int) -> Wrong | None:
    """Grade ``fn(functions, inputs)``: ``functions[i](inputs[i])`` for all i, in threads.

    They run at the same time, with the caller's autograd mode. Expected are the results in the
    order of the functions; the exception of a thread is raised in the caller.
    """
    error = (RuntimeError, KeyError, ZeroDivisionError)[failing]
    words = f"part {failing} has failed"
    barrier = threading.Barrier(count, timeout=_MEET_S)
    modes = []

    def part(number: int) -> int:
        modes.append(torch.is_grad_enabled())
        barrier.wait()
        # The first thread ends last, so that results in the order of the ends are noticed.
        time.sleep(0.02 * (count - 1 - number))
        if number == failing:
            raise error(words)
        return 10 * number

    try:
        with torch.set_grad_enabled(grad_mode), mock.patch.object(threading, "excepthook"):
            result = plain(fn([part] * count, list(range(count))))
    except Exception as raised:
        if failing < 0 and not barrier.broken:
            raise
        result = raised
    if barrier.broken:
        return Wrong(f"{count} functions do not run at the same time: start all threads first")
    if failing >= 0:
        if type(result) is error and words in str(result):
            return None
        text = f"functions[{failing}] raised {error(words)!r}, the caller got {short(result)}"
        return Wrong(text)
    expected = [10 * number for number in range(count)]
    if not agree(result, expected):
        return Wrong(f"the function returned {beside(result, expected)}")
    if modes != [grad_mode] * count:
        return Wrong(f"is_grad_enabled() is {grad_mode} in the caller, {modes} in the threads")
    return None


@judged(
    "outputs, targets",
    *(([1, 3, 2],), ([4, 3],), ([1, 1, 1, 1],), ([5],)),
    in_words=lambda samples: f"outputs of {', '.join(map(str, samples))} samples, by device",
)
def gather(fn: Callable, samples: list[int]) -> Wrong | None:
    """Grade ``fn(outputs, targets)``: the loss on device 0, and what goes back to the devices.

    ``outputs`` are [n_i, classes] by device, ``targets`` [n]. Expected are the mean cross-entropy
    over all n samples and, by device, its gradient. None may run on into the replicas.
    """
    n = sum(samples)
    leaves = [torch.randn(count, 3, requires_grad=True) for count in samples]
    targets = torch.arange(n) * 2 % 3
    # One number stands for the parameters of a replica.
    replicas = [torch.ones((), requires_grad=True) for _ in samples]
    outputs = [leaf.detach() * replica for leaf, replica in zip(leaves, replicas)]
    returned = plain(fn(outputs, targets.clone()))
    if not isinstance(returned, list) or len(returned) != 2:
        return Wrong(f"expected the loss and a list of gradients, got {short(returned)}")
    if any(replica.grad is not None for replica in replicas):
        return Wrong("a gradient has run on into the replicas: detach the outputs first")
    loss = functional.cross_entropy(torch.cat(leaves), targets)
    expected = [loss.item(), *torch.autograd.grad(loss, leaves)]
    local_losses = torch.stack([*map(functional.cross_entropy, leaves, targets.split(samples))])
    mistakes = {}
    for name, loss in (
        ("the sum over the samples", functional.cross_entropy(torch.cat(leaves), targets) * n),
        ("the mean of the devices' own means", local_losses.mean()),
        ("the sum of the devices' own means", local_losses.sum()),
    ):
        mistakes[name] = [loss.item(), *torch.autograd.grad(loss, leaves, retain_graph=True)]
    loss, gradients = returned
    values = [loss, *gradients] if isinstance(gradients, list) else [loss, gradients]
    if kind := other_kind(values[1:], expected[1:]):
        return Wrong(f"what the function returns beside the loss: {kind}")
    for index, (value, right) in enumerate(zip(values, expected)):
        if agree(value, right):
            continue
        name = f"the gradient of device {index - 1}" if index else "the loss"
        if kind := other_kind(value, right):
            return Wrong(f"{name}: {kind}\na device gets as many rows as it has made outputs")
        text = f"{name}: it is {beside(value, right)}"
        for mistake, wrong in mistakes.items():
            if agree(values[index:], wrong[index:]):
                text += f"\n{name} belongs to {mistake}"
                break
        return Wrong(text)
    return None


# The gradient of the last parameter is zero on all devices.
_SHAPES = ((4,), (4,), (2, 3), (4,), (), (1,))


def _gaps_in_words(devices_with_gradient: str) -> str:
    words = devices_with_gradient.split()
    return f"{len(words[0])} devices and {len(words)} parameters"


@judged(
    "gradients",
    *(("yyy -yy yy- --- --y yyy",), ("yy -y y- -- -- yy",)),
    ("yyyyy -y-yy yy-yy ----- ---y- yyyyy",),
    in_words=_gaps_in_words,
)
def reduce(fn: Callable, devices_with_gradient: str) -> Wrong | None:
    """Grade ``fn(gradients)``: by device, by parameter -> the sums over the devices, by parameter.

    If it is None on all devices, so is the sum. The gradients of devices 1 and up must not change.
    ``devices_with_gradient`` says by parameter which devices have a gradient.
    """
    words = devices_with_gradient.split()
    num_devices = len(words[0])
    by_device: list[list] = [[] for _ in range(num_devices)]
    totals = []
    for index, (shape, word) in enumerate(zip(_SHAPES, words)):
        gradients = [torch.randn(shape) * (index < 5) for _ in range(word.count("y"))]
        total = None
        if gradients:
            total = torch.stack(gradients).sum(0)
        totals.append(total)
        for device, letter in enumerate(word):
            gradient = None
            if letter == "y":
                gradient = gradients.pop()
            by_device[device].append(gradient)
    before = copy.deepcopy(by_device[1:])
    later = [list(gradients) for gradients in by_device[1:]]
    sums = plain(fn(by_device))
    if not isinstance(sums, list) or len(sums) != len(words):
        return Wrong(f"expected a list of {len(words)} sums, got {short(sums)}")
    if not agree(later, before):
        return Wrong("the gradients of other devices have changed: add into copies")
    for index, (value, total, word) in enumerate(zip(sums, totals, words)):
        if not agree(value, total):
            holders = [str(device) for device, letter in enumerate(word) if letter == "y"]
            text = f"parameter {index} has a gradient on "
            text += f"devices {', '.join(holders)}" if holders else "no device"
            text += f": its sum is {beside(value, total)}"
            if value is None and "0" not in holders:
                text += "\ndevice 0 has none, but others may: begin with the first that is there"
            for count in {len(holders), len(by_device)} - {0, 1}:
                if value is not None and agree(count * torch.as_tensor(value), total):
                    text += f"\nthat is the mean, the sum over {count}"
            return Wrong(text)
    return None
