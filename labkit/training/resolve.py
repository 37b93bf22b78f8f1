"""From settings to what a run needs: its data, model, loss, optimizer and technique.

What cannot run is refused here, before any process starts; the learner's own parts are tried on a
few samples. On a rank ``work_of`` finds the same work again.
"""

import copy
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils.data import TensorDataset

from labkit import builtin as counterparts, strategies
from labkit.engine.devices import check_named, plan, print_once
from labkit.engine.files import check_folder
from labkit.engine.started import is_rank_0
from labkit.extras import require
from labkit.schedules.split_points import check_split_points
from labkit.strategies.base import Strategy
from labkit.strategies.traits import Division
from labkit.training.config import (
    OPTIONS,
    RunConfig,
    parse_augment,
    parse_names,
    parse_split_points,
    parse_straggler,
)
from labkit.training.optimizers import OPTIMIZERS, try_optimizer
from labkit.training.own_model import check_values, hooked, note_on_unused
from labkit.training.trial import try_out, try_share
from labkit.units import check_choice
from labkit.workload.datasets import IMAGENET, is_folder, load_dataset, open_folder
from labkit.workload.experts import Experts
from labkit.workload.losses import LOSSES, ShareLoss
from labkit.workload.models import build_model
from labkit.workload.samples import (
    Samples,
    Transform,
    as_dtype,
    first_of,
    num_classes,
    parts_of,
    seeded,
)

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
    parts = {name: settings[name] for name in PARTS if name in settings}
    parts = {name: part for name, part in parts.items() if not isinstance(part, str)}
    names = {name: f"{name_of(part)} (own)" for name, part in parts.items()}
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


def resolve(config: RunConfig, own_parts: Own, download: bool = False) -> tuple[Strategy, Work]:
    """Find all parts of a run, and refuse what cannot be trained or would not equal one device.

    Raises:
        ValueError: unknown names, or parts that do not go together; the message says what to do.
        FileNotFoundError: one of labkit's data sets is absent, and not to ``download``.
    """
    # (Unknown models and data sets are refused where they are made.)
    for name, known in (("loss", LOSSES), ("optimizer", OPTIMIZERS)):
        if getattr(own_parts, name) is None:
            check_choice(name, getattr(config, name), tuple(known))
    if config.log_dir is not None:
        require("tensorboard", "log_dir")
    _check_record(config)
    for name in ("checkpoint_dir", "log_dir", "record"):
        folder = getattr(config, name)
        if folder is not None and is_rank_0():
            check_folder(name, folder)
    if config.augment is not None or config.resize is not None:
        require("torchvision", "augment or resize")
    work = work_of(config, own_parts, download)
    model = work.make_model()
    # A loss may count its calls: training begins with one that no trial has called.
    loss = copy.deepcopy(work.loss)
    weighing = try_out(config.loss, model, loss, work.train, work.test, config.seed)
    _check_balance(model, config)
    strategy = make_strategy(config, own_parts=own_parts, work=work)
    strategy.check_model(model, loss, config.world_size)
    try_share(model, work.train, _smallest_share(config, strategy, len(work.train)))
    strategy.weighing = weighing
    if own_parts.model is not None:
        print_once(note_on_unused(model, loss, *work.train.first(1), config.seed))
    technique = config.technique_name
    is_alone = config.strategy == "single" and not config.accumulate
    names = hooked(model)
    if names and not is_alone:
        raise ValueError(
            f"{names[0]} of the model has a hook, which {technique} would lose or call on a part "
            "of the gradient: change gradients in the optimizer's step instead, or use strategy "
            "single without accumulate"
        )
    if own_parts.optimizer is not None:
        division = strategy.traits.division
        if config.world_size == 1 and division != Division.ELEMENTS:
            division = Division.NONE
        keeps_sparse = config.strategy == "single" or (
            config.builtin and config.strategy in ("ddp", "data_parallel")
        )
        note = try_optimizer(
            config.optimizer,
            own_parts.optimizer,
            model,
            technique,
            division,
            config.seed,
            keeps_sparse=keeps_sparse,
            is_saved=config.checkpoint_dir is not None,
        )
        print_once(note)
    return strategy, work


def _check_record(config: RunConfig) -> None:
    if config.record is not None and config.strategy == "async_parameter_server":
        raise ValueError(
            "record: the workers of async_parameter_server have no steps in common: leave record "
            "out, or record parameter_server"
        )
    if config.record is not None and list(Path(config.record).glob("rank-*.jsonl*")):
        raise ValueError(
            f"record {config.record} holds the record of another run: give another folder, or "
            "remove it"
        )


def _check_balance(model: nn.Module, config: RunConfig) -> None:
    """Refuse a balance loss of experts that would be left out, or be of a part of the batch."""
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    if not any(layer.balance for layer in layers):
        return
    technique = find_technique(config.strategy, builtin=config.builtin)
    if not technique.traits.balances_experts:
        raise ValueError(
            f"{config.technique_name} does not know the choices of the whole batch, on which the "
            "balance loss of experts depends: use expert_parallel or single, or make the experts "
            "with balance=0"
        )
    if (config.accumulate or 1) > 1:
        raise ValueError(
            "the balance loss of experts depends on the choices of the whole batch, and "
            f"accumulate {config.accumulate} shows them in parts: leave it out, or make the "
            "experts with balance=0"
        )


