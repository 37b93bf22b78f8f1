"""RunConfig: everything that decides a training run, in one frozen, self-checking place."""

import re
from dataclasses import asdict, dataclass, fields
from reprlib import repr as shortened
from typing import Any

from labkit import units
from labkit.schedules.pipeline import PIPELINES
from labkit.units import format_count

DTYPES = ("float32", "float64")
BACKENDS = ("auto", "gloo", "nccl", "labkit")
AMP = ("bf16", "fp16")
COMPRESSIONS = ("fp16", "bf16", "topk")
# Their ranks share the model out, and not the batch.
STAGED = ("model_parallel", "pipeline")
# What a technique may take beside the settings that all of them have.
OPTIONS = (
    *("backend", "bucket_mb", "accumulate", "amp", "compress"),
    *("servers", "straggler", "max_staleness", "devices"),
    *("split_points", "micro_batches", "schedule"),
)

_MOST_MB = units.MOST_BYTES // 2**20
# Repeats count upwards from a seed, and torch's generators take 64 bits.
_MOST_SEED = 2**32 - 1
# PyTorch refuses a rate that the parameters' type cannot hold.
_MOST_LR = {"float32": 3.4e38, "float64": 1.7e308}
# A straggler sleeps so many times as long as it has computed.
_MOST_SLOWDOWN = 1e6
_TEXTS = ("strategy", "model", "dataset", "device", "transport")
_TEXTS += ("straggler", "devices", "split_points")
_CHOICES = {"dtype": DTYPES, "backend": BACKENDS, "amp": AMP, "compress": COMPRESSIONS}
_CHOICES["schedule"] = tuple(PIPELINES)
_WHOLE = {
    **dict.fromkeys(("batch_size", "epochs", "train_size"), (1, units.MOST)),
    **dict.fromkeys(("accumulate", "servers", "micro_batches"), (1, units.MOST)),
    "world_size": (1, units.MOST_RANKS),
    "max_staleness": (0, units.MOST),
    "seed": (0, _MOST_SEED),
}
# Of a momentum of 1 nothing ever fades.
_NUMBERS = {"bucket_mb": (0, _MOST_MB), "momentum": (0, 0.999999)}


