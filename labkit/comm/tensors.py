"""The tensors of a message: what may be sent and received, and in which memory."""

from collections.abc import Mapping

import torch
from torch import Tensor


def describe(tensor: Tensor) -> str:
    """What both ends of a message must agree on, for example ``float32 [3, 4]``."""
    return name_of(tensor.dtype, tensor.shape)


def name_of(dtype: torch.dtype, shape: torch.Size) -> str:
    """See ``describe``."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


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
    outgoing = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # The strides of an empty array of NumPy are 0, which PyTorch cannot view as bytes.
    return outgoing if outgoing.numel() else outgoing.new_empty(outgoing.shape)


def to_receive(tensor: Tensor, device: torch.device) -> Tensor:
    """Where a message for ``tensor`` arrives: the tensor itself if contiguous, or a buffer."""
    check_tensor(tensor, device)
    flat = tensor.detach()
    if not flat.numel():
        return flat.new_empty(flat.shape)
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
    """Whether two contiguous tensors share a byte.

    False for any other tensor: its messages travel through a buffer of their own.
    """
    if not (one.is_contiguous() and other.is_contiguous()):
        return False
    start, first = one.data_ptr(), other.data_ptr()
    return max(start, first) < min(start + one.nbytes, first + other.nbytes)


def check_apart(written: Mapping[str, Tensor], read: Mapping[str, Tensor] | None = None) -> None:
    """Raise ValueError, with the names, if a tensor that is written shares memory with another.

    Values that are not contiguous dense tensors are ignored, as in ``overlap``.
    """
    rows = []
    for name, tensor in {**written, **(read or {})}.items():
        is_dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        if is_dense and not tensor.is_meta and tensor.nbytes and tensor.is_contiguous():
            rows.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name))
    # The tensors so far that reach furthest, of all and of those that are written.
    furthest = furthest_written = (0, 0, "")
    for row in sorted(rows):
        start, _, name = row
        nearest = furthest if name in written else furthest_written
        if start < nearest[1]:
            raise ValueError(
                f"{nearest[2]} and {name} share memory, and one would be overwritten before it is "
                "sent: use separate memory for each, for example with .clone()"
            )
        furthest = max(furthest, row, key=lambda one: one[1])
        if name in written:
            furthest_written = max(furthest_written, row, key=lambda one: one[1])
