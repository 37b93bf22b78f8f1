"""From settings to what a run needs: its data, model, loss and technique, each found once.

What cannot run is refused here, before any process starts; the learner's own parts are tried on a
few samples. On a rank ``work_of`` finds the same work again.
"""

import copy
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from multiprocessing import parent_process
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from labkit import strategies
from labkit.config import (
    OPTIONS,
    STAGED,
    RunConfig,
    parse_augment,
    parse_freeze,
    parse_split_points,
    parse_straggler,
)
from labkit.devices import check_named, check_world_size, plan
from labkit.placement.even_split import even_split
from labkit.runtime.preload import under_torchrun
from labkit.schedules.split_points import check_split_points
from labkit.strategies.base import Strategy
from labkit.training.optimizer import OPTIMIZERS, check_optimizer, optimizer_maker
from labkit.training.own import NOTHING, Own, made
from labkit.units import check_choice, format_count
from labkit.workload.chain import layers_of
from labkit.workload.datasets import DATASETS, load_dataset, open_dataset
from labkit.workload.folders import IMAGENET, is_folder, open_folder
from labkit.workload.freezing import freeze
from labkit.workload.images import Transform
from labkit.workload.losses import LOSSES, Loss, SumOfMean, named_loss, sum_cross_entropy
from labkit.workload.models import MODELS, build_model, check_pixels
from labkit.workload.random_numbers import seeded
from labkit.workload.samples import (
    DatasetSamples,
    Samples,
    TensorSamples,
    first_samples,
    is_integer,
    num_classes,
    parts_of,
)
from labkit.workload.weights import load_weights

# Of a data set that is put into floating point as a whole: up to 16 MB. To do it for each batch
# takes 12 us per batch of digits.
_MOST_FLOATS = 4 * 2**20
# Samples that are enough to tell a mean over samples from a sum or a weighted mean.
_FEW = 4


@dataclass(frozen=True, eq=False)
class Work:
    """What is trained, in one process.

    Attributes:
        train: the samples of an epoch.
        test: held-out samples; None if there are none.
        start: makes the model, on the CPU, and says what of ``weights`` it did not take.
        loss: (outputs, targets) -> the sum over the samples.
        mean_loss: the mean over them, as it was given.
    """

    train: Samples
    test: Samples | None
    start: Callable[[], tuple[nn.Module, str]] = field(repr=False)
    loss: Loss = field(repr=False)
    mean_loss: Loss = field(repr=False)

    def make_model(self) -> nn.Module:
        """The model as training starts with it, on the CPU."""
        return self.start()[0]


class Resolved(NamedTuple):
    """A run that is possible here: its technique, its work, and what is to be noted."""

    strategy: Strategy
    work: Work
    note: str


def resolve(config: RunConfig, own: Own, download: bool = False) -> Resolved:
    """Find all parts of a run, and refuse what cannot be trained or would not equal one device.

    Args:
        config: the settings.
        own: the learner's own parts, see ``own.resolved``.
        download: fetch one of labkit's data sets if it is absent.

    Raises:
        ValueError: unknown names, or parts that do not go together; the message says what to do.
        FileNotFoundError: the data set is absent.
    """
    find_work = cache(partial(work_of, config, own, download))
    strategy = make_strategy(config, own=own, work=find_work)
    work = find_work()
    if own.model is None and own.dataset is None:
        check_pixels(config.model, tuple(first_samples(work.train, 1)[0].shape[1:]))
    is_usual = (config.loss, config.optimizer) == ("cross_entropy", "sgd")
    is_usual = is_usual and config.weights is None and config.freeze is None
    if (
        is_usual
        and config.dataset in DATASETS
        and all(part is None for part in vars(own).values())
    ):
        return Resolved(strategy, work, "")
    if len(work.train) < config.world_size and config.strategy not in STAGED:
        raise ValueError(
            f"{format_count(len(work.train), 'training sample')} for world_size "
            f"{config.world_size}: some ranks would never get one. Use fewer ranks or more samples"
        )
    model, note = work.start()
    inputs, targets = first_samples(work.train, _FEW)
    _check_loss(work, _outputs(model, inputs, config.seed), targets)
    if own.optimizer is not None:
        make = optimizer_maker(config, own.optimizer, strategy, len(work.train))
        check_optimizer(make, strategy.optimizes, config.strategy)
    if work.test is not None:
        _outputs(model, first_samples(work.test, 1)[0], config.seed)
        return Resolved(strategy, work, note)
    way_out = "put some into a folder val beside a folder train"
    if own.dataset is not None:
        way_out = "give dataset=(train, test) to test on what was not trained on"
    notes = filter(None, (note, f"no held-out samples: {way_out}"))
    return Resolved(strategy, work, ". ".join(notes))


