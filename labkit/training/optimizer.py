"""The optimizer of a run, whose learning rate follows the run's schedule.

The schedule is advanced by the optimizer's own steps. So it is right wherever a technique makes
its updates: on every rank, on a server of a slice, in a thread of RPC, on each stage. An update
that fp16 skips, because its gradients overflow, does not advance it.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from labkit.config import RunConfig
from labkit.schedules.learning_rate import lr_factor, parse_lr_schedule
from labkit.strategies.base import MakeOptimizer, Strategy

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
_RATES = ("lr", "weight_decay")
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
    rates = {name: getattr(config, name) for name in _RATES}
    given = {name: float(rate) for name, rate in rates.items() if rate is not None}

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

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if own is not None:
            optimizer = own(list(parameters))
        else:
            optimizer = OPTIMIZERS[config.optimizer](parameters, **given)
        # A scheduler takes some microseconds per update.
        if config.changes_lr:
            scheduler = LambdaLR(optimizer, factor)
            setattr(optimizer, _SCHEDULER, scheduler)
            optimizer.register_step_post_hook(lambda *_: scheduler.step())
        return optimizer

    return make


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


Cut = Callable[[Tensor, Tensor], list[list[Tensor]]]
# How techniques divide two parameters among optimizers.
_CUTS: dict[str, Cut] = {
    "model": lambda first, second: [[first, second]],
    "layers": lambda first, second: [[first], [second]],
    "elements": lambda first, second: [[torch.cat([first.flatten(), second[:1]])], [second[1:]]],
}


def check_optimizer(make: MakeOptimizer, optimizes: str, technique: str) -> None:
    """Refuse an optimizer that would not do on the ranks what it does on one device.

    It makes some updates of two small parameters at once, and in the pieces in which the technique
    gives parameters to optimizers: ``optimizes``, see ``strategies.base.Strategy``.

    Raises:
        ValueError: it makes no optimizer, needs a closure, or makes other updates in pieces.
    """

    def updated(cut: Cut) -> Tensor:
        """All values of both after some updates, with an optimizer for each piece."""
        generator = torch.Generator().manual_seed(0)

        def random_pieces() -> list[list[Tensor]]:
            options = {"generator": generator, "dtype": torch.float64}
            pieces = cut(torch.randn(4, 3, **options), torch.randn(5, **options))
            return [[tensor.clone() for tensor in piece] for piece in pieces]

        parameters = [[nn.Parameter(tensor) for tensor in piece] for piece in random_pieces()]
        optimizers = [make(piece) for piece in parameters]
        for _ in range(3):
            for piece, gradients, optimizer in zip(parameters, random_pieces(), optimizers):
                for parameter, gradient in zip(piece, gradients):
                    parameter.grad = gradient
                optimizer.step()
        return torch.cat([one.detach().flatten() for piece in parameters for one in piece])

    try:
        expected, found = updated(_CUTS["model"]), updated(_CUTS[optimizes])
    except Exception as error:
        raise ValueError(
            f"optimizer fails ({type(error).__name__}: {error}): give a function of a list of "
            "parameters, such as torch.optim.SGD, that returns an optimizer without a closure. In "
            f"{technique} it gets the {optimizes} of a rank"
        ) from error
    if not torch.allclose(expected, found, rtol=1e-9, atol=1e-12):
        raise ValueError(
            f"in {technique} an optimizer gets the {optimizes} of a rank, and this one then makes "
            "other updates than on the whole model: use one that works element by element, such "
            "as SGD or Adam, or a technique with the whole model on each rank, such as ddp"
        )
