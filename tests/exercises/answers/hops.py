"""Answers to ``check.hops``: the forward and the backward of one stage."""

import torch
from graded import Answers, ends
from ranks import travel_by_value

from workbook import check

travel_by_value(__name__)


def is_last(comm):
    return comm.rank == comm.world_size - 1


# Forward


def variant(
    received=lambda tensor: tensor.requires_grad_(),
    run=lambda layers, entering, inputs: layers(entering),
    sent=lambda entering, leaving: leaving,
    kept=lambda entering, leaving: (entering, leaving),
    receives=lambda comm: comm.rank > 0,
    sends=lambda comm: not is_last(comm),
):
    """A stage's forward; each option changes a part of it."""

    def fn(comm, layers, inputs):
        entering = inputs
        if receives(comm):
            source = (comm.rank - 1) % comm.world_size
            entering = received(comm.recv(torch.empty_like(inputs), source))
        leaving = run(layers, entering, inputs)
        if sends(comm):
            comm.send(sent(entering, leaving), (comm.rank + 1) % comm.world_size)
        return kept(entering, leaving)

    return fn


def yields_both(comm, layers, inputs):
    yield from variant(received=lambda t: t.clone().requires_grad_())(comm, layers, inputs)


def runs_a_copy(comm, layers, inputs):
    """The values are right, but the stage's own parameters are in no graph."""
    import copy

    return variant()(comm, copy.deepcopy(layers), inputs)


# Backward


def way_back(
    begin=lambda leaving, gradient: gradient,
    run=lambda leaving, gradient: leaving.backward(gradient),
    sent=lambda entering, gradient, comm: entering.grad,
    to=lambda comm: comm.rank - 1,
):
    """A stage's backward; each option changes a part of it."""

    def fn(comm, entering, leaving):
        gradient = None
        if not is_last(comm):
            gradient = comm.recv(torch.empty_like(leaving), comm.rank + 1)
        run(leaving, begin(leaving, gradient))
        if comm.rank > 0 and to:
            comm.send(sent(entering, gradient, comm), to(comm))

    return fn


def keeps_the_graph(comm, entering, leaving):
    way_back(run=lambda v, g: v.backward(g, retain_graph=True))(comm, entering, leaving)


def at_half_precision(comm, entering, leaving):
    way_back(sent=lambda e, g, comm: e.grad.half().float())(comm, entering, leaving)


ANSWERS = [
    Answers(
        check.hops.forward,
        [yields_both],
        [runs_a_copy, variant(run=lambda f, e, x: f(x)), variant(run=lambda f, e, x: f(e).cos())],
    ),
    Answers(
        check.hops.backward,
        [keeps_the_graph],
        [
            at_half_precision,
            way_back(sent=lambda e, g, comm: e.grad / comm.world_size),
            ends(way_back(to=lambda comm: 0)),
        ],
    ),
]
