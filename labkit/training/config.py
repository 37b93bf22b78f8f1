"""RunConfig: all settings of a training run, with their defaults, limits and help texts."""

import re
from dataclasses import dataclass, field, fields
from reprlib import repr as shortened
from typing import Any, get_args

from labkit.engine.started import read_numbers
from labkit.schedules.learning_rate import parse_lr_schedule
from labkit.schedules.pipeline import PIPELINES, stages_on_each
from labkit.units import (
    MOST,
    check_choice,
    check_integer,
    check_number,
    join_names,
    parse_devices,
    parse_names,
)

# Techniques whose ranks divide the model between them, not the batch; a mesh divides both.
STAGED = ("model_parallel", "pipeline", "tensor_parallel", "mesh")
# Techniques for which several devices are devices of one process, not one for each rank.
ONE_PROCESS = ("single", "data_parallel", "model_parallel")
AUGMENTATIONS = ("crop", "flip", "randaugment", "colorjitter", "erasing")
# (lr, weight_decay) of labkit's optimizers where none are given.
_RATES = {"sgd": (0.05, 0.0), "adam": (1e-3, 0.0), "adamw": (1e-3, 0.01)}
# Without normalization, sgd's rate above makes the loss of this model infinite.
_SGD_LR = {"vgg16": 0.005}
# Seconds, and bytes per second.
_LINK_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6}
_LINK_UNITS |= {"GB/s": 1e9, "Mbit/s": 125e3, "Gbit/s": 125e6}


def parse_augment(text: str | None) -> tuple[str, ...]:
    """``"crop,flip"`` is ("crop", "flip"); no text is ()."""
    names = parse_names(text)
    for name in names:
        check_choice("augment", name, AUGMENTATIONS)
    return names


def parse_split_points(text: str) -> tuple[int, ...]:
    """``"5,12"`` is (5, 12); an empty text is one stage."""
    if not all(name.isdecimal() for name in parse_names(text)):
        raise ValueError(f"split_points must be layers, as in 5,12, got {shortened(text)}")
    return tuple(map(int, parse_names(text)))


def parse_straggler(text: str, world_size: int) -> tuple[int, float]:
    """``"1:4.0"`` is (1, 4.0): rank 1 takes four times as long to compute."""
    match = re.fullmatch(r"([0-9]{1,4}):([0-9]+\.?[0-9]*)", str(text), re.ASCII)
    rank, factor = -1, 0.0
    if match:
        rank, factor = int(match[1]), float(match[2])
    if not (0 <= rank < world_size and factor >= 1):
        raise ValueError(
            f"straggler must be RANK:FACTOR, as in 1:4.0, got {shortened(text)}: with world_size "
            f"{world_size} the ranks are 0 to {world_size - 1}, and a factor is 1 or more"
        )
    return rank, factor


def parse_link(text: str) -> dict[str, Any]:
    """``"10ms,100MB/s,2 per host"`` as the arguments of ``EmulatedLink``; each may be left out."""
    options: dict[str, Any] = {}
    for word in parse_names(text) or ("",):
        match = re.fullmatch(r"([0-9]+\.?[0-9]*(?:e[-+]?[0-9]+)?) ?(.*)", word)
        number = unit = ""
        if match:
            number, unit = match.groups()
        if unit == "per host" and number.isdecimal():
            options["ranks_per_host"] = int(number)
        elif unit in _LINK_UNITS and "/" in unit:
            options["bandwidth_bytes_per_s"] = float(number) * _LINK_UNITS[unit]
        elif unit in _LINK_UNITS:
            options["latency_s"] = float(number) * _LINK_UNITS[unit]
        else:
            raise ValueError(
                f"link must be LATENCY,BANDWIDTH, as in 10ms,100MB/s; for hosts ,2 per host; got "
                f"{shortened(text)} (units: {', '.join(_LINK_UNITS)})"
            )
    return options


def _option(default: Any, about: str) -> Any:
    """Make a field of ``RunConfig`` with the help text that ``labkit train --help`` shows."""
    return field(default=default, metadata={"help": about})


