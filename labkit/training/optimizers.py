"""An optimizer of the learner's own, tried before any process starts.

It has to hold the parameters that it was given. Where ranks divide what is updated, it also has to
change the parts that they hold as it changes whole parameters: two short runs with the same
gradients, one on whole parameters and one on such parts, show whether it does. SGD and Adam work
element by element; one that groups parameters by dimension or position, or uses norms or matrix
products, sees the difference.
"""

from typing import Any

import torch
from torch import Tensor, nn

from labkit.strategies.base import MakeOptimizer, trained_parameters
from labkit.workload.samples import seeded

# Rows and columns at most of the parameters that are tried; updates, as a warm-up begins with 0.
_MOST_SIZE, _UPDATES = 64, 3
# In float64, of the largest change.
_ROUNDING = 1e-8

WAY_OUT = (
    "give a class or function that takes the parameters and returns an optimizer of them, such as "
    "lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
)


def try_optimizer(
    name: str, make: MakeOptimizer, model: nn.Module, technique: str, optimizes: str, seed: int
) -> str:
    """Return a note if the optimizer holds only some of the trained parameters, else "".

    ``optimizes`` tells what a rank of the technique holds, see ``Strategy``.

    Raises:
        ValueError: it cannot be made or makes no steps, holds other parameters, or would not
            equal one device with this technique.
    """
    given = trained_parameters(model)
    with seeded(seed):
        optimizer = _made(name, make, given)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    known = held & {id(parameter) for parameter in given}
    if not known or held - known:
        raise ValueError(
            f"optimizer {name} holds {len(held)} parameters, of which {len(known)} are among the "
            f"{len(given)} that it was given, so it would train something else: {WAY_OUT}"
        )
    generator = torch.Generator().manual_seed(seed)
    rounds: list[list[Tensor]] = []
    for _ in range(1 + _UPDATES):
        tensors = []
        for number, parameter in enumerate(given, start=1):
            shape = [min(size, _MOST_SIZE) for size in parameter.shape]
            values = torch.randn(shape, dtype=torch.float64, generator=generator)
            tensors.append(number * values)
        rounds.append(tensors)
    try:
        after = _trained(name, make, rounds, seed)
    except (RuntimeError, TypeError, AssertionError) as error:
        if optimizes == "model":
            # It may need the device on which the run will be.
            return _note(name, len(known), len(given))
        raise ValueError(
            f"optimizer {name} cannot be tried on the CPU, so it is not known whether {technique} "
            f"would equal one device: {type(error).__name__}: {error}. Use ddp or ring_all_reduce"
        ) from error
    if optimizes != "model":
        _compare(name, make, technique, optimizes, rounds, after, seed)
    return _note(name, len(known), len(given))


def _note(name: str, known: int, given: int) -> str:
    if known == given:
        return ""
    return f"optimizer {name} holds {known} of {given} trained parameters: the others stay as is"


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


def _trained(
    name: str, make: MakeOptimizer, rounds: list[list[Tensor]], seed: int
) -> list[Tensor]:
    """Parameters that begin with the first tensors, after updates with the others as gradients."""
    parameters = [nn.Parameter(values.clone()) for values in rounds[0]]
    with seeded(seed):
        optimizer = _made(name, make, parameters)
        for gradients in rounds[1:]:
            for parameter, gradient in zip(parameters, gradients):
                parameter.grad = gradient.clone()
            try:
                optimizer.step()
            except Exception:
                _refuse_closure(name, optimizer)
                raise
    return [parameter.detach() for parameter in parameters]


def _refuse_closure(name: str, optimizer: Any) -> None:
    """Refuse an optimizer whose step works with a closure, after one without has failed."""
    try:
        optimizer.step(lambda: torch.zeros((), dtype=torch.float64))
    except Exception:
        return
    raise ValueError(
        f"optimizer {name} asks step() for a closure that computes the loss again, and no "
        "technique has one: use an optimizer that needs one gradient per update, such as SGD"
    )


def _compare(
    name: str,
    make: MakeOptimizer,
    technique: str,
    optimizes: str,
    rounds: list[list[Tensor]],
    after: list[Tensor],
    seed: int,
) -> None:
    """Refuse an optimizer that does not change the ranks' parts as it changed the whole."""
    parts = [shares(tensors, optimizes) for tensors in rounds]
    largest = max(float((b - a).abs().max()) for a, b in zip(rounds[0], after) if a.numel())
    reason = ""
    for rank, expected in enumerate(shares(after, optimizes)):
        try:
            changed = _trained(name, make, [part[rank] for part in parts], seed)
        except Exception as error:
            cause = error.__cause__ or error
            reason = f"{type(cause).__name__}: {cause}"
            break
        worst = max(float((b - a).abs().max()) for a, b in zip(expected, changed))
        if not worst <= _ROUNDING * largest:
            reason = f"in {_UPDATES} updates by {worst / largest:.2%} of the largest change"
            break
    if reason:
        raise ValueError(
            f"optimizer {name} does not change the parts of parameters that a rank of {technique} "
            f"holds as it changes whole ones ({reason}): it goes by shape, position or norm, and "
            "the run would not equal one device. Use ddp or ring_all_reduce, whose ranks hold all "
            "parameters, or an optimizer such as SGD or Adam with equal settings for all"
        )


def shares(tensors: list[Tensor], optimizes: str) -> list[list[Tensor]]:
    """What two ranks (four, if they have rows of layers) hold of tensors, by rank."""
    if optimizes == "elements":
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return [[part] for part in flat.tensor_split(2) if part.numel()]
    by_rank = [tensors]
    if "layers" in optimizes:
        middle = (1 + len(tensors)) // 2
        by_rank = [tensors[:middle], tensors[middle:]]
    if "rows" in optimizes:
        halves = []
        for held in by_rank:
            # A number without dimensions stays whole.
            rows = [(t if t.dim() else t.view(1)).tensor_split(2) for t in held]
            for half in range(2):
                cut = zip(held, rows)
                pieces = [pair[half] if t.dim() else pair[half].view(-1) for t, pair in cut]
                halves.append([piece for piece in pieces if piece.numel()])
        by_rank = halves
    return [held for held in by_rank if held]
