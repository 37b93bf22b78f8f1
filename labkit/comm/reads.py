"""Reading a value from a GPU waits for all that is queued there: the status board should say so.

``loss.item()`` waits inside CUDA, where nobody sees for whom. So on a transport that only queues,
the ways in which a program reads a tensor's values first wait for this thread's operations, which
is posted on the board: a deadlock is found there as if the operation itself had waited.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labkit.comm.session import Session

_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


# The session of this process that queues at present; under torchrun one follows another.
_session: Session | None = None


def flush_before_reads(session: Session) -> None:
    """From now on, reading a tensor in this process waits for what the session has queued."""
    global _session
    is_first, _session = _session is None, session
    if is_first:
        for name in _READS:
            setattr(Tensor, name, _after_flush(getattr(Tensor, name), f"{name}()"))
        wait = torch.cuda.synchronize
        torch.cuda.synchronize = _after_flush(wait, "torch.cuda.synchronize()")


def _after_flush(read: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(read)
    def flushed(*args: Any, **options: Any) -> Any:
        assert _session is not None
        is_elsewhere = isinstance(args[0], Tensor) if args else False
        is_elsewhere = is_elsewhere and args[0].device.type != _session.device.type
        if not is_elsewhere and not _session.is_closed:
            _session.flush(name, mine=True)
        return read(*args, **options)

    return flushed