def _own_option(default: Any, about: str) -> Any:
    """Make a field that belongs to some techniques only."""
    return field(default=default, metadata={"help": about, "of_technique": True})


@dataclass(frozen=True)
class RunConfig:
    """The settings of one training run; ``labkit train`` has an option for each.

    Some settings belong to some techniques only (``OPTIONS``), ``devices`` to all; None means the
    technique's own default. ``devices`` and ``split_points`` determine the world size, which may
    then be left at 1. ``devices`` may be given as a sequence of names, too. The text beside each
    default is the option's help.

    Raises:
        ValueError: a value outside its limits, or settings that contradict each other.
    """

    strategy: str = _option("single", "the technique, for example ring_all_reduce")
    world_size: int = _option(1, "number of ranks; under torchrun as many as it starts")
    # Global, so that runs with other world sizes do the same arithmetic.
    batch_size: int = _option(64, "global batch size, over all ranks together")
    epochs: int = _option(1, "passes over the training samples")
    model: str = _option("small_cnn", "labkit's model of this name, or your MODULE:FUNCTION")
    dataset: str = _option(
        "digits", "data set of this name, a folder of images, or your MODULE:FUNCTION"
    )
    loss: str = _option("cross_entropy", "torch.nn.functional's, or your MODULE:FUNCTION")
    optimizer: str = _option("sgd", "sgd, adam, adamw, or your MODULE:FUNCTION")
    device: str = _option("auto", "where the ranks run: auto, cpu or cuda")
    seed: int = _option(0, "random seed of parameters and sample order")
    lr: float | None = _option(None, "learning rate (sgd 0.05, for vgg16 0.005; adam 0.001)")
    weight_decay: float | None = _option(None, "of the optimizer (0; adamw 0.01)")
    lr_schedule: str = _option(
        "constant", "after the warm-up: constant, cosine to 0 at the end, or step:EPOCHS:FACTOR"
    )
    warmup_epochs: float = _option(
        0.0, "first epochs (2 or 0.5), in which the learning rate rises"
    )
    clip_norm: float | None = _option(None, "scale gradients down to this global norm")
    dtype: str = _option("float32", "type of parameters; float64 is for tests")
    builtin: bool = _option(False, "run PyTorch's counterpart of the technique")
    train_size: int | None = _option(None, "only the first N training samples")
    link: str | None = _option(
        None,
        "emulate a slower link, as in 10ms,100MB/s; with ',2 per host' it is between hosts of "
        "two ranks each",
    )
    hosts: int | None = _option(None, "run on that many nodes of a Ray cluster")
    augment: str | None = _option(
        None, "change training images at random: crop, flip, randaugment, colorjitter, erasing"
    )
    resize: int | None = _option(None, "scale images to this height and width, such as 224")
    weights: str | None = _option(
        None, "start from the parameters in this file or folder: safetensors, .pt, shards"
    )
    freeze: str | None = _option(
        None, "layers A,A that are not trained; features: all but the last"
    )
    checkpoint_dir: str | None = _option(
        None, "folder of the run's checkpoints, which all machines share"
    )
    checkpoint_every: int | None = _option(None, "steps between checkpoints (an epoch)")
    resume: bool = _option(False, "continue from the newest checkpoint in checkpoint_dir, if any")
    log_dir: str | None = _option(None, "folder for TensorBoard's files")
    record: str | None = _option(
        None, "folder for a record of every step, which labkit diff compares with another"
    )

    backend: str = _own_option("auto", "for --builtin; labkit is this package's own")
    bucket_mb: float | None = _own_option(
        None,
        "ddp, mesh: bucket size in MiB (25), of the first bucket 1 at most; 0 gives each "
        "parameter a bucket",
    )
    average_every: int | None = _own_option(
        None, "ddp: local SGD: average parameters after that many updates, not gradients"
    )
    outer_lr: float | None = _own_option(
        None, "ddp with average_every: outer learning rate (1: the average); DiLoCo's is 0.7"
    )
    outer_momentum: float | None = _own_option(
        None, "ddp with average_every: outer Nesterov momentum (0); DiLoCo's is 0.9"
    )
    accumulate: int | None = _own_option(None, "micro-batches per update and synchronization")
    amp: str | None = _own_option(
        None, "mixed precision; tf32: products of float32 on NVIDIA's GPUs"
    )
    sync_batch_norm: bool = _own_option(
        False, "BatchNorm normalizes with the statistics of the global batch"
    )
    compress: str | None = _own_option(None, "ring_all_reduce: compress gradients on the wire")
    hierarchical: bool = _own_option(
        False, "ring_all_reduce, ddp: sum inside each host first, then between"
    )
    servers: int | None = _own_option(None, "parameter_server: ranks that hold parameters")
    straggler: str | None = _own_option(None, "1:4.0 makes rank 1 compute four times as slowly")
    max_staleness: int | None = _own_option(
        None, "async_parameter_server: updates by others that a gradient may miss"
    )
    devices: str | None = _own_option(
        None,
        "a device per rank, for example cuda:2,cuda:3; data_parallel and model_parallel are "
        "then one process with a replica or a stage on each",
    )
    split_points: str | None = _own_option(
        None, "layers K,K that begin a stage; by default an even split by FLOPs"
    )
    micro_batches: int | None = _own_option(None, "pipeline, mesh: micro-batches per batch")
    schedule: str | None = _own_option(
        None, f"pipeline, mesh: order of micro-batches: {', '.join(PIPELINES)}"
    )
    stages_per_rank: int | None = _own_option(
        None, "pipeline with schedule interleaved: V short stages on each rank (2)"
    )
    recompute: bool = _own_option(
        False, "of stages: hold their inputs alone, and run forward again"
    )
    sequence_parallel: bool = _own_option(
        False, "tensor_parallel: divide positions where layers are not cut"
    )
    capacity: float | None = _own_option(
        None, "expert_parallel: an expert drops what exceeds so many times an even load"
    )
    stage: int | None = _own_option(
        None, "sharded: what ranks divide; 1 optimizer states, 2 also gradients, 3 also parameters"
    )
    dp: int | None = _own_option(None, "mesh: replicas of the model, which divide the batch")
    pp: int | None = _own_option(None, "mesh: stages of a replica")
    tp: int | None = _own_option(None, "mesh: ranks over which each layer of a stage is cut")

    def __post_init__(self) -> None:
        given = {setting.name: getattr(self, setting.name) for setting in fields(self)}
        # Sequences become texts, so that settings can be compared and recorded.
        if self.devices is not None:
            given["devices"] = join_names(self.devices)
        for setting in fields(self):
            if given[setting.name] is not None or setting.default is not None:
                _check(setting.name, type_of(setting), given[setting.name])
        parse_lr_schedule(self.lr_schedule)
        given["world_size"] = self._num_ranks()
        rates = dict(zip(("lr", "weight_decay"), _RATES.get(self.optimizer, ())))
        if not rates and (self.lr, self.weight_decay) != (None, None):
            raise ValueError(
                f"optimizer {self.optimizer} takes no lr and no weight_decay here: leave them to "
                "the function that makes it"
            )
        if self.optimizer == "sgd":
            rates["lr"] = _SGD_LR.get(self.model, rates["lr"])
        for name, rate in rates.items():
            if given[name] is None:
                given[name] = rate
        # (It is frozen.)
        vars(self).update(given)
        divisor, num_shares = "world_size", self.world_size
        if self.strategy in STAGED:
            divisor, num_shares = "dp", self.dp or 1
        if self.batch_size < num_shares:
            raise ValueError(
                f"batch_size {self.batch_size} is smaller than {divisor} {num_shares}: some ranks "
                "would never get a sample"
            )
        if self.checkpoint_dir is None and (self.resume or self.checkpoint_every):
            raise ValueError("resume and checkpoint_every need checkpoint_dir: give its folder")
        in_one_process = self.devices and self.strategy in ONE_PROCESS
        if self.link and (in_one_process or (self.builtin and self.backend != "labkit")):
            raise ValueError(
                f"link {self.link!r}: the tensors of this run do not pass through labkit's "
                "messages: leave out devices, or builtin (or choose backend labkit)"
            )

    def _num_ranks(self) -> int:
        """The world size, which devices, stages or the sides of a mesh may determine."""
        counts = {}
        if self.world_size > 1:
            counts[f"world_size {self.world_size}"] = self.world_size
        if self.devices is not None:
            # The ranks on each machine get the devices of this list.
            machines = self.hosts or read_numbers().num_hosts
            if machines is not None:
                counts[f"devices {self.devices}"] = machines * len(parse_devices(self.devices))
        if self.strategy == "mesh":
            dp, pp, tp = self.dp or 1, self.pp or 1, self.tp or 1
            counts[f"dp {dp} x pp {pp} x tp {tp}"] = dp * pp * tp
        elif self.split_points is not None:
            stages = len(parse_split_points(self.split_points)) + 1
            counts[f"split_points {self.split_points}"] = stages // self.stages_on_each()
        if len({*counts.values()}) > 1:
            words = ", ".join(f"{name} is {n} ranks" for name, n in counts.items())
            raise ValueError(f"{words}: leave out one, or make them agree")
        return max(counts.values(), default=1)

    def stages_on_each(self) -> int:
        """V, the stages of a rank, where ranks divide the model between them."""
        return stages_on_each(self.schedule or "gpipe", self.stages_per_rank)

    @property
    def num_stages(self) -> int:
        """The number of stages, where a technique cuts the model into some."""
        if self.strategy == "mesh":
            return (self.pp or 1) * self.stages_on_each()
        return self.world_size * self.stages_on_each()

    @property
    def technique_name(self) -> str:
        """The technique as errors name it: ``ddp``, or ``ddp with builtin``."""
        if self.builtin:
            return f"{self.strategy} with builtin"
        return self.strategy

    def shared(self) -> dict[str, Any]:
        """The settings that all layouts of one run have in common."""
        machine = ("device", "link", "checkpoint_dir", "checkpoint_every", "resume", "log_dir")
        other = (*LAYOUT, *machine, "record", "epochs")
        return {name: value for name, value in vars(self).items() if name not in other}

    def options(self) -> dict[str, Any]:
        """The technique's own options that were given, as keyword arguments of its constructor."""
        options = {}
        for name in OPTIONS:
            value = getattr(self, name)
            if value != getattr(RunConfig, name):
                options[name] = value
        return options