def _smallest_share(config: RunConfig, strategy: Strategy, num_samples: int) -> int:
    """The fewest samples, but not none, that the model gets at once on a rank."""
    workers = config.world_size - strategy.servers
    if strategy.traits.in_one_process:
        workers = len(strategy.devices)
    if strategy.traits.takes_whole_batch or strategy.sync_batch_norm:
        workers = 1
    if "dp" in options_of(type(strategy)):
        workers = getattr(strategy, "dp", 1)
    micro_batches = getattr(strategy, "micro_batches", getattr(strategy, "accumulate", 1))
    if not isinstance(micro_batches, int):
        micro_batches = config.accumulate or 1
    batches = {min(config.batch_size, num_samples), num_samples % config.batch_size} - {0}
    shares = [batch // min(batch, micro_batches) // max(1, workers) for batch in batches]
    return max(1, min(shares))


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
        model = _own_model(own_parts.model, config.seed, train).to(dtype)
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


def _own_model(part: Any, seed: int, train: Samples) -> nn.Module:
    """The learner's own model; in the caller's process a copy."""
    part = _in_sequence(part)
    if isinstance(part, nn.Module):
        _detach_computed(part)
    made = _in_sequence(_made(part, "model", seed))
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"model is of type {type(made).__name__}: give an nn.Module, a list of layers, or a "
            "function without arguments that makes one"
        )
    is_lazy = any(isinstance(p, UninitializedTensorMixin) for p in made.parameters())
    if not is_lazy:
        check_values(made)
    if made is part and not parent_process():
        names = hooked(made)
        if names:
            raise ValueError(
                f"{names[0]} of the model has a hook, which a copy of the model does not have: "
                "give a function without arguments that makes the model and its hooks"
            )
        made = copy.deepcopy(made).cpu()
    _detach_computed(made)
    if is_lazy:
        # Modules such as nn.LazyLinear take their shapes from a first batch.
        inputs = train.first(2)[0]
        with seeded(seed), torch.no_grad():
            made.eval()(as_dtype(inputs, torch.get_default_dtype()))
        made.train()
        check_values(made)
    return made


def _in_sequence(part: Any) -> Any:
    return nn.Sequential(*part) if isinstance(part, list | tuple) else part


def _detach_computed(model: nn.Module) -> None:
    """Make attributes copyable that hooks compute before each forward, as of old weight_norm."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_computed = isinstance(value, Tensor) and value.grad_fn is not None
            if is_computed and module._forward_pre_hooks:
                vars(module)[name] = value.detach()


def options_of(technique: type[Strategy]) -> list[str]:
    """Return the names of the options that a technique takes."""
    return list(inspect.signature(technique).parameters)


def find_technique(
    name: str, *, builtin: bool = False, in_one_process: bool = False
) -> type[Strategy]:
    """Return the class of a technique: ours, or PyTorch's counterpart (``single`` has none)."""
    if builtin and name in counterparts.TECHNIQUES:
        return counterparts.get(name)
    return strategies.get(name, in_one_process=in_one_process and not builtin)


def make_strategy(
    config: RunConfig, *, own_parts: Own = NOTHING, work: Work | None = None
) -> Strategy:
    """The strategy that ``config`` names, with its options; it is not set up yet.

    A technique that cuts its model takes it from ``work``, the run's, if that is known.
    ValueError for unknown names, or what does not fit the world size or the model.
    """
    named_devices = config.devices
    technique = find_technique(
        config.strategy, builtin=config.builtin, in_one_process=named_devices is not None
    )
    options = config.options()
    if config.amp == "tf32":
        # A mode of the device, which no technique has to know.
        del options["amp"]
        device = named_devices or plan(1, config.device).devices[0]
        if "cuda" not in device:
            raise ValueError(f"tf32 is a mode of NVIDIA's GPUs, and this run is on {device}")
    if not technique.traits.in_one_process:
        options.pop("devices", None)
    elif named_devices is None:
        options["devices"] = plan(config.world_size, config.device).devices
    else:
        options["devices"] = check_named(named_devices, config.device)
    known = [name for name in OPTIONS if name in options_of(technique)]
    for name in options:
        if name not in known:
            raise ValueError(
                f"strategy {config.technique_name} takes no option {name}: its options are "
                f"{', '.join(known) or 'none'}"
            )
    if config.straggler is not None:
        options["straggler"] = parse_straggler(config.straggler, config.world_size)
    if "split_points" in options_of(technique):
        # Not at the top: few runs need it, and it brings all of costs.
        from labkit.costs.layer_profile import even_split
        from labkit.workload.layers import layers_of, output_shapes

        work = work or work_of(config, own_parts)
        model = work.make_model()
        inputs, _ = work.train.first(1)
        num_layers = len(layers_of(model))
        num_stages = config.num_stages
        if num_stages > num_layers:
            problem = f"{num_layers} layers are no {num_stages} stages"
            raise ValueError(f"{problem}: use fewer ranks or stages_per_rank")
        if config.split_points is None:
            points = even_split(model, tuple(inputs.shape[1:]), num_stages, inputs.dtype)
        else:
            points = parse_split_points(config.split_points)
        if not technique.traits.in_one_process:
            # Each rank asks for them, to know what it receives.
            output_shapes(model, tuple(inputs.shape[1:]), dtype=inputs.dtype)
        options["split_points"] = check_split_points(points, num_layers, num_stages)
    strategy = technique(**options)
    strategy.check_ranks(config.world_size)
    return strategy
