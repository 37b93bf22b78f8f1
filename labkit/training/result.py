"""The result of a training run, the files it is saved in, and how two runs are compared."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labkit.engine.comm.peak_memory import PeakMemory
from labkit.engine.comm.transport import as_bytes
from labkit.engine.files import write_atomically
from labkit.engine.tracing import Trace
from labkit.engine.tracing.limits import Limit, what_limited
from labkit.training.config import RunConfig


@dataclass(frozen=True)
class TrainResult:
    """The result of a training run.

    Attributes:
        config: the settings.
        epochs: one dict per epoch: ``loss`` and ``train_accuracy``, means over the training
            samples while they were trained on; ``seconds`` of training alone; ``test_accuracy``,
            ``test_loss`` of the held-out samples. NaN where there is nothing to measure.
        phases_s: seconds by kind of span, the mean over the ranks (in one process the main
            thread's).
        bytes_sent, messages: of the technique, by rank, counted as they leave; None if they are
            not counted: PyTorch's own messages, and those within one process.
        state: parameters and buffers of the whole model, on the CPU; ``checksums``, by rank.
        notes: what is special about the technique's run (staleness, lost ranks), from rank 0.
        hardware, versions: of the machine that made the figures.
        peak_memory: by rank, the most memory that the steps took. None for a lost rank.
    """

    config: RunConfig
    epochs: list[dict[str, Any]]
    phases_s: dict[str, float]
    bytes_sent: list[int] | None
    messages: list[int] | None
    state: dict[str, Tensor] = field(repr=False)
    checksums: list[str] = field(repr=False)
    trace: Trace = field(repr=False)
    hardware: dict[str, Any] = field(repr=False)
    versions: dict[str, str] = field(repr=False)
    notes: dict[str, Any] = field(repr=False, default_factory=dict)
    peak_memory: list[PeakMemory | None] = field(repr=False, default_factory=list)

    @property
    def test_accuracy(self) -> float:
        """Accuracy on the held-out part after the last epoch."""
        return self.epochs[-1]["test_accuracy"]

    def explain(self) -> Limit:
        """Explain what limited the run: computing, messages, or waiting and for whom."""
        limit = what_limited(self.trace)
        if self.bytes_sent is None and self.config.world_size > 1 and not self.config.devices:
            text = f"{limit.text} PyTorch's messages are not recorded: they count as computing."
            return replace(limit, text=text)
        return limit

    @property
    def replicas_agree(self) -> bool:
        """True if all ranks ended with the same parameters, to the bit."""
        return len(set(self.checksums)) == 1

    def difference_from(self, other: "TrainResult") -> float:
        """The largest relative difference between the two runs' parameters and buffers.

        Per tensor: ``max |a - b| / max |b|``; 0 means equal to the bit.
        """
        return largest_difference(self.state, other.state)

    def tolerance(self, other: "TrainResult") -> float:
        """The largest difference between the two runs that rounding explains."""
        dtypes = {self.config.dtype, other.config.dtype}
        devices = [str(self.config.devices), *self.trace.devices.values()]
        devices += [str(other.config.devices), *other.trace.devices.values()]
        dtype = "float64" if dtypes == {"float64"} else "float32"
        return tolerance(dtype, on_gpu="cuda" in " ".join(devices))

    def equals(self, other: "TrainResult") -> bool:
        """True if the two runs made the same updates: no difference but that of rounding."""
        return self.difference_from(other) < self.tolerance(other)

    def as_dict(self) -> dict[str, Any]:
        """The object that ``--json`` writes: all of the result but the state and the trace."""
        # JSON has no NaN, which stands where there is nothing to measure.
        epochs = [dict(row) for row in self.epochs]
        for row in epochs:
            for name, value in row.items():
                if not math.isfinite(value):
                    row[name] = None
        return {
            "config": asdict(self.config),
            "epochs": epochs,
            "phases_s": self.phases_s,
            "bytes_sent": self.bytes_sent,
            "messages": self.messages,
            "replicas_agree": self.replicas_agree,
            "peak_memory": [peak and asdict(peak) for peak in self.peak_memory],
            **self.notes,
            "hardware": self.hardware,
            "versions": self.versions,
        }

    def save_json(self, path: str | Path) -> None:
        """Write ``as_dict`` as a JSON file."""
        write_atomically(path, json.dumps(self.as_dict(), indent=2) + "\n")

    def save_state(self, path: str | Path) -> None:
        """Write ``state`` as a safetensors file."""
        from safetensors.torch import save

        write_atomically(path, save(self.state))


def checksum(state: dict[str, Tensor]) -> str:
    """SHA-256 of all names and values: equal on two ranks only if their replicas are equal."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(as_bytes(tensor.contiguous()).numpy().tobytes())
    return digest.hexdigest()


def tolerance(dtype: str, on_gpu: bool) -> float:
    """The ``largest_difference`` up to which two runs count as having made the same updates.

    The contract for synchronous techniques. In float32, GPUs choose other algorithms for other
    batch sizes and devices, and round more differently than a CPU; float64 tells mistakes apart
    from rounding everywhere.
    """
    if dtype == "float64":
        return 1e-10
    return 1e-4 if on_gpu else 1e-5


def largest_difference(state: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest relative difference between two states: max of ``|a - b| / |b|``.

    The norm is each tensor's largest magnitude. A tensor that is zero but for rounding in both
    states has none: then the difference is taken as it is. (A bias that starts at zero and whose
    effect BatchNorm cancels is such a tensor.) NaN if a tensor contains NaN.
    """
    if state.keys() != other.keys():
        raise ValueError(f"states differ in tensors: {sorted(state.keys() ^ other.keys())}")
    worst = 0.0
    for name, tensor in other.items():
        if not tensor.numel():
            continue
        # An imaginary part counts, too.
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        values = state[name].to(wide)
        reference = tensor.to(wide)
        scale = max(reference.abs().max().item(), torch.finfo(torch.float64).tiny)
        largest = max(values.abs().max().item(), scale)
        if tensor.is_floating_point() and largest < 100 * torch.finfo(tensor.dtype).eps:
            scale = 1.0
        difference = (values - reference).abs().max().item()
        if math.isnan(difference):
            return math.nan
        worst = max(worst, difference / scale)
    return worst
