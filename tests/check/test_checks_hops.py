"""The checks of a stage's hops: each accepts its solution, and names wrong answers."""

from functools import partial

import pytest
import torch
from graded import in_shared_runs
from ranks import travel_by_value

from labkit import check

travel_by_value(__name__)


def told(verdict, capsys):
    capsys.readouterr()
    assert not verdict
    return " ".join(verdict.notes)


def is_last(comm):
    return comm.rank == comm.world_size - 1


# Forward


def forward(comm, layers, inputs):
    entering = inputs
    if comm.rank > 0:
        entering = comm.recv(torch.empty_like(inputs), comm.rank - 1).requires_grad_()
    leaving = layers(entering)
    if not is_last(comm):
        comm.send(leaving, comm.rank + 1)
    return entering, leaving


def variant(
    received=lambda tensor: tensor.requires_grad_(),
    run=lambda layers, entering, inputs: layers(entering),
    sent=lambda entering, leaving: leaving,
    kept=lambda entering, leaving: (entering, leaving),
):
    """``forward`` with one part of it changed."""

    def fn(comm, layers, inputs):
        entering = inputs
        if comm.rank > 0:
            entering = received(comm.recv(torch.empty_like(inputs), comm.rank - 1))
        leaving = run(layers, entering, inputs)
        if not is_last(comm):
            comm.send(sent(entering, leaving), comm.rank + 1)
        return kept(entering, leaving)

    return fn


def without_graph(comm, layers, inputs):
    with torch.no_grad():
        return forward(comm, layers, inputs)


def asks_too_late(comm, layers, inputs):
    entering, leaving = variant(received=lambda tensor: tensor)(comm, layers, inputs)
    return entering.requires_grad_(), leaving


def runs_twice(layers, entering, inputs):
    layers(entering)
    return layers(entering)


def sends_before_it_runs(comm, layers, inputs):
    entering, leaving = inputs, torch.zeros_like(inputs)
    if not is_last(comm):
        comm.send(leaving, comm.rank + 1)
    if comm.rank > 0:
        entering = comm.recv(torch.empty_like(inputs), comm.rank - 1).requires_grad_()
    return entering, layers(entering)


def in_a_circle(comm, layers, inputs):
    entering = comm.recv(torch.empty_like(inputs), (comm.rank - 1) % comm.world_size)
    leaving = layers(entering.requires_grad_())
    comm.send(leaving, (comm.rank + 1) % comm.world_size)
    return entering, leaving


def all_receive(comm, layers, inputs):
    entering = comm.recv(torch.empty_like(inputs), comm.rank - 1).requires_grad_()
    return entering, layers(entering)


def sends_nothing(comm, layers, inputs):
    entering = inputs
    if comm.rank > 0:
        entering = comm.recv(torch.empty_like(inputs), comm.rank - 1).requires_grad_()
    return entering, layers(entering)


def tells_all_behind(comm, layers, inputs):
    entering, leaving = inputs, None
    for rank in range(comm.rank):
        entering = comm.recv(torch.empty_like(inputs), rank).requires_grad_()
    leaving = layers(entering)
    for rank in range(comm.rank + 1, comm.world_size):
        comm.send(leaving, rank)
    return entering, leaving


WRONG_FORWARDS = [
    (variant(received=lambda t: t), "entering asks for no gradient"),
    (variant(received=lambda t: t.requires_grad_().clone()), "entering is no leaf"),
    (variant(kept=lambda e, v: (e, v.detach())), "leaving has no graph behind it"),
    (without_graph, "was it computed under no_grad?"),
    (asks_too_late, "the layers ran before it asked"),
    (variant(run=lambda f, e, x: f(e.detach())), "ran on another tensor"),
    (variant(sent=lambda e, v: e), "is what had entered stage 0, too"),
    (variant(run=lambda f, e, x: f(x)), "is made of inputs, which enter stage 0 alone"),
    (variant(run=lambda f, e, x: e * 1), "the layers did not run"),
    (variant(run=runs_twice), "its layers ran 2 times"),
    (variant(kept=lambda e, v: (v, v)), "return what went into them first"),
    (variant(kept=lambda e, v: v), "something else than (entering, leaving)"),
    (sends_before_it_runs, "was it sent before the layers had run?"),
    (tells_all_behind, "2 1 0, where 1 1 0 is the target"),
]
BROKEN_FORWARDS = [
    (in_a_circle, "rank 0 -> rank 2 -> rank 1 -> rank 0, each waits for the next"),
    (all_receive, "rank 0 cannot receive from rank -1"),
    (sends_nothing, "has returned and never came"),
]


# Backward


def backward(comm, entering, leaving):
    gradient = None
    if not is_last(comm):
        gradient = comm.recv(torch.empty_like(leaving), comm.rank + 1)
    leaving.backward(gradient)
    if comm.rank > 0:
        comm.send(entering.grad, comm.rank - 1)


