"""Answers to ``check.hops``: the forward and the backward of one stage."""

import copy

import torch
from graded import Answers, ends

from workbook import check


def forward(comm, layers, inputs, run=lambda layers, entering, inputs: layers(entering)):
    entering = inputs
    if comm.rank:
        entering = comm.recv(torch.empty_like(inputs), comm.rank - 1).requires_grad_()
    leaving = run(layers, entering, inputs)
    if comm.rank < comm.world_size - 1:
        comm.send(leaving, comm.rank + 1)
    return entering, leaving


def yields_both(comm, layers, inputs):
    yield from forward(comm, layers, inputs)


def runs_a_copy(comm, layers, inputs):
    """The values are right, but the stage's own parameters are in no graph."""
    return forward(comm, copy.deepcopy(layers), inputs)


def runs_on_its_own_inputs(comm, layers, inputs):
    return forward(comm, layers, inputs, lambda layers, entering, inputs: layers(inputs))


def sends_something_else(comm, layers, inputs):
    return forward(comm, layers, inputs, lambda layers, entering, inputs: layers(entering).cos())


def backward(comm, entering, leaving, change=lambda gradient: gradient, to=None):
    gradient = None
    if comm.rank < comm.world_size - 1:
        gradient = comm.recv(torch.empty_like(leaving), comm.rank + 1)
    leaving.backward(gradient, retain_graph=True)
    if comm.rank:
        comm.send(change(entering.grad), comm.rank - 1 if to is None else to)


def at_half_precision(comm, entering, leaving):
    backward(comm, entering, leaving, lambda gradient: gradient.half().float())


def to_the_first_stage(comm, entering, leaving):
    backward(comm, entering, leaving, to=0)


ANSWERS = [
    Answers(
        check.hops.forward,
        [yields_both],
        [runs_a_copy, runs_on_its_own_inputs, sends_something_else],
    ),
    Answers(check.hops.backward, [backward], [at_half_precision, ends(to_the_first_stage)]),
]
