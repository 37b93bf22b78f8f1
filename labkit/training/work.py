"""The work of a run: data, model and loss, labkit's by name or the learner's own parts.

Every process makes the same ``Work`` from the same settings.
"""

import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import parent_process
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import TensorDataset

from labkit.engine.devices import print_once
from labkit.training.config import RunConfig, parse_augment, parse_names
from labkit.training.own_model import copy_for_run, in_sequence
from labkit.workload.datasets import IMAGENET, is_folder, load_dataset, open_folder
from labkit.workload.losses import ShareLoss
from labkit.workload.models import build_model
from labkit.workload.samples import Samples, Transform, first_of, num_classes, parts_of, seeded

PARTS = ("model", "dataset", "loss", "optimizer")


@dataclass(frozen=True, eq=False)
class Own:
    """The learner's own parts of a run; None where the config names one of labkit's.

    Attributes:
        model: an ``nn.Module``, whose parameters are the starting point; a list of layers; or a
            function or class without arguments that makes one, with the run's seed.
        dataset: see ``workload.samples.parts_of``, or a function that makes it.
        loss: (outputs, targets) -> the mean over the samples, one loss per sample, or (sum,
            weight), see ``workload.losses.ShareLoss``; or a class that makes it.
        optimizer: parameters -> ``torch.optim.Optimizer``; a class with its defaults is one. Where
            ranks divide the model, it is given what a rank holds, and has to change it as it would
            change the whole, as SGD and Adam do: see ``training.optimizers``.
    """

    model: Any = None
    dataset: Any = None
    loss: Any = None
    optimizer: Any = None


# A run without own parts.
NOTHING = Own()


def take_own(settings: dict[str, Any]) -> tuple[Own, dict[str, Any]]:
    """Separate own objects from the settings, in which names such as ``MyNet (own)`` stand."""
    parts = {}
    names = {}
    for name in PARTS:
        if name in settings and not isinstance(settings[name], str):
            parts[name] = settings[name]
            names[name] = f"{name_of(settings[name])} (own)"
    return Own(**parts), settings | names


def name_of(part: Any) -> str:
    return getattr(part, "__name__", type(part).__name__).strip("<>")


def imported(config: RunConfig, own_parts: Own) -> Own:
    """Return ``own_parts`` with the parts that the config names as ``my_module:make_model``."""
    parts: dict[str, Any] = {}
    for name in PARTS:
        path = getattr(config, name)
        if getattr(own_parts, name) is not None or ":" not in path or is_folder(path):
            continue
        # The script labkit, unlike python -m labkit, does not look in the current directory.
        folder = os.getcwd()
        if folder not in sys.path:
            sys.path.insert(0, folder)
        try:
            parts[name] = pkgutil.resolve_name(path)
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"{name} {path!r} cannot be imported in {folder}: {type(error).__name__}: {error}"
            ) from error
    return replace(own_parts, **parts)


def _made(part: Any, name: str, seed: int) -> Any:
    """Call a function or class without arguments; the result is the same from one seed."""
    if not callable(part) or isinstance(part, nn.Module) or hasattr(type(part), "__getitem__"):
        return part
    with seeded(seed):
        try:
            return part()
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"{name} {name_of(part)}() raised {type(error).__name__}: {error}. Give a "
                f"function without arguments that makes a {name}"
            ) from error


class Work(NamedTuple):
    """The data, model and loss of a run, in one process.

    Attributes:
        train: the samples of an epoch.
        test: held-out samples; None if there are none.
        make_model: makes the model as training starts with it, on the CPU.
        loss: (outputs, targets) -> the sum of the losses, and their weight.
    """

    train: Samples
    test: Samples | None
    make_model: Callable[[], nn.Module]
    loss: ShareLoss


def work_of(config: RunConfig, own_parts: Own, download: bool = False) -> Work:
    """The work of a run, the same in every process; raises as ``resolve``."""
    train, test = samples_for(config, own_parts, download)
    if own_parts.loss is None:
        loss = getattr(nn.functional, config.loss)
    elif isinstance(own_parts.loss, type):
        loss = own_parts.loss()
    else:
        loss = own_parts.loss
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise ValueError("this loss has its own parameters to train: make them the model's")
    if own_parts.dataset is None:
        # None of labkit's own targets are ignored.
        share_loss = ShareLoss.of(loss)
    else:
        share_loss = ShareLoss.of(loss, train.first(1)[1], train, test)
    return Work(train, test, partial(_make_model, config, own_parts, train), share_loss)


def samples_for(
    config: RunConfig, own_parts: Own, download: bool = False
) -> tuple[Samples, Samples | None]:
    """Samples to train on, and held-out ones if there are any; raises as ``resolve``."""
    dtype = getattr(torch, config.dtype)
    size = config.train_size
    names = parse_augment(config.augment)
    resize = config.resize
    transform = Transform(None, names, resize)
    if own_parts.dataset is not None:
        train, test = parts_of(
            _made(own_parts.dataset, "dataset", config.seed), dtype, config.seed
        )
        if size is not None:
            train = first_of(train, size)
        return replace(train, transform=transform), test and replace(test, transform=transform)
    if is_folder(config.dataset):
        crop = "crop" in names
        images, held_out = open_folder(config.dataset, train_size=size, resize=resize, crop=crop)
        if resize is not None:
            # Done as the images are read: a random part of each takes the place of a shift.
            names = tuple(name for name in names if name != "crop")
        train = Samples(images, dtype, Transform(IMAGENET, names), config.seed)
        return train, None if held_out is None else replace(train, dataset=held_out)
    data = load_dataset(
        config.dataset, train_size=size, download=download, dtype=dtype, stored=True
    )
    tensors = TensorDataset(data.train_inputs, data.train_targets)
    transform = replace(transform, standard=data.standard)
    train = Samples(tensors, dtype, transform, config.seed, data.num_classes)
    return train, replace(train, dataset=TensorDataset(data.test_inputs, data.test_targets))


def _make_model(config: RunConfig, own_parts: Own, train: Samples) -> nn.Module:
    dtype = getattr(torch, config.dtype)
    if own_parts.model is not None:
        part = in_sequence(own_parts.model)
        made = in_sequence(_made(part, "model", config.seed))
        model = copy_for_run(made, part, train, config.seed).to(dtype)
    else:
        shape = tuple(train.first(1)[0].shape[1:])
        options: dict[str, Any] = {"num_classes": num_classes(train), "input_shape": shape}
        model = build_model(config.model, **options, seed=config.seed, dtype=dtype)
    # Not at the top: few runs need it, and every rank would import it.
    if config.weights is not None:
        from labkit.workload.weights import load_weights

        name = config.model if own_parts.model is None else None
        note = load_weights(model, config.weights, name)
        if not parent_process():
            print_once(note)
    if config.freeze is not None:
        from labkit.workload.weights import freeze

        freeze(model, parse_names(config.freeze))
    return model
