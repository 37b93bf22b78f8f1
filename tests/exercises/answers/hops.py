"""Answers to ``check.hops``: the forward and the backward of one stage."""

from collections import namedtuple

import torch
from graded import Answers
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


def always(comm):
    return True


def never(comm):
    return False


def without_graph(comm, layers, inputs):
    with torch.no_grad():
        return variant()(comm, layers, inputs)


def asks_too_late(comm, layers, inputs):
    entering, leaving = variant(received=lambda tensor: tensor)(comm, layers, inputs)
    return entering.requires_grad_(), leaving


def runs_twice(layers, entering, inputs):
    layers(entering)
    return layers(entering)


def runs_on_inputs(comm, layers, inputs):
    """What comes goes into a buffer that nobody reads."""
    if comm.rank > 0:
        comm.recv(torch.empty_like(inputs), comm.rank - 1)
        inputs.requires_grad_()
    leaving = layers(inputs)
    if not is_last(comm):
        comm.send(leaving, comm.rank + 1)
    return inputs, leaving


def receives_into_inputs(comm, layers, inputs):
    if comm.rank > 0:
        comm.recv(inputs, comm.rank - 1)
        inputs.requires_grad_()
    leaving = layers(inputs)
    if not is_last(comm):
        comm.send(leaving, comm.rank + 1)
    return inputs, leaving


def sends_before_it_runs(comm, layers, inputs):
    entering, leaving = inputs, torch.zeros_like(inputs)
    if not is_last(comm):
        comm.send(leaving, comm.rank + 1)
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


def layer_by_layer(comm, layers, inputs):
    """Runs the layers one by one, and the last rank needs no case of its own."""
    before, after = comm.rank - 1, comm.rank + 1
    entering = value = inputs if before < 0 else comm.recv(torch.zeros(inputs.shape), before)
    value.requires_grad_(before >= 0)
    for layer in layers:
        value = layer(value)
    if after < comm.world_size:
        comm.send(value, after)
    return [entering, value]


def by_its_forward_method(comm, layers, inputs):
    entering = inputs.clone()
    if comm.rank:
        comm.recv(entering, comm.rank - 1)
    entering.requires_grad_(True)
    leaving = layers.forward(entering)
    if not is_last(comm):
        comm.send(leaving.detach().clone(), comm.rank + 1)
    return {"entering": entering, "leaving": leaving}.values()


Passed = namedtuple("Passed", ["entering", "leaving"])


def in_a_named_tuple(comm, layers, inputs):
    entering, leaving = variant(received=lambda t: t.detach().requires_grad_())(
        comm, layers, inputs
    )
    return Passed(leaving=leaving, entering=entering)


def asks_on_stage_0_too(comm, layers, inputs):
    return variant()(comm, layers, inputs.requires_grad_())


def yields_both(comm, layers, inputs):
    yield from variant(received=lambda t: t.clone().requires_grad_())(comm, layers, inputs)


def runs_a_copy(comm, layers, inputs):
    """The values are right, but the stage's own parameters are in no graph."""
    import copy

    return variant()(comm, copy.deepcopy(layers), inputs)


def keeps_what_came_first(comm, layers, inputs, kept=[]):  # noqa: B006
    if not kept:
        kept.append(variant()(comm, layers, inputs))
    return kept[0]


def receives_in_halves(comm, layers, inputs):
    """Right values in twice as many messages."""
    entering = inputs
    if comm.rank:
        entering = torch.empty_like(inputs)
        for part in entering.chunk(2):
            comm.recv(part, comm.rank - 1)
        entering.requires_grad_()
    leaving = layers(entering)
    if not is_last(comm):
        for part in leaving.detach().chunk(2):
            comm.send(part, comm.rank + 1)
    return entering, leaving


WRONG_FORWARDS = [
    (runs_a_copy, "hops.runs", "ran 0 times"),
    (keeps_what_came_first, "hops.other_input"),
    (receives_in_halves, "traffic.off_target"),
    (variant(received=lambda t: t), "hops.no_requires_grad"),
    (variant(received=lambda t: t.requires_grad_().clone()), "hops.no_leaf"),
    (variant(kept=lambda e, v: (e, v.detach())), "hops.no_graph"),
    (without_graph, "hops.no_graph"),
    (asks_too_late, "hops.gets_nothing"),
    (variant(run=lambda f, e, x: f(e.detach())), "hops.gets_nothing"),
    (variant(sent=lambda e, v: e), "hops.sent_what_entered"),
    (variant(run=lambda f, e, x: f(x)), "hops.ran_on_inputs"),
    (runs_on_inputs, "hops.returned_inputs", "not hops.sent_what_entered"),
    (variant(run=lambda f, e, x: e * 1), "hops.not_run"),
    (variant(run=runs_twice), "hops.runs"),
    (variant(kept=lambda e, v: (v, v)), "hops.swapped"),
    (variant(kept=lambda e, v: v), "hops.no_pair"),
    (sends_before_it_runs, "hops.other_input"),
    (tells_all_behind, "traffic.off_target"),
    (variant(receives=always, sends=always), "run.stuck"),
    (variant(sends=never), "run.stuck"),
    (variant(kept=lambda e, v: (e, v[:1])), "hops.kind"),
    (variant(run=lambda f, e, x: f(e).cos()), "hops.other_output"),
]


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


