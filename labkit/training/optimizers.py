"""The optimizers of a run, and a trial of one of the learner's own before a process starts.

Such an optimizer has to hold the parameters that it was given. Where ranks divide what is updated,
it also has to change the parts that they hold as it changes whole parameters: short runs with the
same gradients, on whole parameters and on such parts, show whether it does. SGD and Adam work
element by element; one that groups parameters by dimension or position, or uses norms or matrix
products, does not.
"""

import contextlib
import io
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from labkit.schedules.learning_rate import lr_factor, parse_lr_schedule
from labkit.strategies.base import MakeOptimizer, Strategy, trained_parameters
from labkit.strategies.saved_state import as_tensor
from labkit.strategies.traits import Division
from labkit.training.config import RunConfig
from labkit.training.kept import numbers_of
from labkit.workload.samples import seeded

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
# Rows and columns at most of the parameters that are tried.
_MOST_SIZE = 64
# More than one, as a warm-up begins with 0.
_UPDATES = 3
# In float64, of the largest change.
_ROUNDING = 1e-8

WAY_OUT = (
    "give a class or function that takes the parameters and returns an optimizer of them, such as "
    "lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
)


class Schedule:
    """Sets the learning rate of an optimizer before each of its steps, wherever those are made.

    An update that fp16 skips does not advance it. ``update`` is the number of the next one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float]):
        self.update = 0
        self._factor = factor
        self._rates = [group["lr"] for group in optimizer.param_groups]
        optimizer.register_step_pre_hook(self._set)

    def _set(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates):
            group["lr"] = rate * self._factor(self.update)
        self.update += 1


def schedule_of(optimizer: torch.optim.Optimizer | None) -> Schedule | None:
    """The schedule of an optimizer; None if its learning rate is constant."""
    return getattr(optimizer, "labkit_schedule", None)


def optimizer_maker(
    config: RunConfig, make_own: MakeOptimizer | None, strategy: Strategy, num_samples: int
) -> MakeOptimizer:
    """Return a factory that maps parameters to an optimizer of the run.

    ``make_own`` is the learner's own function, or None; ``num_samples`` are those of an epoch.
    """
    full_batches, rest = divmod(num_samples, config.batch_size)
    updates = full_batches * strategy.updates_of(config.batch_size, config.world_size)
    if rest:
        updates += strategy.updates_of(rest, config.world_size)
    factor = partial(
        lr_factor,
        schedule=parse_lr_schedule(config.lr_schedule),
        warmup_epochs=config.warmup_epochs,
        epochs=config.epochs,
        updates_per_epoch=updates,
    )

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if make_own is not None:
            optimizer = make_own(list(parameters))
        else:
            rates = {"lr": config.lr, "weight_decay": config.weight_decay}
            optimizer = OPTIMIZERS[config.optimizer](parameters, **rates)
        if config.lr_schedule != "constant" or config.warmup_epochs:
            optimizer.labkit_schedule = Schedule(optimizer, factor)  # type: ignore[attr-defined]
        return optimizer

    return make


def try_optimizer(
    name: str,
    make: MakeOptimizer,
    model: nn.Module,
    technique: str,
    division: Division,
    seed: int,
    *,
    keeps_sparse: bool = False,
    is_saved: bool = False,
) -> str:
    """Return a note if the optimizer holds only some of the trained parameters, else "".

    ``division`` tells what a rank of the technique holds, see ``Traits``; ``keeps_sparse``
    whether sparse gradients, as of ``nn.Embedding(sparse=True)``, reach the optimizer as such;
    ``is_saved`` whether checkpoints have to hold what it changes.

    Raises:
        ValueError: it cannot be made or makes no steps, holds other parameters, would not equal
            one device with this technique, or could not be continued.
    """
    given = trained_parameters(model)
    with seeded(seed):
        optimizer = _made(name, make, given)
    held: set[int] = set()
    for group in optimizer.param_groups:
        held.update(map(id, group["params"]))
    known = held.intersection(map(id, given))
    if not known or held - known:
        raise ValueError(
            f"optimizer {name} holds {len(held)} parameters, of which {len(known)} are among the "
            f"{len(given)} that it was given, so it would train something else: {WAY_OUT}"
        )
    generator = torch.Generator().manual_seed(seed)
    rounds: list[list[Tensor]] = [[] for _ in range(1 + _UPDATES)]
    for tensors in rounds:
        for number, parameter in enumerate(given, start=1):
            shape = [min(size, _MOST_SIZE) for size in parameter.shape]
            tensors.append(number * torch.randn(shape, dtype=torch.float64, generator=generator))
    expected: list[Tensor] = []
    try:
        expected = _updated(name, make, rounds, seed, is_saved)
    except ValueError:
        raise
    except _TakesSparse as error:
        if not keeps_sparse:
            raise ValueError(
                f"optimizer {name} takes sparse gradients alone, and {technique} has dense ones: "
                "use Adam or SGD, strategy single, or ddp or data_parallel with builtin"
            ) from error
    except Exception as error:
        # Where it does not matter how it works, it may need the device of the run.
        if division:
            reason = f"its step raised {type(error).__name__}: {error}"
            raise _differs(name, technique, reason) from error
    if division:
        _check_parts(name, make, rounds, expected, technique, division, seed)
    if len(known) < len(given):
        return f"optimizer {name} trains {len(known)} of {len(given)} parameters, the others stay"
    return ""


def _check_parts(
    name: str,
    make: MakeOptimizer,
    rounds: list[list[Tensor]],
    expected: list[Tensor],
    technique: str,
    division: Division,
    seed: int,
) -> None:
    """Refuse an optimizer that does not turn the ranks' parts into those of ``expected``."""
    parts = [shares(tensors, division) for tensors in rounds]
    largest = _distance(rounds[0], expected)
    for rank, expected_part in enumerate(shares(expected, division)):
        try:
            updated = _updated(name, make, [part[rank] for part in parts], seed)
        except Exception as error:
            raise _differs(name, technique, str(error.__cause__ or error)) from error
        worst = _distance(expected_part, updated)
        if not worst <= _ROUNDING * largest:
            difference = f"{worst / largest:.2%} of the largest change in {_UPDATES} updates"
            raise _differs(name, technique, difference)


