"""Page 11: the ledger, the part of each rank, the sharded update, tensors that live for a moment.

Symbols: P ranks, S bytes of parameters; a part is what one rank has of a flat tensor.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from labkit.collectives.ring import split_chunks
from labkit.costs.traffic import (
    Cost,
    ring_all_reduce_cost,
    share_only_cost,
    share_reduce_cost,
)
from labkit.engine.comm.comm import Comm
from labkit.schedules.ring import chunk_bounds, owned_chunk
from workbook.exercises.grader import Case, Check, Target, Wrong, judged, solved
from workbook.exercises.grader.held_memory import PeakBytes

LR = 0.1
MOMENTUM = 0.9
# Elements by layer: neither divides by all P.
_LAYERS = 10, 7, 12, 5, 9


def _divided(num_bytes: int, P: int, stage: int, least: tuple[int, ...] = (3, 2, 1)) -> list[int]:
    sizes = [num_bytes, num_bytes, 2 * num_bytes]
    for kind, first_stage in enumerate(least):
        if stage >= first_stage:
            sizes[kind] //= P
    return sizes


@solved(
    *((9600, P, stage) for P in (2, 4) for stage in (0, 1, 2, 3)),
    *((96, 3, stage) for stage in (0, 1, 2, 3)),
    mistakes={
        "stage 1 divides the optimizer's state first, and parameters come last": (
            lambda rule, *case: _divided(*case, least=(1, 2, 3))
        ),
        "stage 1 divides Adam's state, and stage 2 the gradients as well": (
            lambda rule, *case: _divided(*case, least=(3, 1, 2))
        ),
    },
)
def ledger(num_bytes: int, world_size: int, stage: int) -> list[int]:
    """Grade ``fn(num_bytes, world_size, stage)``: parameters, gradients, Adam's state in bytes."""
    return _divided(num_bytes, world_size, stage)