def work_of(config: RunConfig, own: Own, download: bool = False) -> Work:
    """The work of a run, the same in every process; raises as ``resolve``."""
    check_names(config, own)
    train, test = samples_for(config, own, download)
    loss = own.loss() if isinstance(own.loss, type) else own.loss
    loss = named_loss(config.loss) if loss is None else loss
    if not callable(loss):
        raise ValueError(
            f"loss {config.loss} is of type {type(loss).__name__}: give a function (outputs, "
            "targets) that returns the mean over the samples"
        )
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise ValueError("this loss has parameters of its own to train: make them the model's")
    # The same arithmetic for one target per sample, in one step.
    is_common = config.loss == "cross_entropy" and own.loss is None
    direct = is_common and first_samples(train, 1)[1].dim() == 1
    total = sum_cross_entropy if direct else SumOfMean(loss)
    return Work(train, test, partial(_start, config, own, train), total, loss)


def check_names(config: RunConfig, own: Own) -> None:
    """Raise ValueError for a name that is neither labkit's nor one of the learner's own parts."""
    known = {"model": MODELS, "dataset": DATASETS, "loss": LOSSES, "optimizer": tuple(OPTIMIZERS)}
    for name, names in known.items():
        is_own = getattr(own, name) is not None
        if not is_own and not (name == "dataset" and is_folder(config.dataset)):
            what = "data set" if name == "dataset" else name
            check_choice(what, getattr(config, name), names)


def samples_for(
    config: RunConfig, own: Own, download: bool = False
) -> tuple[Samples, Samples | None]:
    """Samples to train on, and held-out ones if there are any; raises as ``resolve``."""
    dtype, size = getattr(torch, config.dtype), config.train_size
    names = parse_augment(config.augment)
    transform = Transform(dtype, augment=names, resize=config.resize, seed=config.seed)
    if own.dataset is not None:
        dataset = made(own.dataset, "dataset", config.seed)
        train, test = parts_of(dataset, dtype, config.seed)
        if size is not None:
            train = _first(train, size, config.dataset)
        if transform.changes:
            train = replace(train, transform=transform)
            test = test and replace(test, transform=transform)
        return train, test
    if is_folder(config.dataset):
        images, held_out = open_folder(
            config.dataset, train_size=size, resize=config.resize, crop="crop" in names
        )
        if config.resize is not None:
            # Done as the images are read: a random part of each takes the place of a shift.
            names = tuple(name for name in names if name != "crop")
        transform = replace(transform, standard=IMAGENET, augment=names, resize=None)
        train = DatasetSamples(images, dtype, transform, config.seed)
        return train, None if held_out is None else replace(train, dataset=held_out)
    if config.dataset == "fake":
        data = load_dataset("fake", train_size=size, dtype=dtype)
    else:
        stored = open_dataset(config.dataset, train_size=size, download=download)
        if transform.changes or stored.train_images.numel() > _MOST_FLOATS:
            each = replace(transform, standard=stored.standard)
            train = TensorSamples(
                stored.train_images, stored.train_targets, stored.num_classes, each
            )
            return train, replace(train, inputs=stored.test_images, targets=stored.test_targets)
        data = stored.in_floats(dtype)
    each = transform if transform.changes else None
    train = TensorSamples(data.train_inputs, data.train_targets, data.num_classes, each)
    return train, replace(train, inputs=data.test_inputs, targets=data.test_targets)


def _first(train: Samples, size: int, name: str) -> Samples:
    if size > len(train):
        has = format_count(len(train), "training sample")
        raise ValueError(f"train_size {size}: {name} has {has}")
    if isinstance(train, TensorSamples):
        return replace(train, inputs=train.inputs[:size], targets=train.targets[:size])
    return replace(train, dataset=Subset(train.dataset, range(size)))


