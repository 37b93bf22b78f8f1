"""A training run from outside: check the settings, start the ranks, gather the result."""

import inspect
import json
import math
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from labkit import strategies
from labkit.config import OPTIONS, RunConfig, parse_devices, parse_split_points, parse_straggler
from labkit.devices import check_world_size, hardware, num_gpus, plan, versions
from labkit.files import write_atomically
from labkit.placement.even_split import even_split
from labkit.runtime.launch import RunResult, run
from labkit.runtime.preload import under_torchrun
from labkit.schedules.stages import check_split_points
from labkit.trace import Trace
from labkit.training.loop import fit
from labkit.training.state import largest_difference
from labkit.units import MOST_SECONDS, check_above_zero, format_count
from labkit.workload.datasets import DATASETS, load_dataset
from labkit.workload.layers import layers_of
from labkit.workload.models import MODELS, build_model


@dataclass(frozen=True)
class TrainResult:
    """What a training run gave.

    Attributes:
        config: the settings.
        epochs: one ``{"loss", "test_accuracy", "seconds"}`` an epoch; seconds of training alone.
        phases_s: seconds by kind of span, the mean over the ranks; of a technique that runs its
            replicas in threads, those of the main thread.
        bytes_sent, messages: of the technique, by rank, counted as they leave; None where nobody
            counts: a builtin that is not on our backend, or a technique of one process (its
            ``notes`` tell what it moves).
        state: parameters and buffers of the whole model, on the CPU.
        checksums: of every rank's parameters and buffers.
        notes: what is special about the technique's run (staleness, ranks lost), as rank 0 tells.
        hardware, versions: what made the figures.
    """

    config: RunConfig
    epochs: list[dict[str, float]]
    phases_s: dict[str, float]
    bytes_sent: list[int] | None
    messages: list[int] | None
    state: dict[str, Tensor] = field(repr=False)
    checksums: list[str] = field(repr=False)
    trace: Trace = field(repr=False)
    hardware: dict[str, Any] = field(repr=False)
    versions: dict[str, str] = field(repr=False)
    notes: dict[str, Any] = field(repr=False, default_factory=dict)

    @property
    def test_accuracy(self) -> float:
        """Accuracy on the held-out part after the last epoch."""
        return self.epochs[-1]["test_accuracy"]

    @property
    def replicas_agree(self) -> bool:
        """Whether all ranks ended with the same parameters, to the bit."""
        return len(set(self.checksums)) == 1

    def difference_from(self, other: "TrainResult") -> float:
        """The largest relative difference between the two runs' parameters and buffers.

        Per tensor: max |a - b| / max |b|; 0 means equal to the bit. The contract for synchronous
        techniques is 1e-5 in float32 and 1e-10 in float64.
        """
        return largest_difference(self.state, other.state)

    def as_dict(self) -> dict[str, Any]:
        """What ``--json`` writes."""
        return {
            "config": self.config.as_dict(),
            "epochs": [
                {key: _or_null(value) for key, value in row.items()} for row in self.epochs
            ],
            "phases_s": self.phases_s,
            "bytes_sent": self.bytes_sent,
            "messages": self.messages,
            "replicas_agree": self.replicas_agree,
            **self.notes,
            "hardware": self.hardware,
            "versions": self.versions,
        }

    def save_json(self, path: str | Path) -> None:
        write_atomically(path, json.dumps(self.as_dict(), indent=2) + "\n")

    def save_state(self, path: str | Path) -> None:
        """Write ``state`` as a safetensors file."""
        from safetensors.torch import save

        write_atomically(path, save(self.state))


def _or_null(value: float) -> float | None:
    # JSON has no NaN, which is the loss of a run that diverged.
    return value if math.isfinite(value) else None


