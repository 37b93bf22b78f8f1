"""Answers to ``check.hops``: the forward and the backward of one stage."""

import copy
from functools import partial

import torch
from graded import Answers
from ranks import travel_by_value

from workbook import check

travel_by_value(__name__)


def forward(comm, layers, inputs, received=torch.Tensor.requires_grad_, run=lambda f, e, x: f(e)):
    entering = inputs
    if comm.rank > 0:
        entering = received(comm.recv(torch.empty_like(inputs), comm.rank - 1))
    leaving = run(layers, entering, inputs)
    if comm.rank < comm.world_size - 1:
        comm.send(leaving, comm.rank + 1)
    return entering, leaving


def yields_both(comm, layers, inputs):
    yield from forward(comm, layers, inputs, lambda tensor: tensor.clone().requires_grad_())


def backward(comm, entering, leaving, sent=lambda entering: entering.grad):
    gradient = None
    if comm.rank < comm.world_size - 1:
        gradient = comm.recv(torch.empty_like(leaving), comm.rank + 1)
    leaving.backward(gradient, retain_graph=True)
    if comm.rank > 0:
        comm.send(sent(entering), comm.rank - 1)


ANSWERS = [
    Answers(
        check.hops.forward,
        [yields_both],
        [
            partial(forward, received=lambda tensor: tensor),
            partial(forward, run=lambda f, e, x: f(x)),
            # The values are right, but the stage's own parameters are in no graph.
            partial(forward, run=lambda f, e, x: copy.deepcopy(f)(e)),
        ],
    ),
    Answers(
        check.hops.backward,
        [backward],
        [
            partial(backward, sent=lambda entering: entering.grad.half().float()),
            partial(backward, sent=lambda entering: entering.grad / 3),
            partial(backward, sent=lambda entering: entering.detach()),
        ],
    ),
]