def _start(config: RunConfig, own: Own, train: Samples) -> tuple[nn.Module, str]:
    """The model as training starts with it, and a note about its weights."""
    dtype = getattr(torch, config.dtype)
    if own.model is not None:
        model = _own_model(own.model, dtype, config.seed)
    else:
        inputs, _ = first_samples(train, 1)
        if inputs.dim() != 4:
            raise ValueError(
                f"the inputs of dataset have shape {list(inputs.shape[1:])}, and labkit's models "
                "take images [channels, height, width]: give your own model, too"
            )
        shape, classes = tuple(inputs.shape[1:]), num_classes(train)
        options: dict[str, Any] = {"num_classes": classes, "input_shape": shape}
        model = build_model(config.model, **options, seed=config.seed, dtype=dtype)
    note = ""
    if config.weights is not None:
        name = config.model if own.model is None else None
        note = load_weights(model, config.weights, name)
    if config.freeze is not None:
        freeze(model, parse_freeze(config.freeze))
    return model, note


def _own_model(part: Any, dtype: torch.dtype, seed: int) -> nn.Module:
    """The learner's own model in ``dtype``; in the caller's process a copy."""
    if isinstance(part, list | tuple):
        if not all(isinstance(layer, nn.Module) for layer in part):
            raise ValueError("model: a list of layers holds nn.Modules, such as nn.Flatten()")
        part = nn.Sequential(*part)
    if not isinstance(part, nn.Module):
        model = made(part, "model", seed)
    elif parent_process():
        model = part
    else:
        try:
            model = copy.deepcopy(part).cpu()
        except Exception as error:
            raise ValueError(
                f"model {type(part).__name__} cannot be copied ({error}): give a function that "
                "makes it, which each rank calls"
            ) from None
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model is of type {type(model).__name__}: give an nn.Module, a list of layers, or a "
            "function without arguments that makes one"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"no parameter of {type(model).__name__} requires a gradient: nothing can be trained"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in (torch.float32, dtype):
            raise ValueError(
                f"{name} is {parameter.dtype}, and dtype is {dtype}: give a model in float32, or "
                "the dtype of the model"
            )
    for name, module in model.named_modules():
        if module.training != model.training:
            raise ValueError(
                f"{name} is in {'training' if module.training else 'evaluation'} mode and the "
                "rest of the model is not, but a run trains all layers in training mode: call "
                "model.train(), and override train() in a layer that has to stay as it is"
            )
    return model.to(dtype)


def make_strategy(
    config: RunConfig, *, own: Own = NOTHING, work: Callable[[], Work] | None = None
) -> Strategy:
    """The strategy that ``config`` names, with its options; it is not set up yet.

    Args:
        config: the settings.
        own: the learner's own parts, which may determine where to cut.
        work: what finds the work of the run, for a technique that cuts its model.

    Raises:
        ValueError: unknown names, or a technique that does not fit the world size or the model.
    """
    in_one_process = config.devices is not None
    technique = strategies.get(
        config.strategy, builtin=config.builtin, in_one_process=in_one_process
    )
    check_names(config, own)
    check_world_size(config.world_size, warn=False)
    options = _options(config, technique)
    if technique.in_one_process:
        options["devices"] = devices = _devices_of_one_process(config)
    elif config.hosts is not None:
        devices = ()
    else:
        ranks = config.world_size
        if under_torchrun():
            ranks = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
        devices = plan(ranks, config.device, devices=config.devices).devices
    needs = {"nccl": "cuda", "labkit": "cpu"}.get(config.backend, "")
    if wrong := [device for device in devices if not device.startswith(needs)]:
        raise ValueError(
            f"backend {config.backend!r} moves tensors on {needs}, and the ranks are on "
            f"{wrong[0]}: choose device {needs!r}, or backend 'gloo'"
        )
    if config.tf32 and devices and not any(name.startswith("cuda") for name in devices):
        raise ValueError(
            f"tf32 is a mode of NVIDIA's GPUs, and this run is on {devices[0]}: leave it out, or "
            "run on a GPU"
        )
    if "split_points" in technique.options():
        work = work or partial(work_of, config, own)
        options["split_points"] = _split_points(config, work())
    strategy = technique(**options)
    strategy.check_ranks(config.world_size)
    return strategy


def _options(config: RunConfig, technique: type[Strategy]) -> dict[str, Any]:
    """The options that were given for this technique, as its constructor takes them."""
    taken = [name for name in OPTIONS if name in technique.options()]
    given = config.options()
    if not technique.in_one_process:
        # They are the devices of the ranks, and nothing that the technique has to know.
        given.pop("devices", None)
    for name in given:
        if name not in taken:
            whose = f"strategy {config.strategy}" + " with builtin" * config.builtin
            its_own = f"its options are {', '.join(taken)}" if taken else "it has no options"
            why = technique.instead.get(name, its_own)
            raise ValueError(f"{whose} takes no option {name}: {why}")
    if config.straggler is not None:
        given["straggler"] = parse_straggler(config.straggler, config.world_size)
    return given