@solved(
    *((size, rank, P) for size, P in ((10, 4), (12, 3), (2, 3)) for rank in range(P)),
    mistakes={
        "after share_reduce rank r has the sum of chunk (r + 1) mod P, not of chunk r": (
            lambda rule, size, rank, P: rule(size, (rank - 1) % P, P)
        ),
        "chunks differ by one element at most: the remainder is not the last one's": (
            lambda rule, size, rank, P: [
                size // P * ((rank + 1) % P),
                size if rank == P - 2 else size // P * ((rank + 1) % P + 1),
            ]
        ),
        "the longer chunks come first, not last": (
            lambda rule, size, rank, P: [size * ((rank + 1) % P + end) // P for end in (0, 1)]
        ),
    },
)
def part(num_elements: int, rank: int, world_size: int) -> tuple[int, int]:
    """Grade ``fn(num_elements, rank, world_size)``: where the rank's chunk starts and ends."""
    return chunk_bounds(num_elements, world_size)[owned_chunk(rank, world_size)]


def _own(flat: Tensor, rank: int, world_size: int) -> Tensor:
    return split_chunks(flat, world_size)[owned_chunk(rank, world_size)].clone()


def _values(case: Case) -> Tensor:
    return case.random(5, case.size)


def _momentum(case: Case) -> Tensor:
    return case.random(6, case.size)


def _gradient_of(rank: int, case: Case) -> Tensor:
    """A rank's gradient: whole numbers, which have the same sum in any order."""
    return (8 * case.random(40 + rank, case.size)).round()


def _updated(rank: int, case: Case) -> list[Tensor]:
    momentum = MOMENTUM * _momentum(case) + case.over_ranks(lambda r: _gradient_of(r, case))
    return [_values(case) - LR * momentum, _own(momentum, rank, case.world_size)]


def _unshared(rank: int, case: Case) -> list[Tensor]:
    values = _values(case)
    updated, momentum = _updated(rank, case)
    owned = split_chunks(values, case.world_size)[owned_chunk(rank, case.world_size)]
    owned.copy_(_own(updated, rank, case.world_size))
    return [values, momentum]


def _update(fn: Callable, comm: Comm, values: Tensor, gradient: Tensor, momentum: Tensor) -> Any:
    fn(comm, values, gradient, momentum)
    return [values, momentum]


def _two_passes(rank: int, case: Case) -> Target:
    """The ring, or straight to the owners and back, whichever sends more from this rank."""
    ring = ring_all_reduce_cost(case.size, 4, case.world_size, rank)
    owned_bytes = _own(_values(case), rank, case.world_size).nbytes
    straight_bytes = 4 * case.size + (case.world_size - 2) * owned_bytes
    return Target(ring.messages, max(ring.num_bytes, straight_bytes))


# ``values`` [N] are the same on all ranks, ``momentum`` is the part that this rank updates.
update = Check(
    "sharded.update",
    _updated,
    signature="comm, values, gradient, momentum",
    inputs=lambda rank, case: (
        _values(case),
        _gradient_of(rank, case),
        _own(_momentum(case), rank, case.world_size),
    ),
    written=None,
    call=_update,
    parts=lambda case: {
        "the old values": _values(case),
        "the old momentum": _momentum(case),
        **{
            f"the gradient of rank {rank}": _gradient_of(rank, case)
            for rank in range(case.world_size)
        },
    },
    mistakes={
        "the parts that other ranks update are as they were: share_only them": _unshared,
        "the momentum is as it was given: write into it": lambda rank, case: [
            _updated(rank, case)[0],
            _own(_momentum(case), rank, case.world_size),
        ],
    },
    target=_two_passes,
)


def _layer(kind: int, number: int, case: Case) -> Tensor:
    return case.random(100 * kind + number, _LAYERS[number])


def _layer_gradient(rank: int, number: int, case: Case) -> Tensor:
    return (8 * _layer(rank + 1, number, case)).round()


def _totals(rank: int, case: Case, combine: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """This rank's part by layer of ``combine(what was there, the sum of the gradients)``."""
    totals = []
    for number in range(case.size):
        before = _layer(9, number, case)
        total = case.over_ranks(partial(_layer_gradient, number=number, case=case))
        totals.append(_own(combine(before, total), rank, case.world_size))
    return totals


class _Alive(dict[int, Any]):
    """Storages by layer of the tensors that were handed out, and the offsets in them."""

    def note(self, number: int, tensor: Tensor) -> Tensor:
        self[number] = (weakref.ref(tensor.untyped_storage()), tensor.storage_offset())
        return tensor

    def layers(self, but: int = -1) -> list[int]:
        """The layers whose tensors are not freed, and not overwritten by that of ``but``."""
        addresses = {}
        for number, (reference, offset) in self.items():
            storage = reference()
            if storage:  # a storage without bytes is false
                addresses[number] = (storage.data_ptr(), offset)
        return [n for n, address in addresses.items() if address != addresses.get(but)]


def _reduce(fn: Callable, comm: Comm, case: Case, totals: list[Tensor]) -> Any:
    """The gradients of the layers come one after another, from the last to the first."""
    alive = _Alive()
    held = []

    def backward() -> Iterator[tuple[int, Tensor]]:
        for number in reversed(range(case.size)):
            if layers := alive.layers():
                held.append(
                    f"when layer {number} comes, the gradients of layers {layers} are still held"
                )
            yield number, alive.note(number, _layer_gradient(comm.rank, number, case))

    fn(comm, backward(), totals)
    if held:
        return Wrong(f"{held[0]}: let go of each before the next")
    return totals


def _by_layer(cost_of: Callable[..., Cost]) -> Callable[[int, Case], Target]:
    def target(rank: int, case: Case) -> Target:
        costs = [cost_of(size, 4, case.world_size, rank) for size in _LAYERS[: case.size]]
        return Target(sum(cost.messages for cost in costs), sum(cost.num_bytes for cost in costs))

    return target


_in_layers = {
    "written": None,
    "sizes": (5, 3),
    "nouns": ("rank", "layer"),
}
# ``backward`` gives (number, gradient) once each; ``totals`` are this rank's parts, by layer.
reduce = Check(
    "sharded.reduce",
    lambda rank, case: _totals(rank, case, torch.add),
    signature="comm, backward, totals",
    inputs=lambda rank, case: (case, _totals(rank, case, lambda before, _: before)),
    call=_reduce,
    parts=lambda case: {},
    mistakes={
        "it is the sum of the gradients alone: add it to what is in totals": (
            lambda rank, case: _totals(rank, case, lambda _, total: total)
        ),
    },
    target=_by_layer(share_reduce_cost),
    **_in_layers,
)


class _Allocations(PeakBytes):
    """Inside ``with``, tell ``note`` the bytes of each new tensor."""

    def __init__(self, note: Callable[[int], None]) -> None:
        super().__init__()
        self.note = note

    def _add(self, num_bytes: int) -> None:
        self.note(num_bytes)


def _forward(fn: Callable, comm: Comm, case: Case, shards: list[Tensor], inputs: Tensor) -> Any:
    """Note the layers held while another one works, and when the next one's tensor is made."""
    alive = _Alive()
    held = []
    at_work = []
    messages_before = comm.messages

    def note_held(when: str, but: int = -1) -> None:
        if layers := alive.layers(but):
            held.append(f"{when}, the parameters of layers {layers} are still held")

    def note_tensor(num_bytes: int) -> None:
        coming = len(alive)
        if not at_work and coming < case.size and num_bytes == 4 * _LAYERS[coming]:
            note_held(f"when the tensor of layer {coming} is made")

    def layer(number: int, parameters: Tensor, inputs: Tensor) -> Tensor:
        alive.note(number, parameters)
        note_held(f"while layer {number} works", but=number)
        messages = comm.messages - messages_before
        if messages > len(alive) * (comm.world_size - 1):
            held.append(
                f"when layer {number} works, {messages} messages have been sent, and the layers "
                f"so far take {len(alive) * (comm.world_size - 1)}: another layer is gathered"
            )
        at_work.append(number)
        outputs = _apply(number, parameters, inputs, case)
        at_work.pop()
        return outputs

    layers = [partial(layer, number) for number in range(case.size)]
    with _Allocations(note_tensor):
        outputs = fn(comm, shards, [*_LAYERS[: case.size]], layers, inputs)
    if not held:
        note_held("after the last layer")
    return Wrong(held[0]) if held else outputs


def _apply(number: int, parameters: Tensor, inputs: Tensor, case: Case) -> Tensor:
    # The outputs of other inputs or parameters are no multiple of these.
    return torch.sin(torch.arange(1.0, 5.0) * (inputs + parameters @ _layer(20, number, case)))


def _outputs(rank: int, case: Case, first: int = 0) -> Tensor:
    outputs = case.random(700 + rank, 4)
    for number in range(first, case.size):
        outputs = _apply(number, _layer(30, number, case), outputs, case)
    return outputs


def _gathered_by_layer(rank: int, case: Case) -> Target:
    """The ring, or this rank's part straight to all others, whichever sends more from it."""
    ring = _by_layer(share_only_cost)(rank, case)
    owned_bytes = 0
    for number in range(case.size):
        owned_bytes += _own(_layer(30, number, case), rank, case.world_size).nbytes
    straight_bytes = (case.world_size - 1) * owned_bytes
    return Target(ring.messages, max(ring.num_bytes or 0, straight_bytes))


# layer(parameters, inputs) gets all parameters [size]; ``shards`` has this rank's part of them.
forward = Check(
    "sharded.forward",
    _outputs,
    signature="comm, shards, sizes, layers, inputs",
    inputs=lambda rank, case: (
        case,
        [_own(_layer(30, number, case), rank, case.world_size) for number in range(case.size)],
        case.random(700 + rank, 4),
    ),
    call=_forward,
    parts=lambda case: {},
    mistakes={
        "each layer gets what the one before has made, not the first inputs": lambda rank, case: (
            _outputs(rank, case, first=case.size - 1)
        ),
    },
    target=_gathered_by_layer,
    **_in_layers,
)


@judged("order, gather, use, free", ([0, 1, 2, 3],), ([3, 2, 1, 0],), ([2],), ([4, 0, 2],))
def prefetch(fn: Callable, order: Sequence[int]) -> Wrong | None:
    """Grade ``fn(order, gather, use, free)``: each unit is gathered while the one before works."""
    started: list[int] = []
    gathered: list[int] = []
    used: list[int] = []
    freed: list[int] = []
    problems: list[str] = []

    def unfreed() -> list[int]:
        return [unit for unit in started if unit not in freed]

    def gather(unit: int) -> SimpleNamespace:
        if unit in started:
            problems.append(f"unit {unit} is gathered twice")
        started.append(unit)
        if len(unfreed()) > 2:
            units = f"units {unfreed()} are whole, or being gathered, at once"
            problems.append(f"{units}: at most two may be")
        return SimpleNamespace(wait=lambda: gathered.append(unit))

    def use(unit: int) -> None:
        if unit not in gathered:
            problems.append(f"unit {unit} is used before the wait for its gather")
        if unit in freed:
            problems.append(f"unit {unit} is used after it was freed")
        used.append(unit)
        if len(used) >= len(order):
            return
        following = order[len(used)]
        if following not in started:
            text = f"nothing is gathered while unit {unit} works: begin with unit {following}"
            problems.append(text)
        elif following in gathered:
            text = f"it waits for unit {following} before unit {unit} works: no overlap"
            problems.append(text)

    fn(list(order), gather, use, freed.append)
    if problems:
        return Wrong(problems[0])
    if used != list(order):
        return Wrong(f"it uses the units {used}, expected {list(order)}")
    if unfreed():
        return Wrong(f"units {unfreed()} are not freed")
    return None
