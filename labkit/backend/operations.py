"""The collectives that PyTorch asks a process group for, each as one of ours.

PyTorch has several methods for one collective: "coalesced" ones take several tensors at once,
"single" ones a tensor in place of a list of its P parts, and some have an older name, too.
``METHODS`` says for each which function of this file checks its arguments and returns a ``Call``.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from labkit import collectives
from labkit.backend.chosen import all_reduce as chosen_all_reduce
from labkit.backend.reductions import reduction_of, scaled
from labkit.collectives.common import check_fits, check_one_per_rank
from labkit.engine.comm.comm import Comm

Tensors = list[Tensor]


class Call(NamedTuple):
    """A collective with checked arguments: ``run`` carries it out; ``opts`` are PyTorch's."""

    name: str
    run: Callable[[], object]
    inputs: Tensors
    outputs: Tensors
    opts: Any


# The arguments after ``comm`` are PyTorch's. ``opts`` has rootRank, reduceOp and asyncOp, where
# there are such.


def all_reduce(comm: Comm, tensors, opts=None) -> Call:
    ops = [reduction_of(opts, tensor) for tensor in tensors]

    def run() -> None:
        for tensor, op in zip(tensors, ops):
            total = chosen_all_reduce(comm, scaled(tensor, opts), op)
            tensor.copy_(total)

    return Call("all_reduce", run, tensors, tensors, opts)


def broadcast(comm: Comm, tensors, opts) -> Call:
    run = partial(collectives.broadcast, comm, tensors[0], opts.rootRank)
    return Call("broadcast", run, tensors, tensors, opts)


def reduce(comm: Comm, tensors, opts) -> Call:
    (tensor,) = tensors
    op = reduction_of(opts, tensor)

    def run() -> None:
        total = collectives.reduce(comm, scaled(tensor, opts), opts.rootRank, op)
        if comm.rank == opts.rootRank:
            tensor.copy_(total)

    return Call("reduce", run, tensors, tensors, opts)


def all_gather(comm: Comm, outputs, tensors, opts=None) -> Call:
    """Gather each of the ``tensors`` of all ranks into its P outputs."""
    _check_gathered(comm, outputs, tensors)

    def run() -> None:
        for targets, tensor in zip(outputs, tensors):
            _copy(collectives.all_gather(comm, tensor), targets)

    return Call("all_gather", run, tensors, _flat(outputs), opts)


def all_gather_by_rank(comm: Comm, output_lists, tensors, opts=None) -> Call:
    # output_lists[rank][i] takes what that rank has in tensors[i].
    return all_gather(comm, list(zip(*output_lists)), tensors, opts)


def all_gather_single(comm: Comm, output, tensor, opts=None) -> Call:
    return all_gather_singles(comm, [output], [tensor], opts)


def all_gather_singles(comm: Comm, outputs, tensors, opts=None) -> Call:
    return all_gather(comm, _parts(comm, outputs, tensors), tensors, opts)


def gather(comm: Comm, outputs, tensors, opts) -> Call:
    """Gather on the root; ``outputs`` is empty on the other ranks."""
    _check_gathered(comm, outputs, tensors)

    def run() -> None:
        gathered = collectives.gather(comm, tensors[0], opts.rootRank)
        if gathered is not None:
            _copy(gathered, outputs[0])

    return Call("gather", run, tensors, _flat(outputs), opts)


def gather_single(comm: Comm, output, tensor, opts) -> Call:
    outputs = []
    if comm.rank == opts.rootRank:
        outputs = _parts(comm, [output], [tensor])
    return gather(comm, outputs, [tensor], opts)


def scatter(comm: Comm, outputs, inputs, opts) -> Call:
    """Scatter the root's ``inputs``, which are empty on the other ranks."""
    shares = _flat(inputs)
    run = partial(collectives.scatter, comm, shares, outputs[0], opts.rootRank)
    return Call("scatter", run, shares, outputs, opts)


def reduce_scatter(comm: Comm, outputs, inputs, opts=None) -> Call:
    """Reduce each output's P inputs over all ranks; the output gets this rank's share."""
    ops = [reduction_of(opts, output) for output in outputs]
    for output, shares in zip(outputs, inputs):
        # A copy would convert and broadcast.
        check_fits(shares[comm.rank], output, "this rank's share of the inputs")

    def run() -> None:
        for output, shares, op in zip(outputs, inputs, ops):
            scaled_shares = [scaled(share, opts) for share in shares]
            output.copy_(collectives.reduce_scatter(comm, scaled_shares, op))

    return Call("reduce_scatter", run, _flat(inputs), outputs, opts)


def reduce_scatter_single(comm: Comm, output, tensor, opts=None) -> Call:
    return reduce_scatter_singles(comm, [output], [tensor], opts)


def reduce_scatter_singles(comm: Comm, outputs, tensors, opts=None) -> Call:
    return reduce_scatter(comm, outputs, _parts(comm, tensors, outputs), opts)


def all_to_all(comm: Comm, outputs, inputs, opts=None) -> Call:
    run = partial(collectives.all_to_all, comm, inputs, outputs)
    return Call("all_to_all", run, inputs, outputs, opts)


def all_to_all_single(comm: Comm, output, tensor, output_splits, input_splits, opts=None) -> Call:
    # Without splits, P equal parts.
    P = comm.world_size
    inputs = list(tensor.split(input_splits or [len(tensor) // P] * P))
    outputs = list(output.split(output_splits or [len(output) // P] * P))
    run = partial(collectives.all_to_all, comm, inputs, outputs)
    return Call("all_to_all", run, [tensor], [output], opts)


def _parts(comm: Comm, tensors: Tensors, parts: Tensors) -> list[Tensors]:
    """View each tensor as P tensors of the shape of its part."""
    views = []
    for tensor, part in zip(tensors, parts):
        views.append(list(tensor.view(comm.world_size, *part.shape).unbind()))
    return views


def _check_gathered(comm: Comm, outputs: list[Tensors], tensors: Tensors) -> None:
    for targets, tensor in zip(outputs, tensors):
        check_one_per_rank(comm, targets, "output tensors")
        for target in targets:
            check_fits(tensor, target, "the tensor that every rank sends")


def _copy(sources: Tensors, targets: Tensors) -> None:
    for source, target in zip(sources, targets):
        target.copy_(source)


def _flat(lists: Iterable[Tensors]) -> Tensors:
    return list(chain.from_iterable(lists))


# PyTorch's methods, older names included.
METHODS: dict[str, Callable[..., Call]] = {
    "allreduce": all_reduce,
    "allreduce_coalesced": all_reduce,
    "broadcast": broadcast,
    "reduce": reduce,
    "allgather": all_gather,
    "allgather_coalesced": all_gather_by_rank,
    "all_gather_single": all_gather_single,
    "_allgather_base": all_gather_single,
    "all_gather_single_coalesced": all_gather_singles,
    "allgather_into_tensor_coalesced": all_gather_singles,
    "gather": gather,
    "gather_single": gather_single,
    "gather_into_tensor": gather_single,
    "scatter": scatter,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_single": reduce_scatter_single,
    "_reduce_scatter_base": reduce_scatter_single,
    "reduce_scatter_single_coalesced": reduce_scatter_singles,
    "reduce_scatter_tensor_coalesced": reduce_scatter_singles,
    "alltoall": all_to_all,
    "all_to_all_single": all_to_all_single,
    "alltoall_base": all_to_all_single,
}
