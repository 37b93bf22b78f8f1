"""The tensors of a message: what may be sent and received, and in which memory."""

from collections.abc import Mapping
from itertools import combinations

import torch
from torch import Tensor


def describe(tensor: Tensor) -> str:
    """What both ends of a message must agree on, for example ``float32 [3, 4]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def check_tensor(tensor: Tensor, device: torch.device) -> None:
    """Raise ValueError unless ``tensor`` is dense and on a device of this type."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"a tensor is needed, got {type(tensor).__name__}: {tensor!r:.60}")
    if tensor.layout != torch.strided:
        raise ValueError(f"a dense tensor is needed, got {tensor.layout}: use .to_dense()")
    if tensor.device.type != device.type:
        raise ValueError(
            f"the ranks of this run work on {device.type}, but the tensor is on "
            f"{tensor.device}: move it with .to(comm.device)"
        )


def to_send(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor that is sent for ``tensor``: detached and contiguous."""
    check_tensor(tensor, device)
    # A conjugate or negative view is only a flag: the bytes in memory are not its values.
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def to_receive(tensor: Tensor, device: torch.device) -> Tensor:
    """Where a message for ``tensor`` arrives: the tensor itself if contiguous, or a buffer."""
    check_tensor(tensor, device)
    flat = tensor.detach()
    if flat.is_contiguous() and not flat.is_conj() and not flat.is_neg():
        return flat
    if any(step == 0 and size > 1 for step, size in zip(flat.stride(), flat.shape)):
        raise ValueError(
            "cannot receive into an expanded tensor: its elements share memory. "
            "Receive into a new tensor (.clone() or torch.empty)"
        )
    return torch.empty(flat.shape, dtype=flat.dtype, device=flat.device)


def deliver(landing: Tensor, tensor: Tensor) -> Tensor:
    """Copy ``landing`` into ``tensor``, unless it is the same memory; returns ``tensor``."""
    if landing.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(landing)
    return tensor


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors share a byte; others travel through buffers of their own."""
    for tensor in (one, other):
        is_dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        if not is_dense or not tensor.is_contiguous():
            return False
    start, first = one.data_ptr(), other.data_ptr()
    return max(start, first) < min(start + one.nbytes, first + other.nbytes)


def check_apart(written: Mapping[str, Tensor], read: Mapping[str, Tensor] | None = None) -> None:
    """Raise ValueError, with the names, if a tensor that is written shares memory with another."""
    for (name, one), (other_name, other) in combinations(
        [*written.items(), *(read or {}).items()], 2
    ):
        if name in written and overlap(one, other):
            raise ValueError(
                f"{name} and {other_name} share memory, and one would be overwritten before it is "
                "sent: use separate memory for each, for example with .clone()"
            )
