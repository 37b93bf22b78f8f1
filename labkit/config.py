"""RunConfig: all settings of a training run, with their defaults, limits and help texts."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from reprlib import repr as shortened
from typing import Any

from labkit import units
from labkit.schedules.learning_rate import parse_lr_schedule
from labkit.schedules.pipeline import PIPELINES
from labkit.schedules.split_points import check_devices
from labkit.units import format_count

BACKENDS = ("auto", "gloo", "nccl", "labkit")
# Techniques whose ranks divide the model between them, not the batch.
STAGED = ("model_parallel", "pipeline")
# Techniques for which several devices are devices of one process, not one for each rank.
ONE_PROCESS = ("single", "data_parallel", "model_parallel")

_MOST_MB = units.MOST_BYTES // 2**20
# Repeats count upwards from the seed, and torch's generators take 64 bits.
_MOST_SEED = 2**32 - 1
# The largest learning rate that a parameter of this type can hold; PyTorch refuses more.
_MOST_LR = {"float32": 3.4e38, "float64": 1.7e308}
# Mb/s could be megabits or megabytes, and is refused.
_DECIMAL = {"B/s": 1.0, "kB/s": 1e3, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}
_BINARY = {"KiB/s": 2.0**10, "MiB/s": 2.0**20, "GiB/s": 2.0**30}
_BITS = {"kbit/s": 125.0, "Mbit/s": 125e3, "Gbit/s": 125e6}
# The units of a link's numbers, in seconds and in bytes per second.
_LINK_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6} | _DECIMAL | _BINARY | _BITS
_RATES = {
    "sgd": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.0},
    "adam": {"lr": 1e-3, "weight_decay": 0.0},
    "adamw": {"lr": 1e-3, "weight_decay": 0.01},
}
# Without normalisation, sgd's rate above makes the loss of this model infinite.
_SGD_LR = {"vgg16": 0.005}
AUGMENTATIONS = ("crop", "flip")
_MOST_PIXELS = 8192
# The largest factor by which a straggler may be slower.
_MOST_SLOWDOWN = 1e6
# No gradient that a run can use has a larger norm.
_MOST_NORM = 1e12


def _setting(
    default: Any,
    metavar: str,
    help: str,
    check: Callable[[str, Any], None],
    parse: Callable[[str], Any] = str,
) -> Any:
    """A field with its help text, the parser of its text, and the check of its values."""
    metadata = {"metavar": metavar, "help": help, "check": check, "parse": parse}
    return field(default=default, metadata=metadata)


def _text(default: str | None, metavar: str, help: str) -> Any:
    return _setting(default, metavar, help, _check_text)


def _path(default: str | None, metavar: str, help: str) -> Any:
    return _setting(default, metavar, help, _check_path)


def _choice(default: str | None, choices: tuple[str, ...], help: str) -> Any:
    return _setting(default, "|".join(choices), help, partial(units.check_choice, known=choices))


def _integer(
    default: int | None, metavar: str, help: str, least: int = 1, most: int = units.MOST
) -> Any:
    check = partial(units.check_integer, least=least, most=most)
    return _setting(default, metavar, help, check, units.parse_integer)


def _number(default: float | None, metavar: str, help: str, most: float) -> Any:
    check = partial(units.check_number, least=0, most=most)
    return _setting(default, metavar, help, check, units.parse_number)


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {value!r}")


def _check_path(name: str, value: Any) -> None:
    _check_text(name, value)
    if not value or "\0" in value:
        raise ValueError(f"{name} must be the name of a file or a folder, got {value!r}")


def _check_devices(name: str, value: Any) -> None:
    parse_devices(value)


def _check_hosts(name: str, value: Any) -> None:
    parse_hosts(value)


def _check_lr_schedule(name: str, value: Any) -> None:
    _check_text(name, value)
    parse_lr_schedule(value)


def _check_augment(name: str, value: Any) -> None:
    parse_augment(value)


def _check_freeze(name: str, value: Any) -> None:
    _check_text(name, value)
    parse_freeze(value)


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


@dataclass(frozen=True)
class RunConfig:
    """The settings of one training run; ``labkit train`` has an option for each.

    The settings from ``backend`` on belong to some techniques only (``OPTIONS``), ``devices`` to
    all; ``None`` means the technique's own default. ``devices`` and ``split_points`` determine the
    world size, which may then be left at 1. ``devices`` may be given as a sequence of names, too.

    Raises:
        ValueError: a value outside its limits, or settings that contradict each other.
    """

    strategy: str = _text("single", "S", "the technique, for example ring_all_reduce")
    world_size: int = _integer(
        1, "N", "number of ranks; under torchrun as many as it starts", most=units.MOST_RANKS
    )
    # Global, so that runs with other world sizes do the same arithmetic.
    batch_size: int = _integer(64, "B", "global batch size, over all ranks together")
    epochs: int = _integer(1, "E", "passes over the training samples")
    model: str = _text("small_cnn", "M", "labkit's model of this name, or your MODULE:FUNCTION")
    dataset: str = _text("digits", "D", "data set of this name, or your MODULE:FUNCTION")
    loss: str = _text("cross_entropy", "L", "torch.nn.functional's, or your MODULE:FUNCTION")
    optimizer: str = _text("sgd", "O", "sgd, adam, adamw, or your MODULE:FUNCTION of parameters")
    device: str = _text("auto", "auto|cpu|cuda", "where the ranks run")
    seed: int = _integer(0, "K", "random seed of parameters and sample order", 0, _MOST_SEED)
    # How large a learning rate may be depends on the dtype.
    lr: float | None = _setting(
        None,
        "RATE",
        "learning rate (0.05, of vgg16 0.005; adam, adamw 0.001)",
        check=partial(units.check_above_zero, most=float("inf")),
        parse=units.parse_number,
    )
    # With a momentum of 1 the weight of past gradients would never decrease.
    momentum: float | None = _number(None, "X", "momentum of sgd (0.9)", most=0.999999)
    weight_decay: float | None = _number(
        None, "DECAY", "of the optimizer (0; adamw 0.01)", most=1e6
    )
    lr_schedule: str = _setting(
        "constant",
        "S",
        "after the warm-up: constant, cosine to 0 at the end, or step:EPOCHS:FACTOR",
        _check_lr_schedule,
    )
    warmup_epochs: float = _number(
        0.0, "EPOCHS", "first epochs (2 or 0.5), in which the learning rate rises", most=units.MOST
    )
    scale_lr: int | None = _integer(
        None, "B", "lr is for batches of B samples: use lr * batch_size / B, with a warm-up"
    )
    clip_norm: float | None = _setting(
        None,
        "NORM",
        "scale gradients down to this global norm",
        check=partial(units.check_above_zero, most=_MOST_NORM),
        parse=units.parse_number,
    )
    dtype: str = _choice("float32", tuple(_MOST_LR), "type of parameters; float64 is for tests")
    builtin: bool = _setting(False, "", "run PyTorch's counterpart of the technique", _check_flag)
    transport: str = _text("auto", "auto|shared|gloo", "how messages travel, see labkit.run")
    train_size: int | None = _integer(None, "N", "only the first N training samples")
    link: str | None = _text(
        None,
        "LATENCY,BANDWIDTH",
        "emulate a slower link, for example 10ms,100MB/s; with ',2 per host' it is between hosts "
        "of two ranks each",
    )
    hosts: str | None = _setting(
        None,
        "H",
        "run on that many nodes of a Ray cluster, or on those with the addresses A,A",
        _check_hosts,
    )
    num_workers: int = _integer(0, "N", "processes per rank that read your data set", least=0)
    augment: str | None = _setting(
        None,
        "A,A",
        "change training images at random: crop (move by up to 4 pixels), flip (left to right)",
        _check_augment,
    )
    resize: int | None = _integer(
        None, "PIXELS", "scale images to this height and width, such as 224", most=_MOST_PIXELS
    )
    weights: str | None = _path(None, "FILE", "start from these parameters: safetensors or .pt")
    freeze: str | None = _setting(
        None,
        "NAME,NAME",
        "layers that are not trained; features: all but the last",
        _check_freeze,
    )
    checkpoint_dir: str | None = _path(
        None, "DIR", "folder of the run's checkpoints, which all machines share"
    )
    checkpoint_every: int | None = _integer(None, "N", "steps between checkpoints (an epoch)")
    checkpoint_keep: int = _integer(2, "N", "newest checkpoints that are kept, beside the best")
    resume: bool = _setting(
        False, "", "continue from the newest checkpoint in checkpoint_dir, if any", _check_flag
    )
    log_dir: str | None = _path(None, "DIR", "folder for epochs.csv, TensorBoard and rank logs")
    tf32: bool = _setting(
        False, "", "on GPUs: round the factors of float32 products to 10 bits", _check_flag
    )

    backend: str = _choice("auto", BACKENDS, "for --builtin; labkit is this package's own")
    bucket_mb: float | None = _number(
        None, "MB", "ddp: bucket size in MiB; 0 gives each parameter a bucket", most=_MOST_MB
    )
    accumulate: int | None = _integer(None, "N", "micro-batches per update and synchronisation")
    amp: str | None = _choice(None, ("bf16", "fp16"), "mixed precision")
    sync_batch_norm: bool = _setting(
        False, "", "BatchNorm normalises with the statistics of the global batch", _check_flag
    )
    compress: str | None = _choice(
        None, ("fp16", "bf16", "topk"), "ring_all_reduce: compress gradients on the wire"
    )
    hierarchical: bool = _setting(
        False, "", "ring_all_reduce, ddp: sum inside each host first, then between", _check_flag
    )
    servers: int | None = _integer(None, "S", "parameter_server: ranks that hold parameters")
    straggler: str | None = _text(
        None, "RANK:FACTOR", "1:4.0 makes rank 1 compute four times as slowly"
    )
    max_staleness: int | None = _integer(
        None, "N", "async_parameter_server: updates by others that a gradient may miss", least=0
    )
    devices: str | None = _setting(
        None,
        "D,D",
        "a device per rank, for example cuda:2,cuda:3; data_parallel and model_parallel are then "
        "one process with a replica or a stage on each",
        _check_devices,
    )
    split_points: str | None = _text(
        None, "K,K", "layers that begin a stage; by default an even split by FLOPs"
    )
    micro_batches: int | None = _integer(None, "M", "pipeline: micro-batches per batch")
    schedule: str | None = _choice(None, tuple(PIPELINES), "pipeline: order of micro-batches")

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value is not None or setting.default is not None:
                setting.metadata["check"](setting.name, value)
        self._complete_rates()
        if self.hosts is not None:
            named = parse_hosts(self.hosts)
            text = str(named) if isinstance(named, int) else ",".join(named)
            object.__setattr__(self, "hosts", text)
        if self.devices is not None:
            object.__setattr__(self, "devices", ",".join(parse_devices(self.devices)))
        if self.devices is not None and self.split_points is not None:
            check_devices(len(parse_devices(self.devices)), parse_split_points(self.split_points))
        if self.devices is not None:
            # The ranks on each machine get the devices of this list.
            machines = self.num_hosts or int(os.environ.get("GROUP_WORLD_SIZE", 1))
            self._follow("devices", machines * len(parse_devices(self.devices)))
        if self.split_points is not None:
            self._follow("split_points", len(parse_split_points(self.split_points)) + 1)
        if self.servers is not None:
            check_servers(self.servers, self.world_size)
        if self.straggler is not None:
            parse_straggler(self.straggler, self.world_size)
        if self.link is not None:
            parse_link(self.link)
        self._check_together()

    def _complete_rates(self) -> None:
        """Set the optimizer's rates where none were given; refuse those that it does not take."""
        defaults = _RATES.get(self.optimizer, {})
        if self.optimizer == "sgd" and self.model in _SGD_LR:
            defaults = defaults | {"lr": _SGD_LR[self.model]}
        for name in ("lr", "momentum", "weight_decay"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, defaults.get(name))
            elif name not in defaults:
                raise ValueError(
                    f"optimizer {self.optimizer} takes no {name} here: leave it out, or set it in "
                    "a function of the parameters that makes the optimizer"
                )
        if self.lr is not None:
            units.check_above_zero("lr", self.lr, _MOST_LR[self.dtype])
        self._check_schedule()

    def _check_schedule(self) -> None:
        if self.warmup_epochs > self.epochs:
            raise ValueError(
                f"warmup_epochs {self.warmup_epochs} of {format_count(self.epochs, 'epoch')}: the "
                "learning rate would never reach lr. Use fewer, or train for more epochs"
            )
        if self.scale_lr is not None and self.used_lr is None:
            raise ValueError(
                f"scale_lr {self.scale_lr} is for the lr of sgd, adam and adamw: optimizer "
                f"{self.optimizer} sets its own rate, so scale it in your function"
            )
        if self.used_lr is not None:
            scaled = f"lr {self.lr} scaled to batches of {self.batch_size}"
            units.check_above_zero(scaled, self.used_lr, _MOST_LR[self.dtype])

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
    def used_lr(self) -> float | None:
        """The rate that the schedule's factors multiply: ``lr``, scaled if ``scale_lr`` is given.

        A batch that is k times as large gets k times the rate, so that an epoch of 1/k as many
        updates moves the parameters about as far (Goyal et al. 2017, section 2.1). None for an
        optimizer of the learner's own, which sets its rate.
        """
        if self.lr is None or self.scale_lr is None:
            return self.lr
        return self.lr * self.batch_size / self.scale_lr

    def _check_together(self) -> None:
        if self.tf32 and self.dtype != "float32":
            raise ValueError(f"tf32 is for dtype float32, got {self.dtype}")
        if self.amp and self.dtype != "float32":
            raise ValueError(f"amp {self.amp} is for dtype float32, got {self.dtype}")
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
        if self.checkpoint_dir is None and (self.resume or self.checkpoint_every is not None):
            option = "resume" if self.resume else f"checkpoint_every {self.checkpoint_every}"
            raise ValueError(f"{option} needs checkpoint_dir, the folder of the run's checkpoints")
        if self.link is not None and self.devices is not None and self.strategy in ONE_PROCESS:
            raise ValueError(
                f"link {self.link!r}: with devices one process moves the tensors, and no messages "
                "pass a link. Leave out one of the two"
            )
        if self.link is not None and self.builtin and self.backend != "labkit":
            raise ValueError(
                f"link {self.link!r}: PyTorch's own backends send their messages themselves, so "
                "no emulated link can delay them. Use backend 'labkit', or no builtin"
            )

    def _follow(self, name: str, count: int) -> None:
        """Set the world size from an option; ValueError if another world size was given."""
        if self.world_size not in (1, count):
            made = format_count(count, {"devices": "device", "split_points": "stage"}[name])
            raise ValueError(
                f"{name} {getattr(self, name)!r} makes {made}, but world_size is "
                f"{self.world_size}: leave out one of the two"
            )
        object.__setattr__(self, "world_size", count)

    def options(self) -> dict[str, Any]:
        """The technique's own options that were given, as keyword arguments of its constructor."""
        defaults = {setting.name: setting.default for setting in fields(self)}
        given = {name: getattr(self, name) for name in OPTIONS}
        return {name: value for name, value in given.items() if value != defaults[name]}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


