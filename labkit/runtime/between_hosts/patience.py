"""A clock for "time enough to answer": it hardly moves while a process is waiting for a core.

On a busy machine a rank that is about to raise an error may get no core for seconds. Seconds in
which it could not run say nothing about it, so they are not counted.

Source: Linux, Documentation/scheduler/sched-stats: the second number of /proc/PID/schedstat is the
time in nanoseconds that a thread was ready to run, and did not run.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable

from labkit.comm.processes import PROCESSES

# Threads that compute without end, more of them than cores, are always waiting: so some of the
# time always counts.
_LEAST = 0.1
_PAUSE_S = 0.05


class Patience:
    """How long some processes have been able to run since this was made.

    Args:
        pids: of the processes; the one that waits for a core most counts.

    Attributes:
        used_s: seconds until the last ``look``.
    """

    def __init__(self, pids: Iterable[int]):
        self._pids = list(pids)
        self._waited_s = self._waits()
        self._seen_s = time.monotonic()
        self.used_s = 0.0

    def look(self) -> float:
        """Count the time since the last look, which should not be long ago; the seconds so far.

        Between two looks the thread counts that has waited longest: one may wait for another.
        """
        waited_s, now_s = self._waits(), time.monotonic()
        before = self._waited_s
        longest_s = max((waited_s[one] - before.get(one, 0.0) for one in waited_s), default=0.0)
        passed_s = now_s - self._seen_s
        self.used_s += max(passed_s - longest_s, _LEAST * passed_s)
        self._waited_s, self._seen_s = waited_s, now_s
        return self.used_s

    def sleep(self, until_s: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Sleep until so many seconds were used since this was made; whether it was over before.

        Args:
            is_over: asked again and again, and ends the sleep.
        """
        while not (over := is_over()) and self.look() < until_s:
            time.sleep(_PAUSE_S)
        return over

    def _waits(self) -> dict[str, float]:
        """By thread, the seconds for which it has waited for a core in its life.

        Empty where the system does not tell: then all time counts.
        """
        found = {}
        for pid in self._pids:
            with contextlib.suppress(OSError):
                for task in os.scandir(PROCESSES / f"{pid}/task"):
                    found[task.path] = _waited_s(task.path)
        return found


def _waited_s(task: str) -> float:
    with contextlib.suppress(OSError, IndexError), open(f"{task}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0
