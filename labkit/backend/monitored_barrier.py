"""The monitored barrier: its error names the ranks that do not come, to find out which one hangs.

It uses the store of the process group and no messages between ranks. So it also works, and names
the right rank, while a rank is stuck in a collective.
"""

import time
from datetime import timedelta

import torch.distributed as dist

from labkit.units import format_count

_FINE = "fine"


def monitored_barrier(
    store: dist.Store, rank: int, size: int, timeout: timedelta, wait_all_ranks: bool
) -> None:
    """Wait until all P ranks have come, for at most ``timeout``.

    With ``wait_all_ranks`` the error names all missing ranks, not only the first.

    Raises:
        RuntimeError: on every rank that came, if a rank did not.
    """
    number = store.add(f"labkit/monitored/{rank}", 1)
    place = f"labkit/monitored/{number}"
    if rank == 0:
        missing = _missing(store, place, size, timeout, wait_all_ranks)
        verdict = _FINE
        if missing:
            seconds = f"{timeout.total_seconds():g} s"
            verdict = f"{missing} did not come to the monitored barrier in {seconds}"
        store.set(f"{place}/verdict", verdict)
    else:
        store.set(f"{place}/{rank}", "came")
        # Rank 0 may come last, and then wait for a whole timeout for the missing ranks.
        if not _comes(store, f"{place}/verdict", 2 * timeout):
            raise RuntimeError(f"rank 0 did not come to the monitored barrier of rank {rank}")
        verdict = store.get(f"{place}/verdict").decode()
    if verdict != _FINE:
        raise RuntimeError(verdict)


def _missing(
    store: dist.Store, place: str, size: int, timeout: timedelta, wait_all_ranks: bool
) -> str:
    until_s = time.monotonic() + timeout.total_seconds()
    missing = []
    for other in range(1, size):
        left = timedelta(seconds=max(0.001, until_s - time.monotonic()))
        if not _comes(store, f"{place}/{other}", left):
            missing.append(other)
            if not wait_all_ranks:
                break
    names = ", ".join(map(str, missing))
    return f"{format_count(len(missing), 'rank').split()[1]} {names}" if missing else ""


def _comes(store: dist.Store, key: str, timeout: timedelta) -> bool:
    try:
        store.wait([key], timeout)
    except RuntimeError:
        return False
    return True
