"""Records of a training run, step by step, small enough to keep: for ``labkit diff``.

Of each tensor a record keeps its norm and the sums of eight parts of it, one after the other: a
few hundred bytes. All nine are of float64. The sums are linear, so if one run's gradient is twice
another's, every sum is, too; and they show which eighth of a tensor differs.

A record is a folder with a file of JSON lines per rank. The first line is a ``Header``, each
other one an ``Entry``. As long as the run lasts, or if it ended with an error, the file's name
ends with ``.part``.
"""

import contextlib
import functools
import itertools
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.units import format_count

VERSION = 1
NUM_PARTS = 8


@dataclass(frozen=True)
class Header:
    """The first line of a rank's file; ``layout`` is the technique, in words.

    ``is_whole`` if there is this one file, whose tensors are those of all ranks put together.
    ``settings`` are those that runs in other layouts share.
    """

    version: int
    rank: int
    world_size: int
    layout: str = ""
    is_whole: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """One tensor in one step.

    Attributes:
        step: from 1 on; 0 is before the first.
        phase: ``forward`` (of a module: its output), ``loss``, ``gradient`` (when the optimizer
            gets it), ``parameter`` (after the step), or ``random`` if the step drew numbers.
        name: of the module or the parameter.
        norm, sums: in float64; nan or infinite where the tensor has such values.
    """

    step: int
    phase: str
    name: str
    shape: list[int]
    dtype: str
    norm: float
    sums: list[float]


def entry_of(step: int, phase: str, name: str, tensor: Tensor) -> Entry:
    """Make the entry of a tensor of numbers; of a DTensor, of this rank's part."""
    values = tensor.detach()
    if hasattr(values, "to_local"):
        values = values.to_local()
    flat = values.to_dense().flatten().double()
    sums = [part.sum() for part in flat.tensor_split(NUM_PARTS)]
    # One transfer from a GPU for all of them.
    norm, *sums_list = torch.stack([flat.square().sum().sqrt(), *sums]).tolist()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Entry(step, phase, name, list(values.shape), dtype, norm, sums_list)


def together(entries: Iterable[Entry]) -> Entry:
    """The entry of a tensor that is in several parts: a flat shape, and one sum of all."""
    parts = list(entries)
    size = sum(math.prod(part.shape) for part in parts)
    norm = math.sqrt(sum(part.norm**2 for part in parts))
    total = sum(sum(part.sums) for part in parts)
    return replace(parts[0], shape=[size], norm=norm, sums=[total])


class Recorder:
    """Writes the entries of one rank. ``end`` gives the file its name; a folder of files is made.

    Raises:
        FileExistsError: the folder holds this rank's file of another run.
    """

    def __init__(self, folder: str | Path, header: Header):
        self.path = Path(folder) / f"rank-{header.rank}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            raise FileExistsError(
                f"{self.path} holds the record of another run: give another folder, or remove it"
            )
        self.part = self.path.with_name(f"{self.path.name}.part")
        self.file = self.part.open("w", encoding="utf-8")
        self._write(asdict(header))

    def add(self, step: int, phase: str, name: str, tensor: Tensor) -> None:
        if tensor.is_floating_point():
            self.write(entry_of(step, phase, name, tensor))

    def write(self, entry: Entry) -> None:
        self._write(asdict(entry))

    def _write(self, line: dict[str, Any]) -> None:
        self.file.write(json.dumps(line) + "\n")

    def end(self) -> None:
        self.file.close()
        self.part.replace(self.path)


def random_checksum() -> int:
    """A number that changes when this process draws random numbers, as dropout does."""
    checksum = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_initialized():
        checksum = zlib.crc32(torch.cuda.get_rng_state().numpy().tobytes(), checksum)
    return checksum


