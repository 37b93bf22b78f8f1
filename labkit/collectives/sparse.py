"""All-reduce of sparse tensors: ranks have different entries, so these are gathered, then added.

Symbols: P ranks, E the largest number of entries of a rank (an entry: an index, its values).
"""

import torch

from labkit.collectives.reduction import Reduction
from labkit.collectives.ring import all_gather
from labkit.comm.comm import Comm


def sparse_all_reduce(comm: Comm, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """Add up a sparse ``tensor`` over all ranks, in place.

    Args:
        tensor: sparse COO, the same shape, dtype and number of sparse dimensions on every rank;
            returned, coalesced.
        op: "sum" only. An entry may be missing on some ranks, so no maximum or product is defined.

    Three all-gathers, of the number of entries, of their indices and of their values, padded to E:
    3 (P - 1) messages and (P - 1) x E entries on every rank. Every rank adds in the order of the
    ranks, so all end with the same bits.

    Raises:
        ValueError: another layout or operation, or a dtype that cannot be added.
    """
    if tensor.layout != torch.sparse_coo or op != "sum":
        raise ValueError(
            f"cannot take the {op} of a {tensor.layout} tensor over ranks: of sparse tensors only "
            "the sum of sparse_coo is supported; use .to_sparse_coo(), or .to_dense()"
        )
    mine = tensor.detach().coalesce()
    indices, values = mine.indices(), mine.values()
    Reduction.of(op, values)
    with comm.collective("sparse_all_reduce", None, f"{list(tensor.shape)} {tensor.dtype}"):
        counts = [int(count) for count in all_gather(comm, torch.tensor(indices.shape[1]))]
        all_indices = all_gather(comm, _padded(indices.t(), max(counts)))
        all_values = all_gather(comm, _padded(values, max(counts)))
    total = _sparse(indices[:, :0], values[:0], tensor.shape)
    for count, others_indices, others_values in zip(counts, all_indices, all_values):
        total = total + _sparse(others_indices[:count].t(), others_values[:count], tensor.shape)
    # Copying into tensor.detach() would replace the entries of that detached tensor only.
    with torch.no_grad():
        return tensor.copy_(total.coalesce())


def _sparse(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    # Entries of coalesced tensors need no check; without an explicit choice PyTorch warns.
    return torch.sparse_coo_tensor(
        indices, values, shape, check_invariants=False, is_coalesced=True
    )


def _padded(entries: torch.Tensor, length: int) -> torch.Tensor:
    """``entries`` [n, ...] as [length, ...], zeros at the end."""
    padded = entries.new_zeros(length, *entries.shape[1:])
    padded[: len(entries)] = entries
    return padded
