"""The optimizer of a run, whose learning rate follows the run's schedule.

The schedule is advanced by the optimizer's own steps. So it is right wherever a technique makes
its updates: on every rank, on a server of a slice, in a thread of RPC, on each stage. An update
that fp16 skips, because its gradients overflow, does not advance it.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from labkit.config import RunConfig
from labkit.schedules.learning_rate import lr_factor, parse_lr_schedule
from labkit.strategies.base import MakeOptimizer, Strategy

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
_RATES = ("momentum", "weight_decay")
# The attribute of an optimizer that holds its scheduler.
_SCHEDULER = "labkit_scheduler"


def optimizer_maker(
    config: RunConfig, own: MakeOptimizer | None, strategy: Strategy, num_samples: int
) -> MakeOptimizer:
    """What makes the optimizers of a run, of the parameters that they are given.

    Args:
        config: the settings.
        own: the learner's own function; None for the optimizer that the config names.
        strategy: how many updates it makes of a batch.
        num_samples: of an epoch.
    """
    make = partial(_made, config, own)
    # A scheduler takes some microseconds per update.
    if not config.changes_lr:
        return make
    whole, rest = divmod(num_samples, config.batch_size)
    updates = whole * strategy.updates_of(config.batch_size, config.world_size)
    updates += strategy.updates_of(rest, config.world_size) if rest else 0
    factor = partial(
        lr_factor,
        schedule=parse_lr_schedule(config.lr_schedule),
        warmup_epochs=config.warmup_epochs,
        epochs=config.epochs,
        updates_per_epoch=updates,
    )
    return lambda parameters: _scheduled(make(parameters), factor)


def scheduler_of(optimizer: torch.optim.Optimizer) -> LambdaLR | None:
    """The scheduler that an optimizer's steps advance; None if its learning rate is constant.

    ``last_epoch`` is the number of its next update (PyTorch counts in epochs, we in updates).
    """
    return getattr(optimizer, _SCHEDULER, None)


def continue_schedule(optimizer: torch.optim.Optimizer, update: int) -> None:
    """Let an optimizer's next step be the update with this number, as far as its rate goes."""
    scheduler = scheduler_of(optimizer)
    if scheduler is None or scheduler.last_epoch == update:
        return
    # One step from the update before: PyTorch would warn of a first step without an update.
    before = {"last_epoch": update - 1, "_step_count": update + 1}
    scheduler.load_state_dict(scheduler.state_dict() | before)
    scheduler.step()


def _made(
    config: RunConfig, own: MakeOptimizer | None, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    if own is not None:
        return own(list(parameters))
    rates = {name: getattr(config, name) for name in _RATES} | {"lr": config.used_lr}
    given = {name: float(rate) for name, rate in rates.items() if rate is not None}
    return OPTIMIZERS[config.optimizer](parameters, **given)


def _scheduled(
    optimizer: torch.optim.Optimizer, factor: Callable[[int], float]
) -> torch.optim.Optimizer:
    if any("lr" not in group for group in optimizer.param_groups):
        raise ValueError(
            f"lr_schedule and warmup_epochs change the lr of an optimizer, and "
            f"{type(optimizer).__name__} has no lr in its param_groups: leave them out"
        )
    scheduler = LambdaLR(optimizer, factor)
    setattr(optimizer, _SCHEDULER, scheduler)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer
