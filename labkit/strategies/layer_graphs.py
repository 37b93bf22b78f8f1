"""A forward with a graph for each layer, so that its backward can be cut into two halves.

For the gradient of a stage's input (B) the stage before waits, for those of the weights (W) only
the update does. So B goes from the last layer to the first, and leaves with each layer that has
weights the gradient of its output; from there W goes into the weights later. (What is inside one
layer, such as a transformer block, is gone through twice.) A graph holds what its operations keep,
not the layer's output.

Source: Qi et al., "Zero bubble pipeline parallelism" (2023), section 2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from labkit.workload.layers import HeldBytes


@dataclass(eq=False)
class _Graph:
    """The autograd graph of one layer.

    Attributes:
        begin, end: the edges where the layer's input and output are; None where no gradient goes.
        trained, gradient: what W needs: the weights, and the gradient of the layer's output.
        held: the ``HeldBytes`` of what the graph keeps, or None.
    """

    begin: Any
    end: Any
    trained: list[nn.Parameter]
    held: Any
    gradient: Tensor | None = None


class LayerGraphs:
    """One micro-batch on its way through a stage: first ``entering`` [n, ...], then ``leaving``.

    ``measured`` makes the context of a layer's forward: a ``HeldBytes``, where they are counted.
    """

    def __init__(self, entering: Tensor, measured: Callable[[], Any]):
        self.leaving = entering
        self._measured = measured
        self._graphs: list[_Graph] = []

    @property
    def num_bytes(self) -> int:
        """The bytes that the layers keep for B or W now."""
        return HeldBytes.together(graph.held for graph in self._graphs)

    def add(self, layer: Callable[[Tensor], Tensor]) -> None:
        """Run the next layer, or a function without weights."""
        anchor = torch.empty(0, requires_grad=self.leaving.requires_grad)
        begin = _Begin.apply(self.leaving.detach(), anchor)
        # Before a layer works in place on the tensor, which changes where its gradient goes.
        first_edge = _edge(begin)
        with self._measured() as held:
            self.leaving = layer(begin)
        trained = []
        if isinstance(layer, nn.Module):
            trained = [weight for weight in layer.parameters() if weight.requires_grad]
        self._graphs.append(_Graph(first_edge, _edge(self.leaving), trained, held))

    def backward_input(self, gradient: Tensor | None) -> Tensor | None:
        """B: the gradient of the stage's input (or None) from that of its output (None: loss)."""
        if gradient is None:
            gradient = torch.ones_like(self.leaving)
        del self.leaving
        waiting = []
        for graph in reversed(self._graphs):
            if graph.end is None:
                gradient = None
                break
            if gradient is None:
                break
            if graph.trained:
                graph.gradient = gradient
                waiting.append(graph)
                if graph.held:
                    graph.held.keep(gradient)
            if graph.begin is None:
                gradient = None
                continue
            (gradient,) = torch.autograd.grad(
                graph.end,
                graph.begin,
                gradient,
                retain_graph=bool(graph.trained),
                allow_unused=True,
            )
        self._graphs = waiting
        return gradient

    def backward_weight(self) -> None:
        """W: add the gradients of the weights to their ``grad``."""
        for graph in self._graphs:
            torch.autograd.backward(graph.end, graph.gradient, inputs=graph.trained)
        self._graphs.clear()


class _Begin(torch.autograd.Function):
    """The first tensor of a graph: ``value``, which the graph does not hold as it would a leaf."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        return value.detach()


def _edge(tensor: Tensor) -> Any:
    return get_gradient_edge(tensor) if tensor.requires_grad else None
