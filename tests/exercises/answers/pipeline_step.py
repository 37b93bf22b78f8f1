"""Answers to ``check.pipeline.step``: a stage's part of a training step, by any stream."""

import torch
from graded import Answers, ends
from ranks import travel_by_value
from torch.nn import functional

from labkit.schedules.pipeline import Action, Hop
from labkit.strategies.stage import carry_out
from workbook import check

travel_by_value(__name__)


def is_last(comm):
    return comm.rank == comm.world_size - 1


def loss_of(outputs, targets, weight):
    return weight * functional.cross_entropy(outputs, targets)


def variant(
    loss=loss_of,
    carry=carry_out,
    sent=lambda leaving: leaving.detach(),
    before_backward=lambda layers: None,
    stream_of=lambda stream: stream,
    landing=torch.empty_like,
    begin=lambda gradient: gradient,
):
    """The step of the solution; each option changes a part of it."""

    def fn(comm, layers, stream, micro_batches):
        first, last = comm.rank == 0, is_last(comm)
        entered = {m: part[0] for m, part in enumerate(micro_batches) if first}
        left, came = {}, {}
        for one in stream_of(stream):
            if isinstance(one, Hop):
                outgoing = into = None
                if one.send:
                    m, is_gradient = one.send.micro_batch, one.send.kind == "gradient"
                    outgoing = entered[m].grad if is_gradient else sent(left[m])
                if one.recv:
                    m, is_gradient = one.recv.micro_batch, one.recv.kind == "gradient"
                    into = (came if is_gradient else entered)[m] = landing(micro_batches[m][0])
                carry(comm, one, outgoing, into)
            elif one.kind == "forward":
                m = one.micro_batch
                left[m] = layers(entered[m].requires_grad_(not first))
                if last:
                    left[m] = loss(left[m], *micro_batches[m][1:])
            else:
                before_backward(layers)
                left[one.micro_batch].backward(begin(came.get(one.micro_batch)))

    return fn


def clears_first(comm, layers, stream, micro_batches):
    layers.zero_grad(set_to_none=False)
    return variant(sent=lambda leaving: leaving)(comm, layers, stream, micro_batches)


def all_at_once(comm, layers, stream, micro_batches):
    """Right gradients from the whole batch at once, without micro-batches."""
    inputs, targets = (torch.cat([part[k] for part in micro_batches]) for k in (0, 1))
    if comm.rank:
        inputs = comm.recv(torch.empty_like(inputs), comm.rank - 1).requires_grad_()
    leaving, gradient = layers(inputs), None
    if is_last(comm):
        leaving = functional.cross_entropy(leaving, targets)
    else:
        comm.send(leaving.detach(), comm.rank + 1)
        gradient = comm.recv(torch.empty_like(leaving), comm.rank + 1)
    leaving.backward(gradient)
    if comm.rank:
        comm.send(inputs.grad, comm.rank - 1)


def forwards_first(stream):
    """Runs GPipe's order on any stream of two messages a micro-batch that never meet."""
    return sorted(stream, key=lambda one: isinstance(one, Action) and one.kind == "backward")


ANSWERS = [
    Answers(
        check.pipeline.step,
        [clears_first],
        [
            variant(loss=lambda out, targets, weight: loss_of(out, targets, 1)),
            all_at_once,
            ends(variant(stream_of=forwards_first)),
        ],
    ),
]
