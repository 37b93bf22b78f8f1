"""``labkit diff``: where two layouts of one training run part, by how much, and the usual cause.

Both runs are recorded (``labkit.training.recording``), or were recorded before. Their entries are
compared in the order in which a step makes them: what the modules return, the loss, the gradients
from the last layer to the first, the parameters. The first that differs is named, since all that
follow may differ because of it. A tensor of which each rank holds a part (its samples, its shard)
is compared by its sum and its summed squares over the ranks.

Where the difference is a factor, the same in all parts of a tensor, the factor often tells the
cause: the number of ranks, or of micro-batches. For parameters it is the factor of the change in
that step.
"""

import math
import tempfile
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, Subset

from labkit.training.config import LAYOUT
from labkit.training.recording import Entry, Record, read_record, together
from labkit.training.train_run import train_with
from labkit.units import check_integer, format_count

# Relative differences that rounding explains, by dtype; inputs of other dtypes are integers.
_ROUNDING = {"float64": 1e-9, "float32": 1e-4}
_ROUNDING |= dict.fromkeys(("float16", "bfloat16", "fp16", "bf16", "tf32"), 0.03)
# Of runs that ``diff`` makes, these are not the caller's.
_OWN_SETTINGS = {"checkpoint_dir", "checkpoint_every", "epochs", "log_dir", "record", "resume"}
_PHASES = ("forward", "loss", "gradient", "parameter")
# (Power of the number of ranks, the usual cause of a difference by that factor.)
_POWERS = (
    (1, "the number of ranks: means were added, not divided, or added twice and divided once"),
    (-1, "1 / the number of ranks: divided once too often, as a mean over the batch under a mean"),
    (-2, "1 / the number of ranks squared: divided twice too often"),
)
_CAUSES = {
    "start": "the runs start with different values: another seed, or weights that were not loaded",
    "replicas start apart": "the replicas start with different values: rank 0's not broadcast",
    "inputs": "the batches differ: another order of samples, another seed, another share",
    "output": "same inputs and parameters, another output: the mode (train or eval), the dtype, "
    "or statistics of a share (BatchNorm)",
    "random": "random numbers, such as dropout's, are drawn in this step, and another layout "
    "draws others: compare without them (dropout 0)",
    "replicas gradient": "the ranks have different gradients, not summed on all: no_sync, "
    "a module used beside its wrapper, an all-reduce that autograd or a hook does not see",
    "replicas parameter": "the ranks have equal gradients and update differently: optimizer "
    "settings (learning rate) or states that differ by rank, or a parameter frozen on one",
    "rate": "the gradients are equal, so the optimizer is not: its learning rate or schedule",
    "update": "the gradients are equal, so the optimizer is not: weight decay, momentum, a state "
    "that was not restored, or a rule that needs whole matrices",
    "nothing": "nothing arrives: a frozen parameter, a detached output, gradients set to zero",
    "times": "gradients of micro-batches added and not divided, or not set to zero before",
    "part": "divided by a number of micro-batches twice, or only one of them counted",
    "factor": "no number of ranks: a loss divided by the samples of a share in place of the "
    "batch's (padding, ignored targets, a last short batch), another rate, or clipping, which "
    "hides the factor before it",
    "statistics": "no single factor, and the model has BatchNorm: a rank or a micro-batch "
    "normalises with its own statistics (sync_batch_norm)",
    "weights": "no single factor: shares of unequal weight that count alike (a mean of means over "
    "padded or unequal batches), or clipping before the sum",
}
Key = tuple[int, str, str]
_DRAWS = ("random", "draws")