def way_back(
    begin=lambda leaving, gradient: gradient, sent=lambda entering, gradient, comm: entering.grad
):
    """``backward`` with one part of it changed."""

    def fn(comm, entering, leaving):
        gradient = None
        if not is_last(comm):
            gradient = comm.recv(torch.empty_like(leaving), comm.rank + 1)
        leaving.backward(begin(leaving, gradient))
        if comm.rank > 0:
            comm.send(sent(entering, gradient, comm), comm.rank - 1)

    return fn


def stores_nothing(comm, entering, leaving):
    gradient = None
    if not is_last(comm):
        gradient = comm.recv(torch.empty_like(leaving), comm.rank + 1)
    if comm.rank > 0:
        (back,) = torch.autograd.grad(leaving, entering, gradient)
        comm.send(back, comm.rank - 1)


def runs_backward_twice(comm, entering, leaving):
    gradient = None
    if not is_last(comm):
        gradient = comm.recv(torch.empty_like(leaving), comm.rank + 1)
    leaving.backward(gradient, retain_graph=True)
    leaving.backward(gradient)
    if comm.rank > 0:
        comm.send(entering.grad, comm.rank - 1)


def to_the_next(comm, entering, leaving):
    gradient = None
    if comm.rank > 0:
        gradient = comm.recv(torch.empty_like(entering), comm.rank - 1)
    leaving.backward(gradient)
    if not is_last(comm):
        comm.send(entering.grad, comm.rank + 1)


def keeps_it(comm, entering, leaving):
    gradient = None
    if not is_last(comm):
        gradient = comm.recv(torch.empty_like(leaving), comm.rank + 1)
    leaving.backward(gradient)


def without_the_gradient(comm, entering, leaving):
    leaving.backward()


def to_the_first(comm, entering, leaving):
    gradient = None
    if not is_last(comm):
        gradient = comm.recv(torch.empty_like(leaving), comm.rank + 1)
    leaving.backward(gradient)
    if comm.rank > 0:
        comm.send(entering.grad, 0)


WRONG_BACKWARDS = [
    (
        way_back(begin=lambda v, g: torch.ones_like(v)),
        "backward began with ones",
    ),
    (way_back(sent=lambda e, g, comm: e.grad if g is None else g), "passes on the gradient"),
    (way_back(sent=lambda e, g, comm: e), "the activation went back"),
    (
        way_back(sent=lambda e, g, comm: e.grad if g is None else e.grad + g),
        "has it in already",
    ),
    (way_back(sent=lambda e, g, comm: e.grad / comm.world_size), "nothing is averaged"),
    (runs_backward_twice, "backward ran twice"),
    (way_back(sent=lambda e, g, comm: e.grad.zero_()), "what went back is all zeros"),
]
BROKEN_BACKWARDS = [
    (stores_nothing, "torch.autograd.grad returns gradients and stores none"),
    (to_the_next, "grad can be implicitly created only for scalar outputs"),
    (keeps_it, "has returned and never came"),
    (without_the_gradient, "grad can be implicitly created only for scalar outputs"),
    (to_the_first, "rank 1 to send"),
]


WRONG = {check.hops.forward: WRONG_FORWARDS, check.hops.backward: WRONG_BACKWARDS}
# What raises or stands still ends its run; all others share one.
BROKEN = {check.hops.forward: BROKEN_FORWARDS, check.hops.backward: BROKEN_BACKWARDS}
RIGHT = [
    (check.hops.forward, forward),
    (check.hops.forward, variant(sent=lambda e, v: v.detach(), kept=lambda e, v: [e, v])),
    (check.hops.backward, backward),
]


def listed(answers):
    return [(checker, *case) for checker, cases in answers.items() for case in cases]


@pytest.fixture(scope="module")
def verdicts():
    """By answer and world size: what one run for each world size finds out."""
    answers = [(*pair, size) for pair in RIGHT for size in (2, 3, 4)]
    answers += [(checker, fn, 3) for checker, fn, _ in listed(WRONG)]
    return in_shared_runs(
        {(fn, size): partial(checker, fn, world_sizes=(size,)) for checker, fn, size in answers}
    )


@pytest.mark.parametrize(("checker", "right"), RIGHT)
def test_a_right_hop_passes(checker, right, verdicts):
    for world_size in (2, 3, 4):
        verdict = verdicts[right, world_size]
        assert verdict.passed, verdict
        middle = " 1" * (world_size - 2)
        counted = f"1{middle} 0" if checker is check.hops.forward else f"0{middle} 1"
        assert verdict.rows["messages"] == [counted]


@pytest.mark.parametrize(("checker", "wrong", "sentence"), listed(WRONG))
def test_a_wrong_hop_is_named(checker, wrong, sentence, verdicts, capsys):
    assert sentence in told(verdicts[wrong, 3], capsys)


@pytest.mark.parametrize(("checker", "wrong", "sentence"), listed(BROKEN))
def test_a_broken_hop_is_named(checker, wrong, sentence, capsys):
    assert sentence in told(checker(wrong, world_sizes=(3,)), capsys)
