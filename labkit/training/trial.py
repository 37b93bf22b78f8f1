"""A model and a loss, tried on a few samples before any process starts.

What the ranks compute adds up to the loss of one device only if the loss of a batch is a sum of
its samples' terms, divided by the sum of their weights. PyTorch's own losses of classes are known.
Of any other the trial compares a batch with the parts of random, uneven divisions of it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from labkit.workload.losses import ShareLoss, Weighing, count_right
from labkit.workload.samples import Pair, Samples, is_integer, seeded

# Samples that show whether model and loss take them.
_FEW = 4
# Samples that show how a loss of one's own adds them up.
_ENOUGH = 24
# Values of inputs at most, where a sample is large.
_MOST_VALUES = 2**20
# Targets that are looked for, and divisions of a batch that are tried.
_RARE = 12
_DIVISIONS = 8

WAYS_OUT = (
    "return the pair (sum, weight), whose quotient is the mean; or one loss per sample, [n]; or "
    "the mean over samples (reduction='mean'; with weights, (weights * losses).mean()), so that "
    "shares add up. PyTorch's nn.CrossEntropyLoss(weight=..., ignore_index=...) works as it is"
)


def try_out(
    name: str, model: nn.Module, loss: ShareLoss, train: Samples, test: Samples | None, seed: int
) -> Weighing:
    """Try model and loss; return the kind of divisor of the sum of the losses.

    Raises:
        ValueError: model and loss do not take the samples, or would not equal one device; the
            message, with the loss's ``name``, says what to do.
    """
    count = _FEW if loss.classes else _ENOUGH
    inputs, targets = _draw(train, seed, count)
    vocabulary: list[int] = []
    note_tokens = _note_tokens(inputs, vocabulary)
    hooks = []
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            hooks.append(module.register_forward_pre_hook(note_tokens))
    parts = [part for part in (train, test) if part is not None]
    with torch.no_grad(), seeded(seed):
        try:
            in_training = model.train()(inputs)
            outputs = model.eval()(inputs)
        except Exception as error:
            _check_tokens(vocabulary, inputs, parts)
            raise _misfit(name, inputs, targets, error) from error
        finally:
            for hook in hooks:
                hook.remove()
        _check_tokens(vocabulary, inputs, parts)
        _check_outputs(in_training, outputs)
        _check_classes(loss, outputs, targets, parts)
        try:
            returned = None
            with torch.enable_grad():
                if loss.classes is None:
                    returned = loss.loss(outputs.detach().clone(), targets)
                    _check_kind(returned, len(targets))
                # No leaf, which a loss may not change in place.
                part = outputs.detach().requires_grad_().clone()
                total, weight = loss(part, targets)
        except Exception as error:
            raise _misfit(name, inputs, targets, error) from error
        _check_gradients(name, returned, total, weight)
        if loss.classes is None:
            for division in _divisions(len(targets), seed):
                _check_division(name, loss, outputs, targets, division)
    if isinstance(returned, tuple):
        return Weighing.DATA
    return loss.weighing


def try_share(model: nn.Module, train: Samples, count: int) -> None:
    """Raise ValueError if the model does not train on ``count`` samples, a rank's smallest share.

    BatchNorm needs two values per channel, for example.
    """
    if count >= min(_FEW, len(train)):
        # ``try_out`` has tried as many.
        return
    inputs, _ = train.first(count)
    try:
        with torch.no_grad(), seeded(train.seed):
            model.train()(inputs)
    except Exception as error:
        raise ValueError(
            f"the smallest part of a batch that the model gets at once has {count} of "
            f"{len(train)} samples (the last batch may be small), and the model does not take "
            f"it: {str(error).rstrip('.')}. Use another batch_size, fewer ranks or micro-batches, "
            "or sync_batch_norm where a technique has it"
        ) from error


def _misfit(name: str, inputs: Tensor, targets: Tensor, error: Exception) -> ValueError:
    return ValueError(
        f"the model and loss {name} do not take {inputs.dtype} inputs {list(inputs.shape)} and "
        f"{targets.dtype} targets {list(targets.shape)}, or the loss is not one number: {error}"
    )


def _draw(samples: Samples, seed: int, most: int) -> Pair:
    """Samples from all over the data set, those with rare targets first."""
    sample_values = samples.first(1)[0].numel()
    count = min(len(samples), most, max(8, _MOST_VALUES // max(1, sample_values)))
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
    chosen: dict[int, None] = {}
    if isinstance(samples.dataset, TensorDataset) and most > _FEW:
        targets = samples.dataset.tensors[1]
        if is_integer(targets):
            # Ignored targets are below or above the classes.
            values = targets.unique()
            values = torch.cat([values[: _RARE // 2], values[-_RARE // 2 :]])
            masks = [targets == value for value in values]
        else:
            masks = [targets.isnan()]
        for mask in masks:
            chosen |= dict.fromkeys(mask.nonzero()[:1, 0].tolist())
    chosen |= dict.fromkeys(order.tolist())
    return samples.read(torch.tensor(list(chosen)[:count]))


def _check_outputs(in_training: Any, in_evaluation: Any) -> None:
    for mode, outputs in (("training", in_training), ("evaluation", in_evaluation)):
        if not isinstance(outputs, Tensor):
            raise ValueError(
                f"in {mode} mode the model returns a {type(outputs).__name__}, and the techniques "
                "hand one tensor on to the loss: return the logits alone (torchvision's models "
                "do with aux_logits=False), or several outputs concatenated, which the loss splits"
            )


def _note_tokens(inputs: Tensor, vocabulary: list[int]) -> Any:
    def note(module: nn.Embedding, arguments: tuple[Any, ...]) -> None:
        if arguments and arguments[0] is inputs:
            vocabulary.append(module.num_embeddings)

    return note


def _tensors(parts: list[Samples], index: int, tried: Tensor) -> Iterator[Tensor]:
    """All inputs (0) or targets (1), where they are tensors; else those that were tried."""
    for part in parts:
        if isinstance(part.dataset, TensorDataset):
            yield part.dataset.tensors[index]
        else:
            yield tried


def _check_tokens(vocabulary: list[int], inputs: Tensor, parts: list[Samples]) -> None:
    """Refuse tokens that an embedding of the inputs does not have."""
    for size in vocabulary:
        for tokens in _tensors(parts, 0, inputs):
            if tokens.numel() and (tokens.min() < 0 or tokens.max() >= size):
                raise ValueError(
                    f"the inputs of dataset are tokens from {int(tokens.min())} to "
                    f"{int(tokens.max())}, and the model's embedding has 0 to {size - 1}: use "
                    f"num_embeddings {int(tokens.max()) + 1} or more, and no negative tokens"
                )


def _check_classes(
    loss: ShareLoss, outputs: Tensor, targets: Tensor, parts: list[Samples]
) -> None:
    """Refuse classes that the model's outputs do not have, and targets of which none counts."""
    if loss.classes is None or count_right(outputs, targets, None) is None:
        return
    ignored = loss.classes.ignore_index
    count = outputs.shape[1]
    by_class = loss.classes.weight
    if by_class is not None and len(by_class) != count:
        raise ValueError(
            f"the loss has weights for {len(by_class)} classes, and the model tells {count} apart"
        )
    for number, classes in enumerate(_tensors(parts, 1, targets)):
        counted = classes[classes != ignored]
        if counted.numel() and (counted.min() < 0 or counted.max() >= count):
            raise ValueError(
                f"the targets of dataset are classes from {int(counted.min())} to "
                f"{int(counted.max())}, and the model tells {count} apart, 0 to {count - 1} (a "
                f"target that does not count is {ignored}, the loss's ignore_index)"
            )
        if number == 0 and classes is not targets and not counted.numel():
            raise ValueError(
                f"all {classes.numel()} targets of dataset are {ignored}, which the loss ignores"
            )


