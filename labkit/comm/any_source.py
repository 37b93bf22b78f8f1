"""``recv_any``: receiving from whichever of several ranks sends first.

Ranks of one machine see on the status board who has something to send, and sleep on a doorbell
while nobody has (``labkit.comm.waiting``). Between machines gloo chooses, from all ranks.
"""

from torch import Tensor

from labkit.comm.board import RECV_ANY
from labkit.comm.session import Session
from labkit.comm.source_lines import caller_location
from labkit.comm.tensors import describe
from labkit.comm.waiting import Doorbells
from labkit.errors import PeerLostError


class AnySource:
    """The sources of one rank's ``recv_any``, and which of them are known to be lost."""

    def __init__(self, session: Session):
        self._session = session
        self._known_lost: set[int] = set()

    def recv(self, tensor: Tensor, landing: Tensor, sources: list[int]) -> int:
        """Receive a message like ``tensor`` into ``landing``; returns its source.

        Raises:
            PeerLostError: a source has ended, told once; or all have.
        """
        left = [source for source in sources if source not in self._known_lost]
        if not left:
            raise PeerLostError(f"all the sources have ended: ranks {sources}")
        if (doorbells := self._session.doorbells) is None:
            return self._recv_from_all(landing, left)
        return self._recv_first(doorbells, tensor, landing, left)

    def _recv_first(
        self, doorbells: Doorbells, tensor: Tensor, landing: Tensor, sources: list[int]
    ) -> int:
        """Look on the board who is there, sleep until somebody is, and receive from that rank."""
        session, what = self._session, describe(tensor)
        start = session.recorder.timer.mark()
        session.board.enter_any(session.rank, sources, what, caller_location())
        try:
            src = doorbells.wait_for_sender(sources)
            with session.operation(RECV_ANY, expected=(src, what), start=start):
                session.transport.recv(landing, src)
        except PeerLostError as error:
            session.board.leave(session.rank)
            if error.rank is not None:
                self._known_lost.add(error.rank)
            raise
        return src

    def _recv_from_all(self, landing: Tensor, sources: list[int]) -> int:
        """Where no board shows who is there: over gloo, from whoever it is."""
        session = self._session
        if not session.transport.receives_from_any:
            raise ValueError(
                f"recv_any from ranks {sources} needs a board that these ranks share: between "
                "machines use gloo"
            )
        start = session.recorder.timer.mark()
        try:
            src = session.transport.recv_any(landing)
        except PeerLostError as error:
            raise PeerLostError(f"{RECV_ANY} broke off: {error}") from error
        if src not in sources:
            raise ValueError(
                f"rank {src} has sent to rank {session.rank}, which takes from {sources} only: "
                "between machines nobody else may send meanwhile"
            )
        session.operations += 1
        session.record(start, 0, src)
        return src