@dataclass(frozen=True)
class RunConfig:
    """The settings of one training run.

    Attributes:
        strategy: the technique, by its ``--strategy`` name.
        world_size: number of ranks.
        batch_size: the global batch, over all ranks together, so that runs with other world sizes
            do the same arithmetic.
        epochs: passes over the training samples.
        model, dataset: names, see ``labkit.workload.datasets``.
        device: ``auto``, ``cpu`` or ``cuda``.
        seed: of the parameters and of the order of the samples.
        lr, momentum: of plain SGD.
        dtype: ``float32``, or ``float64`` for the equivalence tests.
        builtin: run PyTorch's counterpart of the technique.
        backend: the process group below PyTorch's counterpart; ``labkit`` is this package's own
            collectives, ``auto`` what suits the device.
        transport: how the messages of our implementations travel, see ``labkit.run``.
        train_size: use the first so many training samples; None uses all.
        bucket_mb: MiB of gradients that are sent together; 0 is a bucket a parameter.
        accumulate: micro-batches a rank's share is cut into; one synchronisation an update.
        amp: mixed precision, ``bf16`` or ``fp16``.
        compress: of gradients on the wire, ``fp16``, ``bf16`` or ``topk``.
        servers: ranks that hold the parameters, of a parameter server.
        straggler: ``"1:4.0"`` makes rank 1 compute four times as slowly.
        max_staleness: updates by others that one update may have missed.
        devices: of one process, ``"cpu,cpu"``, one a replica or stage. Their number is the world
            size, which may be left at 1.
        split_points: layers that begin a stage, ``"5,12"`` for three stages. The number of stages
            is the world size, which may be left at 1; by default an even split by FLOPs.
        micro_batches: that a batch goes through a pipeline in.
        schedule: of a pipeline, ``gpipe`` or ``1f1b``.

    Of those from bucket_mb on, ``None`` is the technique's own default; each takes its own.
    """

    strategy: str = "single"
    world_size: int = 1
    batch_size: int = 64
    epochs: int = 1
    model: str = "small_cnn"
    dataset: str = "digits"
    device: str = "auto"
    seed: int = 0
    lr: float = 0.05
    momentum: float = 0.9
    dtype: str = "float32"
    builtin: bool = False
    backend: str = "auto"
    transport: str = "auto"
    train_size: int | None = None
    bucket_mb: float | None = None
    accumulate: int | None = None
    amp: str | None = None
    compress: str | None = None
    servers: int | None = None
    straggler: str | None = None
    max_staleness: int | None = None
    devices: str | None = None
    split_points: str | None = None
    micro_batches: int | None = None
    schedule: str | None = None

    def __post_init__(self):
        self._check_each()
        if self.devices is not None and self.split_points is not None:
            _check_one_each(parse_devices(self.devices), parse_split_points(self.split_points))
        if self.devices is not None:
            self._follow("devices", len(parse_devices(self.devices)))
        if self.split_points is not None:
            self._follow("split_points", len(parse_split_points(self.split_points)) + 1)
        if self.amp and self.dtype != "float32":
            raise ValueError(f"amp {self.amp} is for dtype float32, got {self.dtype}")
        if self.servers is not None:
            check_servers(self.servers, self.world_size)
        if self.straggler is not None:
            parse_straggler(self.straggler, self.world_size)
        if self.batch_size < self.world_size and self.strategy not in STAGED:
            raise ValueError(
                f"batch_size {self.batch_size} is smaller than world_size {self.world_size}: some "
                f"ranks would never get a sample. Use a batch of at least {self.world_size}"
            )
        if self.backend != "auto" and not self.builtin:
            raise ValueError(
                f"backend {self.backend!r} is for PyTorch's counterpart: choose builtin as well, "
                "or transport for our own implementation"
            )

    def _check_each(self) -> None:
        """Every setting by itself; None is the technique's own default, where that may be."""
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if name in _TEXTS and not isinstance(value, str):
                raise ValueError(f"{name} must be a text, got {value!r}")
            if name == "builtin" and not isinstance(value, bool):
                raise ValueError(f"builtin must be True or False, got {value!r}")
            if name in _CHOICES and value not in _CHOICES[name]:
                known = ", ".join(_CHOICES[name])
                raise ValueError(f"unknown {name} {value!r}: choose one of {known}")
            if name in _WHOLE:
                units.check_integer(name, value, *_WHOLE[name])
            if name in _NUMBERS:
                units.check_number(name, value, *_NUMBERS[name])
        units.check_above_zero("lr", self.lr, _MOST_LR[self.dtype])

    def _follow(self, name: str, count: int) -> None:
        """Let the world size be what an option makes it."""
        if self.world_size not in (1, count):
            made = format_count(count, {"devices": "device", "split_points": "stage"}[name])
            raise ValueError(
                f"{name} {getattr(self, name)!r} makes {made}, but world_size is "
                f"{self.world_size}: leave out one of the two"
            )
        object.__setattr__(self, "world_size", count)

    def options(self) -> dict[str, Any]:
        """The technique's own options that were given, as its constructor takes them."""
        defaults = {field.name: field.default for field in fields(self)}
        given = {name: getattr(self, name) for name in OPTIONS}
        return {name: value for name, value in given.items() if value != defaults[name]}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_straggler(text: str, world_size: int) -> tuple[int, float]:
    """``"1:4.0"`` is (1, 4.0): rank 1 takes four times as long to compute.

    Raises:
        ValueError: not of this form, no such rank, or a factor below 1.
    """
    rank, colon, factor = str(text).partition(":")
    try:
        parsed = units.parse_integer(rank), units.parse_number(factor)
    except ValueError:
        colon = ""
    if not colon:
        raise ValueError(f"straggler must be RANK:FACTOR, as in 1:4.0, got {shortened(text)}")
    if not 0 <= parsed[0] < world_size:
        raise ValueError(
            f"straggler {shortened(text)}: with world_size {world_size} the ranks are 0 to "
            f"{world_size - 1}"
        )
    units.check_number(f"straggler {shortened(text)}: the factor", parsed[1], 1, _MOST_SLOWDOWN)
    return parsed


def check_servers(servers: int, world_size: int) -> None:
    """Refuse servers that leave no rank to work; with world size 1 the one rank does both.

    Raises:
        ValueError: as many servers as ranks, or more.
    """
    if servers >= max(world_size, 2):
        fewer = f"at most {world_size - 1} servers" if world_size > 1 else "1 server"
        raise ValueError(
            f"servers {servers} of world_size {world_size} leave no rank to work: use {fewer}, or "
            f"a world_size of {servers + 1} or more"
        )


def parse_devices(text: str) -> tuple[str, ...]:
    """``"cpu,cpu"`` is ("cpu", "cpu"); GPUs are ``cuda:0``, ``cuda:1``, ...

    Raises:
        ValueError: a name of another form.
    """
    names = tuple(name.strip() for name in str(text).split(","))
    for name in names:
        if not re.fullmatch(r"cpu|cuda:[0-9]{1,4}", name):
            raise ValueError(
                "devices must be cpu or cuda:NUMBER with commas between, got "
                f"{shortened(name)} in {shortened(text)}"
            )
    return names


def parse_split_points(text: str) -> tuple[int, ...]:
    """``"5,12"`` is (5, 12); an empty text is one stage.

    Raises:
        ValueError: not integers with commas between.
    """
    words = [word.strip() for word in str(text).split(",")] if str(text).strip() else []
    if not all(re.fullmatch(r"[0-9]{1,9}", word) for word in words):
        raise ValueError(f"split_points must be layers, as in 5,12, got {shortened(text)}")
    return tuple(map(int, words))


def _check_one_each(devices: tuple[str, ...], split_points: tuple[int, ...]) -> None:
    if len(devices) != len(split_points) + 1:
        raise ValueError(
            f"{format_count(len(devices), 'device')} for "
            f"{format_count(len(split_points) + 1, 'stage')}: name one a stage, or leave devices "
            "out and give each stage a process of its own"
        )
