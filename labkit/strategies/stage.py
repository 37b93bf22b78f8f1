"""One stage of a model: its layers, their forward and backward, and what is kept in between.

Autograd sees no messages: the graph of a micro-batch begins with a leaf, the tensor that enters
the stage, and ends with a tensor whose gradient is passed to backward.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from labkit.engine.comm.comm import Comm
from labkit.strategies.layer_graphs import LayerGraphs
from labkit.strategies.precision import Precision
from labkit.strategies.recompute import ForwardState
from labkit.workload.layers import HeldBytes, NonLeaf


class ActivationMeter:
    """Measures ``peak_bytes``, the most bytes that a rank keeps for backwards at one time.

    They are counted by stage and micro-batch, the ``key``. The parameters and buffers of
    ``module`` do not count. When ``is_on`` is False nothing is counted, and the peak stays.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self.is_on = True
        self.peak_bytes = 0
        self.counters: dict[tuple[int, int], Any] = {}

    def counting(self) -> Any:
        """A context in which a ``HeldBytes`` counts what forwards keep; None if it is off."""
        if self.is_on:
            return HeldBytes(self.module)
        return contextlib.nullcontext()

    def add(self, key: tuple[int, int], counter: Any) -> None:
        """Count the ``num_bytes`` of a ``HeldBytes`` or ``LayerGraphs`` until ``remove``."""
        if self.is_on:
            self.counters[key] = counter

    def remove(self, key: tuple[int, int]) -> None:
        """Stop counting what a backward has freed."""
        self.counters.pop(key, None)

    def note_peak(self) -> None:
        """Compare what is kept now with the peak so far."""
        if self.is_on:
            live_bytes = sum(counter.num_bytes for counter in self.counters.values())
            self.peak_bytes = max(self.peak_bytes, live_bytes)


@dataclass(eq=False, kw_only=True)
class Stage:
    """The layers of stage ``index``, and the tensors kept for backward, by micro-batch.

    With ``recompute`` (activation checkpointing; Chen et al., "Training deep nets with sublinear
    memory cost", 2016, section 4) a forward keeps the stage's input alone (and copies of its
    buffers), and backward begins with the same forward again: see ``ForwardState``.

    Args:
        loss_fn: (outputs, targets) -> the loss that backward begins with, on the last stage.
        has_backward: whether this stage or one before it is trained.
        returns_gradient: whether a stage before it is trained, and waits for a gradient.
        cuts_backward: whether backwards may be cut in two, which takes a graph for each layer.

    Attributes:
        entering, leaving: the layers' inputs and outputs, of the last stage the loss.
    """

    layers: nn.Sequential
    index: int
    comm: Comm
    precision: Precision
    meter: ActivationMeter
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    is_last: bool
    has_backward: bool
    returns_gradient: bool
    cuts_backward: bool
    recompute: bool

    def start_step(self, targets: Sequence[Tensor]) -> None:
        """Forget all micro-batches of the step before; ``targets`` are those of the next ones."""
        self.targets = targets
        self.entering: dict[int, Tensor] = {}
        self.leaving: dict[int, Tensor] = {}
        self.graphs: dict[int, LayerGraphs] = {}
        self.states: dict[int, ForwardState] = {}

    def run(self, inputs: Tensor) -> Tensor:
        """The layers' output, in the dtype in which it crosses a cut or enters the loss."""
        with self.precision.autocast(self.comm.device):
            outputs = self.layers(NonLeaf.apply(inputs))
        return self._as_output(outputs)

    def _as_output(self, outputs: Tensor) -> Tensor:
        if self.is_last:
            return self.precision.wide(outputs)
        return outputs.to(self.precision.crossing_dtype(outputs.dtype))

    def forward(self, micro_batch: int, entering: Tensor) -> Tensor:
        """Run the layers, and on the last stage the loss; returns what leaves, detached."""
        with self.comm.span("forward"):
            # A leaf, which collects a gradient if one has to be sent back.
            entering.requires_grad_(self.returns_gradient)
            self.entering[micro_batch] = entering
            if self.recompute and self.has_backward:
                leaving = self._forward_without_graph(micro_batch)
            else:
                leaving = self._forward_with_graph(micro_batch)
        self.meter.note_peak()
        if not self.has_backward:
            # Nothing that a frozen stage was given or made is needed again.
            del self.entering[micro_batch]
            del self.leaving[micro_batch]
        return leaving.detach()

    def _forward_without_graph(self, micro_batch: int) -> Tensor:
        entering = self.entering[micro_batch]
        state = ForwardState(self.layers, self.comm.device)
        self.states[micro_batch] = state
        # A copy, because the first layer may work in place.
        with torch.no_grad(), self.meter.counting() as counter:
            leaving = self.run(entering.clone())
        if counter:
            counter.keep(entering)
            for _, _, copied in state.buffers:
                counter.keep(copied)
        self.meter.add((self.index, micro_batch), counter)
        return leaving

    def _forward_with_graph(self, micro_batch: int) -> Tensor:
        """Return what backward begins with: the layers' output, on the last stage the loss."""
        if self.cuts_backward and self.has_backward:
            leaving = self._forward_by_layer(micro_batch)
        else:
            with self.meter.counting() as counter:
                leaving = self.run(self.entering[micro_batch])
                if self.is_last:
                    leaving = self.loss_fn(leaving, self.targets[micro_batch])
            self.meter.add((self.index, micro_batch), counter)
        self.leaving[micro_batch] = leaving
        return leaving

    def _forward_by_layer(self, micro_batch: int) -> Tensor:
        """Do the same with a graph for each layer, so that backward can be cut in two."""
        graphs = LayerGraphs(self.entering[micro_batch], self.meter.counting)
        self.graphs[micro_batch] = graphs
        self.meter.add((self.index, micro_batch), graphs)
        with self.precision.autocast(self.comm.device):
            for layer in self.layers:
                graphs.add(layer)
        graphs.add(self._as_output)
        if self.is_last:
            graphs.add(lambda outputs: self.loss_fn(outputs, self.targets[micro_batch]))
        return graphs.leaving

    def backward(
        self, micro_batch: int, gradient: Tensor | None, kind: str = "backward"
    ) -> Tensor | None:
        """Compute the gradient of the stage's input from the ``gradient`` of its output.

        On the last stage the latter is None. Kind ``backward`` also computes the gradients of the
        weights, ``backward_input`` leaves them to ``backward_weight``.
        """
        with self.comm.span(kind):
            if self.recompute:
                with self.states.pop(micro_batch).restored():
                    self._forward_with_graph(micro_batch)
                self.meter.note_peak()
            entering = self.entering.pop(micro_batch)
            leaving = self.leaving.pop(micro_batch)
            if self.cuts_backward:
                input_gradient = self.graphs[micro_batch].backward_input(gradient)
                self.meter.note_peak()
                if kind == "backward":
                    self._finish_weights(micro_batch)
                return input_gradient
            if leaving.requires_grad:
                torch.autograd.backward(leaving, gradient)
            self.meter.remove((self.index, micro_batch))
            return entering.grad

    def backward_weight(self, micro_batch: int) -> None:
        """Compute the gradients of the weights, the second half of ``backward``."""
        with self.comm.span("backward_weight"):
            self._finish_weights(micro_batch)

    def _finish_weights(self, micro_batch: int) -> None:
        self.graphs.pop(micro_batch).backward_weight()
        self.meter.remove((self.index, micro_batch))
