"""A model as a chain of layers: the list of its layers in the order in which they run.

An ``nn.Sequential`` is such a list. Any other model is one if its forward is: ``traced``.
"""

from torch import nn

from labkit.workload.traced import NotTraceableError, is_from_torch, segments_of


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model in the order in which they run.

    A nested ``nn.Sequential`` is replaced by its layers, unless it has hooks: then it stays one
    layer, so that its hooks run. A model that is not an ``nn.Sequential`` is cut wherever only one
    tensor crosses in its forward, which torch.fx traces. Its parts stay one layer each, except
    those that are chains themselves: a residual block is one layer.

    Raises:
        ValueError: a model that is not a chain of layers, has none, or has hooks as a whole.
    """
    return [layer for _, layer in named_layers(model)]


def named_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """``layers_of``, each with the prefix of its parameters' names in the model.

    This is ``"0"``, or ``"0.1"`` in a nested one, and empty for a layer that is made of several
    operations of the model's own forward: its parameters have their full names already.

    Raises:
        ValueError: as ``layers_of``.
    """
    if _has_hooks(model):
        raise ValueError(
            f"hooks on this {type(model).__name__} would not run, because its layers run one by "
            "one: register them on its layers"
        )
    if not _is_sequential(model):
        return _traced(model)
    # named_children() would leave out repetitions of a layer.
    children = [(name, model.get_submodule(name)) for name in model._modules]
    found = [layer for name, child in children for layer in _opened(name, child)]
    if not found:
        raise ValueError("this nn.Sequential has no layers: there is nothing to place")
    return found


def state_key(prefix: str, key: str) -> str:
    """The name in the model of the parameter ``key`` of a layer, see ``named_layers``."""
    return ".".join(filter(None, (prefix, key)))


def _opened(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of a nested ``nn.Sequential``; any other module is one layer."""
    if not _is_sequential(module) or not module._modules or _has_hooks(module):
        return [(name, module)]
    return [(state_key(name, inner), layer) for inner, layer in named_layers(module)]


def _traced(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of a model whose forward is a chain.

    Raises:
        ValueError: it is not; the message says why, and what to do.
    """
    try:
        found = _open_segments(model)
        why = "in its forward, no single tensor crosses from one part to the next"
    except NotTraceableError as error:
        found, why = [], str(error)
    if len(found) < 2:
        raise ValueError(
            f"{type(model).__name__} cannot be cut into layers: {why}. Give the model as a list "
            "of layers, or as nn.Sequential, each of which takes one tensor and returns one; a "
            "block with a skip connection is one layer"
        )
    return found


def _open_segments(model: nn.Module) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    segments = segments_of(model)
    for segment in segments:
        opened = _opened(segment.name, segment.layer)
        if len(opened) == 1 and segment.name:
            opened = _opened_chain(segment.name, segment.layer, is_all=len(segments) == 1)
        found += opened
    return found


def _opened_chain(name: str, module: nn.Module, is_all: bool) -> list[tuple[str, nn.Module]]:
    """The layers of a part that is a pure chain, such as a backbone; any other is one layer.

    A part that is all of the model (``is_all``) need not be pure.
    """
    if is_from_torch(module) or _is_sequential(module) or _has_hooks(module):
        return [(name, module)]
    try:
        # A block in which a value passes by a module, such as a residual block, stays whole.
        blocks = [segment for segment in segments_of(module) if segment.calls and not segment.name]
        if blocks and not is_all:
            return [(name, module)]
        return [(state_key(name, inner), layer) for inner, layer in _open_segments(module)]
    except NotTraceableError:
        return [(name, module)]


def _is_sequential(module: nn.Module) -> bool:
    # A subclass that overrides forward may do anything between the layers.
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _has_hooks(module: nn.Module) -> bool:
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    return any(getattr(module, f"_{kind}_hooks") for kind in kinds)
