"""From settings to what a run needs: its data, model, loss and technique, each found once.

What cannot run is refused here, before any process starts; the learner's own parts are tried on a
few samples. On a rank ``work_of`` finds the same work again.
"""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import parent_process
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from labkit import strategies
from labkit.config import (
    OPTIONS,
    RunConfig,
    parse_augment,
    parse_freeze,
    parse_split_points,
    parse_straggler,
)
from labkit.devices import check_named, plan
from labkit.runtime.preload import under_torchrun
from labkit.schedules.split_points import check_split_points
from labkit.strategies.base import Strategy
from labkit.training.optimizer import OPTIMIZERS, check_optimizer, optimizer_maker
from labkit.training.own import NOTHING, Own, made
from labkit.units import check_choice, format_count
from labkit.workload.datasets import DATASETS, IMAGENET, is_folder, load_dataset, open_folder
from labkit.workload.losses import LOSSES, Loss, SumOfMean, sum_cross_entropy
from labkit.workload.models import MODELS, build_model
from labkit.workload.samples import Samples, Transform, num_classes, parts_of, seeded

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
    check_names(config, own)
    work = work_of(config, own, download)
    strategy = make_strategy(config, own=own, work=work)
    inputs, targets = work.train.first(_FEW)
    is_usual = all(part is None for part in vars(own).values()) and config.dataset in DATASETS
    given = config.loss, config.weights, config.freeze
    if is_usual and given == ("cross_entropy", None, None):
        return Resolved(strategy, work, "")
    model, note = work.start()
    try:
        with torch.no_grad(), seeded(config.seed):
            outputs = model.eval()(inputs)
    except Exception as error:
        takes = f"{list(inputs.shape)} {inputs.dtype}".replace("torch.", "")
        raise ValueError(
            f"{type(model).__name__} does not take inputs {takes}: {error}. Its parameters are "
            f"{next(model.parameters()).dtype}"
        ) from error
    together = _value(work.mean_loss, outputs, targets)
    alone = torch.stack(
        [_value(work.mean_loss, *one) for one in zip(outputs.split(1), targets.split(1))]
    )
    if not torch.allclose(together, alone.mean(), rtol=1e-4, equal_nan=True):
        raise ValueError(
            f"loss of {len(alone)} samples is {together:.4g}, and the mean of their losses one by "
            f"one is {alone.mean():.4g}: return the mean over samples (reduction='mean'; with "
            "weights, (weights * losses).mean()), so that shares add up"
        )
    if own.optimizer is not None:
        make = optimizer_maker(config, own.optimizer, strategy, len(work.train))
        check_optimizer(make, strategy.optimizes, config.strategy)
    if work.test is None:
        way_out = "give dataset=(train, test)" if own.dataset is not None else "add a folder val"
        note = ". ".join(filter(None, (note, f"no held-out samples: {way_out} to test on others")))
    return Resolved(strategy, work, note)