class _TakesSparse(Exception):
    """A step that has failed with dense gradients succeeds with sparse ones."""


def _distance(before: list[Tensor], after: list[Tensor]) -> float:
    largest = [(b - a).abs().max().item() for a, b in zip(before, after) if a.numel()]
    return max(largest, default=0.0)


def _differs(name: str, technique: str, reason: str) -> ValueError:
    return ValueError(
        f"optimizer {name} does not change the parts of parameters that a rank of {technique} "
        f"holds as it changes whole ones ({reason}): it goes by shape, position or norm, and the "
        "run would not equal one device. Use ddp or ring_all_reduce, whose ranks hold all "
        "parameters, or an optimizer such as SGD or Adam with equal settings for all"
    )


def _made(name: str, make: MakeOptimizer, parameters: list[nn.Parameter]) -> Any:
    try:
        optimizer: Any = make(parameters)
    except Exception as error:
        raise ValueError(
            f"optimizer {name} of {len(parameters)} parameters raised {type(error).__name__}: "
            f"{error}. If this is no fault in it, {WAY_OUT}"
        ) from error
    if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "step"):
        raise ValueError(f"optimizer {name} returned a {type(optimizer).__name__}: {WAY_OUT}")
    return optimizer


def _updated(
    name: str,
    make: MakeOptimizer,
    rounds: list[list[Tensor]],
    seed: int,
    is_saved: bool = False,
) -> list[Tensor]:
    """Parameters that begin with the first tensors, after updates with the others as gradients."""
    parameters = [nn.Parameter(values.clone()) for values in rounds[0]]
    with seeded(seed):
        optimizer = _made(name, make, parameters)
        before = _not_kept(optimizer, parameters)
        objects_before = _objects(optimizer)
        for gradients in rounds[1:]:
            for parameter, gradient in zip(parameters, gradients):
                parameter.grad = gradient.clone()
            try:
                optimizer.step()
            except Exception as error:
                if _steps_with(optimizer, lambda: torch.zeros((), dtype=torch.float64)):
                    raise ValueError(
                        f"optimizer {name} asks step() for a closure that computes the loss "
                        "again, which no technique has: use one that takes one gradient, such as "
                        "SGD"
                    ) from error
                for parameter, gradient in zip(parameters, gradients):
                    parameter.grad = gradient.to_sparse()
                if _steps_with(optimizer):
                    raise _TakesSparse from error
                raise
    after = _not_kept(optimizer, parameters)
    changed = [name for name in after if after[name] != before.get(name)]
    changed += sorted(_objects(optimizer) - objects_before)
    if is_saved:
        for entries in optimizer.state.values():
            if isinstance(entries, dict):
                for key, value in entries.items():
                    as_tensor(f"{name}/{key}", value)
    if is_saved and changed:
        raise ValueError(
            f"optimizer {name} changes {changed[0]} in a step, and a checkpoint would not hold "
            "it: keep tensors and numbers by parameter in self.state[parameter], "
            "other numbers in attributes or self.param_groups, or leave checkpoint_dir out"
        )
    return [parameter.detach() for parameter in parameters]


