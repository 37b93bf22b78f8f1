"""What a run trains, from its config and the learner's own parts: model, data, loss."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import parent_process
from typing import Any

import torch
from torch import nn

from labkit.collectives import broadcast
from labkit.comm.comm import Comm
from labkit.config import RunConfig, parse_freeze
from labkit.training.data import samples_for
from labkit.training.optimizer import OPTIMIZERS
from labkit.training.own import Own, made
from labkit.units import check_choice
from labkit.workload.datasets import DATASETS
from labkit.workload.folders import is_folder
from labkit.workload.freezing import freeze
from labkit.workload.losses import LOSSES, Loss, SumOfMean, named_loss, sum_cross_entropy
from labkit.workload.models import MODELS, build_model
from labkit.workload.samples import Samples, first_samples, num_classes
from labkit.workload.weights import load_weights


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


def work_of(config: RunConfig, own: Own, *, download: bool = False) -> Work:
    """The work of a run, the same in every process.

    Args:
        config: the settings.
        own: the learner's own parts.
        download: fetch one of labkit's data sets if it is absent.

    Raises:
        ValueError: unknown names, or own parts of the wrong kind.
        FileNotFoundError: the data set is absent.
    """
    check_names(config, own)
    train, test = samples_for(config, own, download)
    mean = _mean_loss(config, own)
    # The same arithmetic for one target per sample, in one step.
    is_common = config.loss == "cross_entropy" and own.loss is None
    direct = is_common and first_samples(train, 1)[1].dim() == 1
    return Work(
        train,
        test,
        start=partial(_start, config, own, train),
        loss=sum_cross_entropy if direct else SumOfMean(mean),
        mean_loss=mean,
    )


def check_names(config: RunConfig, own: Own) -> None:
    """Raise ValueError for a name that is neither labkit's nor one of the learner's own parts."""
    known = {"model": MODELS, "data set": DATASETS, "loss": LOSSES}
    for what, names in known.items():
        name = what.replace(" ", "")
        if name == "dataset" and is_folder(config.dataset):
            continue
        if getattr(own, name) is None:
            check_choice(what, getattr(config, name), names)
    if own.optimizer is None:
        check_choice("optimizer", config.optimizer, tuple(OPTIMIZERS))


def start_equal(comm: Comm, model: nn.Module, own: Own) -> nn.Module:
    """Give all ranks rank 0's parameters and buffers of a learner's own model.

    A function that makes a model may not be the same on all ranks, and under ``torchrun`` each
    rank has made its own model.
    """
    if own.model is None or comm.world_size == 1:
        return model
    model.to(comm.device)
    for tensor in (*model.parameters(), *model.buffers()):
        broadcast(comm, tensor.data)
    return model


def _start(config: RunConfig, own: Own, train: Samples) -> tuple[nn.Module, str]:
    model, told = _model(config, own, train), ""
    if config.weights is not None:
        name = config.model if own.model is None else None
        told = load_weights(model, config.weights, name)
    if config.freeze is not None:
        freeze(model, parse_freeze(config.freeze))
    return model, told


def _model(config: RunConfig, own: Own, train: Samples) -> nn.Module:
    dtype = getattr(torch, config.dtype)
    if own.model is not None:
        return _own_model(config, own.model, dtype)
    inputs, _ = first_samples(train, 1)
    if inputs.dim() != 4:
        raise ValueError(
            f"the inputs of dataset have shape {list(inputs.shape[1:])}, and labkit's models take "
            "images [channels, height, width]: give your own model, too"
        )
    _, channels, height, width = inputs.shape
    return build_model(
        config.model,
        num_classes=num_classes(train),
        input_shape=(channels, height, width),
        seed=config.seed,
        dtype=dtype,
    )


def _own_model(config: RunConfig, part: Any, dtype: torch.dtype) -> nn.Module:
    if isinstance(part, (list, tuple)):
        part = nn.Sequential(*map(_as_layer, part))
    if isinstance(part, nn.Module):
        model = part if parent_process() else _copied(part)
    else:
        model = made(part, "model", config.seed)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model {config.model} is of type {type(model).__name__}: give an nn.Module, a "
            "list of layers, or a function without arguments that makes one"
        )
    _check_model(model, dtype)
    return model.to(dtype)


def _as_layer(layer: Any) -> nn.Module:
    if not isinstance(layer, nn.Module):
        raise ValueError(
            f"a layer in the list is of type {type(layer).__name__}: give nn.Modules, such as "
            "nn.Flatten() for a function"
        )
    return layer


def _copied(model: nn.Module) -> nn.Module:
    """A copy on the CPU; the learner's own model stays as it is."""
    if any(tensor.is_meta for tensor in model.parameters()):
        raise ValueError("model is on the meta device and has no values: give one on the CPU")
    try:
        return copy.deepcopy(model).cpu()
    except Exception as error:
        raise ValueError(
            f"model {type(model).__name__} cannot be copied ({error}): give a function that makes "
            "it, which each rank calls"
        ) from None


def _check_model(model: nn.Module, dtype: torch.dtype) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"no parameter of {type(model).__name__} requires a gradient: nothing can be trained"
        )
    wanted = str(dtype).removeprefix("torch.")
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in (torch.float32, dtype):
            found = str(parameter.dtype).removeprefix("torch.")
            way_out = "dtype='float64'" if found == "float64" else "model.float(), and amp"
            raise ValueError(f"{name} is {found}, and dtype is {wanted}: use {way_out}")
    modes = {module.training for module in model.modules()}
    if len(modes) > 1:
        name = next(n for n, module in model.named_modules() if module.training != model.training)
        raise ValueError(
            f"{name} is in {'evaluation' if model.training else 'training'} mode and the rest of "
            "the model is not, but a run trains all layers in training mode: call model.train(), "
            "and override train() in a layer that has to stay in evaluation mode"
        )


def _mean_loss(config: RunConfig, own: Own) -> Loss:
    loss = own.loss
    if loss is None:
        return named_loss(config.loss)
    loss = loss() if isinstance(loss, type) else loss
    if not callable(loss):
        raise ValueError(
            f"loss {config.loss} is of type {type(loss).__name__}: give a function (outputs, "
            "targets) that returns the mean over the samples"
        )
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise ValueError("this loss has parameters of its own to train: make them the model's")
    return loss