def _value(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    fits = f"outputs {_described(outputs)} and targets {_described(targets)}"
    try:
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


def work_of(config: RunConfig, own: Own, download: bool = False) -> Work:
    """The work of a run, the same in every process; raises as ``resolve``."""
    train, test = samples_for(config, own, download)
    loss = own.loss() if isinstance(own.loss, type) else own.loss
    loss = getattr(nn.functional, config.loss) if loss is None else loss
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise ValueError("this loss has parameters of its own to train: make them the model's")
    # The same arithmetic for one target per sample, in one step.
    is_common = config.loss == "cross_entropy" and own.loss is None
    direct = is_common and train.first(1)[1].dim() == 1
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
    transform = Transform(None, names, config.resize)
    if own.dataset is not None:
        dataset = made(own.dataset, "dataset", config.seed)
        train, test = parts_of(dataset, dtype, config.seed)
        if size is not None:
            train = _first(train, size, config.dataset)
        return replace(train, transform=transform), test and replace(test, transform=transform)
    if is_folder(config.dataset):
        images, held_out = open_folder(
            config.dataset, train_size=size, resize=config.resize, crop="crop" in names
        )
        if config.resize is not None:
            # Done as the images are read: a random part of each takes the place of a shift.
            names = tuple(name for name in names if name != "crop")
        transform = replace(transform, standard=IMAGENET, augment=names, resize=None)
        train = Samples(images, dtype, transform, config.seed)
        return train, None if held_out is None else replace(train, dataset=held_out)
    data = load_dataset(
        config.dataset, train_size=size, download=download, dtype=dtype, stored=True
    )
    tensors = TensorDataset(data.train_inputs, data.train_targets)
    transform = replace(transform, standard=data.standard)
    train = Samples(tensors, dtype, transform, config.seed, data.num_classes)
    return train, replace(train, dataset=TensorDataset(data.test_inputs, data.test_targets))


def _first(train: Samples, size: int, name: str) -> Samples:
    if size > len(train):
        has = format_count(len(train), "training sample")
        raise ValueError(f"train_size {size}: {name} has {has}")
    if train.tensors is None:
        return replace(train, dataset=Subset(train.dataset, range(size)))
    return replace(train, dataset=TensorDataset(*(part[:size] for part in train.tensors)))


def _start(config: RunConfig, own: Own, train: Samples) -> tuple[nn.Module, str]:
    """The model as training starts with it, and a note about its weights."""
    dtype = getattr(torch, config.dtype)
    if own.model is not None:
        model = _own_model(own.model, config.seed).to(dtype)
    else:
        inputs, _ = train.first(1)
        if inputs.dim() != 4:
            raise ValueError(
                f"the inputs of dataset have shape {list(inputs.shape[1:])}, and labkit's models "
                "take images [channels, height, width]: give your own model, too"
            )
        shape, classes = tuple(inputs.shape[1:]), num_classes(train)
        options: dict[str, Any] = {"num_classes": classes, "input_shape": shape}
        model = build_model(config.model, **options, seed=config.seed, dtype=dtype)
    note = ""
    # Not at the top: few runs need it, and every rank would import it.
    if config.weights is not None:
        from labkit.workload.weights import load_weights

        name = config.model if own.model is None else None
        note = load_weights(model, config.weights, name)
    if config.freeze is not None:
        from labkit.workload.weights import freeze

        freeze(model, parse_freeze(config.freeze))
    return model, note


def _own_model(part: Any, seed: int) -> nn.Module:
    """The learner's own model; in the caller's process a copy."""
    if isinstance(part, list | tuple):
        part = nn.Sequential(*part)
    if not isinstance(part, nn.Module):
        part = made(part, "model", seed)
    elif not parent_process():
        try:
            part = copy.deepcopy(part).cpu()
        except Exception as error:
            raise ValueError(
                f"model {type(part).__name__} cannot be copied ({error}): give a function that "
                "makes it, which each rank calls"
            ) from None
    if not isinstance(part, nn.Module):
        raise ValueError(
            f"model is of type {type(part).__name__}: give an nn.Module, a list of layers, or a "
            "function without arguments that makes one"
        )
    if not any(parameter.requires_grad for parameter in part.parameters()):
        raise ValueError(
            f"no parameter of {type(part).__name__} requires a gradient: nothing can be trained"
        )
    return part


def make_strategy(config: RunConfig, *, own: Own = NOTHING, work: Work | None = None) -> Strategy:
    """The strategy that ``config`` names, with its options; it is not set up yet.

    Args:
        config: the settings.
        own: the learner's own parts, which may determine where to cut.
        work: the work of the run, if it is known, for a technique that cuts its model.

    Raises:
        ValueError: unknown names, or a technique that does not fit the world size or the model.
    """
    world_size, in_one_process = config.world_size, config.devices is not None
    technique = strategies.get(
        config.strategy, builtin=config.builtin, in_one_process=in_one_process
    )
    options, taken = config.options(), [name for name in OPTIONS if name in technique.options()]
    if not technique.in_one_process:
        # They are the devices of the ranks, and nothing that the technique has to know.
        options.pop("devices", None)
    for name in options:
        if name not in taken:
            whose = f"strategy {config.strategy}" + " with builtin" * config.builtin
            its_own = f"its options are {', '.join(taken)}" if taken else "it has no options"
            raise ValueError(f"{whose} takes no option {name}: {its_own}")
    if config.straggler is not None:
        options["straggler"] = parse_straggler(config.straggler, world_size)
    ranks, devices = world_size, ()
    if under_torchrun():
        ranks = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    if technique.in_one_process and under_torchrun() and int(os.environ["WORLD_SIZE"]) > 1:
        raise ValueError(
            f"{config.strategy} is one process with {format_count(world_size, 'device')}, but "
            f"torchrun started {os.environ['WORLD_SIZE']} ranks: start it without torchrun"
        )
    if technique.in_one_process and config.devices is not None:
        devices = check_named(config.devices, config.device)
    elif config.hosts is None:
        devices = plan(ranks, config.device, devices=config.devices).devices
    if technique.in_one_process:
        options["devices"] = devices
    needs = {"nccl": "cuda", "labkit": "cpu"}.get(config.backend, "")
    if wrong := [device for device in devices if not device.startswith(needs)]:
        raise ValueError(
            f"backend {config.backend!r} moves tensors on {needs}, and the ranks are on "
            f"{wrong[0]}: choose device {needs!r}, or backend 'gloo'"
        )
    if config.tf32 and devices and not any(name.startswith("cuda") for name in devices):
        raise ValueError(f"tf32 is a mode of NVIDIA's GPUs, and this run is on {devices[0]}")
    if "split_points" in technique.options():
        options["split_points"] = _split_points(config, work or work_of(config, own))
    strategy = technique(**options)
    strategy.check_ranks(world_size)
    return strategy


def _split_points(config: RunConfig, work: Work) -> tuple[int, ...]:
    """The given split points, or an even split by FLOPs of this model's layers on this data."""
    # Not at the top: few runs need it, and it brings all of placement.
    from labkit.placement.profile import even_split
    from labkit.workload.layers import layers_of

    model, (inputs, _) = work.make_model(), work.train.first(1)
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
