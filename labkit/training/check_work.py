"""Try the learner's own parts on a few samples before any rank starts."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from labkit.config import STAGED, RunConfig
from labkit.strategies.base import MakeOptimizer, Strategy
from labkit.training.optimizer import optimizer_maker
from labkit.training.own import Own
from labkit.training.work import Work, work_of
from labkit.units import format_count
from labkit.workload.datasets import DATASETS
from labkit.workload.losses import sum_cross_entropy
from labkit.workload.random_numbers import seeded
from labkit.workload.samples import TensorSamples, first_samples, is_integer

# Two parameters -> those of one optimizer.
Cut = Callable[[Tensor, Tensor], list[Tensor]]
_CUTS: dict[str, list[Cut]] = {
    "model": [lambda first, second: [first, second]],
    "layers": [lambda first, second: [first], lambda first, second: [second]],
    "elements": [
        lambda first, second: [torch.cat([first.flatten(), second[:1]])],
        lambda first, second: [second[1:]],
    ],
}
# Enough to tell a mean over samples from a sum or a weighted mean.
_FEW = 4


def check_work(config: RunConfig, own: Own, strategy: Strategy) -> str:
    """Refuse what cannot be trained or would not equal one device; return a note, or nothing.

    Raises:
        ValueError: own parts that do not go together; the message says what to change.
    """
    is_usual = (config.loss, config.optimizer) == ("cross_entropy", "sgd")
    is_usual = is_usual and config.weights is None and config.freeze is None
    if own.is_empty and is_usual and config.dataset in DATASETS:
        return ""
    work = work_of(config, own)
    told = work.start()[1]
    if len(work.train) < config.world_size and config.strategy not in STAGED:
        raise ValueError(
            f"{format_count(len(work.train), 'training sample')} for world_size "
            f"{config.world_size}: some ranks would never get one. Use fewer ranks or more samples"
        )
    samples = first_samples(work.train, _FEW)
    outputs = _outputs(work, samples[0], config.seed)
    _check_loss(work, outputs, samples[1])
    if own.optimizer is not None:
        check_optimizer(own.optimizer, strategy.optimizes, config.strategy)
    if own.optimizer is not None and config.changes_lr:
        make = optimizer_maker(config, own.optimizer, strategy, len(work.train))
        check_optimizer(make, strategy.optimizes, config.strategy)
    if work.test is not None:
        _outputs(work, first_samples(work.test, 1)[0], config.seed, "held-out ")
        return told
    way_out = "put some into a folder val beside a folder train"
    if own.dataset is not None:
        way_out = "give dataset=(train, test) to test on what was not trained on"
    return ". ".join(filter(None, (told, f"no held-out samples: {way_out}")))


def check_optimizer(make: MakeOptimizer, optimizes: str, technique: str) -> None:
    """Refuse an optimizer that would not do on the ranks what it does on one device.

    It makes some updates of two small parameters at once, and in the pieces in which the technique
    gives parameters to optimizers.

    Args:
        make: parameters -> optimizer.
        optimizes: see ``strategies.base.Strategy``.
        technique: its name, for the message.

    Raises:
        ValueError: it makes no optimizer, needs a closure, or makes other updates in pieces.
    """
    whole = _updated(make, _CUTS["model"])
    try:
        pieces = _updated(make, _CUTS[optimizes])
    except ValueError as error:
        raise ValueError(_why_not_in_pieces(optimizes, technique, f" ({error})")) from None
    if not torch.allclose(whole, pieces, rtol=1e-9, atol=1e-12):
        raise ValueError(_why_not_in_pieces(optimizes, technique, ""))


def _why_not_in_pieces(optimizes: str, technique: str, more: str) -> str:
    gets = {
        "layers": "each rank has an optimizer for the parameters of its own layers",
        "elements": "the parameters are flat vectors without shapes, cut at any element",
        "model": "the same updates have to come out twice",
    }
    return (
        f"in {technique} {gets[optimizes]}, and this optimizer then makes other updates than on "
        f"the whole model{more}: use one that works element by element, such as SGD or Adam, or a "
        "technique with the whole model on each rank, such as ddp"
    )


def _updated(make: MakeOptimizer, cuts: list[Cut]) -> Tensor:
    """All values of two parameters after some updates, with one optimizer per cut."""
    generator = torch.Generator().manual_seed(0)
    shapes, options = ((4, 3), (5,)), {"generator": generator, "dtype": torch.float64}
    values = [torch.randn(shape, **options) for shape in shapes]
    pieces = [[nn.Parameter(p.clone()) for p in cut(*values)] for cut in cuts]
    optimizers = [_made(make, parameters) for parameters in pieces]
    for _ in range(3):
        gradients = [torch.randn(shape, **options) for shape in shapes]
        for cut, parameters, optimizer in zip(cuts, pieces, optimizers):
            for parameter, gradient in zip(parameters, cut(*gradients)):
                parameter.grad = gradient.clone()
            _step(optimizer)
    return torch.cat([p.detach().flatten() for p in itertools.chain(*pieces)])


def _made(make: MakeOptimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if isinstance(make, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer {type(make).__name__} has one model's parameters, and each rank has its "
            f"own: give a function, as in lambda params: torch.optim.{type(make).__name__}"
            "(params, lr=...)"
        )
    try:
        optimizer = make(parameters)
    except Exception as error:
        raise ValueError(
            f"optimizer fails on a list of parameters: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer returns {type(optimizer).__name__}: give a function of the parameters "
            "that returns a torch.optim.Optimizer"
        )
    return optimizer


def _step(optimizer: torch.optim.Optimizer) -> None:
    try:
        optimizer.step()
    except TypeError as error:
        raise ValueError(
            f"{type(optimizer).__name__} needs a closure that computes the loss several times per "
            f"update ({error}), and a step has one: use another, such as SGD or Adam"
        ) from None


def _outputs(work: Work, inputs: Tensor, seed: int, which: str = "") -> Tensor:
    """The outputs of the model for a few samples, in evaluation mode.

    Raises:
        ValueError: the model does not take these inputs, or returns no tensor with a row for each.
    """
    model = work.make_model().eval()
    name, takes = type(model).__name__, f"{which}inputs {_described(inputs)}"
    try:
        with torch.no_grad(), seeded(seed):
            outputs = model(inputs)
    except Exception as error:
        raise ValueError(
            f"{name} does not take {takes}: {error}. Its parameters are "
            f"{next(model.parameters()).dtype}"
        ) from error
    if not isinstance(outputs, Tensor) or not outputs.dim() or len(outputs) != len(inputs):
        found = _described(outputs) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"{name} returns {found} for {takes}: it has to return one tensor with "
            f"{format_count(len(inputs), 'row')}, one for each sample"
        )
    return outputs


def _check_loss(work: Work, outputs: Tensor, targets: Tensor) -> None:
    """Refuse a loss that does not take these outputs, or is not the mean over samples."""
    _check_classes(work, outputs, targets)
    mean = _value(work.mean_loss, outputs, targets)
    alone = [
        _value(work.mean_loss, outputs[i : i + 1], targets[i : i + 1]) for i in range(len(targets))
    ]
    total = torch.stack(alone).sum()
    if len(alone) < 2 or torch.allclose(mean, total / len(alone), rtol=1e-4, equal_nan=True):
        return
    count = format_count(len(alone), "sample")
    if torch.allclose(mean, total, rtol=1e-4):
        raise ValueError(
            f"loss is the sum over the samples ({mean:.4g} for {count}), and labkit itself "
            "divides by the size of the global batch: return the mean (reduction='mean')"
        )
    raise ValueError(
        f"loss of {count} is {mean:.4g}, and the mean of their losses one by one is "
        f"{total / len(alone):.4g}: shares of a batch add up only if the loss is the mean over "
        "samples. With weights, return (weights * losses).mean()"
    )


def _check_classes(work: Work, outputs: Tensor, targets: Tensor) -> None:
    """Refuse classes that the model has no output for; of tensors, all targets are known."""
    if work.loss is not sum_cross_entropy or not is_integer(targets) or outputs.dim() != 2:
        return
    known = work.train.targets if isinstance(work.train, TensorSamples) else targets
    least, most = int(known.min()), int(known.max())
    if least < 0 or most >= outputs.shape[1]:
        raise ValueError(
            f"the targets are classes from {least} to {most}, and the model has "
            f"{format_count(outputs.shape[1], 'output')} per sample, for classes 0 to "
            f"{outputs.shape[1] - 1}: give it {most + 1} outputs, or count classes from 0"
        )


def _value(loss: Callable[..., Any], outputs: Tensor, targets: Tensor) -> Tensor:
    fits = f"outputs {_described(outputs)} and targets {_described(targets)}"
    try:
        # mse_loss only warns when [n, 1] and [n] become [n, n].
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Using a target size")
            value = loss(outputs, targets)
    except Exception as error:
        raise ValueError(f"loss does not take {fits}: {error}") from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = _described(value) if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(
            f"loss returns {found} for {fits}: it has to return one number as a tensor, the mean "
            "over the samples (reduction='mean')"
        )
    return value.detach().double().reshape(())


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
