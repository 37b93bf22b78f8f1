"""Where two layouts of one training run part, by how much, and the usual cause: ``labkit diff``.

Both runs are recorded (``labkit.training.recording``), or were recorded before. Their entries are
compared in the order in which a step makes them: what the modules return, the loss, the gradients
from the last layer to the first, the parameters. The first that differs is named, since all that
follow may differ because of it.

Where the difference is a factor, the same in all parts of a tensor, the factor often tells the
cause: the number of ranks, or of micro-batches. For parameters it is the factor of the change in
that step.
"""

import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, Subset

from labkit.config import OPTIONS
from labkit.training.recording import Entry, Record, read_record
from labkit.training.train_run import train_with

# Relative differences that rounding explains, by dtype.
_ROUNDING = {"float64": 1e-9, "float32": 1e-4, "float16": 3e-2, "bfloat16": 3e-2}
_PHASES = ("forward", "loss", "gradient", "parameter")
# What a layout is, beside the options of the techniques; everything else is the same in both.
_OF_A_LAYOUT = ("strategy", "world_size", "builtin", "devices", "hosts", *OPTIONS)
Key = tuple[int, str, str]


@dataclass(frozen=True)
class Difference:
    """The first tensor in which two records differ.

    Attributes:
        step, phase, name, rank: as in ``Entry``; the rank is the second record's.
        size: of the difference, relative to the tensor.
        factor: the second's divided by the first's, if that is the same everywhere, or None.
        parts: the numbers, 1 to 8, of the parts of the tensor that differ.
        cause: the usual one, in words.
    """

    step: int
    phase: str
    name: str
    rank: int
    size: float
    factor: float | None
    parts: list[int]
    cause: str

    def __str__(self) -> str:
        what = self.phase
        if self.phase == "forward":
            what = "output"
        if self.phase == "parameter" and self.step:
            what = "change" if self.factor is not None else "value after the step"
        where = f"the {what} of {self.name}" if self.phase != "loss" else "the loss"
        text = f"step {self.step}: {where} differs on rank {self.rank}, by {self.size:.2g} of it"
        if self.factor is not None:
            text += f"; it is {self.factor:.6g} x the first's"
        elif len(self.parts) < 8:
            text += f"; of eight parts only in {', '.join(map(str, self.parts))}"
        return f"{text}\n  {self.cause}"


@dataclass
class Comparison:
    """The result of a comparison; ``str`` tells it.

    Attributes:
        first, second: the layouts, in words.
        steps, num_tensors: compared, of all ranks.
        difference: the first, or None if they are equal.
        largest: the largest relative difference that was taken for rounding, and its key.
        notes: what else there is to say.
    """

    first: str
    second: str
    steps: int = 0
    num_tensors: int = 0
    difference: Difference | None = None
    largest: tuple[float, Key | None] = (0.0, None)
    notes: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return self.difference is None

    def __str__(self) -> str:
        lines = [f"{self.first}, then {self.second}"]
        lines.append(f"compared: {self.num_tensors} tensors of {self.steps} steps")
        if self.difference is None:
            size, key = self.largest
            at = f", {key[1]} of {key[2]} in step {key[0]}" if key else ""
            lines.append(f"equal: the largest relative difference is {size:.2g}{at}")
        else:
            lines.append(str(self.difference))
        return "\n".join(lines + self.notes)

    __repr__ = __str__


