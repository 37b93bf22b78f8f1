"""What the actor of a host and the driver send each other, in addition to jobs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

CONTROL, OUTPUT = 0, 1


@dataclass(frozen=True)
class News:
    """What has happened on a host since it was last asked.

    Attributes:
        data: (rank, CONTROL or OUTPUT, bytes), in order, as read from the pipe of that rank; no
            bytes mean that the rank has closed its end.
        board: what the host's ranks have written to their status board, see ``comm.mirror``;
            empty if that is unchanged.
        ages_s: {rank: seconds since second 0 of its trace}, of the ranks that have come to it.
        pids: {rank: process id} of the ranks that were started.
        there: the ranks that have begun.
        stopped: the ranks that a signal has suspended.
        exit_codes: {rank: exit code} in the order in which ranks ended; None if unknown.
        error: why the ranks could not be started; empty if there was no error.
        fault: why the ranks' end may not be known, see ``forkserver.server_fault``; often empty.
        finished: no rank is left, none will be started, and all their data was sent.
    """

    data: Sequence[tuple[int, int, bytes]] = ()
    board: bytes = b""
    ages_s: Mapping[int, float] = field(default_factory=dict)
    pids: Mapping[int, int] = field(default_factory=dict)
    there: Sequence[int] = ()
    stopped: Sequence[int] = ()
    exit_codes: Mapping[int, int | None] = field(default_factory=dict)
    error: str = ""
    fault: str = ""
    finished: bool = False


@dataclass(frozen=True)
class Orders:
    """What the driver asks of a host in a run.

    Attributes:
        data: (rank, bytes) for the control pipes of its ranks.
        signals: (rank, signal number).
        lost: ranks, of any host, without which the run continues.
        end: kill the host's ranks.
    """

    data: Sequence[tuple[int, bytes]] = ()
    signals: Sequence[tuple[int, int]] = ()
    lost: Sequence[int] = ()
    end: bool = False
