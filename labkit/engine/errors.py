"""The errors that end a run: each names the rank, the operation, the line and the next step."""


class WorkerError(RuntimeError):
    """A rank raised, was killed, or left early; the other ranks were ended and joined.

    Attributes:
        rank: the rank that failed first; None when no single rank did.
        location: the learner's own line, as ``file, line N: source``; empty when unknown.
        worker_traceback: the rank's traceback as text; may be empty.
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
    """The run had not ended after its ``timeout_s``; the message holds each rank's stack."""


class MismatchError(ValueError):
    """Raised inside a rank, before a transfer: ranks disagree on shape, dtype or collective."""


class PeerLostError(ConnectionError):
    """Raised inside a rank whose peer ``rank`` (None: any of several) was lost in a transfer."""

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


class PreemptedError(RuntimeError):
    """Raised inside a rank that was told to end (SIGTERM), when its checkpoint is written."""


class OutputError(OSError):
    """An output could not be written, for example to a full disk; an old file stays intact."""