def diff(
    strategy: str = "ddp",
    *,
    against: str | Mapping[str, Any] = "single",
    steps: int = 5,
    **settings: Any,
) -> Comparison:
    """Train twice, with one technique and with another, and say where they part.

    Args:
        strategy, settings: as for ``train_with``, which see; float64 unless ``dtype`` is given.
        against: the other layout: a technique, or settings (``{"strategy": "sharded",
            "world_size": 2}``) in place of those that make a layout. It comes first.
        steps: updates to compare.

    Where the two part, the second is trained again: if that differs from itself, too, the cause
    are random numbers, or operations whose order is not fixed. The errors are those of
    ``train_with``.
    """
    if isinstance(against, str):
        against = {"strategy": against}
    second = {"strategy": strategy, **settings}
    shared = {name: value for name, value in second.items() if name not in _OF_A_LAYOUT}
    shared = {"dtype": "float64", "epochs": 1} | shared | _first_samples(shared, steps)
    with tempfile.TemporaryDirectory(prefix="labkit-diff-") as folder:
        layouts = {"first": dict(against), "second": second}
        records = {}
        for name, layout in layouts.items():
            train_with(**shared | layout | {"record": f"{folder}/{name}"} | _shared_only(shared))
            records[name] = read_record(f"{folder}/{name}")
        comparison = compare(records["first"], records["second"])
        if not comparison.equal:
            train_with(**shared | second | {"record": f"{folder}/again"} | _shared_only(shared))
            again = compare(records["second"], read_record(f"{folder}/again"))
            if again.equal:
                note = "again, the second layout gives the same: the cause is not random"
            else:
                note = (
                    "the second layout differs from itself when it is trained again: random "
                    "numbers such as dropout's, or operations without a fixed order"
                )
            comparison.notes.append(note)
    return comparison


def _shared_only(shared: Mapping[str, Any]) -> dict[str, Any]:
    """What a layout may not change."""
    return {name: shared[name] for name in ("epochs", "train_size", "dataset") if name in shared}


