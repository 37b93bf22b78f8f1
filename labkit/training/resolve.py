"""Settings resolved to a run, its work and its technique; what cannot run is refused.

That is before any process starts; the learner's own parts are tried on a few samples. On a rank
``work_of`` finds the same work again.
"""

import copy
import inspect
from pathlib import Path

from torch import nn

from labkit import builtin as counterparts, strategies
from labkit.engine.devices import check_named, plan, print_once
from labkit.engine.files import check_folder
from labkit.engine.started import is_rank_0
from labkit.extras import require
from labkit.schedules.split_points import check_split_points
from labkit.strategies.base import Strategy
from labkit.strategies.traits import Division
from labkit.training.config import OPTIONS, STAGED, RunConfig, parse_split_points, parse_straggler
from labkit.training.optimizers import OPTIMIZERS, try_optimizer
from labkit.training.own_model import check_forward, hooked, note_on_unused
from labkit.training.trial import try_out, try_share
from labkit.training.work import NOTHING, Own, Work, work_of
from labkit.units import check_choice
from labkit.workload.experts import Experts
from labkit.workload.losses import LOSSES


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
    _check_folders(config)
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
    technique = config.technique_name
    is_alone = config.strategy == "single" and not config.accumulate
    if own_parts.model is not None:
        print_once(note_on_unused(model, loss, *work.train.first(1), config.seed))
        if not is_alone:
            inputs, _ = work.train.first(4)
            divides = config.strategy not in STAGED or (config.dp or 1) > 1
            print_once(check_forward(model, inputs, config.seed, technique, divides=divides))
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


def _check_folders(config: RunConfig) -> None:
    if config.log_dir is not None:
        require("tensorboard", "log_dir")
    for name in ("checkpoint_dir", "log_dir", "record"):
        folder = getattr(config, name)
        if folder is not None and is_rank_0():
            check_folder(name, folder)
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
    """The fewest samples that the model gets at once on a rank; 0 if PyTorch runs it on none."""
    workers = config.world_size - strategy.servers
    least = 0 if config.builtin and getattr(strategy, "runs_empty", False) else 1
    if strategy.traits.in_one_process:
        workers = len(strategy.devices)
    if strategy.traits.takes_whole_batch or strategy.sync_batch_norm:
        workers = 1
    if "dp" in options_of(type(strategy)):
        workers = getattr(strategy, "dp", 1)
        least = 1
    micro_batches = getattr(strategy, "micro_batches", getattr(strategy, "accumulate", 1))
    if not isinstance(micro_batches, int):
        micro_batches = config.accumulate or 1
    batches = {min(config.batch_size, num_samples), num_samples % config.batch_size} - {0}
    shares = [batch // min(batch, micro_batches) // max(1, workers) for batch in batches]
    return max(least, min(shares))


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
