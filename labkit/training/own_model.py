"""What of a learner's own model would be lost in silence when it is copied, converted or cut."""

import torch
from torch import Tensor, nn

from labkit.workload.losses import ShareLoss
from labkit.workload.samples import seeded

# Gradients that a hook is tried with are of these sizes, so that a limit shows.
_SMALL, _LARGE = 1.0, 1000.0


def check_values(model: nn.Module) -> None:
    """Refuse complex numbers, and parameters that share memory but are not the same parameter.

    Raises:
        ValueError: a conversion to a real dtype drops imaginary parts; copies come apart.
    """
    last: dict[int, tuple[int, str, Tensor]] = {}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    kept = [(n, t) for n, t in tensors if not nn.parameter.is_lazy(t) and not t.is_meta]
    for name, tensor in kept:
        if tensor.is_complex():
            raise ValueError(
                f"{name} of the model is {tensor.dtype}, and the techniques train real numbers: "
                "keep torch.view_as_real(values), and use torch.view_as_complex(...) in forward"
            )
    strided = [(n, t) for n, t in kept if t.layout == torch.strided and t.numel()]
    for name, tensor in sorted(strided, key=lambda pair: pair[1].data_ptr()):
        storage = tensor.untyped_storage().data_ptr()
        extent = 1 + sum((size - 1) * by for size, by in zip(tensor.shape, tensor.stride()))
        end = tensor.data_ptr() + extent * tensor.element_size()
        before, other, owner = last.get(storage, (0, "", tensor))
        is_trained = isinstance(tensor, nn.Parameter) or isinstance(owner, nn.Parameter)
        if tensor.data_ptr() < before and is_trained:
            raise ValueError(
                f"{other} and {name} of the model share memory, and are not the same parameter: "
                "they come apart where a model is copied, converted or cut. Use one parameter in "
                "both places, as in head.weight = embedding.weight, without .data"
            )
        if end > before:
            last[storage] = end, name, tensor


def unused(model: nn.Module, loss: ShareLoss, inputs: Tensor, targets: Tensor, seed: int) -> str:
    """Return a note that names a parameter without a gradient from these samples, or ""."""
    with seeded(seed):
        try:
            loss(model.eval()(inputs), targets)[0].backward()
        except Exception:
            # The trial has said what the model does not take; some cannot do this in evaluation.
            return ""
    parameters = model.named_parameters()
    named = [(n, p) for n, p in parameters if p.requires_grad and p.numel()]
    names = [name for name, parameter in named if parameter.grad is None]
    model.zero_grad()
    if not names or len(names) == len(named):
        return ""
    return (
        f"{len(names)} of {len(named)} parameters, {names[0]} first, get no gradient from the "
        "first sample. Here that counts as zeros, and weight decay and momentum still move the "
        "parameter; PyTorch's optimizers leave it as it is. freeze what is never used"
    )


def hooked(model: nn.Module) -> list[str]:
    """The names of parameters that have hooks of their own."""
    names = []
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            names.append(name)
    return names


def check_hooks(model: nn.Module, technique: str, *, keeps: bool, seed: int) -> None:
    """Refuse hooks on parameters that a technique loses, or calls on parts of a gradient.

    ``keeps`` tells whether the ranks train the parameters that the model has, and no copies.
    A hook that adds up, h(a) + h(b) = h(a + b), may be called on each part.
    """
    for name in hooked(model):
        parameter = model.get_parameter(name)
        adds_up = keeps and not parameter._post_accumulate_grad_hooks
        generator = torch.Generator().manual_seed(seed)
        gradients = []
        for scale in (_SMALL, _LARGE):
            values = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            gradients.append((scale * values).to(parameter))
        hooks = [*(parameter._backward_hooks or {}).values()] if adds_up else []
        results = []
        with seeded(seed), torch.no_grad():
            for gradient in (*gradients, gradients[0] + gradients[1]):
                for hook in hooks:
                    changed = hook(gradient.clone())
                    gradient = gradient if changed is None else changed
                results.append(gradient)
        first, second, together = results
        rounding = 100 * torch.finfo(together.dtype).eps * _LARGE
        if not adds_up or not torch.allclose(first + second, together, atol=rounding):
            raise ValueError(
                f"{name} of the model has a hook, which {technique} would lose or call on a part "
                "of the gradient: change gradients in the optimizer's step instead, or use "
                "strategy single"
            )