def _check_kind(returned: Any, count: int) -> None:
    if isinstance(returned, tuple):
        if len(returned) == 2 and torch.as_tensor(returned[0]).dim() == 0:
            return
        raise ValueError(f"the loss returns {len(returned)} values as a tuple: {WAYS_OUT}")
    if not isinstance(returned, Tensor):
        raise ValueError(f"the loss returns a {type(returned).__name__}: {WAYS_OUT}")
    if returned.dim() > 0 and len(returned) != count:
        shape = list(returned.shape)
        raise ValueError(f"the loss of {count} samples has shape {shape}: {WAYS_OUT}")


def _check_gradients(name: str, returned: Any, total: Tensor, weight: Tensor | float) -> None:
    """Refuse a loss whose gradient is not that of its sum with respect to the outputs.

    ``returned`` is for outputs without a gradient, ``total`` and ``weight`` are for others.
    """
    values = returned if isinstance(returned, tuple) else (returned,)
    if any(isinstance(value, Tensor) and value.requires_grad for value in values):
        raise ValueError(
            f"loss {name} depends on parameters, not only on outputs and targets. It would read "
            "a copy of them, which no step changes: use weight_decay for a penalty on parameters, "
            "let the model return what the loss needs, or, if they are constants, call "
            "requires_grad_(False) on them"
        )
    if isinstance(weight, Tensor) and weight.requires_grad:
        raise ValueError(
            f"the weight that loss {name} returns depends on the outputs, and the sum is divided "
            "by it as by a constant: return weight.detach(), or one loss per sample"
        )
    if not total.requires_grad:
        raise ValueError(
            f"loss {name} has no gradient with respect to the outputs: leave out .detach(), "
            ".item() and torch.no_grad() in it"
        )


