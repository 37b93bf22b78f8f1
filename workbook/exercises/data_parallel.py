"""Checks of page 02: the parts of single-process data parallelism, on one real rank.

Symbols: P devices, n samples.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from workbook.exercises.grader import Case, Mistake, Verdict, returns
from workbook.exercises.grader.compare import plain, same, short
from workbook.exercises.grader.exercise import random_tensor, with_parameters

DEVICES = 4
_MEET_S = 1.0
# By number of samples: the devices, and the shape of a sample.
_BATCHES: dict[int, tuple[int, tuple[int, ...]]] = {
    6: (DEVICES, (2,)),
    7: (DEVICES, ()),
    2: (DEVICES, (2,)),
    1: (DEVICES, (2,)),
    8: (3, (2, 3)),
    3: (1, (2,)),
}


def scatter(fn: Callable) -> Verdict:
    """Grade ``fn(inputs, num_devices)``: a list of parts of ``inputs`` [n, ...], in order.

    There are as many parts as devices, or as samples if there are fewer; their sizes differ by one
    at most, and any of them may be the larger ones.
    """
    return returns(
        fn,
        name="data_parallel.scatter",
        inputs=lambda rank, case: (case.size,),
        signature="inputs, num_devices",
        judge=_judge_parts,
        call=lambda fn, comm, size: _of_all(_parts_of, fn, _BATCHES, size),
        sizes=tuple(_BATCHES),
        nouns=("", "sample"),
        world_sizes=(1,),
    )


def _of_all(result_of: Callable, fn: Callable, sizes: Iterable[int], size: int) -> dict[int, Any]:
    """What ``fn`` returns, by size; an error at any other size than ``size`` is not raised here.

    A mistake is named only if the results of all sizes agree with it.
    """
    found = {size: result_of(fn, size)}
    for other in {*sizes} - {size}:
        try:
            found[other] = result_of(fn, other)
        except Exception:
            found[other] = None
    return found


def _samples(size: int) -> Tensor:
    _, shape = _BATCHES[size]
    samples = torch.arange(1, 1 + size * torch.Size(shape).numel()).view(size, *shape)
    # Targets are integers, and are scattered, too.
    return samples if len(shape) == 2 else samples.float()


def _parts_of(fn: Callable, size: int) -> Any:
    parts = fn(_samples(size), _BATCHES[size][0])
    listed = isinstance(parts, Iterable) and not isinstance(parts, Tensor)
    return list(map(torch.as_tensor, parts)) if listed else parts


# A mistake's id, and what it makes of the inputs and the number of devices.
_WRONG_PARTS: list[tuple[str, Callable[[Tensor, int], list[Tensor]]]] = [
    ("scatter_fairly.chunk", lambda x, P: list(x.chunk(P))),
    ("scatter_fairly.in_turn", lambda x, P: [x[i::P] for i in range(min(P, len(x)))]),
    ("scatter_fairly.in_turn", lambda x, P: [x[i::P] for i in range(P)]),
    ("scatter_fairly.dropped", lambda x, P: list(x.split(max(1, len(x) // P)))[:P]),
    ("scatter_fairly.dropped", lambda x, P: [_nth(x, len(x) // P, i) for i in range(P)]),
    ("scatter_fairly.rest_to_last", lambda x, P: _with_rest(x, P)),
    ("scatter_fairly.rest_to_last", lambda x, P: _with_rest(x, min(P, len(x)))),
    ("scatter_fairly.whole_batch", lambda x, P: [x] * P),
    ("scatter_fairly.one_each", lambda x, P: list(x.split(1))),
]


def _nth(inputs: Tensor, size: int, index: int) -> Tensor:
    return inputs[index * size : (index + 1) * size]


def _with_rest(inputs: Tensor, num_parts: int) -> list[Tensor]:
    size = len(inputs) // num_parts
    first = [_nth(inputs, size, index) for index in range(num_parts - 1)]
    return [*first, inputs[(num_parts - 1) * size :]]


def _judge_parts(case: Case, values: list[Any]) -> Mistake | None:
    found: dict[int, Any] = values[0]
    devices, _ = _BATCHES[case.size]
    wrong = _wrong_with(found[case.size], _samples(case.size), devices)
    if wrong is None:
        return None
    for id, rule in _WRONG_PARTS:
        rules = {size: rule(_samples(size), _BATCHES[size][0]) for size in found}
        if all(same(parts, rules[size]) for size, parts in found.items()):
            wrong.explain(Mistake(id))
            break
    return Mistake("scatter_fairly.devices", wrong, devices=devices)


def _wrong_with(parts: Any, inputs: Tensor, devices: int) -> Mistake | None:
    """What is wrong with the parts: their kind, their number, their sizes or their order."""
    due = min(devices, len(inputs))
    if not isinstance(parts, list):
        return Mistake("scatter_fairly.kind", due=due, kind=f"{parts!r:.60}")
    shaped = [part for part in parts if part.shape[1:] == inputs.shape[1:] and part.dim()]
    sizes = [len(part) for part in shaped]
    if len(shaped) == len(parts) and 0 in sizes:
        return Mistake("scatter_fairly.empty_device")
    if len(parts) != due:
        return Mistake("scatter_fairly.count", found=len(parts), due=due)
    if len(shaped) < due or not torch.equal(torch.cat(shaped), inputs):
        return Mistake("scatter_fairly.samples", parts=f"{short(parts):.80}", due=short(inputs))
    if (dtype := shaped[0].dtype) != inputs.dtype:
        return Mistake("scatter_fairly.dtype", found=dtype, due=inputs.dtype)
    if max(sizes) - min(sizes) > 1:
        return Mistake("scatter_fairly.sizes", sizes=", ".join(map(str, sizes)))
    return None


def replicate(fn: Callable) -> Verdict:
    """Grade ``fn(model, num_devices)``: a list of modules, the model and independent copies of it.

    The first is ``model`` itself. The others hold the same numbers, parameters and buffers, in
    memory of their own.
    """
    return returns(
        fn,
        name="data_parallel.replicate",
        signature="model, num_devices",
        judge=lambda case, values: values[0],
        call=_look_at_replicas,
        nouns=("", ""),
        world_sizes=(1,),
    )


def _small_model() -> nn.Sequential:
    """With buffers, a frozen parameter, and a gradient from an earlier step."""
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = with_parameters(layers, seed=5)
    model(random_tensor(6, 8, 3)).sum().backward()
    model[0].bias.requires_grad_(False)
    return model


def _look_at_replicas(fn: Callable, comm: Any) -> Mistake | None:
    """On the rank: try ``fn``, and return what is wrong with it."""
    for devices in (3, 2, 1, 4):
        model = _small_model()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        replicas = fn(model, devices)
        if wrong := _wrong_with_replicas(replicas, model, before, devices):
            return wrong
    return None


def _wrong_with_replicas(
    replicas: Any, model: nn.Module, before: Mapping[str, Tensor], devices: int
) -> Mistake | None:
    if isinstance(replicas, Iterable) and not isinstance(replicas, nn.Sequential):
        replicas = list(replicas)
    are_modules = isinstance(replicas, list) and all(isinstance(r, nn.Module) for r in replicas)
    if not are_modules or len(replicas) != devices:
        found = f"{len(replicas)} modules" if are_modules else f"{replicas!r:.60}"
        return Mistake("copies.count", due=devices, found=found)
    pairs = list(itertools.combinations(enumerate(replicas), 2))
    if one := next(((a, b) for (a, one), (b, other) in pairs if one is other), None):
        return Mistake("copies.one_module", first=one[0], second=one[1])
    if replicas[0] is not model:
        return Mistake("copies.first_copied")
    for (a, one), (b, other) in pairs:
        if name := _shared_tensor(one, other):
            return Mistake("copies.shared_memory", first=a, second=b, name=name)
    for index, replica in enumerate(replicas):
        if wrong := _other_than(before, model, replica):
            return Mistake("copies.replica", index=index, what=wrong)
    return None


def _shared_tensor(one: nn.Module, other: nn.Module) -> str:
    """The name of a parameter or buffer of which both modules hold the same memory, or ""."""
    places = {tensor.data_ptr() for tensor in _tensors(other).values() if tensor.numel()}
    return next((name for name, t in _tensors(one).items() if t.data_ptr() in places), "")


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _other_than(
    before: Mapping[str, Tensor], model: nn.Module, replica: nn.Module
) -> Mistake | None:
    """What differs between a replica and the model as it was."""
    due, found = dict(model.named_parameters()), dict(replica.named_parameters())
    if due.keys() != found.keys():
        return Mistake("copies.names", due=", ".join(due), found=", ".join(found) or "none")
    state = replica.state_dict()
    for name, tensor in before.items():
        if name not in state or not torch.equal(state[name], tensor):
            return Mistake("copies.numbers" if name in due else "copies.buffer", name=name)
    frozen = [name for name in due if due[name].requires_grad != found[name].requires_grad]
    return Mistake("copies.frozen", name=frozen[0]) if frozen else None


def parallel_apply(fn: Callable) -> Verdict:
    """Grade ``fn(functions, inputs)``: ``functions[i](inputs[i])`` for all i, in threads.

    The threads have to run at the same time, with the caller's autograd mode. Expected are the
    results in the order of the functions, and the exception of a thread raised in the caller.
    """
    return returns(
        fn,
        name="data_parallel.parallel_apply",
        signature="functions, inputs",
        judge=lambda case, values: values[0],
        call=_observe,
        nouns=("", ""),
        world_sizes=(1,),
    )


def _observe(fn: Callable, comm: Any) -> Mistake | None:
    """On the rank: try ``fn``, and return what is wrong with it."""
    wrong = _look_at_threads(fn, 3) or _look_at_threads(fn, 5)
    for failing, error in ((1, KeyError), (0, RuntimeError), (2, ZeroDivisionError)):
        wrong = wrong or _look_at_error_in(fn, failing, error)
    return wrong or _look_at_autograd(fn)


def _look_at_threads(fn: Callable, count: int) -> Mistake | None:
    """Whether ``count`` functions run at the same time, and their results are in order."""
    meeting, seen = threading.Barrier(count, timeout=_MEET_S), set()
    due = [10 * number for number in range(count)]

    def part(number: int) -> int:
        seen.add(threading.get_ident())
        meeting.wait()
        # The first thread ends last, so that results in the order of the ends are noticed.
        time.sleep(0.02 * (count - 1 - number))
        return 10 * number

    try:
        results = _listed(fn([part] * count, list(range(count))))
    except threading.BrokenBarrierError:
        results = None
    results = plain(results)
    if same(results, due):
        return None
    if seen and (meeting.broken or len(seen) < count):
        if seen == {threading.get_ident()}:
            return Mistake("threads.none")
        if len(seen) == 1 or count == 3:
            return Mistake("threads.one_by_one")
        return Mistake("threads.too_few", count=count)
    if isinstance(results, list) and same(sorted(r for r in results if r is not None), due):
        return Mistake("threads.order")
    not_waited = isinstance(results, list) and None in results
    why = Mistake("threads.not_waited") if not_waited else None
    return Mistake("threads.results", why, results=repr(results), due=due)


def _listed(results: Any) -> Any:
    """The results as a list; a generator runs only now, and may raise only now."""
    return list(results) if isinstance(results, Iterable) else results


def _look_at_error_in(fn: Callable, failing: int, kind: type[Exception]) -> Mistake | None:
    words = f"part {failing} has failed"

    def part(number: int) -> int:
        if number == failing:
            raise kind(words)
        return number

    raised, told = kind.__name__, {"part": failing}
    kept, threading.excepthook = threading.excepthook, lambda args: None
    try:
        results = _listed(fn([part] * 3, [0, 1, 2]))
    except kind as error:
        if words in str(error):
            return None
        return Mistake("threads.other_words", raised=raised, words=words, said=str(error), **told)
    except Exception as error:
        return Mistake("threads.other_error", raised=raised, kind=type(error).__name__, **told)
    finally:
        threading.excepthook = kept
    return Mistake("threads.lost_error", raised=raised, results=repr(results), **told)


def _look_at_autograd(fn: Callable) -> Mistake | None:
    def part(_: int) -> bool:
        return torch.is_grad_enabled()

    with torch.no_grad():
        modes = list(fn([part] * 2, [0, 1]))
    if any(modes):
        return Mistake("threads.record")
    if not all(fn([part] * 2, [0, 1])) or not torch.is_grad_enabled():
        return Mistake("threads.do_not_record")
    return None


_CLASSES = 3
# By number of samples: how many each device has.
_PARTS = {6: (1, 3, 2), 7: (4, 3), 4: (1, 1, 1, 1), 5: (5,)}


def gather(fn: Callable) -> Verdict:
    """Grade ``fn(outputs, targets)``: the loss on device 0, and what goes back to the devices.

    ``outputs`` are [n_i, classes] by device, ``targets`` [n]. Expected is the mean cross-entropy
    over all n samples, and by device its gradient with respect to the outputs, [n_i, classes]. No
    gradient may run on into the replicas.
    """
    return returns(
        fn,
        name="data_parallel.gather",
        inputs=lambda rank, case: (case.size,),
        signature="outputs, targets",
        judge=_judge_gradients,
        call=lambda fn, comm, size: _of_all(_gather_and_look, fn, _PARTS, size),
        sizes=tuple(_PARTS),
        nouns=("", "sample"),
        world_sizes=(1,),
    )


def _outputs_and_targets(size: int) -> tuple[list[Tensor], Tensor]:
    outputs = [random_tensor(size + i, n, _CLASSES) for i, n in enumerate(_PARTS[size])]
    return outputs, torch.arange(size) * 2 % _CLASSES


def _gather_and_look(fn: Callable, size: int) -> tuple[Any, bool]:
    """(what ``fn`` returns, whether a gradient has run on into a replica)."""
    outputs, targets = _outputs_and_targets(size)
    # One number stands for the parameters of a replica.
    replicas = [torch.ones((), requires_grad=True) for _ in outputs]
    found = fn([output * replica for output, replica in zip(outputs, replicas)], targets)
    return _as_lists(found), any(replica.grad is not None for replica in replicas)


def _as_lists(found: Any) -> Any:
    """(loss, gradients), the gradients as a list."""
    if not isinstance(found, Iterable) or isinstance(found, Tensor):
        return f"{found!r:.60}"
    return [plain(list(one) if isinstance(one, Iterator) else one) for one in found]


def _loss_and_gradients(
    size: int, sizes: Sequence[int] | None = None, reduction: str = "mean", by_part: bool = False
) -> list[Any]:
    """What ``fn`` has to return; the options make mistakes.

    Args:
        size: the number of samples.
        sizes: those of the gradients' parts, if not those of the outputs.
        reduction: of the cross-entropy.
        by_part: the mean over the devices of the means over their samples.
    """
    outputs, targets = _outputs_and_targets(size)
    gathered = torch.cat(outputs).requires_grad_()
    loss = functional.cross_entropy(gathered, targets, reduction=reduction)
    if by_part:
        parts = zip(*(whole.split(_PARTS[size]) for whole in (gathered, targets)))
        loss = torch.stack([functional.cross_entropy(*part) for part in parts]).mean()
    (gradient,) = torch.autograd.grad(loss, gathered)
    return [loss.item(), list(gradient.split(list(sizes or _PARTS[size])))]


# A mistake's id -> what it returns for that many samples.
_WRONG_GRADIENTS: dict[str, Callable[[int], list[Any]]] = {
    "gather_loss.mean_of_means": lambda n: _loss_and_gradients(n, by_part=True),
    "gather_loss.sum": lambda n: _loss_and_gradients(n, reduction="sum"),
    "gather_loss.whole": lambda n: [
        _loss_and_gradients(n)[0],
        [torch.cat(_loss_and_gradients(n)[1])] * len(_PARTS[n]),
    ],
    "gather_loss.own_mean": lambda n: [
        _loss_and_gradients(n)[0],
        [n / len(part) * part for part in _loss_and_gradients(n)[1]],
    ],
    "gather_loss.equal_parts": lambda n: _loss_and_gradients(
        n, [len(part) for part in torch.ones(n).tensor_split(len(_PARTS[n]))]
    ),
}


def _judge_gradients(case: Case, values: list[Any]) -> Mistake | None:
    found: dict[int, Any] = values[0]
    result, has_run_on = found[case.size]
    due = _loss_and_gradients(case.size)
    wrong = None
    if not isinstance(result, list) or len(result) != 2:
        return Mistake("gather_loss.kind", result=f"{result!r:.60}")
    if not same(result[0], due[0]):
        wrong = Mistake("gather_loss.loss", loss=short(result[0]), due=short(due[0]))
    elif not same(result[1], due[1], gaps=False):
        wrong = Mistake(
            "gather_loss.gradients", found=f"{short(result[1]):.90}", due=short(due[1])
        )
    if wrong is None:
        return Mistake("gather_loss.ran_on") if has_run_on else None
    for id, rule in _WRONG_GRADIENTS.items():
        if all(one and same(one[0], rule(size), gaps=False) for size, one in found.items()):
            return Mistake(id)
    if has_run_on:
        wrong.explain(Mistake("gather_loss.ran_on"))
    return wrong


# By number of devices: whether each of them has a gradient, by parameter.
_THERE: dict[int, list[str]] = {
    3: ["yyy", "-yy", "yy-", "---", "--y", "yyy"],
    2: ["yy", "-y", "y-", "--", "--", "yy"],
    5: ["yyyyy", "-y-yy", "yy-yy", "-----", "---y-", "yyyyy"],
}
# The gradient of the last parameter is zero on all devices.
_SHAPES = ((4,), (4,), (2, 3), (4,), (), (1,))


def reduce(fn: Callable) -> Verdict:
    """Grade ``fn(gradients)``: by device, by parameter -> the sums over the devices, by parameter.

    A gradient of None counts as zero; if it is None on all devices, the sum is None. The gradients
    of devices 1 and up must not change.
    """
    return returns(
        fn,
        name="data_parallel.reduce",
        inputs=lambda rank, case: (case.size,),
        signature="gradients",
        judge=_judge_sums,
        call=lambda fn, comm, devices: _of_all(_reduce_and_look, fn, _THERE, devices),
        sizes=tuple(_THERE),
        nouns=("", "device"),
        world_sizes=(1,),
    )


def _gradients(devices: int) -> list[list[Tensor | None]]:
    """By device, by parameter."""
    return [
        [
            random_tensor(7 * device + parameter, *shape) * (parameter < len(_SHAPES) - 1)
            if there[device] == "y"
            else None
            for parameter, (there, shape) in enumerate(zip(_THERE[devices], _SHAPES))
        ]
        for device in range(devices)
    ]


def _reduce_and_look(fn: Callable, devices: int) -> tuple[Any, bool]:
    """(what ``fn`` returns, whether the gradients of devices 1 and up are as before)."""
    gradients = _gradients(devices)
    given = [list(of_device) for of_device in gradients[1:]]
    found = fn(gradients)
    listed = isinstance(found, Iterable) and not isinstance(found, Tensor)
    return list(found) if listed else found, all(map(_alike, given, _gradients(devices)[1:]))


def _there(column: Sequence[Tensor | None]) -> list[Tensor]:
    return [gradient for gradient in column if gradient is not None]


def _sum(column: Sequence[Tensor | None]) -> Tensor | None:
    there = _there(column)
    return sum(there[1:], there[0]) if there else None


# A mistake's id -> the "sum" of one parameter's gradients by device, c.
_WRONG_SUMS: dict[str, Callable[[tuple], Tensor | None]] = {
    "sum_devices.mean": lambda c: _sum([g / len(c) for g in _there(c)]),
    "sum_devices.first_alone": lambda c: c[0],
    "sum_devices.first_missing": lambda c: _sum(c[1:]),
    "sum_devices.follows_first": lambda c: None if c[0] is None else _sum(c),
    "sum_devices.wants_all": lambda c: _sum(c) if len(_there(c)) == len(c) else None,
    "sum_devices.two_alone": lambda c: _sum(c[:2]),
    "sum_devices.three_alone": lambda c: _sum(c[:3]),
    "sum_devices.zeros": lambda c: torch.zeros(4) if _sum(c) is None else _sum(c),
    "sum_devices.mean_of_some": lambda c: _sum([g / len(_there(c)) for g in _there(c)]),
    "sum_devices.nothing_for_zero": lambda c: _sum([g for g in _there(c) if g.any()]),
}


def _judge_sums(case: Case, values: list[Any]) -> Mistake | None:
    result, others_kept = values[0][case.size]
    due = list(map(_sum, zip(*_gradients(case.size))))
    if not isinstance(result, list) or len(result) != len(due):
        return Mistake("sum_devices.kind", count=len(due), result=f"{result!r:.60}")
    if _alike(result, due):
        return None if others_kept else Mistake("sum_devices.others_changed")
    for id, wrong in _WRONG_SUMS.items():
        if all(_agrees(found, wrong, devices) for devices, found in values[0].items()):
            return Mistake(id)
    if not others_kept:
        return Mistake("sum_devices.others_changed")
    place = next(p for p, pair in enumerate(zip(result, due)) if not _alike(*zip(pair)))
    value, expected = short(result[place]), short(due[place])
    return Mistake("sum_devices.differs", parameter=place, value=value, due=expected)


def _agrees(found: tuple[Any, bool] | None, wrong: Callable, devices: int) -> bool:
    sums = list(map(wrong, zip(*_gradients(devices))))
    return (
        found is not None
        and isinstance(found[0], list)
        and len(found[0]) == len(sums)
        and _alike(found[0], sums)
    )


def _alike(sums: Sequence, due: Sequence) -> bool:
    return all((s is None) == (d is None) and (d is None or same(s, d)) for s, d in zip(sums, due))
