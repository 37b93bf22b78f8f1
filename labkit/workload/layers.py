"""A model as a list of layers: their names, the shapes between them, the bytes forward keeps.

Shapes come from PyTorch's meta device, on which tensors have a shape and no memory.
"""

import copy
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

Shape = tuple[int, ...]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of an ``nn.Sequential`` in the order in which they run; ValueError for others.

    A nested ``nn.Sequential`` is replaced by its layers. Any other module is one layer, and so is
    one that has hooks, so that they run.
    """
    return [layer for _, layer in named_layers(model)]


def named_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """``layers_of``, each with its name in the model: ``"0"``, or ``"0.1"`` in a nested one."""
    if not _is_chain(model):
        raise ValueError(
            f"{type(model).__name__} cannot be cut into layers: give a list of layers, or an "
            "nn.Sequential without hooks; a block with a skip connection is one layer"
        )
    layers = []
    # named_children() would leave out repetitions of a layer.
    for name in model._modules:
        layer = model.get_submodule(name)
        if _is_chain(layer):
            layers += [(f"{name}.{key}", inner) for key, inner in named_layers(layer)]
        else:
            layers.append((name, layer))
    return layers


def _is_chain(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return False
    # A subclass that overrides forward may do anything between the layers.
    if type(module).forward is not nn.Sequential.forward or not module._modules:
        return False
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    return not any(getattr(module, f"_{kind}_hooks") for kind in kinds)


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy on the meta device: all layers and shapes, no values."""
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        tensors += [value for value in vars(module).values() if isinstance(value, Tensor)]
    # deepcopy takes what is in its memo as already copied.
    memo = {}
    for tensor in tensors:
        trains = tensor.requires_grad
        memo[id(tensor)] = torch.empty_like(tensor, device="meta", requires_grad=trains)
    return copy.deepcopy(model, memo)


def output_shapes(
    model: nn.Module, input_shape: Shape, batch_size: int = 1, dtype: torch.dtype | None = None
) -> list[tuple[torch.Size, torch.dtype]]:
    """The shape [batch_size, ...] and the dtype of each layer's output.

    The model is a chain of layers on any device; it is not changed. ``input_shape`` and ``dtype``
    are those of one sample. ValueError for layers that cannot do without values.
    """
    dtype = dtype or input_dtype(model)
    inputs = torch.empty((batch_size, *input_shape), dtype=dtype, device="meta")
    layers = meta_copy(model)
    try:
        # Also for what a forward makes without naming a device, such as torch.arange(n).
        with torch.device("meta"):
            return [(output.shape, output.dtype) for output in layer_outputs(layers, inputs)]
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            "a cut model has to tell its layers' shapes from tensors without values, and raises "
            f"{type(error).__name__}: {error}. Make tensors on the inputs' device (device="
            "x.device), and take no decision by a value (item, if)"
        ) from error


def input_dtype(model: nn.Module) -> torch.dtype:
    """int64 if the first layer begins with an embedding, else that of the first parameter."""
    kinds = nn.Embedding | nn.EmbeddingBag
    if any(isinstance(module, kinds) for module in layers_of(model)[0].modules()):
        return torch.int64
    return next((p.dtype for p in model.parameters()), torch.float32)


def layer_outputs(model: nn.Module, value: Tensor) -> Iterator[Tensor]:
    """Run the layers one by one in evaluation mode, where one sample is enough for BatchNorm."""
    for layer in layers_of(model.eval()):
        # With gradients: a forward may register hooks on what it computes.
        if value.requires_grad:
            value = NonLeaf.apply(value.detach().requires_grad_())
        value = layer(value)
        if not isinstance(value, Tensor):
            raise ValueError(
                f"layer {type(layer).__name__} returns a {type(value).__name__}, and a cut model "
                "hands on one tensor: make it one layer with the layer that takes this"
            )
        yield value


class NonLeaf(torch.autograd.Function):
    """An identity whose output is not a leaf: ``NonLeaf.apply(leaf)`` shares the leaf's memory.

    Autograd forbids in-place changes of a leaf, and a layer such as ``nn.ReLU(inplace=True)`` may
    be the first layer of a stage and get the stage's input, a leaf.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class HeldBytes(saved_tensors_hooks):
    """Count, inside ``with``, the bytes that forward passes keep for their backward.

    A tensor that several operations keep counts once, and stays alive as long as this object.
    The parameters and buffers of ``module`` exist anyway.
    """

    def __init__(self, module: nn.Module):
        super().__init__(self.keep, lambda tensor: tensor)
        # Keep the storages themselves: the identity of a freed one may be used again. (Its address
        # may change: that of sharded parameters does.)
        self._own = {}
        for tensor in (*module.parameters(), *module.buffers()):
            storage = tensor.untyped_storage()
            self._own[storage._cdata] = storage
        # By storage, and of each storage the bytes kept by where they begin.
        self._kept: dict[int, tuple[torch.UntypedStorage, Counter[int]]] = {}

    @property
    def num_bytes(self) -> int:
        """The count so far."""
        return self.together([self])

    @staticmethod
    def together(several: Iterable["HeldBytes"]) -> int:
        """The bytes that several keep, which count once here, too."""
        kept: dict[int, tuple[torch.UntypedStorage, Counter[int]]] = {}
        for held in several:
            for identity, (storage, counts) in held._kept.items():
                _, counted = kept.get(identity, (storage, Counter()))
                kept[identity] = storage, counted | counts
        return sum(min(storage.nbytes(), counts.total()) for storage, counts in kept.values())

    def __enter__(self) -> Self:  # type: ignore[override]
        super().__enter__()
        return self

    def keep(self, tensor: Tensor) -> Tensor:
        """Count a tensor, also one that no operation keeps; returns it."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._own:
            _, kept = self._kept.setdefault(storage._cdata, (storage, Counter()))
            start = int(tensor.storage_offset())
            # Of a slice of a batch count only the slice, of an expanded tensor only what exists.
            kept[start] = max(kept[start], tensor.nbytes)
        return tensor


class EmulatedLayer(nn.Module):
    """Takes time as a separate device would, asleep: more of them than cores can work at once.

    A forward takes ``call_s`` + n x ``sample_s`` seconds, a backward twice as long, as it does in
    most layers: one half for the gradient of the input, one for that of a trained number, by which
    it multiplies (if the input needs none, both). So it can be cut, trained and compared like any
    other layer. Shapes: [n, ...] to [n, ...].
    """

    def __init__(self, sample_s: float, call_s: float = 0.0):
        super().__init__()
        self.sample_s = sample_s
        self.call_s = call_s
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, value: Tensor) -> Tensor:
        # Without memory (the meta device) only shapes are asked for.
        seconds = 0.0 if value.is_meta else self.call_s + len(value) * self.sample_s
        time.sleep(seconds)
        value = value.view_as(value)
        scale = self.scale.view_as(self.scale)
        scale_s = seconds if value.requires_grad else 2 * seconds
        for factor, factor_s in ((value, seconds), (scale, scale_s)):
            if factor.requires_grad:
                factor.register_hook(lambda _, factor_s=factor_s: time.sleep(factor_s))
        return value * scale
