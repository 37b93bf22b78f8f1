"""Labkit's own count of bytes, read at the same moments as the kernel's."""

from collections.abc import Callable
from typing import Any

from labkit.comm.comm import Comm


class Counting:
    """What the scripts measure (their ``Measured``), and labkit's count of bytes beside it.

    Args:
        comm: a function, as a script makes its Comm before its first step.
        measured: a ``Measured``.

    Attributes:
        step_s, sent_bytes: of ``measured``.
        counted_bytes: payload bytes that this rank has sent, one number per step.
    """

    def __init__(self, comm: Callable[[], Comm], measured: Any):
        self._comm, self._measured = comm, measured
        self.step_s: list[float] = measured.step_s
        self.sent_bytes: list[int] = measured.sent_bytes
        self.counted_bytes: list[int] = []

    def __enter__(self) -> "Counting":
        self._before = self._comm().bytes_sent
        self._measured.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._measured.__exit__(*error)
        self.counted_bytes.append(self._comm().bytes_sent - self._before)
