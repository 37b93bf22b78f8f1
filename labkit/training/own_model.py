"""A learner's own model: checked for what a copy, a conversion or a cut loses in silence."""

import copy
from multiprocessing import parent_process
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from labkit.workload.losses import ShareLoss
from labkit.workload.samples import Samples, as_dtype, seeded


def in_sequence(part: Any) -> Any:
    """Return a list of layers as one model, and anything else as it is."""
    return nn.Sequential(*part) if isinstance(part, list | tuple) else part


def copy_for_run(made: Any, part: Any, train: Samples, seed: int) -> nn.Module:
    """Return the model that ``part`` has made; if it is the learner's object, a copy of it.

    (In a rank it is a copy already.) Lazy modules take their shapes from ``train``.
    """
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"model is of type {type(made).__name__}: give an nn.Module, a list of layers, or a "
            "function without arguments that makes one"
        )
    is_lazy = any(isinstance(p, UninitializedTensorMixin) for p in made.parameters())
    if not is_lazy:
        check_values(made)
    _detach_computed(made)
    if made is part and not parent_process():
        names = hooked(made)
        if names:
            raise ValueError(
                f"{names[0]} of the model has a hook, which a copy of the model does not have: "
                "give a function without arguments that makes the model and its hooks"
            )
        made = copy.deepcopy(made).cpu()
    if is_lazy:
        # Modules such as nn.LazyLinear take their shapes from a first batch.
        inputs = train.first(2)[0]
        with seeded(seed), torch.no_grad():
            made.eval()(as_dtype(inputs, torch.get_default_dtype()))
        made.train()
        check_values(made)
    return made


def _detach_computed(model: nn.Module) -> None:
    """Make attributes copyable that hooks compute before each forward, as of old weight_norm."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_computed = isinstance(value, Tensor) and value.grad_fn is not None
            if is_computed and module._forward_pre_hooks:
                vars(module)[name] = value.detach()


def check_values(model: nn.Module) -> None:
    """Refuse complex numbers, and parameters that share memory but are not the same parameter.

    Raises:
        ValueError: a conversion to a real dtype drops imaginary parts; copies come apart.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    strided = []
    for name, tensor in tensors:
        if nn.parameter.is_lazy(tensor) or tensor.is_meta:
            continue
        if tensor.is_complex():
            raise ValueError(
                f"{name} of the model is {tensor.dtype}, and the techniques train real numbers: "
                "keep torch.view_as_real(values), and use torch.view_as_complex(...) in forward"
            )
        if tensor.layout == torch.strided and tensor.numel():
            strided.append((name, tensor))
    last_end, last_name, last_tensor = 0, "", None
    for name, tensor in sorted(strided, key=lambda pair: pair[1].data_ptr()):
        extent = 1 + sum((size - 1) * by for size, by in zip(tensor.shape, tensor.stride()))
        end = tensor.data_ptr() + extent * tensor.element_size()
        is_trained = isinstance(tensor, nn.Parameter) or isinstance(last_tensor, nn.Parameter)
        if tensor.data_ptr() < last_end and is_trained:
            raise ValueError(
                f"{last_name} and {name} of the model share memory, and are not the same "
                "parameter: they come apart where a model is copied, converted or cut. Use one "
                "parameter in both places, as in head.weight = embedding.weight, without .data"
            )
        if end > last_end:
            last_end, last_name, last_tensor = end, name, tensor


def note_on_unused(
    model: nn.Module, loss: ShareLoss, inputs: Tensor, targets: Tensor, seed: int
) -> str:
    """Return a note that names a parameter without a gradient from these samples, or ""."""
    with seeded(seed):
        try:
            loss(model.eval()(inputs), targets)[0].backward()
        except Exception:
            # The trial has said what the model does not take; some cannot do this in evaluation.
            return ""
    num_trained = 0
    names = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.numel():
            num_trained += 1
            if parameter.grad is None:
                names.append(name)
    model.zero_grad()
    if not names or len(names) == num_trained:
        return ""
    return (
        f"{len(names)} of {num_trained} parameters, {names[0]} first, get no gradient from the "
        "first sample. Here that counts as zeros, and weight decay and momentum still move the "
        "parameter; PyTorch's optimizers leave it as it is. Next step: freeze what is never used."
    )


def check_forward(
    model: nn.Module, inputs: Tensor, seed: int, technique: str, *, divides: bool
) -> str:
    """Return a note if a forward in training leaves something behind for the next, else "".

    Raises:
        ValueError: forward changes a parameter by what its samples are, and the technique
            ``divides`` a batch.
    """
    versions = {parameter: parameter._version for parameter in model.parameters()}
    buffers = _own_buffers(model)
    outputs = []
    for _ in range(2):
        with seeded(seed), torch.no_grad():
            outputs.append(model.train()(inputs.clone()))
    for name, parameter in model.named_parameters():
        is_changed = divides and parameter._version > versions[parameter]
        if is_changed and _depends_on_samples(model, name, inputs, seed):
            raise ValueError(
                f"a forward of the model changes parameter {name} in place, as max_norm of an "
                f"embedding does, and with {technique} each rank or micro-batch would change it "
                "by its own samples: leave that out, do it in the optimizer's step, or use "
                "strategy single without accumulate"
            )
    after = _own_buffers(model)
    changed = [f"buffer {name}" for name, buffer in buffers.items() if after.get(name) != buffer]
    if not torch.allclose(*outputs, equal_nan=True):
        changed.append("its outputs")
    if not changed:
        return ""
    return (
        f"Each forward of the model changes something for the next ({changed[0]}), as a counter, "
        f"a running average or spectral_norm does: {technique} equals one device only if that "
        "does not depend on the samples, and each rank runs one forward for each batch (no "
        "accumulate, no micro-batches, no fewer samples than ranks)."
    )


def _depends_on_samples(model: nn.Module, name: str, inputs: Tensor, seed: int) -> bool:
    """True if a forward of zeros makes another parameter ``name``, or is impossible."""
    values = []
    for samples in (inputs.clone(), torch.zeros_like(inputs)):
        trial = copy.deepcopy(model).train()
        parameter = trial.get_parameter(name)
        with seeded(seed), torch.no_grad():
            parameter.mul_(1000)  # beyond any limit of its norm
            try:
                trial(samples)
            except Exception:
                return True
        values.append(parameter)
    return not torch.equal(*values)


def _own_buffers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return identity and version of the buffers, but for those of BatchNorm and the like."""
    versions = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, nn.modules.batchnorm._NormBase):
            for name, buffer in module.named_buffers(prefix, recurse=False):
                versions[name] = id(buffer), buffer._version
    return versions


def hooked(model: nn.Module) -> list[str]:
    """Return the names of the parameters that have hooks."""
    names = []
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            names.append(name)
    return names
