"""A model as a list of layers: what can be cut, what crosses a cut, what each layer costs.

Shapes come from PyTorch's meta device, on which tensors have a shape and no memory; times and the
bytes that a layer keeps for its backward are measured.
"""

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from labkit.costs import Link
from labkit.models import VGG16_CHANNELS
from labkit.placement import LayerCost, Profile, best_split

Shape = tuple[int, ...]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of an ``nn.Sequential`` in the order in which they run; nested ones are opened.

    A nested one with hooks of its own stays one layer, so that they run.

    Raises:
        ValueError: a model that is no chain of layers, has none, or has hooks as a whole.
    """
    return [layer for _, layer in named_layers(model)]


def named_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """``layers_of`` with their names in the model: ``"0"``, or ``"0.1"`` in a nested one.

    Raises:
        ValueError: as ``layers_of``.
    """
    if not _is_chain(model):
        raise ValueError(
            f"{type(model).__name__} is not an nn.Sequential, and only a chain of layers can be "
            "cut between any two: wrap its parts in nn.Sequential, a block with a short cut as "
            "one layer"
        )
    if _has_hooks(model):
        raise ValueError(
            f"hooks on this {type(model).__name__} would not run, because nothing runs it whole "
            "once it is cut: register them on its layers"
        )
    found: list[tuple[str, nn.Module]] = []
    # named_children() would leave out a layer that comes twice.
    for name, child in model._modules.items():
        if _is_chain(child) and len(child) and not _has_hooks(child):
            found += [(f"{name}.{inner}", layer) for inner, layer in named_layers(child)]
        else:
            found.append((name, child))
    if not found:
        raise ValueError("this nn.Sequential has no layers: there is nothing to place")
    return found


def _is_chain(module: nn.Module) -> bool:
    # A subclass with a forward of its own may do anything between the layers.
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _has_hooks(module: nn.Module) -> bool:
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    return any(getattr(module, f"_{kind}_hooks") for kind in kinds)


def output_shapes(
    model: nn.Module,
    input_shape: Shape,
    batch_size: int = 1,
    dtype: torch.dtype | None = None,
) -> list[tuple[torch.Size, torch.dtype]]:
    """By layer, the shape [batch_size, ...] and dtype of what it hands on.

    Args:
        model: a chain of layers, on any device; it stays as it is.
        input_shape: of one sample.
        batch_size: samples.
        dtype: of the samples; by default int64 where an ``nn.Embedding`` is the first layer, else
            that of the first parameter.

    Raises:
        ValueError: no chain of layers, or one that does not take this shape; the layer is named.
    """
    dtype = dtype or _dtype_of(model)
    inputs = torch.empty((batch_size, *input_shape), dtype=dtype, device="meta")
    return [(output.shape, output.dtype) for output in _walk(ghost_of(model), inputs)]


def ghost_of(model: nn.Module) -> nn.Module:
    """A copy on the meta device: the layers and all shapes, none of the values; hooks are idle."""
    plain = (v for module in model.modules() for v in vars(module).values())
    tensors = (*model.parameters(), *model.buffers(), *(v for v in plain if isinstance(v, Tensor)))
    # What deepcopy is told to be copied already it takes as it is.
    memo = {id(tensor): _meta(tensor) for tensor in tensors}
    ghost = copy.deepcopy(model, memo)
    for module in ghost.modules():
        # They look at values, or collect them, and want the real ones.
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.update(dict.fromkeys(hooks, _idle))
    return ghost


def _idle(*_) -> None:
    """A hook that does nothing."""


def _meta(tensor: Tensor) -> Tensor:
    ghost = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(ghost, requires_grad=tensor.requires_grad)
    return ghost


def even_split(
    model: nn.Module, input_shape: Shape, num_stages: int, dtype: torch.dtype | None = None
) -> tuple[int, ...]:
    """Split points that make the largest stage's work as small as it can be, counted in FLOPs.

    Counted, not measured, so that every process finds the same; ``placement.best_split`` of a
    measured ``profile`` knows the machine, too. ``dtype`` as in ``output_shapes``.

    Raises:
        ValueError: fewer layers than stages, or what ``output_shapes`` raises.
    """
    # One real sample: on the meta device, convolutions import PyTorch's compiler first (seconds).
    sample = torch.zeros((1, *input_shape), dtype=dtype or _dtype_of(model))
    with FlopCounterMode(display=False) as counter:
        totals = [counter.get_total_flops() for _ in _walk(copy.deepcopy(model), sample)]
    flops = [total - before for before, total in itertools.pairwise([0, *totals])]
    layers = tuple(LayerCost(str(i), count, 0.0, 0, 0, 0) for i, count in enumerate(flops))
    counted = Profile(type(model).__name__, 1, 0, layers)
    free = Link(0.0, 0.0)
    return best_split(counted, num_stages, free, objective="largest_stage").split_points


def _dtype_of(model: nn.Module) -> torch.dtype:
    if isinstance(layers_of(model)[0], nn.Embedding | nn.EmbeddingBag):
        return torch.int64
    return next((p.dtype for p in model.parameters()), torch.float32)


def _walk(model: nn.Module, value: Tensor) -> Iterator[Tensor]:
    """The output of each layer, in evaluation mode: one sample is enough for BatchNorm there."""
    for index, layer in enumerate(layers_of(model.eval())):
        takes = list(value.shape)
        try:
            with torch.no_grad():
                value = layer(value)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ValueError(
                f"layer {index} ({type(layer).__name__}) does not take {takes}: {error}"
            ) from error
        if not isinstance(value, Tensor):
            raise ValueError(
                f"layer {index} ({type(layer).__name__}) hands on a {type(value).__name__}: "
                "between layers there has to be one tensor"
            )
        yield value


def profile(
    model: nn.Module,
    batch_size: int,
    input_shape: Shape,
    *,
    repeats: int = 5,
    device: str | torch.device = "cpu",
    name: str = "",
    dtype: torch.dtype | None = None,
) -> Profile:
    """Measure what each layer costs for a batch, in this process: medians over the repeats.

    Args:
        model: a chain of layers; it is copied, and only its shapes count.
        batch_size: samples of the batch.
        input_shape: of one sample.
        repeats: counted passes through the model, after one that warms up.
        device: where to measure.
        name: of the model.
        dtype: of the samples, as in ``output_shapes``.

    Raises:
        ValueError: as ``output_shapes``; no repeats.
    """
    if repeats < 1:
        raise ValueError(f"{repeats} repeats measure nothing: give 1 or more")
    dtype = dtype or _dtype_of(model)
    shapes = output_shapes(model, input_shape, batch_size, dtype)
    layers = layers_of(copy.deepcopy(model).to(device).train())
    # As whole numbers zeros: every nn.Embedding has a row 0.
    make = torch.randn if dtype.is_floating_point or dtype.is_complex else torch.zeros
    inputs = make((batch_size, *input_shape), dtype=dtype, device=device)
    passes = [_one_pass(layers, inputs) for _ in range(repeats + 1)][1:]
    costs = []
    for index, layer in enumerate(layers):
        forward_s, backward_s, held_bytes = zip(*(one[index] for one in passes))
        shape, output_dtype = shapes[index]
        costs.append(
            LayerCost(
                name=type(layer).__name__,
                forward_s=statistics.median(forward_s),
                backward_s=statistics.median(backward_s),
                output_bytes=shape.numel() * output_dtype.itemsize,
                parameter_bytes=sum(p.nbytes for p in layer.parameters()),
                held_bytes=max(held_bytes),
            )
        )
    return Profile(name or type(model).__name__, batch_size, inputs.nbytes, tuple(costs))


def _one_pass(layers: list[nn.Module], inputs: Tensor) -> list[tuple[float, float, int]]:
    """Layer by layer: seconds forward and backward, and bytes kept between the two."""
    found, value, held = [], inputs, HeldBytes(nn.ModuleList(layers))
    for index, layer in enumerate(layers):
        entering = value.detach().requires_grad_(index > 0 and value.is_floating_point())
        before = held.num_bytes
        with held:
            forward_s, value = _timed(layer, NoLeaf.apply(entering))
        backward_s = 0.0
        if value.requires_grad:
            gradient = torch.ones_like(value)
            backward_s, _ = _timed(torch.autograd.backward, value, gradient)
        found.append((forward_s, backward_s, held.num_bytes - before))
    return found


def _timed(fn: Callable, *args: Tensor) -> tuple[float, Any]:
    on_gpu = args[0].device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(args[0].device)
    start_s = time.perf_counter()
    result = fn(*args)
    if on_gpu:
        torch.cuda.synchronize(args[0].device)
    return time.perf_counter() - start_s, result


class NoLeaf(torch.autograd.Function):
    """The leaf's memory and gradient in a tensor that is none: autograd lets layers that work in
    place, such as ``nn.ReLU(inplace=True)``, change no leaf."""

    @staticmethod
    def forward(ctx, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class HeldBytes(torch.autograd.graph.saved_tensors_hooks):
    """Count, inside ``with``, the bytes that forward passes keep for their backward.

    A storage counts once, however many operations keep it; parameters and buffers, which are there
    anyway, do not count. Storages stay alive as long as this object.

    Attributes:
        num_bytes: found so far.
    """

    def __init__(self, module: nn.Module):
        own = [t.untyped_storage() for t in (*module.parameters(), *module.buffers())]
        # With the storages themselves: the address of one that is freed may be another's next.
        self._seen = {storage.data_ptr(): storage for storage in own}
        self.num_bytes = 0
        super().__init__(self._pack, lambda tensor: tensor)

    def __enter__(self) -> "HeldBytes":
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen[storage.data_ptr()] = storage
            # Of a part of a batch its part; of an expanded tensor what is there.
            self.num_bytes += min(storage.nbytes(), tensor.nbytes)
        return tensor


def published_vgg16(num_classes: int = 10) -> nn.Sequential:
    """VGG16 as published, with its classifier of 120 million parameters: shapes, no memory.

    Layers 0 to 30 are the features, as in labkit's ``vgg16``; then come the average to 7x7, the
    flattening, and seven layers of classifier, dropout as an identity (it has no shape of its
    own). Source: Simonyan and Zisserman (2015), table 1, column D; torchvision's layer indices.
    """
    with torch.device("meta"):
        layers: list[nn.Module] = []
        channels = 3
        for entry in VGG16_CHANNELS:
            if entry == "pool":
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(channels, entry, 3, padding=1), nn.ReLU()]
            channels = entry
        layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(512 * 49, 4096), nn.ReLU()]
        layers += [nn.Identity(), nn.Linear(4096, 4096), nn.ReLU(), nn.Identity()]
        return nn.Sequential(*layers, nn.Linear(4096, num_classes))
