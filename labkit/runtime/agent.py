"""What a supervisor asks of the agent that starts and ends the ranks of a run.

``start_ranks.Ranks`` does it for ranks on this machine, ``hosts.remote_ranks.RemoteRanks`` for
ranks on other hosts.
"""

import threading
from collections.abc import Mapping
from typing import Protocol


class Agent(Protocol):
    """The ranks of one run, as their supervisor sees them.

    Attributes:
        exit_codes: {rank: exit code} in the order in which ranks ended; None if unknown.
        error: why the ranks could not be started; None if there was no error.
        finished: set once no rank is left and none will be started.
        settle_s: how long after the first sign of a failure its cause may still become known.
    """

    exit_codes: Mapping[int, int | None]
    error: BaseException | None
    finished: threading.Event
    settle_s: float

    @property
    def pids(self) -> Mapping[int, int]:
        """Process ids of the ranks that were started, by rank."""
        ...

    def warm_up(self) -> None:
        """Start what the ranks are started from, unless it is there."""
        return

    def start(self) -> None:
        """Start the ranks in the background."""
        ...

    def send_signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank, unless it has ended."""
        ...

    def is_stopped(self, rank: int) -> bool:
        """Whether a signal has suspended a rank."""
        ...

    def any_runs(self) -> bool:
        """Whether a process of some rank is left."""
        ...

    def fault(self) -> str:
        """Why ranks can neither be started nor be known to have ended; empty if they can."""
        ...

    def lost_with(self, rank: int) -> str:
        """What has become of the host of this rank, if it was lost; else empty."""
        return ""

    def with_hosts(self, text: str) -> str:
        """``text`` with the hosts of the ranks that it names; unchanged on one machine."""
        return text

    def looks(self) -> Mapping[int, int]:
        """By host, how often its part of the status board has arrived; empty on one machine.

        There the board is in memory that the ranks share, so it is never behind.
        """
        return {}

    def lose(self, ranks: frozenset[int]) -> None:
        """Note that the run continues without these ranks; on one machine the board tells it."""
        return

    def stop(self) -> None:
        """Ask for the end of all ranks; return at once."""
        ...

    def kill(self) -> None:
        """Kill the ranks that have not ended, and what would keep ``finished`` from being set.

        (Other hosts do so when they are told to stop.)
        """
        return

    def may_start_ranks(self) -> bool:
        """Whether ranks are running or may still be started."""
        ...