RunConfig.__init__ = units.spelled(RunConfig.__init__)
_NAMES = [setting.name for setting in fields(RunConfig)]
# Options of some techniques only, beside the settings of all techniques.
OPTIONS = tuple(_NAMES[_NAMES.index("backend") :])


def parse_straggler(text: str, world_size: int) -> tuple[int, float]:
    """``"1:4.0"`` is (1, 4.0): rank 1 takes four times as long to compute.

    Raises:
        ValueError: not of this form, no such rank, or a factor below 1.
    """
    rank_text, _, factor_text = str(text).partition(":")
    try:
        rank, factor = units.parse_integer(rank_text), units.parse_number(factor_text)
    except ValueError:
        raise ValueError(
            f"straggler must be RANK:FACTOR, as in 1:4.0, got {shortened(text)}"
        ) from None
    if not 0 <= rank < world_size:
        raise ValueError(
            f"straggler {shortened(text)}: with world_size {world_size} the ranks are 0 to "
            f"{world_size - 1}"
        )
    units.check_number(f"straggler {shortened(text)}: the factor", factor, 1, _MOST_SLOWDOWN)
    return rank, factor


def parse_augment(text: str | None) -> tuple[str, ...]:
    """``"crop,flip"`` is ("crop", "flip"); None is ().

    Raises:
        ValueError: anything else than some of ``AUGMENTATIONS``, separated by commas.
    """
    if text is None:
        return ()
    words = tuple(word.strip() for word in str(text).split(","))
    for word in words:
        if word not in AUGMENTATIONS:
            raise ValueError(
                f"augment must be {' or '.join(AUGMENTATIONS)}, or both with a comma, got "
                f"{shortened(text)}{units.closest(word, AUGMENTATIONS)}"
            )
    return words


