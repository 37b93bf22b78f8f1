"""The micro-batches that a learner's function cuts a batch into: read, and judged.

``check.pipeline`` uses this. Symbols: n samples of a batch, M micro-batches.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.units import format_count
from workbook.exercises.grader import Mistake
from workbook.exercises.grader.compare import agree, plain
from workbook.exercises.grader.exercise import random_tensor
from workbook.exercises.grader.in_process import Question, Wrong

BATCH_NAMES = "inputs, targets, count"
# (n, M, shape of a sample), most telling first.
_CASES = ((7, 3, (2,)), (8, 4, (2,)), (3, 5, (2,)), (6, 4, (1, 2, 2)), (6, 1, (2,)))


class Part(NamedTuple):
    """One micro-batch: inputs [n, ...], targets [n], and the weight of its mean loss."""

    inputs: Any
    targets: Any
    weight: Any


def questions() -> list[Question]:
    """The batches to cut; all targets of a batch differ, so that each sample can be told."""
    found = []
    for key, (n, count, shape) in enumerate(_CASES):
        targets = torch.randperm(n, generator=torch.Generator().manual_seed(key))
        words = f"{format_count(n, 'sample')}, count {count}"
        found.append(Question((random_tensor(key, n, *shape), targets, count), words))
    return found


def parts_of(fn: Callable, inputs: Tensor, targets: Tensor, count: int) -> list[Part]:
    """What ``fn`` returns or yields, as tensors.

    Raises:
        Wrong: it is nothing, or not a sequence of triples.
    """
    returned = fn(inputs, targets, count)
    if returned is None:
        raise Wrong(Mistake("answer.nothing"))
    if not isinstance(returned, Iterable):
        raise Wrong(Mistake("micro_batches.no_triple", found=f"{returned!r:.60}"))
    # An endless generator must not hang the check.
    return [_part(one) for one in itertools.islice(returned, 2 * len(targets) + 2)]


def _part(one: Any) -> Part:
    entries = list(one.values() if isinstance(one, dict) else one) if _is_many(one) else []
    if len(entries) != 3:
        raise Wrong(Mistake("micro_batches.no_triple", found=f"{one!r:.60}"))
    inputs, targets, weight = entries
    return Part(_rows(inputs), _rows(targets), plain(weight))


def _is_many(one: Any) -> bool:
    return isinstance(one, Iterable) and not isinstance(one, (str, Tensor))


def _rows(value: Any) -> Any:
    """A tensor of samples, if ``value`` is one in any clothes."""
    value = plain(value)
    try:
        rows = [torch.as_tensor(row) for row in value] if isinstance(value, list) else []
        return torch.stack(rows) if rows else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return value


def said_when_right(answers: list) -> str:
    """The sentence for batches that are all cut well."""
    return (
        f"all {len(answers)} batches are cut well: the weighted sum of the micro-batches' "
        "gradients is the gradient of the batch"
    )


def wrong_parts(question: Question, parts: list[Part]) -> Mistake | None:
    """Return what is wrong with the micro-batches, or None."""
    inputs, targets, count = question.args
    found = _wrong_shapes(parts, inputs) or _wrong_cut(parts, inputs, targets, count)
    found = found or _wrong_weights(parts, len(targets))
    return Mistake("told.place", place=question.words, what=found) if found else None


def _wrong_shapes(parts: list[Part], inputs: Tensor) -> Mistake | None:
    for m, part in enumerate(parts):
        shapes = [list(getattr(one, "shape", ["none"])) for one in (part.inputs, part.targets)]
        n = shapes[1][0] if len(shapes[1]) == 1 else None
        # Without samples, only the number of them can be right.
        if shapes != [[n, *inputs.shape[1:]], [n]] and not shapes[0][:1] == shapes[1] == [0]:
            due = ", ".join(map(str, ["n", *inputs.shape[1:]]))
            return Mistake("micro_batches.shapes", m=m, x=shapes[0], y=shapes[1], due=due)
    return None


def _wrong_cut(parts: list[Part], inputs: Tensor, targets: Tensor, count: int) -> Mistake | None:
    sizes = [len(part.targets) for part in parts]
    if 0 in sizes:
        return Mistake("micro_batches.empty", sizes=sizes)
    if len(parts) != (due := min(count, len(targets))):
        return Mistake("micro_batches.count", found=len(parts), sizes=sizes, due=due)
    kept = [int(target) for part in parts for target in part.targets]
    if lost := len({*targets.tolist()} - {*kept}):
        return Mistake("micro_batches.lost", lost=format_count(lost, "sample"), sizes=sizes)
    if len(kept) > len(targets):
        return Mistake("micro_batches.twice", sizes=sizes)
    place = {target: row for row, target in enumerate(targets.tolist())}
    for m, part in enumerate(parts):
        if not agree(part.inputs.double(), inputs[[place[int(t)] for t in part.targets]].double()):
            return Mistake("micro_batches.pairs", m=m)
    if max(sizes) - min(sizes) > 1:
        return Mistake("micro_batches.uneven", sizes=sizes)
    return None


def _wrong_weights(parts: list[Part], n: int) -> Mistake | None:
    weights, sizes = [part.weight for part in parts], [len(part.targets) for part in parts]
    due = [size / n for size in sizes]
    if agree(weights, due):
        return None
    looks = {
        "micro_batches.ones": [1] * len(parts),
        "micro_batches.mean_of_means": [1 / len(parts)] * len(parts),
        "micro_batches.sizes": sizes,
        "micro_batches.of_sums": [1 / n] * len(parts),
        "micro_batches.inverse": [n / size for size in sizes],
    }
    for id, wrong in looks.items():
        if agree(weights, wrong):
            return Mistake(id, sizes=sizes)
    shown = [f"{weight:.4g}" if isinstance(weight, (int, float)) else weight for weight in weights]
    return Mistake("micro_batches.weights", sizes=sizes, found=", ".join(map(str, shown)))