class _Steps:
    """Hooks on a model and its optimizer that write each step of a loop into a record."""

    def __init__(self, model: nn.Module, recorder: Recorder):
        self.recorder = recorder
        self.parameters = {_bare(name): p for name, p in model.named_parameters()}
        self.names = {module: _bare(name) for name, module in model.named_modules()}
        self.step = 1
        self.outputs_of: dict[str, list[Entry]] = {}
        self.random_state: int | None = None
        self.has_drawn = False
        for name, parameter in self.parameters.items():
            recorder.add(0, "parameter", name, parameter)

    def hook(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        """Register all hooks; returns what removes them."""
        hooks = [
            # Not the wrapper's, which a faulty loop may leave out.
            getattr(model, "module", model).register_forward_pre_hook(self.note_inputs),
            optimizer.register_step_pre_hook(self.before_update),
            optimizer.register_step_post_hook(self.after_update),
        ]
        for module in self.names:
            if next(module.children(), None) is None:
                hooks.append(module.register_forward_pre_hook(self.note_start))
                hooks.append(module.register_forward_hook(self.note_output))
        return hooks

    def note_start(self, *_: Any) -> None:
        if self.random_state is None:
            self.random_state = random_checksum()

    def note_inputs(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        # What has been drawn before, for the data, is not the model's.
        self.random_state = None
        if inputs:
            self.note("inputs", inputs[0])

    def note_output(self, module: nn.Module, _: Any, outputs: Any) -> None:
        self.has_drawn = self.has_drawn or self.random_state != random_checksum()
        if isinstance(outputs, Tensor) and outputs.is_floating_point():
            self.note(self.names[module], outputs)

    def note(self, name: str, values: Any) -> None:
        # Evaluation is no part of a step.
        if isinstance(values, Tensor) and torch.is_grad_enabled():
            entry = entry_of(self.step, "forward", name, values)
            self.outputs_of.setdefault(name, []).append(entry)

    def before_update(self, *_: Any) -> None:
        for entries in self.outputs_of.values():
            entry = entries[0]
            if len(entries) > 1:
                # Micro-batches as one batch.
                entry = together(entries)
            self.recorder.write(entry)
        self.outputs_of.clear()
        for name, parameter in reversed(self.parameters.items()):
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            self.recorder.add(self.step, "gradient", name, gradient)

    def after_update(self, *_: Any) -> None:
        for name, parameter in self.parameters.items():
            self.recorder.add(self.step, "parameter", name, parameter)
        if self.has_drawn:
            self.recorder.write(Entry(self.step, "random", "draws", [], "", 0.0, []))
        self.random_state = None
        self.has_drawn = False
        self.step += 1


@contextlib.contextmanager
def recording(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | Path
) -> Iterator[None]:
    """Record the steps of a training loop of one's own, on this rank.

    Each ``optimizer.step()`` ends a step. Recorded are, in order, the model's inputs, what its
    innermost modules return, the gradients that the optimizer gets, and the parameters that it
    leaves; before the first step the parameters as they start. Names are those of ``model``,
    without a wrapper's ``module.``. The rank is that of ``torch.distributed``, or RANK, or 0.
    """
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
        world_size = dist.get_world_size()
    if not any(True for _ in model.parameters()):
        raise ValueError(
            "the model has no parameters, so no steps to record: give the model that is trained"
        )
    recorder = Recorder(folder, Header(VERSION, rank, world_size))
    hooks = _Steps(model, recorder).hook(model, optimizer)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        recorder.file.flush()
    recorder.end()


def _bare(name: str) -> str:
    return name.removeprefix("module.").replace("._orig_mod", "").replace("_orig_mod.", "")


class Key(NamedTuple):
    """A tensor of a step, as in ``Entry``."""

    step: int
    phase: str
    name: str


@dataclass(frozen=True)
class Record:
    """A record as it was read: by rank its header and its entries."""

    headers: dict[int, Header]
    entries: dict[int, dict[Key, Entry]]
    notes: list[str]

    def parts(self, key: Key) -> dict[int, Entry]:
        """The part of a tensor that each rank holds, in the order of the ranks."""
        parts = {}
        for rank in sorted(self.entries):
            if key in self.entries[rank]:
                parts[rank] = self.entries[rank][key]
        return parts

    @functools.cached_property
    def keys(self) -> list[Key]:
        """All tensors, each once, in the order in which the steps made them."""
        return list(dict.fromkeys(itertools.chain(*self.entries.values())))

    @property
    def layout(self) -> str:
        header = self.headers[0]
        return header.layout or f"a loop on {format_count(header.world_size, 'rank')}"

    @property
    def world_size(self) -> int:
        return self.headers[0].world_size

    @property
    def is_whole(self) -> bool:
        return self.headers[0].is_whole


def read_record(folder: str | Path) -> Record:
    """Read a record.

    Raises:
        FileNotFoundError: there is none in the folder, or some ranks are missing.
        ValueError: a line is damaged, or it was written by another version.
    """
    headers: dict[int, Header] = {}
    entries: dict[int, dict[Key, Entry]] = {}
    notes = []
    last_steps = []
    cut_steps = []
    for path in sorted(Path(folder).glob("rank-*.jsonl*")):
        is_part = path.suffix == ".part"
        if is_part and path.with_suffix("").exists():
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        header = _header(path, lines)
        headers[header.rank] = header
        entries[header.rank] = {}
        for entry in _entries(path, lines, is_part):
            entries[header.rank][Key(entry.step, entry.phase, entry.name)] = entry
        last = max((key.step for key in entries[header.rank]), default=0)
        last_steps.append(last)
        if is_part:
            cut_steps.append(last)
            notes.append(f"{path} ends in step {last}: that run ended early, or goes on")
    if not headers:
        raise FileNotFoundError(
            f"{folder} holds no record: write one with labkit train --record DIR, or with "
            "labkit.recording(model, optimizer, DIR) around your own loop"
        )
    header = next(iter(headers.values()))
    missing = set(range(header.world_size)) - set(headers)
    if missing and not header.is_whole:
        raise FileNotFoundError(
            f"{folder} has the record of ranks {sorted(headers)}, and not of {sorted(missing)}: "
            "copy the files of all machines into one folder"
        )
    if cut_steps and min(cut_steps) < max(last_steps):
        # A rank was ended in a step: all are compared up to the step before.
        for rank, steps in entries.items():
            entries[rank] = {key: steps[key] for key in steps if key.step < min(cut_steps)}
    return Record(headers, entries, notes)


def _header(path: Path, lines: list[str]) -> Header:
    try:
        header = Header(**json.loads(lines[0]))
    except (ValueError, TypeError, IndexError):
        raise ValueError(f"{path} is not a record of labkit: its first line is damaged") from None
    if header.version != VERSION:
        raise ValueError(
            f"{path} is a record of version {header.version}, and this labkit reads {VERSION}: "
            "record both runs with one version"
        )
    return header


def _entries(path: Path, lines: Iterable[str], is_part: bool) -> Iterator[Entry]:
    rest = list(lines)[1:]
    for number, line in enumerate(rest, start=2):
        try:
            yield Entry(**json.loads(line))
        except (ValueError, TypeError):
            if is_part and number == len(rest) + 1:
                return
            raise ValueError(f"{path}: line {number} is damaged") from None