def parse_freeze(text: str) -> tuple[str, ...]:
    """``"0,1.conv1"`` is ("0", "1.conv1").

    Raises:
        ValueError: no names, or an empty one.
    """
    names = tuple(word.strip() for word in text.split(","))
    if not all(names):
        raise ValueError(
            "freeze must be names of layers, separated by commas, or features, got "
            f"{shortened(text)}"
        )
    return names


def parse_link(text: str) -> tuple[Any, ...]:
    """``"10ms,100MB/s"`` is (0.01, 1e8): latency in seconds, and bandwidth in bytes per second.

    One of the two may be left out: no latency, or a bandwidth without a limit. MB are 10^6 bytes,
    MiB are 2^20, and Mbit are 10^6 bits. With ``2 per host`` as one of the parts, a third number
    says how many ranks stand on each emulated host.

    Raises:
        ValueError: not of this form, or beyond the limits.
    """
    found: dict[str, float] = {}
    for word in str(text).split(","):
        kind, value = _link_part(word.strip())
        if not kind or kind in found:
            raise ValueError(
                f"link must be LATENCY,BANDWIDTH, as in 10ms,100MB/s, got {shortened(text)} "
                f"(units: {', '.join(_LINK_UNITS)}; for emulated hosts, as in 2 per host)"
            )
        found[kind] = value
    latency_s = found.get("latency", 0.0)
    units.check_number(f"link {shortened(text)}: the latency", latency_s, 0, units.MOST_SECONDS)
    bandwidth = found.get("bandwidth", float("inf"))
    units.check_above_zero(f"link {shortened(text)}: the bandwidth", bandwidth, float("inf"))
    if "hosts" not in found:
        return latency_s, bandwidth
    per_host = int(found["hosts"])
    name = f"link {shortened(text)}: the ranks per host"
    units.check_integer(name, per_host, least=1, most=units.MOST_RANKS)
    return latency_s, bandwidth, per_host


