"""Answers to ``check.hops``: the forward and the backward of one stage."""

import copy

import torch
from graded import Answers, ends
from torch.nn import functional

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


def branches(comm, tower, head, inputs, targets, first=False, whole=False, scale=1):
    """The join is a leaf; ``first`` receives first, ``whole`` goes through tower 0 at once."""
    others = range(1, comm.world_size)
    if comm.rank:
        leaving = tower(inputs)
        comm.send(leaving, 0)
        leaving.backward(comm.recv(torch.empty_like(leaving), 0))
        return
    came = [torch.empty_like(inputs) for _ in others]
    if first:
        [comm.recv(one, rank) for one, rank in zip(came, others)]
    leaving = tower(inputs)
    if not first:
        [comm.recv(one, rank) for one, rank in zip(came, others)]
    came = [one.requires_grad_() for one in came]
    mine = leaving if whole else leaving.detach().requires_grad_()
    loss = functional.cross_entropy(head(torch.stack([mine, *came]).sum(0)), targets)
    loss.backward()
    for one, rank in zip(came, others):
        comm.send(one.grad * scale, rank)
    if not whole:
        leaving.backward(mine.grad)


def takes_turns(*args):
    branches(*args, first=True)


def backward_at_once(*args):
    branches(*args, whole=True)


def averages_towers(*args):
    branches(*args, scale=0.5)


ANSWERS = [
    Answers(
        check.hops.branches,
        [branches],
        [takes_turns, backward_at_once, averages_towers],
    ),
    Answers(
        check.hops.forward,
        [yields_both],
        [runs_a_copy, runs_on_its_own_inputs, sends_something_else],
    ),
    Answers(check.hops.backward, [backward], [at_half_precision, ends(to_the_first_stage)]),
]
