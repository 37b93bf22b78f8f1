"""Answers to ``check.pipeline.step``: a stage's part of a training step, by any stream."""

import torch
from graded import Answers, ends
from torch.nn import functional

from labkit.schedules.pipeline import Action, Hop
from labkit.strategies.hops import run_hop
from workbook import check


def step(comm, layers, stream, micro_batches, weighs=True, tracks=True):
    """The step of the solution."""
    first, last = comm.rank == 0, comm.rank == comm.world_size - 1
    entered = {m: part[0] for m, part in enumerate(micro_batches) if first}
    left, came = {}, {}
    for one in stream:
        if isinstance(one, Hop):
            outgoing = into = None
            if one.send:
                m, is_gradient = one.send.micro_batch, one.send.kind == "gradient"
                outgoing = entered[m].grad if is_gradient else left[m]
            if one.recv:
                m, is_gradient = one.recv.micro_batch, one.recv.kind == "gradient"
                into = torch.empty_like(micro_batches[m][0])
                (came if is_gradient else entered)[m] = into
            run_hop(comm, one, outgoing, into)
        elif one.kind == "forward":
            m = one.micro_batch
            left[m] = layers(entered[m].requires_grad_(tracks and not first))
            if last:
                targets, weight = micro_batches[m][1:]
                loss = functional.cross_entropy(left[m], targets)
                left[m] = weight * loss if weighs else loss
        else:
            left[one.micro_batch].backward(came.get(one.micro_batch))


def clears_first(comm, layers, stream, micro_batches):
    layers.zero_grad(set_to_none=False)
    step(comm, layers, stream, micro_batches)


def all_at_once(comm, layers, stream, micro_batches):
    """Right gradients from the whole batch at once, without micro-batches."""
    inputs, targets = (torch.cat([part[k] for part in micro_batches]) for k in (0, 1))
    if comm.rank:
        inputs = comm.recv(torch.empty_like(inputs), comm.rank - 1).requires_grad_()
    leaving, gradient = layers(inputs), None
    if comm.rank == comm.world_size - 1:
        leaving = functional.cross_entropy(leaving, targets)
    else:
        comm.send(leaving.detach(), comm.rank + 1)
        gradient = comm.recv(torch.empty_like(leaving), comm.rank + 1)
    leaving.backward(gradient)
    if comm.rank:
        comm.send(inputs.grad, comm.rank - 1)


def does_not_weigh(comm, layers, stream, micro_batches):
    step(comm, layers, stream, micro_batches, weighs=False)


def asks_for_no_gradient(comm, layers, stream, micro_batches):
    """What comes in does not require a gradient, so there is none to send back."""
    step(comm, layers, stream, micro_batches, tracks=False)


def forwards_first(comm, layers, stream, micro_batches):
    """Runs GPipe's order on any stream of two messages a micro-batch that never meet."""
    order = sorted(stream, key=lambda one: isinstance(one, Action) and one.kind == "backward")
    step(comm, layers, order, micro_batches)


ANSWERS = [
    Answers(
        check.pipeline.step,
        [clears_first],
        [does_not_weigh, all_at_once, ends(forwards_first), ends(asks_for_no_gradient)],
    )
]