def _link_part(word: str) -> tuple[str, float]:
    """What a part of a link's text says, and its value in seconds, bytes per second or ranks."""
    if match := re.fullmatch(r"([0-9]{1,9})\s*(?:ranks?\s+)?per\s+host", word):
        return "hosts", int(match[1])
    match = re.fullmatch(r"([0-9.]+(?:e[-+]?[0-9]+)?)\s*([a-zA-Zµ/]+)", word)
    scale = _LINK_UNITS.get(match[2]) if match else None
    if match is None or scale is None:
        return "", 0.0
    kind = "bandwidth" if match[2].endswith("/s") else "latency"
    return kind, units.parse_number(match[1]) * scale


def check_servers(servers: int, world_size: int) -> None:
    """Refuse a number of servers that leaves no worker; with world size 1, rank 0 is both.

    Raises:
        ValueError: as many servers as ranks, or more.
    """
    if servers >= max(world_size, 2):
        fewer = f"at most {world_size - 1} servers" if world_size > 1 else "1 server"
        raise ValueError(
            f"servers {servers} of world_size {world_size} leave no rank to work: use {fewer}, or "
            f"a world_size of {servers + 1} or more"
        )


def parse_devices(devices: str | Sequence[Any]) -> tuple[str, ...]:
    """``"cpu,cpu"`` is ("cpu", "cpu"); GPUs are ``cuda:0``, ``cuda:1``, ...

    Args:
        devices: the names in one text, or a sequence of names or of ``torch.device``.

    Raises:
        ValueError: a name that is neither ``cpu`` nor ``cuda:NUMBER``, or none at all.
    """
    is_list = isinstance(devices, list | tuple)
    names = tuple(str(name).strip() for name in (devices if is_list else str(devices).split(",")))
    for name in names or ("",):
        if not re.fullmatch(r"cpu|cuda:(0|[1-9][0-9]{0,3})", name):
            number = re.fullmatch(r"(?:cuda|gpu)?:?0*([0-9]{1,4})|cuda|gpu", name.lower())
            hint = f" (did you mean cuda:{number[1] or 0}?)" if number else ""
            raise ValueError(
                "devices must be cpu or cuda:NUMBER, separated by commas, got "
                f"{shortened(name)}{hint} in {shortened(devices)}"
            )
    return names


def parse_hosts(hosts: int | str | Sequence[str]) -> int | tuple[str, ...]:
    """``2`` and ``"2"`` are 2, ``"10.0.0.1,10.0.0.2"`` is ("10.0.0.1", "10.0.0.2").

    Args:
        hosts: a number, or addresses in one text or a sequence.

    Raises:
        ValueError: neither a number above 0 nor addresses.
    """
    if isinstance(hosts, str) and re.fullmatch(r"-?[0-9]+", hosts.strip()):
        hosts = units.parse_integer(hosts.strip())
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


def parse_split_points(text: str) -> tuple[int, ...]:
    """``"5,12"`` is (5, 12); an empty text is one stage.

    Raises:
        ValueError: not integers separated by commas.
    """
    words = [word.strip() for word in str(text).split(",")] if str(text).strip() else []
    if not all(re.fullmatch(r"[0-9]{1,9}", word) for word in words):
        raise ValueError(f"split_points must be layers, as in 5,12, got {shortened(text)}")
    return tuple(map(int, words))
