"""Answers to ``check.pipeline.step``: a stage's part of a training step, by any stream."""

from collections import defaultdict
from types import SimpleNamespace

import torch
from graded import Answers
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


def with_comm_alone(comm, layers, stream, micro_batches):
    """Carries out the hops itself, frees what is not needed, and deletes nothing it was given."""
    kept = SimpleNamespace(entered={}, left={}, came={})
    for one in stream:
        match one:
            case Action("forward", m):
                entering = micro_batches[m][0] if comm.rank == 0 else kept.entered[m]
                kept.left[m] = layers(entering)
                if is_last(comm):
                    kept.left[m] = loss_of(kept.left[m], *micro_batches[m][1:])
            case Action("backward", m):
                torch.autograd.backward([kept.left.pop(m)], [kept.came.pop(m, None)])
            case Hop(send, recv):
                outgoing = landing = None
                if send and send.kind == "activation":
                    outgoing = kept.left[send.micro_batch]
                elif send:
                    outgoing = kept.entered.pop(send.micro_batch).grad
                if recv:
                    landing = torch.zeros(micro_batches[recv.micro_batch][0].shape)
                if send and recv:
                    comm.exchange(outgoing, send.peer, landing, recv.peer)
                elif send:
                    comm.send(outgoing, send.peer)
                else:
                    comm.recv(landing, recv.peer)
                if recv and recv.kind == "activation":
                    kept.entered[recv.micro_batch] = landing.requires_grad_()
                elif recv:
                    kept.came[recv.micro_batch] = landing


class OfOneStage:
    """The same as an object with a method per instruction, and one table of tensors."""

    def __init__(self, comm, layers, parts):
        self.comm, self.layers, self.parts = comm, layers, parts
        self.tensors = {}

    def forward(self, m):
        inputs, targets, weight = self.parts[m]
        entering = self.tensors.get(("activation", m), inputs)
        if self.comm.rank:
            entering.requires_grad_(True)
        value = entering
        for layer in self.layers:
            value = layer(value)
        if is_last(self.comm):
            losses = functional.cross_entropy(value, targets, reduction="none")
            value = losses.sum() * (weight / len(targets))
        self.tensors["in", m], self.tensors["out", m] = entering, value

    def backward(self, m):
        if is_last(self.comm):
            self.tensors["out", m].backward()
        else:
            (self.tensors["out", m] * self.tensors["gradient", m]).sum().backward()

    def hop(self, send, recv):
        calls = self.comm
        outgoing = send and (
            self.tensors["out", send.micro_batch].detach().clone()
            if send.kind == "activation"
            else self.tensors["in", send.micro_batch].grad.clone()
        )
        landing = recv and torch.empty(len(self.parts[recv.micro_batch][1]), 3)
        if recv:
            self.tensors[recv.kind, recv.micro_batch] = landing
        if send is None:
            return calls.recv(landing, recv.peer)
        if recv is None:
            return calls.send(outgoing, send.peer)
        return calls.exchange(outgoing, send.peer, landing, recv.peer)


def by_an_object(comm, layers, stream, micro_batches):
    stage = OfOneStage(comm, layers, micro_batches)
    for one in stream:
        if isinstance(one, Action):
            getattr(stage, one.kind)(one.micro_batch)
        else:
            stage.hop(*one)


def adds_gradients_itself(comm, layers, stream, micro_batches):
    """Through ``autograd.grad``, with the sums kept outside and put in place at the end."""
    parameters = list(layers.parameters())
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    entered, left, came, back = {}, {}, {}, {}
    for one in stream:
        if isinstance(one, Hop):
            outgoing = landing = None
            if one.send:
                m = one.send.micro_batch
                outgoing = back[m] if one.send.kind == "gradient" else left[m].data
            if one.recv:
                landing = torch.empty_like(micro_batches[one.recv.micro_batch][0])
                where = came if one.recv.kind == "gradient" else entered
                where[one.recv.micro_batch] = landing
            carry_out(comm, one, outgoing, landing)
            continue
        kind, m = one
        if kind == "forward":
            entered.setdefault(m, micro_batches[m][0].clone()).requires_grad_()
            left[m] = layers(entered[m])
            if is_last(comm):
                left[m] = loss_of(left[m], *micro_batches[m][1:])
        else:
            wanted = [*parameters, entered[m]]
            *found, back[m] = torch.autograd.grad(left[m], wanted, came.get(m))
            sums = [total + one for total, one in zip(sums, found)]
    for parameter, total in zip(parameters, sums):
        parameter.grad = total


def recomputes_nothing(comm, layers, stream, micro_batches):
    """A generator is run to its end by the check; lists in the place of dicts."""
    M = len(micro_batches)
    tensors = defaultdict(lambda: [None] * M)
    for one in iter(stream):
        if isinstance(one, Hop):
            made = {"activation": "left", "gradient": "back"}
            outgoing = one.send and tensors[made[one.send.kind]][one.send.micro_batch].detach()
            landing = one.recv and micro_batches[one.recv.micro_batch][0].detach() * 0
            carry_out(comm, one, outgoing, landing)
            if one.recv:
                tensors[one.recv.kind][one.recv.micro_batch] = landing
        elif one.kind == "forward":
            m = one.micro_batch
            entering = tensors["activation"][m] if comm.rank else micro_batches[m][0]
            entering = tensors["entered"][m] = entering.detach().requires_grad_()
            tensors["left"][m] = layers.forward(entering)
            if is_last(comm):
                tensors["left"][m] = loss_of(tensors["left"][m], *micro_batches[m][1:])
        else:
            m = one.micro_batch
            tensors["left"][m].backward(gradient=tensors["gradient"][m])
            tensors["back"][m] = tensors["entered"][m].grad
    return tensors


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


def two_calls_a_hop(comm, hop, outgoing, landing):
    for send in (True, False) if comm.rank % 2 else (False, True):
        if send and hop.send:
            comm.send(outgoing, hop.send.peer)
        elif not send and hop.recv:
            comm.recv(landing, hop.recv.peer)


def only_forwards(comm, layers, stream, micro_batches):
    variant()(comm, layers, [], micro_batches)
    for part in micro_batches:
        layers(part[0])


def send_first(comm, hop, outgoing, landing):
    if hop.send:
        comm.send(outgoing, hop.send.peer)
    if hop.recv:
        comm.recv(landing, hop.recv.peer)


def drops_gradients(comm, layers, stream, micro_batches):
    variant()(comm, layers, stream, micro_batches)
    layers.zero_grad()


ANSWERS = [
    Answers(
        check.pipeline.step,
        [
            variant(),
            with_comm_alone,
            by_an_object,
            adds_gradients_itself,
            recomputes_nothing,
            clears_first,
        ],
        [
            (
                variant(loss=lambda out, targets, weight: loss_of(out, targets, 1)),
                "stage_step.weights",
            ),
            (
                variant(
                    loss=lambda out, y, w: w * functional.cross_entropy(out, y, reduction="sum")
                ),
                "stage_step.sums",
            ),
            (variant(before_backward=lambda layers: layers.zero_grad()), "stage_step.last_only"),
            (drops_gradients, "stage_step.no_gradients"),
            (all_at_once, "stage_step.order", "the order F B"),
            (only_forwards, "stage_step.order"),
            (variant(begin=lambda g: g if g is None else -g), "value.wrong"),
            (variant(carry=send_first), "run.stuck"),
            (variant(stream_of=forwards_first), "run.error"),
        ],
    )
]