def _first_samples(shared: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Settings with which an epoch has so many steps, or all if there are fewer."""
    count = steps * shared.get("batch_size", 64)
    dataset = shared.get("dataset", "digits")
    if isinstance(dataset, str):
        return {"train_size": min(count, shared.get("train_size") or count)}
    if isinstance(dataset, tuple):
        return {"dataset": tuple(tensor[:count] for tensor in dataset)}
    if isinstance(dataset, Dataset) and hasattr(dataset, "__len__"):
        return {"dataset": Subset(dataset, range(min(count, len(dataset))))}
    return {}


def compare(first: Record, second: Record) -> Comparison:
    """Compare two records; ValueError if they have no tensor in common."""
    comparison = Comparison(first.layout, second.layout)
    comparison.notes += first.notes + second.notes
    keys = {key for key in first.entries[0] if key in second.entries[0]}
    if not keys:
        raise ValueError(
            f"the two records have no tensor in common: the first has {_some(first)}, the second "
            f"{_some(second)}. Record the same model"
        )
    comparison.steps = max(step for step, *_ in keys)
    skipped = 0
    for key, rank, a, b in _pairs(first, second):
        if a.shape != b.shape:
            skipped += 1
            continue
        comparison.num_tensors += 1
        size = _relative(a, b, _scale(first, key))
        if size <= _tolerance(a, b):
            comparison.largest = max(comparison.largest, (size, key), key=lambda pair: pair[0])
        elif comparison.difference is None:
            comparison.difference = _described(first, second, key, rank, size)
    if comparison.difference is None:
        comparison.difference = _parting_replicas(first) or _parting_replicas(second)
    if skipped:
        comparison.notes.append(
            f"not compared: {skipped} tensors of other shapes, such as shards or other batches"
        )
    return comparison


def _some(record: Record) -> str:
    names = [name for _, _, name in record.entries[0]][:3]
    return ", ".join(names) or "nothing"


def _pairs(first: Record, second: Record) -> Iterator[tuple[Key, int, Entry, Entry]]:
    """(key, rank of the second, entries) of all that can be compared, in the order of a step."""
    order = {key: number for number, key in enumerate(first.entries[0])}
    same_ranks = first.is_like(second)
    for key in sorted(order, key=lambda key: (key[0], _PHASES.index(key[1]), order[key])):
        # Other ranks have other samples.
        if key[1] == "forward" and not same_ranks:
            continue
        for rank, entries in sorted(second.entries.items()):
            of_first = first.entries.get(rank if same_ranks else 0, {})
            if key in entries and key in of_first:
                yield key, rank, of_first[key], entries[key]


def _scale(record: Record, key: Key) -> float:
    """The largest norm of this phase of the step: what is far below it may be noise."""
    norms = [e.norm for k, e in record.entries[0].items() if k[:2] == key[:2]]
    return 1e-6 * max((norm for norm in norms if math.isfinite(norm)), default=0.0)


def _relative(a: Entry, b: Entry, least: float) -> float:
    """The largest difference of the norms and sums, relative to the largest of them."""
    values = [a.norm, *a.sums]
    others = [b.norm, *b.sums]
    if not all(map(math.isfinite, values + others)):
        are_alike = all(map(math.isfinite, values)) == all(map(math.isfinite, others))
        return 0.0 if are_alike else math.inf
    scale = max(*map(abs, values), *map(abs, others), least)
    if scale == 0:
        return 0.0
    return max(abs(x - y) for x, y in zip(values, others)) / scale


def _tolerance(a: Entry, b: Entry) -> float:
    return max(_ROUNDING.get(a.dtype, 0.03), _ROUNDING.get(b.dtype, 0.03))


def _described(first: Record, second: Record, key: Key, rank: int, size: float) -> Difference:
    step, phase, name = key
    partner = rank if first.is_like(second) else 0
    a, b = first.entries[partner][key], second.entries[rank][key]
    tolerance = _tolerance(a, b)
    scale = max(map(abs, [*a.sums, *b.sums, a.norm]))
    parts = [
        n for n, (x, y) in enumerate(zip(a.sums, b.sums), 1) if abs(x - y) > tolerance * scale
    ]
    sums, others = a.sums, b.sums
    before = step - 1, phase, name
    if phase == "parameter" and before in first.entries[partner]:
        sums = [x - y for x, y in zip(sums, first.entries[partner][before].sums)]
        others = [x - y for x, y in zip(others, second.entries[rank][before].sums)]
    factor = _factor(sums, others, 1e-6 if tolerance < 1e-6 else 2e-2)
    replicas = [entries[key] for entries in second.entries.values() if key in entries]
    agree = all(_relative(replicas[0], other, 0.0) <= tolerance for other in replicas)
    cause = _cause(first, second, key, factor, agree, len(parts))
    if size < 1e-2 and tolerance > 1e-6:
        cause += (
            f". Small differences in {b.dtype} grow from step to step: record in float64 to tell "
            "rounding from a fault"
        )
    return Difference(step, phase, name, rank, size, factor, parts, cause)


def _factor(sums: list[float], others: list[float], tolerance: float) -> float | None:
    """The factor between two lists of numbers, if there is one."""
    largest = max(map(abs, sums))
    if largest == 0 or not all(map(math.isfinite, sums + others)):
        return None
    # By least squares.
    factor = sum(x * y for x, y in zip(sums, others)) / sum(x * x for x in sums)
    rest = max(abs(y - factor * x) for x, y in zip(sums, others))
    return factor if rest <= tolerance * max(largest, *map(abs, others)) else None


def _cause(
    first: Record, second: Record, key: Key, factor: float | None, agree: bool, num_parts: int
) -> str:
    """The usual cause of a difference, from where it is and how large."""
    step, phase, name = key
    if step == 0:
        if not agree:
            return "the replicas start with different values: rank 0's were not broadcast"
        return (
            "the runs start with different values: another seed, or weights that were not loaded"
        )
    if phase == "forward":
        if name == "inputs":
            return "the batches differ: another order of samples, another seed, another share"
        return (
            "same inputs and parameters, another output: random numbers (dropout), the mode "
            "(train or eval), the dtype, or statistics of a share (BatchNorm)"
        )
    if not agree:
        if phase == "gradient":
            return (
                "the ranks have different gradients: they were not summed on all of them (no_sync, "
                "a module used beside its wrapper, an all-reduce that autograd or a hook does not "
                "see, another order of calls)"
            )
        return (
            "the ranks have equal gradients and update differently: optimizer settings or states "
            "that differ by rank"
        )
    if factor is not None and abs(factor - 1) > 1e-3:
        has_gradients = any(k[1] == "gradient" for k in second.entries[0])
        if phase == "parameter" and has_gradients:
            return (
                "the gradients are equal, so the optimizer is not: its learning rate or schedule"
            )
        return _cause_of_factor(factor, first.world_size, second.world_size)
    if num_parts < 8 and num_parts > 0 and phase != "loss":
        return (
            "a part of the tensor is as it should be: a shard that was not gathered, updated or "
            "summed, or rows that only some ranks have seen"
        )
    if any(n.endswith("running_mean") for _, _, n in second.entries[0]):
        return (
            "no single factor, and the model has BatchNorm: a rank or a micro-batch normalises "
            "with its own statistics (sync_batch_norm)"
        )
    if phase == "parameter" and any(k[1] == "gradient" for k in second.entries[0]):
        return (
            "the gradients are equal, so the optimizer is not: weight decay, momentum, clipping, "
            "a state that was not restored, or a rule that needs whole matrices"
        )
    return (
        "no single factor: shares of unequal weight that count alike (a mean of means over padded "
        "or unequal batches), clipping before the sum, random numbers"
    )


def _cause_of_factor(factor: float, first_ranks: int, second_ranks: int) -> str:
    ratio = second_ranks / first_ranks
    if abs(factor) < 1e-6:
        return "nothing arrives: a frozen parameter, a detached output, gradients that were zeroed"
    if ratio != 1 and math.isclose(factor, ratio, rel_tol=1e-2):
        return (
            f"the factor {factor:.4g} is the number of ranks: gradients of mean losses were added "
            "and not divided, or added twice and divided once"
        )
    if ratio != 1 and math.isclose(factor, 1 / ratio, rel_tol=1e-2):
        return (
            f"the factor {factor:.4g} is 1 / the number of ranks: divided once too often, as by a "
            "loss over the global batch under an all-reduce that takes the mean"
        )
    if ratio != 1 and math.isclose(factor, ratio**-2, rel_tol=1e-2):
        return (
            f"the factor {factor:.4g} is 1 / the number of ranks squared: divided twice too often"
        )
    whole = factor if factor > 1 else 1 / factor
    if whole > 1.5 and math.isclose(whole, round(whole), rel_tol=1e-2):
        if factor > 1:
            return (
                f"{round(whole)} times: the gradients of {round(whole)} micro-batches added and "
                "not divided, or gradients that were not set to zero"
            )
        return (
            f"a {round(whole)}-th: divided by a number of micro-batches that was divided before, "
            "or only one of them counted"
        )
    return (
        f"the factor {factor:.4g} is no number of ranks: a loss divided by the samples of a share "
        "in place of the batch's (padding, ignored targets, a last short batch), or another rate"
    )


def _parting_replicas(record: Record) -> Difference | None:
    """The first tensor of a record in which one of its ranks is not like rank 0."""
    for key, entry in record.entries[0].items():
        if key[1] not in ("gradient", "parameter"):
            continue
        for rank, entries in sorted(record.entries.items()):
            other = entries.get(key)
            start = record.entries[0].get((0, "parameter", key[2]))
            other_start = entries.get((0, "parameter", key[2]))
            if other is None or other.shape != entry.shape:
                continue
            if key[0] and start and other_start and start.sums != other_start.sums:
                # Shards, which differ from the start.
                continue
            size = _relative(entry, other, _scale(record, key))
            if size > _tolerance(entry, other):
                cause = _cause(record, record, key, None, False, 8)
                return Difference(*key, rank, size, None, [*range(1, 9)], cause)
    return None


def diff_records(first: str | Path, second: str | Path) -> Comparison:
    """Compare two recorded runs; raises the errors of ``read_record``."""
    return compare(read_record(first), read_record(second))