def train_with(
    strategy: str,
    *,
    timeout_s: float = 24 * 3600,
    download: bool = False,
    verbose: bool = False,
    **settings: Any,
) -> TrainResult:
    """Train with one technique on real processes: ``train_with("ring_all_reduce", world_size=4)``.

    Args:
        strategy: the technique, one of ``labkit.strategies.STRATEGIES``.
        timeout_s, download, verbose: as for ``train_run``.
        settings: the other fields of ``RunConfig``.

    Raises:
        What ``train_run`` raises.
    """
    config = RunConfig(strategy=strategy, **settings)
    return train_run(config, timeout_s=timeout_s, download=download, verbose=verbose)


def train_run(
    config: RunConfig,
    *,
    timeout_s: float = 24 * 3600,
    download: bool = False,
    verbose: bool = False,
) -> TrainResult:
    """Train as ``config`` says.

    Args:
        config: the settings.
        timeout_s: the run's deadline.
        download: fetch the data set first where it is absent.
        verbose: print a line an epoch.

    Raises:
        ValueError: settings that cannot be; unknown names (the message lists the known ones).
        FileNotFoundError: the data set is not there; the message says how to get it.
        WorkerError: a rank failed.
    """
    check_above_zero("timeout_s", timeout_s, MOST_SECONDS)
    make_strategy = check(config, download=download)
    load_dataset(config.dataset, train_size=config.train_size, download=download)
    ranks, device = _ranks_and_device(config, make_strategy)
    result = run(
        fit,
        config,
        make_strategy,
        verbose,
        world_size=ranks,
        device=device,
        transport=config.transport,
        timeout_s=timeout_s,
        may_lose=range(1, ranks) if _survives(make_strategy) else (),
    )
    # Of a rank that was lost there is no report.
    reports = [report for report in result.values if report is not None]
    one_process = _in_one_process(make_strategy)
    # A builtin goes past comm: it has to count for itself, and only our backend does.
    counts_itself = hasattr(_class_of(make_strategy), "sent")
    counted = counts_itself if config.builtin else not one_process
    counted = counted and reports[0].bytes_sent is not None
    # Replicas in threads all compute: the main thread alone tells what the time went for.
    seconds = result.trace.seconds_by_kind(lane=0 if one_process else None)
    return TrainResult(
        config=config,
        epochs=reports[0].epochs,
        phases_s={kind: s / ranks for kind, s in seconds.items()},
        bytes_sent=_by_rank(result, "bytes_sent") if counted else None,
        messages=_by_rank(result, "messages") if counted else None,
        state=reports[0].state,
        checksums=[report.checksum for report in reports],
        trace=result.trace,
        hardware=hardware(),
        versions=versions(),
        notes=reports[0].notes | ({"lost_ranks": result.lost} if result.lost else {}),
    )


def check(config: RunConfig, *, download: bool = False):
    """Refuse what cannot run before any process starts; returns what makes the strategy.

    Raises:
        ValueError: unknown names, or a technique that does not fit the world size or the model.
        FileNotFoundError: the data set is not there, and the technique has to know its shape.
    """
    make_strategy = strategies.get(
        config.strategy, builtin=config.builtin, placed=config.devices is not None
    )
    for kind, name, known in (
        ("model", config.model, MODELS),
        ("data set", config.dataset, DATASETS),
    ):
        if name not in known:
            raise ValueError(f"unknown {kind} {name!r}: choose one of {', '.join(known)}")
    check_world_size(config.world_size, warn=False)
    _check_backend(config, plan(config.world_size, config.device, config.transport).devices[0])
    # Before the world size is looked at: an option may have set it.
    options = _options(config, make_strategy)
    if config.strategy == "single" and config.world_size != 1:
        raise ValueError(
            f"strategy single trains on one rank, got world_size {config.world_size}: "
            "use world_size 1, or another strategy"
        )
    if "split_points" in inspect.signature(make_strategy).parameters:
        options["split_points"] = _split_points(config, download)
    make_strategy = partial(make_strategy, **options)
    strategy = make_strategy()  # options that do not go together are refused here, too
    if hasattr(strategy, "check_ranks"):
        strategy.check_ranks(config.world_size)
    return make_strategy