@dataclass(frozen=True)
class Difference:
    """The first tensor in which two records differ.

    Attributes:
        step, phase, name: as in ``Entry``.
        rank: of the second record; None for a tensor that is compared over all ranks.
        size: of the difference, relative to the tensor.
        factor: the second's divided by the first's, if that is the same everywhere, or None.
        cause: the usual one, in words.
    """

    step: int
    phase: str
    name: str
    rank: int | None
    size: float
    factor: float | None
    cause: str

    def __str__(self) -> str:
        noun = "output" if self.phase == "forward" else self.phase
        if self.phase == "parameter" and self.factor is not None:
            noun = "change"
        holder = f"on rank {self.rank}"
        if self.rank is None:
            holder = "over all ranks"
        if self.name == "inputs":
            noun = "input of the model"
        elif self.phase != "loss":
            noun += f" of {self.name}"
        text = f"step {self.step}: the {noun} differs {holder}, by {self.size:.2g} of it"
        if self.factor is not None:
            text += f"; it is {self.factor:.6g} x the first's"
        return f"{text}\n  {self.cause}"


@dataclass
class Comparison:
    """The result of a comparison; ``str`` tells it.

    Attributes:
        first, second: the layouts, in words.
        steps, num_tensors: compared, of all ranks.
        difference: the first, or None if they are equal.
        largest: the largest relative difference that was taken for rounding, and its tensor.
        notes: what else there is to say.
    """

    first: str
    second: str
    steps: int = 0
    num_tensors: int = 0
    difference: Difference | None = None
    largest: tuple[float, str] = (0.0, "")
    notes: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return self.difference is None

    def __str__(self) -> str:
        lines = [f"{self.first}, then {self.second}"]
        tensors = format_count(self.num_tensors, "tensor")
        lines.append(f"compared: {tensors} of {format_count(self.steps, 'step')}")
        if self.difference is None:
            size, name = self.largest
            lines.append(f"equal: the largest relative difference is {size:.2g}{name}")
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

    Where the two part, the second is trained again, which tells operations without a fixed order.
    ValueError if ``against`` has settings of the run, or for a setting that would change what is
    compared, such as ``resume``; other errors are those of ``train_with``.
    """
    if isinstance(against, str):
        against = {"strategy": against}
    others = [name for name in against if name not in LAYOUT]
    if others:
        raise ValueError(
            f"against has {', '.join(others)}, which two layouts of one run have in common: give "
            "it once, for both"
        )
    unused = _OWN_SETTINGS & settings.keys()
    if unused:
        raise ValueError(
            "diff trains one epoch from the start, twice, and keeps nothing: leave out "
            f"{', '.join(sorted(unused))}"
        )
    check_integer("steps", steps, 1)
    second = {"strategy": strategy, **settings}
    shared = {name: value for name, value in second.items() if name not in LAYOUT}
    shared = {"dtype": "float64"} | shared | _first_samples(shared, steps) | {"epochs": 1}
    with tempfile.TemporaryDirectory(prefix="labkit-diff-") as folder:

        def record_of(layout: Mapping[str, Any], name: str) -> Record:
            options: dict[str, Any] = {**layout, **shared, "record": f"{folder}/{name}"}
            train_with(**options)
            return read_record(f"{folder}/{name}")

        second_record = record_of(second, "second")
        comparison = compare(record_of(against, "first"), second_record)
        if not comparison.equal:
            note = "trained again, the second layout gives the same: it repeats what differs"
            if not compare(second_record, record_of(second, "again")).equal:
                note = (
                    "trained again, the second layout differs from itself: operations without a "
                    "fixed order, such as atomics, or random numbers without a seed"
                )
            comparison.notes.append(note)
    return comparison


def _first_samples(shared: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Settings with which an epoch has so many steps, or all if there are fewer."""
    count = steps * shared.get("batch_size", 64)
    dataset = shared.get("dataset", "digits")
    if isinstance(dataset, str):
        return {"train_size": min(count, shared.get("train_size") or count)}
    if isinstance(dataset, tuple):
        return {"dataset": tuple(tensor[:count] for tensor in dataset)}
    if isinstance(dataset, Dataset) and isinstance(dataset, Sized):
        return {"dataset": Subset(dataset, range(min(count, len(dataset))))}
    return {}


def diff_records(first: str | Path, second: str | Path) -> Comparison:
    """Compare two recorded runs; raises the errors of ``read_record`` and ``compare``."""
    return compare(read_record(first), read_record(second))


