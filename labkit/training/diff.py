"""``labkit diff``: where two layouts of one training run part, by how much, and the usual cause.

Both runs are recorded (``labkit.training.recording``), or were recorded before. Their entries are
compared in the order in which a step makes them: what the modules return, the loss, the gradients
from the last layer to the first, the parameters. The first that differs is named, since all that
follow may differ because of it. A tensor of which each rank holds a part (its samples, its shard)
is compared by its sum and its summed squares over the ranks.

Where the difference is a factor, the same in all parts of a tensor, it is told, with the usual
cause (``usual_causes``). For parameters it is the factor of the change in that step.
"""

import math
import tempfile
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, Subset

from labkit.training.config import LAYOUT
from labkit.training.recording import Entry, Key, Record, read_record, together
from labkit.training.train_run import train_with
from labkit.training.usual_causes import factor_of, usual_cause
from labkit.units import check_integer, format_count

# Relative differences that rounding explains, by dtype; inputs of other dtypes are integers.
_ROUNDING = {"float64": 1e-9, "float32": 1e-4}
_ROUNDING |= dict.fromkeys(("float16", "bfloat16", "fp16", "bf16", "tf32"), 0.03)
# Of runs that ``diff`` makes, these are not the caller's.
_OWN_SETTINGS = {"checkpoint_dir", "checkpoint_every", "epochs", "log_dir", "record", "resume"}
_PHASES = ("forward", "loss", "gradient", "parameter")


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
        noun = self.phase
        if self.phase == "forward":
            noun = "output"
        elif self.phase == "parameter" and self.factor is not None:
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
    for key in _common_keys(first, second):
        pairs = _pairs(first, second, key)
        if not pairs:
            num_skipped += 1
            if key.name == "inputs":
                raise ValueError(_other_samples(first, second, key))
        comparison.steps = key.step
        for rank, a, b in pairs:
            comparison.num_tensors += 1
            if not math.isfinite(a.norm) and not math.isfinite(b.norm):
                comparison.notes.append(f"step {key.step}: both have NaN or inf in {key.name}")
                return comparison
            size = _relative(a, b, _scale(first, key))
            if size > _tolerance(a, b):
                comparison.difference = _described(first, second, key, (rank, a, b), size)
                return comparison
            if size > comparison.largest[0]:
                comparison.largest = size, f", {key.phase} of {key.name} in step {key.step}"
    if not comparison.steps:
        raise ValueError(" ".join(["the two records have no step in common", *comparison.notes]))
    if num_skipped:
        comparison.notes.append(f"not compared: {num_skipped} tensors whose parts do not add up")
    return comparison


def _check_one_run(first: Record, second: Record) -> None:
    settings = first.headers[min(first.headers)].settings
    other_settings = second.headers[min(second.headers)].settings
    differences = []
    for name in sorted(settings.keys() & other_settings.keys()):
        if settings[name] != other_settings[name]:
            differences.append(f"{name} {settings[name]} and {other_settings[name]}")
    if differences:
        raise ValueError(
            f"not two layouts of one run: {', '.join(differences)}. Record both alike"
        )
    names = {key.name for key in first.keys if key.step == 0}
    other_names = {key.name for key in second.keys if key.step == 0}
    # Whole records have buffers, too.
    are_of_one_kind = first.is_whole == second.is_whole
    if names == other_names or (not are_of_one_kind and names & other_names):
        return
    only_first = ", ".join(sorted(names - other_names)[:3]) or "none"
    only_second = ", ".join(sorted(other_names - names)[:3]) or "none"
    raise ValueError(
        f"not one model: only the first has {only_first}, only the second {only_second}. Record "
        "the same model"
    )


def _other_samples(first: Record, second: Record, key: Key) -> str:
    sizes = [math.prod(entry.shape) for entry in first.parts(key).values()]
    other_sizes = [math.prod(entry.shape) for entry in second.parts(key).values()]
    return (
        f"not one batch: in step {key.step} the ranks' inputs have {sizes} values in the first "
        f"run, {other_sizes} in the second. Give both the same number of samples per step"
    )


def _common_keys(first: Record, second: Record) -> list[Key]:
    """The keys that both have, in the order in which a step makes them."""
    in_second = set(second.keys)
    keys = [key for key in first.keys if key in in_second and key.phase in _PHASES]
    # Sorting is stable: what a phase makes stays in order.
    return sorted(keys, key=lambda key: (key.step, _PHASES.index(key.phase)))


def _pairs(first: Record, second: Record, key: Key) -> list[tuple[int | None, Entry, Entry]]:
    """(rank of the second, entries) of what the ranks hold of a tensor, or of all parts of it."""
    parts = first.parts(key)
    other_parts = second.parts(key)
    pairs: list[tuple[int | None, Entry, Entry]] = []
    for rank, other in other_parts.items():
        partner = rank if parts.keys() == other_parts.keys() else min(parts)
        if parts[partner].shape == other.shape:
            pairs.append((rank, parts[partner], other))
    if len(pairs) < len(other_parts):
        pairs = []
        whole = together(parts.values())
        other_whole = together(other_parts.values())
        if whole.shape == other_whole.shape:
            pairs.append((None, whole, other_whole))
    return pairs


def _scale(record: Record, key: Key) -> float:
    """The largest norm of this phase of the step: what is far below it may be noise."""
    largest = 0.0
    for other, entry in record.entries[min(record.entries)].items():
        if other[:2] == key[:2] and math.isfinite(entry.norm):
            largest = max(largest, entry.norm)
    return 1e-6 * largest


def _relative(a: Entry, b: Entry, least: float) -> float:
    """The largest difference of the norms and sums, relative to the largest of them."""
    values = [a.norm, *a.sums]
    others = [b.norm, *b.sums]
    if not all(map(math.isfinite, values + others)):
        return math.inf
    scale = max(*map(abs, values), *map(abs, others), least)
    if scale == 0:
        return 0.0
    return max(map(abs, _differences(values, others))) / scale


def _differences(values: list[float], others: list[float]) -> list[float]:
    return [value - other for value, other in zip(values, others)]


def _tolerance(a: Entry, b: Entry) -> float:
    return max(_ROUNDING.get(a.dtype, 1e-12), _ROUNDING.get(b.dtype, 1e-12))


def _described(
    first: Record, second: Record, key: Key, pair: tuple[int | None, Entry, Entry], size: float
) -> Difference:
    rank, a, b = pair
    sums = a.sums
    others = b.sums
    if key.phase == "parameter" and key.step > 0 and rank is not None:
        # What the step has changed.
        key_before = key._replace(step=key.step - 1)
        for rank_before, a_before, b_before in _pairs(first, second, key_before):
            if rank_before == rank:
                sums = _differences(sums, a_before.sums)
                others = _differences(others, b_before.sums)
    tolerance = _tolerance(a, b)
    is_exact = tolerance < 1e-6
    slack = 1e-6 if is_exact else 2e-2
    factor = factor_of(sums, others, slack)
    agree = True
    if rank is not None:
        replicas = list(second.parts(key).values())
        agree = all(_relative(replicas[0], other, 0.0) <= tolerance for other in replicas)
    cause = usual_cause(first, second, key, factor, agree)
    if size < 1e-2 and not is_exact:
        cause += f". Or rounding in {b.dtype}, which grows step by step: record in float64 to tell"
    return Difference(key.step, key.phase, key.name, rank, size, factor, cause)