def _devices_of_one_process(config: RunConfig) -> tuple[str, ...]:
    """One per replica or stage."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and under_torchrun():
        raise ValueError(
            f"{config.strategy} is one process with {format_count(config.world_size, 'device')}, "
            f"but torchrun started {os.environ['WORLD_SIZE']} ranks: start it without torchrun"
        )
    if config.devices is None:
        # Its note is about ranks.
        return plan(config.world_size, config.device).devices
    return check_named(config.devices, config.device)


def _split_points(config: RunConfig, work: Work) -> tuple[int, ...]:
    """The given split points, or an even split by FLOPs of this model's layers on this data."""
    model, (inputs, _) = work.make_model(), first_samples(work.train, 1)
    num_layers = len(layers_of(model))
    if config.split_points is not None:
        points = parse_split_points(config.split_points)
        return check_split_points(points, num_layers, config.world_size)
    if config.world_size > num_layers:
        raise ValueError(
            f"model {config.model} has {format_count(num_layers, 'layer')}, at least one for each "
            f"stage: use world_size {num_layers} or less, got {config.world_size}"
        )
    return even_split(model, tuple(inputs.shape[1:]), config.world_size, inputs.dtype)


def _outputs(model: nn.Module, inputs: Tensor, seed: int) -> Tensor:
    """The outputs of the model for a few samples, in evaluation mode, if they have a row each."""
    name, takes = type(model).__name__, f"inputs {_described(inputs)}"
    try:
        with torch.no_grad(), seeded(seed):
            outputs = model.eval()(inputs)
    except Exception as error:
        raise ValueError(
            f"{name} does not take {takes}: {error}. Its parameters are "
            f"{next(model.parameters()).dtype}"
        ) from error
    if not isinstance(outputs, Tensor) or not outputs.dim() or len(outputs) != len(inputs):
        raise ValueError(
            f"{name} returns {_described(outputs)} for {takes}: it has to return one tensor with "
            f"{format_count(len(inputs), 'row')}, one for each sample"
        )
    return outputs


def _check_loss(work: Work, outputs: Tensor, targets: Tensor) -> None:
    """Refuse a loss that does not take these outputs, or is not the mean over samples."""
    if work.loss is sum_cross_entropy and is_integer(targets) and outputs.dim() == 2:
        known = work.train.targets if isinstance(work.train, TensorSamples) else targets
        least, most = int(known.min()), int(known.max())
        if least < 0 or most >= outputs.shape[1]:
            raise ValueError(
                f"the targets are classes from {least} to {most}, and the model has "
                f"{format_count(outputs.shape[1], 'output')} per sample, for classes 0 to "
                f"{outputs.shape[1] - 1}: give it {most + 1} outputs, or count classes from 0"
            )
    mean = _value(work.mean_loss, outputs, targets)
    each = zip(outputs.split(1), targets.split(1))
    alone = torch.stack([_value(work.mean_loss, *one) for one in each])
    if len(alone) > 1 and not torch.allclose(mean, alone.mean(), rtol=1e-4, equal_nan=True):
        raise ValueError(
            f"loss of {len(alone)} samples is {mean:.4g}, and the mean of their losses one by one "
            f"is {alone.mean():.4g}: return the mean over the samples (reduction='mean'; with "
            "weights, (weights * losses).mean()), so that shares of a batch add up"
        )


def _value(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    fits = f"outputs {_described(outputs)} and targets {_described(targets)}"
    try:
        # mse_loss only warns when [n, 1] and [n] become [n, n].
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Using a target size")
            value = loss(outputs, targets)
    except Exception as error:
        raise ValueError(f"loss does not take {fits}: {error}") from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ValueError(
            f"loss returns {_described(value)} for {fits}: it has to return one number as a "
            "tensor, the mean over the samples (reduction='mean')"
        )
    return value.detach().double().reshape(())


def _described(found: Any) -> str:
    if not isinstance(found, Tensor):
        return f"a {type(found).__name__}"
    return f"{list(found.shape)} {str(found.dtype).removeprefix('torch.')}"