# Options of some techniques only, beside the settings of all techniques.
OPTIONS = tuple(option.name for option in fields(RunConfig) if "of_technique" in option.metadata)
# Settings that make a layout; the others are the same in all layouts of one run.
LAYOUT = ("strategy", "world_size", "builtin", "hosts", *OPTIONS)
_CHOICES = {
    "dtype": ("float32", "float64"),
    "backend": ("auto", "gloo", "nccl", "labkit"),
    "amp": ("bf16", "fp16", "tf32"),
    "compress": ("fp16", "bf16", "topk"),
    "schedule": PIPELINES,
}


def type_of(setting: Any) -> type:
    """bool, int, float or str: ``int | None`` is int."""
    return (get_args(setting.type) or (setting.type,))[0]


def _check(name: str, kind: type, value: Any) -> None:
    """Refuse a value of another type, outside its limits, or that is no choice."""
    if kind is int:
        may_be_0 = name in ("seed", "max_staleness")
        check_integer(name, value, least=int(not may_be_0))
    elif kind is float:
        check_number(name, value, MOST)
    elif not isinstance(value, kind) or (value == "" and name != "split_points"):
        raise ValueError(f"{name} must be a {kind.__name__} that is not empty, got {value!r}")
    elif name in _CHOICES:
        check_choice(name, value, _CHOICES[name])