class _ParameterPickler(cloudpickle.Pickler):
    """Writes parameters by their number, whatever their values; functions with what they hold."""

    def __init__(self, file: io.BytesIO, parameters: list[nn.Parameter]):
        super().__init__(file)
        self._numbers = {id(parameter): n for n, parameter in enumerate(parameters)}

    def persistent_id(self, value: Any) -> int | None:
        return self._numbers.get(id(value))


def _not_kept(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]
) -> dict[str, bytes]:
    """Return what no checkpoint holds, by name, pickled without the parameters' values.

    A checkpoint holds numbers in attributes and groups, and the state of each parameter.
    """
    left_out: dict[str, Any] = {}
    for name, value in _attributes(optimizer).items():
        if not numbers_of({name: value}):
            left_out[name] = value
    for key, value in optimizer.state.items():
        if not isinstance(key, Tensor):
            left_out[f"state[{key!r}]"] = value
    pickled = {}
    for name, value in left_out.items():
        buffer = io.BytesIO()
        # What cannot be pickled, such as an open file, is taken for constant.
        with contextlib.suppress(Exception):
            _ParameterPickler(buffer, parameters).dump(value)
            pickled[name] = buffer.getvalue()
    return pickled


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes and entries of groups by name, without hooks and schedulers."""
    values = {}
    for name, value in vars(optimizer).items():
        is_hook = name.startswith("_optimizer_")
        is_elsewhere = name in ("state", "param_groups") or isinstance(value, LRScheduler)
        if not is_hook and not is_elsewhere:
            values[f"its attribute {name}"] = value
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                values[f"{name} in param_groups[{number}]"] = value
    return values


def _objects(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return the names of what is only kept if it is there from the beginning."""
    kinds = (Tensor, torch.Generator, random.Random, np.random.Generator)
    return {name for name, value in _attributes(optimizer).items() if isinstance(value, kinds)}


def _steps_with(optimizer: torch.optim.Optimizer, *closure: Any) -> bool:
    try:
        optimizer.step(*closure)
    except Exception:
        return False
    return True


def shares(tensors: list[Tensor], division: Division) -> list[list[Tensor]]:
    """Parts of tensors as ranks hold them, by rank."""
    if Division.ELEMENTS in division:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return [[part] for part in flat.tensor_split(2) if part.numel()]
    by_rank = [tensors]
    if Division.LAYERS in division:
        middle = (1 + len(tensors)) // 2
        by_rank = [tensors[:middle], tensors[middle:]]
    if Division.ROWS in division:
        halves = []
        for held in by_rank:
            pairs = [torch.atleast_1d(tensor).tensor_split(2) for tensor in held]
            for half in range(2):
                halves.append([pair[half] for pair in pairs if pair[half].numel()])
        by_rank = halves
    return [held for held in by_rank if held]