def _split_points(config: RunConfig, download: bool) -> tuple[int, ...]:
    """Those given, or an even split by FLOPs of the layers of this model on this data set.

    Raises:
        ValueError: they do not cut these layers into ``world_size`` stages.
    """
    data = load_dataset(config.dataset, train_size=config.train_size, download=download)
    model = build_model(
        config.model, num_classes=data.num_classes, input_shape=data.input_shape, seed=0
    )
    num_layers = len(layers_of(model))
    if config.split_points is not None:
        points = parse_split_points(config.split_points)
        return check_split_points(points, num_layers, config.world_size)
    if config.world_size > num_layers:
        raise ValueError(
            f"model {config.model} has {format_count(num_layers, 'layer')}, at least one for each "
            f"stage: use world_size {num_layers} or less, got {config.world_size}"
        )
    return even_split(model, data.input_shape, config.world_size)


def _check_backend(config: RunConfig, device: str) -> None:
    needs = {"nccl": "cuda", "labkit": "cpu"}.get(config.backend)
    if needs and not device.startswith(needs):
        raise ValueError(
            f"backend {config.backend!r} moves tensors on {needs}, and the ranks are on {device}: "
            f"choose device {needs!r}, or backend 'gloo'"
        )


def _in_one_process(make_strategy) -> bool:
    """Whether world size N is N replicas in one rank, instead of N ranks."""
    return getattr(_class_of(make_strategy), "in_one_process", False)


def _class_of(make_strategy) -> type:
    """The strategy's class, whose options may be bound already."""
    return getattr(make_strategy, "func", make_strategy)


def _by_rank(result: RunResult, count: str) -> list[int]:
    """A count of every rank's report, 0 of a rank that was lost."""
    return [getattr(report, count, 0) for report in result.values]


def _survives(make_strategy) -> bool:
    """Whether the technique goes on without a rank other than 0."""
    return getattr(_class_of(make_strategy), "survives_lost_workers", False)


def _ranks_and_device(config: RunConfig, make_strategy) -> tuple[int, str]:
    """What ``labkit.run`` starts."""
    if not _in_one_process(make_strategy):
        return config.world_size, config.device
    return 1, make_strategy.keywords["devices"][0].partition(":")[0]


def _replica_devices(config: RunConfig) -> tuple[str, ...]:
    """The devices of a technique that runs in one process, one a replica.

    Raises:
        ValueError: not on this machine, at odds with ``device``, or several ranks there already.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and under_torchrun():
        raise ValueError(
            f"{config.strategy} is one process with {format_count(config.world_size, 'device')}, "
            f"but torchrun started {os.environ['WORLD_SIZE']} ranks: start it without torchrun"
        )
    if config.devices is None:
        return plan(config.world_size, config.device).devices
    devices, gpus = parse_devices(config.devices), num_gpus()
    for name in devices:
        kind, _, number = name.partition(":")
        if config.device not in ("auto", kind):
            raise ValueError(f"devices {config.devices!r} do not go with device {config.device!r}")
        if kind == "cuda" and int(number) >= gpus:
            has = format_count(gpus, "CUDA GPU")
            raise ValueError(
                f"devices {config.devices!r}: this machine has {has}, counted from cuda:0; name "
                "others, or leave devices out"
            )
    return devices


def _options(config: RunConfig, make_strategy) -> dict[str, Any]:
    """The technique's own options, as its constructor takes them.

    Raises:
        ValueError: one that this technique does not take; the message lists those it does.
    """
    taken = [name for name in OPTIONS if name in inspect.signature(make_strategy).parameters]
    given = config.options()
    for name in given:
        if name not in taken:
            whose = f"strategy {config.strategy}" + " with builtin" * config.builtin
            its_own = f"its options are {', '.join(taken)}" if taken else "it has no options"
            raise ValueError(f"{whose} takes no option {name}: {its_own}")
    if _in_one_process(make_strategy):
        given["devices"] = _replica_devices(config)
    if "straggler" in given:
        given["straggler"] = parse_straggler(config.straggler, config.world_size)
    return given
