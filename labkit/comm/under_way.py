"""An exchange that goes on while its rank does something else."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from labkit.comm.comm import Comm
from labkit.comm.tensors import describe


@contextmanager
def exchange_under_way(
    comm: Comm, send: Tensor, dst: int, recv: Tensor, src: int
) -> Iterator[None]:
    """``comm.exchange`` that goes on while the block runs, and has ended after it.

    The block may use ``comm`` with other ranks. Where messages do not move by themselves (in
    shared memory, on NCCL) the exchange follows the block. Its span is the part after the block.

    Args:
        send, recv: contiguous, on ``comm.device``, without common memory; not to be touched in
            the block.
    """
    ends = (dst, describe(send)), (src, describe(recv))
    with (
        comm.session.operation("exchange", *ends) as again,
        comm.transport.exchanging(send, dst, recv, src),
    ):
        yield
        again()