def stores_nothing(comm, entering, leaving):
    gradient = None
    if not is_last(comm):
        gradient = comm.recv(torch.empty_like(leaving), comm.rank + 1)
    if comm.rank > 0:
        (back,) = torch.autograd.grad(leaving, entering, gradient)
        comm.send(back, comm.rank - 1)


def runs_twice_over(leaving, gradient):
    leaving.backward(gradient, retain_graph=True)
    leaving.backward(gradient)


def to_the_next(comm, entering, leaving):
    gradient = None
    if comm.rank > 0:
        gradient = comm.recv(torch.empty_like(entering), comm.rank - 1)
    leaving.backward(gradient)
    if not is_last(comm):
        comm.send(entering.grad, comm.rank + 1)


def gives_the_gradient_by_name(comm, entering, leaving):
    on_last = leaving.dim() == 0
    g = None if on_last else comm.recv(torch.zeros(leaving.shape), comm.rank + 1)
    leaving.backward(gradient=g)
    return comm.rank and comm.send(entering.grad.clone(), comm.rank - 1)


def by_the_function(comm, entering, leaving):
    gradient = torch.ones_like(leaving)
    if not is_last(comm):
        comm.recv(gradient, comm.rank + 1)
    torch.autograd.backward([leaving], [gradient])
    if entering.requires_grad:
        comm.send(entering.grad, comm.rank - 1)


def by_a_product(comm, entering, leaving):
    """The gradient of (leaving x g).sum() is that of leaving, given g."""
    if is_last(comm):
        leaving.backward()
    else:
        gradient = torch.empty_like(leaving.detach())
        comm.recv(gradient, comm.rank + 1)
        (leaving * gradient).sum().backward()
    if comm.rank != 0:
        comm.send(entering.grad.detach(), comm.rank - 1)


def by_a_hook(comm, entering, leaving):
    """Sends as soon as autograd has the gradient."""
    if comm.rank > 0:
        entering.register_hook(lambda gradient: comm.send(gradient, comm.rank - 1))
    gradient = None
    if not is_last(comm):
        gradient = torch.empty_like(leaving)
        comm.recv(gradient, comm.rank + 1)
    leaving.backward(gradient)


def keeps_the_graph(comm, entering, leaving):
    way_back(run=lambda v, g: v.backward(g, retain_graph=True))(comm, entering, leaving)


def at_half_precision(comm, entering, leaving):
    way_back(sent=lambda e, g, comm: e.grad.half().float())(comm, entering, leaving)


WRONG_BACKWARDS = [
    (at_half_precision, "value.wrong"),
    (way_back(begin=lambda v, g: g if g is None else -g), "value.wrong"),
    (way_back(begin=lambda v, g: torch.ones_like(v)), "hops.began_with_ones"),
    (way_back(sent=lambda e, g, comm: e.grad if g is None else g), "hops.passed_on"),
    (way_back(sent=lambda e, g, comm: e), "hops.activation_back"),
    (way_back(sent=lambda e, g, comm: e.grad if g is None else e.grad + g), "hops.added"),
    (way_back(sent=lambda e, g, comm: e.grad / comm.world_size), "hops.averaged"),
    (way_back(run=runs_twice_over), "hops.twice"),
    (way_back(sent=lambda e, g, comm: e.grad.zero_()), "hops.zeros"),
    (stores_nothing, "hops.no_gradients"),
    (to_the_next, "run.error"),
    (way_back(to=None), "run.stuck"),
    (way_back(run=lambda v, g: v.backward()), "run.error"),
    (way_back(to=lambda comm: 0), "run.stuck"),
]


detaches_what_it_sends = variant(sent=lambda e, v: v.detach(), kept=lambda e, v: [e, v])
ANSWERS = [
    Answers(
        check.hops.forward,
        [
            variant(),
            detaches_what_it_sends,
            layer_by_layer,
            by_its_forward_method,
            in_a_named_tuple,
            asks_on_stage_0_too,
            receives_into_inputs,
            yields_both,
        ],
        WRONG_FORWARDS,
    ),
    Answers(
        check.hops.backward,
        [
            way_back(),
            gives_the_gradient_by_name,
            by_the_function,
            by_a_product,
            by_a_hook,
            keeps_the_graph,
        ],
        WRONG_BACKWARDS,
    ),
]