def compare(first: Record, second: Record) -> Comparison:
    """Compare two records; ValueError if they are not of one run."""
    _check_one_run(first, second)
    comparison = Comparison(first.layout, second.layout, notes=first.notes + second.notes)
    num_skipped = 0
    for key in _keys(first, second):
        pairs = list(_pairs(first, second, key))
        if not pairs:
            num_skipped += 1
            if key[2] == "inputs":
                raise ValueError(_other_samples(first, second, key))
        comparison.steps = key[0]
        for rank, a, b in pairs:
            comparison.num_tensors += 1
            if not math.isfinite(a.norm) and not math.isfinite(b.norm):
                comparison.notes.append(f"step {key[0]}: both have NaN or inf in {key[2]}")
                return comparison
            size = _relative(a, b, _scale(first, key))
            if size > _tolerance(a, b):
                comparison.difference = _described(first, second, key, (rank, a, b), size)
                return comparison
            if size > comparison.largest[0]:
                comparison.largest = size, f", {key[1]} of {key[2]} in step {key[0]}"
    if not comparison.steps:
        raise ValueError(" ".join(["the two records have no step in common", *comparison.notes]))
    if num_skipped:
        comparison.notes.append(f"not compared: {num_skipped} tensors whose parts do not add up")
    return comparison


def _check_one_run(first: Record, second: Record) -> None:
    settings = [record.headers[min(record.headers)].settings for record in (first, second)]
    common = settings[0].keys() & settings[1].keys()
    others = [name for name in sorted(common) if settings[0][name] != settings[1][name]]
    if others:
        words = [f"{name} {settings[0][name]} and {settings[1][name]}" for name in others]
        raise ValueError(f"not two layouts of one run: {', '.join(words)}. Record both alike")
    names = [
        {key[2] for entries in record.entries.values() for key in entries if key[0] == 0}
        for record in (first, second)
    ]
    # Whole records have buffers, too.
    are_alike = first.is_whole == second.is_whole and names[0] == names[1]
    if not are_alike and (first.is_whole == second.is_whole or not names[0] & names[1]):
        some = [", ".join(sorted(x - y)[:3]) or "none" for x, y in (names, names[::-1])]
        raise ValueError(
            f"not one model: only the first has {some[0]}, only the second {some[1]}. Record the "
            "same model"
        )


def _other_samples(first: Record, second: Record, key: Key) -> str:
    sizes = [
        [
            math.prod(entries[key].shape)
            for _, entries in sorted(record.entries.items())
            if key in entries
        ]
        for record in (first, second)
    ]
    return (
        f"not one batch: in step {key[0]} the ranks' inputs have {sizes[0]} values in the first "
        f"run, {sizes[1]} in the second. Give both the same number of samples per step"
    )


def _keys(first: Record, second: Record) -> list[Key]:
    """The keys that both have, in the order in which a step makes them."""
    order: dict[Key, int] = {}
    for entries in first.entries.values():
        for key in entries:
            order.setdefault(key, len(order))
    of_second = set().union(*second.entries.values())
    keys = [key for key in order if key in of_second and key[1] in _PHASES]
    return sorted(keys, key=lambda key: (key[0], _PHASES.index(key[1]), order[key]))


def _pairs(first: Record, second: Record, key: Key) -> Iterator[tuple[int | None, Entry, Entry]]:
    """(rank of the second, entries) of what the ranks hold of a tensor, or of all parts of it."""
    parts = {rank: entries[key] for rank, entries in first.entries.items() if key in entries}
    others = {rank: entries[key] for rank, entries in second.entries.items() if key in entries}
    same_ranks = parts.keys() == others.keys()
    partners = {rank: rank if same_ranks else min(parts) for rank in others}
    if all(parts[partners[rank]].shape == other.shape for rank, other in others.items()):
        for rank, other in sorted(others.items()):
            yield rank, parts[partners[rank]], other
        return
    whole = together(parts.values())
    other_whole = together(others.values())
    if whole.shape == other_whole.shape:
        yield None, whole, other_whole


def _scale(record: Record, key: Key) -> float:
    """The largest norm of this phase of the step: what is far below it may be noise."""
    norms = [e.norm for k, e in record.entries[min(record.entries)].items() if k[:2] == key[:2]]
    return 1e-6 * max((norm for norm in norms if math.isfinite(norm)), default=0.0)


