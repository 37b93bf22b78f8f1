"""RunConfig: all settings of a training run, with their defaults, limits and help texts."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from reprlib import repr as shortened
from typing import Any, get_args

from labkit import units
from labkit.schedules.learning_rate import parse_lr_schedule
from labkit.schedules.pipeline import PIPELINES
from labkit.schedules.split_points import check_devices
from labkit.units import format_count

# Techniques whose ranks divide the model between them, not the batch.
STAGED = ("model_parallel", "pipeline")
# Techniques for which several devices are devices of one process, not one for each rank.
ONE_PROCESS = ("single", "data_parallel", "model_parallel")
AUGMENTATIONS = ("crop", "flip", "randaugment", "colorjitter", "erasing")

# What an optimizer's rates are where none are given.
_RATES = {
    "sgd": {"lr": 0.05, "weight_decay": 0.0},
    "adam": {"lr": 1e-3, "weight_decay": 0.0},
    "adamw": {"lr": 1e-3, "weight_decay": 0.01},
}
# Without normalisation, sgd's rate above makes the loss of this model infinite.
_SGD_LR = {"vgg16": 0.005}
# The units of a link's numbers, in seconds and in bytes per second. (Mb/s could be megabits or
# megabytes, and is refused.)
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_BYTES = {"B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20}
_BYTES |= {"GiB": 2.0**30, "kbit": 125.0, "Mbit": 125e3, "Gbit": 125e6}
_LINK_UNITS = _SECONDS | {f"{name}/s": value for name, value in _BYTES.items()}


# What reads the text of a setting; each raises ValueError for anything else.


def _words(name: str, text: object, example: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",")) if isinstance(text, str) else ()
    if not words or not all(words):
        raise ValueError(f"{name} must be names with commas, as in {example}, got {text!r}")
    return words


def parse_augment(text: str | None) -> tuple[str, ...]:
    """``"crop,flip"`` is ("crop", "flip"); None is ()."""
    words = () if text is None else _words("augment", text, "crop,flip")
    for word in words:
        units.check_choice("augment", word, AUGMENTATIONS)
    return words


def parse_freeze(text: str) -> tuple[str, ...]:
    """``"0,1.conv1"`` is ("0", "1.conv1")."""
    return _words("freeze", text, "0,1.conv1 or features")


def parse_split_points(text: str) -> tuple[int, ...]:
    """``"5,12"`` is (5, 12); an empty text is one stage."""
    words = [word.strip() for word in str(text).split(",")] if str(text).strip() else []
    if not all(re.fullmatch(r"[0-9]{1,9}", word) for word in words):
        raise ValueError(f"split_points must be layers, as in 5,12, got {shortened(text)}")
    return tuple(map(int, words))


def parse_devices(devices: str | Sequence[Any]) -> tuple[str, ...]:
    """``"cpu,cuda:1"``, or a sequence of names or of ``torch.device``, is ("cpu", "cuda:1")."""
    is_list = isinstance(devices, list | tuple)
    names = tuple(str(name).strip() for name in (devices if is_list else str(devices).split(",")))
    for name in names or ("",):
        if not re.fullmatch(r"cpu|cuda:(0|[1-9][0-9]{0,3})", name):
            raise ValueError(
                f"devices must be cpu or cuda:NUMBER, separated by commas, got {shortened(name)} "
                f"in {shortened(devices)}"
            )
    return names


def parse_hosts(hosts: int | str | Sequence[str]) -> int | tuple[str, ...]:
    """``2`` and ``"2"`` are 2, ``"10.0.0.1,10.0.0.2"`` is ("10.0.0.1", "10.0.0.2")."""
    if isinstance(hosts, str) and re.fullmatch(r"-?[0-9]+", hosts.strip()):
        hosts = int(hosts)
    if isinstance(hosts, int) and not isinstance(hosts, bool):
        units.check_integer("hosts", hosts, most=units.MOST_RANKS)
        return hosts
    names = hosts.split(",") if isinstance(hosts, str) else hosts
    is_list = isinstance(names, list | tuple) and len(names) > 0
    if not is_list or not all(isinstance(name, str) and name.strip() for name in names):
        raise ValueError(
            "hosts must be how many, as in 2, or their addresses, as in 10.0.0.1,10.0.0.2, got "
            f"{shortened(hosts)}"
        )
    return tuple(name.strip() for name in names)


def parse_straggler(text: str, world_size: int) -> tuple[int, float]:
    """``"1:4.0"`` is (1, 4.0): rank 1 takes four times as long to compute."""
    match = re.fullmatch(r"([0-9]{1,4}):([0-9.]{1,9})", str(text), re.ASCII)
    rank, factor = (int(match[1]), float(match[2])) if match else (-1, 0.0)
    if not (0 <= rank < world_size and factor >= 1):
        raise ValueError(
            f"straggler must be RANK:FACTOR, as in 1:4.0, got {shortened(text)}: with world_size "
            f"{world_size} the ranks are 0 to {world_size - 1}, and a factor is 1 or more"
        )
    return rank, factor


def parse_link(text: str) -> tuple[Any, ...]:
    """``"10ms,100MB/s"`` is (0.01, 1e8): latency in seconds, and bandwidth in bytes per second.

    One of the two may be left out. With ``2 per host`` as one of the parts, a third number says
    how many ranks stand on each emulated host.
    """
    found: dict[str, float] = {}
    for word in map(str.strip, str(text).split(",")):
        kind, value = "", 0.0
        if match := re.fullmatch(r"([0-9]{1,9})\s*(?:ranks?\s+)?per\s+host", word):
            kind, value = "hosts", int(match[1])
        elif match := re.fullmatch(r"([0-9.]+(?:e[-+]?[0-9]+)?)\s*([a-zA-Zµ/]+)", word):
            kind = "bandwidth" if match[2].endswith("/s") else "latency"
            value = float(match[1]) * _LINK_UNITS.get(match[2], float("nan"))
        if not kind or kind in found or value != value:
            raise ValueError(
                f"link must be LATENCY,BANDWIDTH, as in 10ms,100MB/s, got {shortened(text)} "
                f"(units: {', '.join(_LINK_UNITS)}; for emulated hosts, as in 2 per host)"
            )
        found[kind] = value
    latency_s, bandwidth = found.get("latency", 0.0), found.get("bandwidth", float("inf"))
    name = f"link {shortened(text)}: the"
    units.check_number(f"{name} latency", latency_s, 0, units.MOST_SECONDS)
    units.check_above_zero(f"{name} bandwidth", bandwidth, float("inf"))
    if "hosts" not in found:
        return latency_s, bandwidth
    units.check_integer(f"{name} ranks per host", found["hosts"], most=units.MOST_RANKS)
    return latency_s, bandwidth, found["hosts"]


def check_servers(servers: int, world_size: int) -> None:
    """Refuse a number of servers that leaves no worker; with world size 1, rank 0 is both."""
    if servers >= max(world_size, 2):
        fewer = f"at most {world_size - 1} servers" if world_size > 1 else "1 server"
        raise ValueError(
            f"servers {servers} of world_size {world_size} leave no rank to work: use {fewer}, or "
            f"a world_size of {servers + 1} or more"
        )


def _setting(default: Any, unit: str, help: str, **limits: Any) -> Any:
    """A field with the limits of its number, or what reads its text; ``a|b`` are all choices."""
    usual = {"least": None, "most": units.MOST, "above_zero": False, "parse": None}
    return field(default=default, metadata={"unit": unit, "help": help} | usual | limits)


def type_of(setting: Any) -> type:
    """bool, int, float or str: ``int | None`` is int."""
    return (get_args(setting.type) or (setting.type,))[0]


@dataclass(frozen=True)
class RunConfig:
    """The settings of one training run; ``labkit train`` has an option for each.

    The settings from ``backend`` on belong to some techniques only (``OPTIONS``), ``devices`` to
    all; ``None`` means the technique's own default. ``devices`` and ``split_points`` determine the
    world size, which may then be left at 1. ``devices`` may be given as a sequence of names, too.

    Raises:
        ValueError: a value outside its limits, or settings that contradict each other.
    """

    strategy: str = _setting("single", "S", "the technique, for example ring_all_reduce")
    world_size: int = _setting(
        1, "N", "number of ranks; under torchrun as many as it starts", most=units.MOST_RANKS
    )
    # Global, so that runs with other world sizes do the same arithmetic.
    batch_size: int = _setting(64, "B", "global batch size, over all ranks together")
    epochs: int = _setting(1, "E", "passes over the training samples")
    model: str = _setting("small_cnn", "M", "labkit's model of this name, or your MODULE:FUNCTION")
    dataset: str = _setting("digits", "D", "data set of this name, or your MODULE:FUNCTION")
    loss: str = _setting("cross_entropy", "L", "torch.nn.functional's, or your MODULE:FUNCTION")
    optimizer: str = _setting("sgd", "O", "sgd, adam, adamw, or your MODULE:FUNCTION")
    device: str = _setting("auto", "DEVICE", "where the ranks run: auto, cpu or cuda")
    # Repeats count upwards from the seed, and torch's generators take 64 bits.
    seed: int = _setting(
        0, "K", "random seed of parameters and sample order", least=0, most=2**32 - 1
    )
    lr: float | None = _setting(
        None, "RATE", "learning rate (sgd 0.05, of vgg16 0.005; adam 0.001)", above_zero=True
    )
    weight_decay: float | None = _setting(None, "DECAY", "of the optimizer (0; adamw 0.01)")
    lr_schedule: str = _setting(
        "constant",
        "S",
        "after the warm-up: constant, cosine to 0 at the end, or step:EPOCHS:FACTOR",
        parse=parse_lr_schedule,
    )
    warmup_epochs: float = _setting(
        0.0, "EPOCHS", "first epochs (2 or 0.5), in which the learning rate rises"
    )
    clip_norm: float | None = _setting(
        None, "NORM", "scale gradients down to this global norm", above_zero=True, most=1e12
    )
    dtype: str = _setting("float32", "float32|float64", "type of parameters; float64 is for tests")
    builtin: bool = _setting(False, "", "run PyTorch's counterpart of the technique")
    train_size: int | None = _setting(None, "N", "only the first N training samples")
    link: str | None = _setting(
        None,
        "LATENCY,BANDWIDTH",
        "emulate a slower link, for example 10ms,100MB/s; with ',2 per host' it is between hosts "
        "of two ranks each",
        parse=parse_link,
    )
    hosts: str | None = _setting(
        None, "H", "run on that many nodes of a Ray cluster, or on those with the addresses A,A"
    )
    augment: str | None = _setting(
        None,
        "A,A",
        "change training images at random: crop, flip, randaugment, colorjitter, erasing",
        parse=parse_augment,
    )
    resize: int | None = _setting(
        None, "PIXELS", "scale images to this height and width, such as 224", most=8192
    )
    weights: str | None = _setting(None, "FILE", "start from these parameters: safetensors or .pt")
    freeze: str | None = _setting(
        None,
        "NAME,NAME",
        "layers that are not trained; features: all but the last",
        parse=parse_freeze,
    )
    checkpoint_dir: str | None = _setting(
        None, "DIR", "folder of the run's checkpoints, which all machines share"
    )
    checkpoint_every: int | None = _setting(None, "N", "steps between checkpoints (an epoch)")
    resume: bool = _setting(
        False, "", "continue from the newest checkpoint in checkpoint_dir, if any"
    )
    log_dir: str | None = _setting(None, "DIR", "folder for epochs.csv and TensorBoard's files")

    backend: str = _setting(
        "auto", "auto|gloo|nccl|labkit", "for --builtin; labkit is this package's own"
    )
    bucket_mb: float | None = _setting(
        None, "MB", "ddp: bucket size in MiB; 0 gives each parameter a bucket", most=2**20
    )
    accumulate: int | None = _setting(None, "N", "micro-batches per update and synchronisation")
    amp: str | None = _setting(
        None, "bf16|fp16|tf32", "mixed precision; tf32: products of float32 on NVIDIA's GPUs"
    )
    sync_batch_norm: bool = _setting(
        False, "", "BatchNorm normalises with the statistics of the global batch"
    )
    compress: str | None = _setting(
        None, "fp16|bf16|topk", "ring_all_reduce: compress gradients on the wire"
    )
    hierarchical: bool = _setting(
        False, "", "ring_all_reduce, ddp: sum inside each host first, then between"
    )
    servers: int | None = _setting(None, "S", "parameter_server: ranks that hold parameters")
    straggler: str | None = _setting(
        None, "RANK:FACTOR", "1:4.0 makes rank 1 compute four times as slowly"
    )
    max_staleness: int | None = _setting(
        None, "N", "async_parameter_server: updates by others that a gradient may miss", least=0
    )
    devices: str | None = _setting(
        None,
        "D,D",
        "a device per rank, for example cuda:2,cuda:3; data_parallel and model_parallel are then "
        "one process with a replica or a stage on each",
    )
    split_points: str | None = _setting(
        None,
        "K,K",
        "layers that begin a stage; by default an even split by FLOPs",
        parse=parse_split_points,
    )
    micro_batches: int | None = _setting(None, "M", "pipeline: micro-batches per batch")
    schedule: str | None = _setting(None, "|".join(PIPELINES), "pipeline: order of micro-batches")

    def __post_init__(self) -> None:
        # Sequences become texts, so that settings can be compared and recorded.
        if self.devices is not None:
            self._set("devices", ",".join(parse_devices(self.devices)))
        if self.hosts is not None:
            hosts = parse_hosts(self.hosts)
            self._set("hosts", str(hosts) if isinstance(hosts, int) else ",".join(hosts))
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value is not None or setting.default is not None:
                _check(setting, value)
        rates = _RATES.get(self.optimizer, {})
        if self.optimizer == "sgd" and self.model in _SGD_LR:
            rates = rates | {"lr": _SGD_LR[self.model]}
        for name in ("lr", "weight_decay"):
            if getattr(self, name) is None:
                self._set(name, rates.get(name))
            elif name not in rates:
                raise ValueError(
                    f"optimizer {self.optimizer} takes no {name} here: leave it out, or set it in "
                    "a function of the parameters that makes the optimizer"
                )
        if self.devices is not None:
            count = len(parse_devices(self.devices))
            if self.split_points is not None:
                check_devices(count, parse_split_points(self.split_points))
            # The ranks on each machine get the devices of this list.
            machines = self.num_hosts or int(os.environ.get("GROUP_WORLD_SIZE", 1))
            self._follow("devices", "device", machines * count)
        if self.split_points is not None:
            self._follow("split_points", "stage", len(parse_split_points(self.split_points)) + 1)
        if self.servers is not None:
            check_servers(self.servers, self.world_size)
        if self.straggler is not None:
            parse_straggler(self.straggler, self.world_size)
        for is_wrong, message in self._contradictions():
            if is_wrong:
                raise ValueError(message)

    def _contradictions(self) -> Iterator[tuple[object, str]]:
        yield (
            self.warmup_epochs > self.epochs,
            f"warmup_epochs {self.warmup_epochs} of {format_count(self.epochs, 'epoch')}: the "
            "learning rate would never reach lr",
        )
        yield (
            self.amp and self.dtype != "float32",
            f"amp {self.amp} is for dtype float32, got {self.dtype}",
        )
        yield (
            self.batch_size < self.world_size and self.strategy not in STAGED,
            f"batch_size {self.batch_size} is smaller than world_size {self.world_size}: some "
            "ranks would never get a sample",
        )
        yield (
            self.backend != "auto" and not self.builtin,
            f"backend {self.backend!r} is for PyTorch's counterpart: choose builtin as well",
        )
        option = "resume" if self.resume else f"checkpoint_every {self.checkpoint_every}"
        yield (
            self.checkpoint_dir is None and (self.resume or self.checkpoint_every is not None),
            f"{option} needs checkpoint_dir, the folder of the run's checkpoints",
        )
        yield (
            self.link and self.devices and self.strategy in ONE_PROCESS,
            f"link {self.link!r}: with devices one process moves the tensors, and no messages "
            "pass a link",
        )
        yield (
            self.link and self.builtin and self.backend != "labkit",
            f"link {self.link!r}: PyTorch's own backends send their messages themselves, so "
            "no emulated link can delay them. Use backend 'labkit', or no builtin",
        )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _follow(self, name: str, noun: str, count: int) -> None:
        """Set the world size from an option; ValueError if another world size was given."""
        if self.world_size not in (1, count):
            raise ValueError(
                f"{name} {getattr(self, name)!r} makes {format_count(count, noun)}, but "
                f"world_size is {self.world_size}: leave out one of the two"
            )
        self._set("world_size", count)

    @property
    def num_hosts(self) -> int:
        """How many hosts ``hosts`` asks for; 0 without it."""
        if self.hosts is None:
            return 0
        named = parse_hosts(self.hosts)
        return named if isinstance(named, int) else len(named)

    @property
    def changes_lr(self) -> bool:
        """Whether the learning rate changes from update to update."""
        return self.lr_schedule != "constant" or self.warmup_epochs > 0

    @property
    def tf32(self) -> bool:
        """A mode of the device, which no technique has to know."""
        return self.amp == "tf32"

    def options(self) -> dict[str, Any]:
        """The technique's own options that were given, as keyword arguments of its constructor."""
        defaults = {setting.name: setting.default for setting in fields(self)}
        given = {name: getattr(self, name) for name in OPTIONS if name != "amp" or not self.tf32}
        return {name: value for name, value in given.items() if value != defaults[name]}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


_NAMES = [setting.name for setting in fields(RunConfig)]
# Options of some techniques only, beside the settings of all techniques.
OPTIONS = tuple(_NAMES[_NAMES.index("backend") :])


def _check(setting: Any, value: Any) -> None:
    """Refuse a value of another type, outside its limits, or of another form."""
    name, kind, limits = setting.name, type_of(setting), setting.metadata
    least, most = limits["least"], limits["most"]
    if kind is bool and not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    if limits["above_zero"]:
        units.check_above_zero(name, value, most)
    elif kind is int:
        units.check_integer(name, value, 1 if least is None else int(least), int(most))
    elif kind is float:
        units.check_number(name, value, least or 0, most)
    elif kind is str:
        parse = limits["parse"]
        if not isinstance(value, str) or "\0" in value or (not value and parse is None):
            raise ValueError(f"{name} must be a text that is not empty, got {value!r}")
        if "|" in limits["unit"]:
            units.check_choice(name, value, limits["unit"].split("|"))
        elif parse is not None:
            parse(value)
