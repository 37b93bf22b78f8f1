"""The errors that end a run: each names the rank, the operation, the line and the next step."""


class WorkerError(RuntimeError):
    """A rank raised, was killed, or left early; the other ranks were ended and joined.

    Attributes:
        rank: the rank that failed first (None when no single rank did).
        location: the learner's own line, as ``file, line N: source``; empty when unknown.
        worker_traceback: the rank's traceback as text; empty when it could not make one.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        location: str = "",
        worker_traceback: str = "",
    ):
        super().__init__(message)
        self.rank = rank
        self.location = location
        self.worker_traceback = worker_traceback


class DeadlockError(WorkerError):
    """The ranks can no longer finish: a cycle, a missing rank, messages that do not fit."""


class DeadlineError(DeadlockError, TimeoutError):
    """The run was still going at its ``timeout_s``; the message holds each rank's stack."""


class MismatchError(ValueError):
    """Raised inside a rank, before the transfer: the two ends disagree on shape or dtype."""


class PeerLostError(ConnectionError):
    """Raised inside a rank whose peer vanished during a transfer: a consequence, not a cause.

    Attributes:
        rank: the peer; None if it could have been any of several.
    """

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


class OutputError(OSError):
    """An output could not be written, for example to a full disk; an old one is intact."""
