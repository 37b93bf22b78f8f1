"""Whether tensors share memory: a tensor that is being sent must not be received into.

The test is exact for strided tensors of any dtype, and cheap: most pairs lie apart, as the
addresses of their first and last bytes show. Any other two share a byte if steps along their
dimensions lead from both starts to the same address, which is an integer equation with bounds. The
strides of views of one tensor are multiples of each other, so the search has few branches.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def check_apart(written: Mapping[str, Tensor], read: Mapping[str, Tensor] | None = None) -> None:
    """Raise ValueError if a tensor that is written shares memory with any other tensor.

    Args:
        written, read: tensors by name, which the message shows. Values that are not dense tensors
            or have no memory are ignored.
    """
    named = [(name, tensor, True) for name, tensor in written.items()]
    named += [(name, tensor, False) for name, tensor in (read or {}).items()]
    named = [(*_ends(row[1]), *row) for row in named if _has_memory(row[1])]
    named.sort(key=lambda row: row[:2])
    for index, (_, end, name, tensor, is_written) in enumerate(named):
        for first, _, other_name, other, is_other_written in named[index + 1 :]:
            if first >= end:
                break
            if (is_written or is_other_written) and overlap(tensor, other):
                raise ValueError(
                    f"{name} and {other_name} share memory, and one would be overwritten before "
                    "it is sent: use separate memory for each, for example with .clone()"
                )


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two dense tensors share a byte; views that only interleave share none."""
    (start, end), (first, last) = _ends(one), _ends(other)
    if min(end, last) <= max(start, first):
        return False
    most: dict[int, list[int]] = {}
    for side, tensor in enumerate((one, other)):
        bytes_of_one = ((tensor.itemsize, 1),)
        by_bytes = [(size, step * tensor.itemsize) for size, step in _dims(tensor)]
        for size, step in (*by_bytes, *bytes_of_one):
            most.setdefault(step, [0, 0])[side] += size - 1
    steps = [(step, -back, forward) for step, (forward, back) in sorted(most.items())[::-1]]
    return _leads_to(first - start, steps)


def _leads_to(distance: int, steps: Sequence[tuple[int, int, int]]) -> bool:
    """Whether the distance is a sum of ``step * n``, with ``low <= n <= high`` for each step."""
    if not steps:
        return distance == 0
    if distance % math.gcd(*(step for step, _, _ in steps)):
        return False
    (step, low, high), *rest = steps
    # The other steps must be able to reach the distance that remains after this one.
    least = sum(step * low for step, low, _ in rest)
    greatest = sum(step * high for step, _, high in rest)
    fewest = max(low, -((greatest - distance) // step))
    most = min(high, (distance - least) // step)
    return any(_leads_to(distance - n * step, rest) for n in range(fewest, most + 1))


def _has_memory(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta


def _ends(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the first byte and of the byte after the last; equal if it is empty."""
    start = tensor.data_ptr()
    if tensor.is_contiguous() or not tensor.numel():
        return start, start + tensor.nbytes
    last = sum((size - 1) * step for size, step in _dims(tensor))
    return start, start + (last + 1) * tensor.itemsize


def _dims(tensor: Tensor) -> list[tuple[int, int]]:
    """(size, stride) in elements of each dimension with more than one address."""
    return [(n, step) for n, step in zip(tensor.shape, tensor.stride()) if n > 1 and step]
