"""What the collectives share: a flat tensor to work on, one step of a timetable, checks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from labkit.comm.comm import Comm
from labkit.comm.tensors import describe
from labkit.schedules.tree import Transfer
from labkit.units import format_count


@contextmanager
def in_place(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Lend ``tensor`` (any shape and strides, with or without gradients) as a flat tensor [N].

    It is a view where the memory layout allows it, otherwise a copy that is written back at the
    end.

    Raises:
        ValueError: not a dense tensor, or an expanded one (its elements share memory, so they
            cannot take different values). Every rank raises the same error, before any message.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"a tensor is needed, got {type(tensor).__name__}: {tensor!r:.60}")
    if tensor.layout != torch.strided:
        raise ValueError(f"a dense tensor is needed, got {tensor.layout}: use .to_dense()")
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape)):
        raise ValueError(
            "cannot work in place in an expanded tensor: its elements share memory. "
            "Use a new tensor (.clone() or torch.empty)"
        )
    # The bytes of a lazily conjugated or negated tensor (tensor.conj()) are not its values.
    mine = tensor.detach()
    flat = mine.resolve_conj().resolve_neg().contiguous().view(-1)
    yield flat
    if flat.data_ptr() != mine.data_ptr():
        mine.copy_(flat.view(mine.shape))


@contextmanager
def collective_in_place(
    comm: Comm, name: str, tensor: torch.Tensor, option: str, kind: str = "all_reduce"
) -> Iterator[torch.Tensor]:
    """Lend ``tensor`` as ``in_place`` does, inside ``Comm.collective`` and a span ``kind``."""
    with in_place(tensor) as flat, comm.collective(name, tensor, option), comm.span(kind):
        yield flat


def transfer(comm: Comm, step: Transfer, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """Do one step of a timetable: send ``outgoing``, fill ``incoming``, or both at once."""
    if step.dst is not None and step.src is not None:
        comm.exchange(outgoing, step.dst, incoming, step.src)
    elif step.dst is not None:
        comm.send(outgoing, step.dst)
    elif step.src is not None:
        comm.recv(incoming, step.src)


def new_like(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor to receive into: shape and dtype of ``tensor``, contiguous, no gradient."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)


def check_root(comm: Comm, root: int) -> None:
    """Raise ValueError, the same on every rank, unless ``root`` is a rank."""
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < comm.world_size:
        raise ValueError(
            f"root {root!r} is not a rank: with world size {comm.world_size} the ranks are "
            f"0 to {comm.world_size - 1}"
        )


def check_one_per_rank(comm: Comm, tensors: list[torch.Tensor], what: str) -> None:
    """Raise ValueError unless there are P tensors; ``what`` names them in the message."""
    if len(tensors) != comm.world_size:
        ranks = format_count(comm.world_size, "rank")
        raise ValueError(f"{len(tensors)} {what} for {ranks}: give one for each rank")


def check_fits(tensor: torch.Tensor, out: torch.Tensor, what: str) -> None:
    """Raise ValueError unless shape and dtype are equal: a copy would convert and broadcast."""
    if describe(tensor) != describe(out):
        raise ValueError(
            f"{what} is {describe(tensor)}, but the output for it is {describe(out)}: "
            "give both the same shape and dtype"
        )