def _relative(a: Entry, b: Entry, least: float) -> float:
    """The largest difference of the norms and sums, relative to the largest of them."""
    values = [a.norm, *a.sums]
    others = [b.norm, *b.sums]
    if not all(map(math.isfinite, values + others)):
        return math.inf
    scale = max(*map(abs, values), *map(abs, others), least)
    if scale == 0:
        return 0.0
    return max(abs(x - y) for x, y in zip(values, others)) / scale


def _tolerance(a: Entry, b: Entry) -> float:
    return max(_ROUNDING.get(entry.dtype, 1e-12) for entry in (a, b))


def _described(
    first: Record, second: Record, key: Key, pair: tuple[int | None, Entry, Entry], size: float
) -> Difference:
    step, phase, name = key
    rank, a, b = pair
    sums = a.sums
    others = b.sums
    if phase == "parameter" and step > 0 and rank is not None:
        # What the step has changed.
        before = {r: (x, y) for r, x, y in _pairs(first, second, (step - 1, phase, name))}
        if rank in before:
            sums = [x - y for x, y in zip(sums, before[rank][0].sums)]
            others = [x - y for x, y in zip(others, before[rank][1].sums)]
    tolerance = _tolerance(a, b)
    factor = _factor(sums, others, 1e-6 if tolerance < 1e-6 else 2e-2)
    replicas = [entries[key] for entries in second.entries.values() if key in entries]
    agree = rank is None or all(
        _relative(replicas[0], other, 0.0) <= tolerance for other in replicas
    )
    cause = _cause(first, second, key, factor, agree)
    if size < 1e-2 and tolerance > 1e-6:
        cause += f". Or rounding in {b.dtype}, which grows step by step: record in float64 to tell"
    return Difference(step, phase, name, rank, size, factor, cause)


def _factor(sums: list[float], others: list[float], tolerance: float) -> float | None:
    """The factor between two lists of several numbers, by least squares, if there is one."""
    largest = max(map(abs, sums))
    if largest == 0 or not all(map(math.isfinite, sums + others)):
        return None
    factor = sum(x * y for x, y in zip(sums, others)) / sum(x * x for x in sums)
    rest = max(abs(y - factor * x) for x, y in zip(sums, others))
    return factor if rest <= tolerance * max(largest, *map(abs, others)) else None


def _cause(first: Record, second: Record, key: Key, factor: float | None, agree: bool) -> str:
    """The usual cause of a difference, from where it is and how large."""
    step, phase, name = key
    names = {k[1:] for entries in second.entries.values() for k in entries}
    if step == 0:
        return _CAUSES["start" if agree else "replicas start apart"]
    if name == "inputs":
        return _CAUSES["inputs"]
    draws = (step, *_DRAWS)
    if any(draws in entries for r in (first, second) for entries in r.entries.values()):
        return _CAUSES["random"]
    if phase == "forward":
        return _CAUSES["output"]
    if not agree:
        return _CAUSES[f"replicas {phase}"]
    has_factor = factor is not None and phase != "loss"
    if phase == "parameter" and ("gradient", name) in names:
        return _CAUSES["rate" if has_factor else "update"]
    if has_factor:
        return _cause_of_factor(factor, second.world_size / first.world_size)
    if any(name.endswith("running_mean") for _, name in names):
        return _CAUSES["statistics"]
    return _CAUSES["weights"]


def _cause_of_factor(factor: float, ratio: float) -> str:
    if abs(factor) < 1e-6:
        return _CAUSES["nothing"]
    for power, cause in _POWERS:
        if ratio != 1 and math.isclose(factor, ratio**power, rel_tol=1e-2):
            return f"the factor {factor:.4g} is {cause}"
    times = max(factor, 1 / factor)
    if times > 1.5 and math.isclose(times, round(times), rel_tol=1e-2):
        name = "times" if factor > 1 else "part"
        return f"a factor of {round(times)}: {_CAUSES[name]}"
    return f"the factor {factor:.4g} is {_CAUSES['factor']}"