def _divisions(count: int, seed: int) -> Iterator[list[Tensor]]:
    """Numbers of samples, divided in two or three at random; then one by one."""
    generator = torch.Generator().manual_seed(seed)
    num_turns = _DIVISIONS if count > 1 else 0
    for turn in range(num_turns):
        order = torch.randperm(count, generator=generator)
        size = count
        if turn > 0:
            size = int(torch.randint(2, count + 1, (), generator=generator))
        cuts = torch.randint(1, size, (1 + turn % 2,), generator=generator).unique()
        yield [part for part in order[:size].tensor_split(cuts) if len(part)]
    yield list(torch.arange(count).split(1))


def _check_division(
    name: str, loss: ShareLoss, outputs: Tensor, targets: Tensor, division: list[Tensor]
) -> None:
    """Refuse a loss whose sum or weight is not what the parts of a batch add up to."""
    batch = torch.cat(division)
    pairs = []
    for part in (batch, *division):
        total, weight = loss(outputs[part], targets[part])
        pairs.append([float(total), float(weight)])
    in_one, *rows = torch.tensor(pairs, dtype=torch.float64)
    in_parts = torch.stack(rows)
    rounding = 1e-9 if outputs.dtype == torch.float64 else 1e-4
    # Numbers that cancel in a sum have been rounded before.
    slack = rounding * (in_parts.abs().sum(0) + in_one.abs())
    if in_one[1] < 0 or not in_one[1].isfinite():
        raise ValueError(f"loss {name} has the weight {in_one[1]:.6g}: {WAYS_OUT}")
    if ((in_parts.sum(0) - in_one).abs() <= slack).all():
        return
    if in_one[0].isnan() and in_parts[:, 0].isnan().any():
        # The model's outputs, or the targets, are not finite; training says so.
        return
    second_total = float(loss(outputs[batch], targets[batch])[0])
    if abs(second_total - in_one[0]) > slack[0]:
        raise ValueError(
            f"loss {name} of the same {len(batch)} samples has the sum {in_one[0]:.6g}, then "
            f"{second_total:.6g}: it counts its calls or draws random numbers, which each rank "
            "and micro-batch would do for itself. Give a function of outputs and targets alone"
        )
    mean = in_one[0] / in_one[1]
    apart = in_parts[:, 0].sum() / in_parts[:, 1].sum()
    sizes = ", ".join(str(len(part)) for part in division)
    raise ValueError(
        f"loss {name} of {len(batch)} samples is {mean:.6g}, and the mean of the losses of its "
        f"parts of {sizes} samples, by their weights, is {apart:.6g}: {WAYS_OUT}"
    )
