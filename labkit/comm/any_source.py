"""``recv_any``: receiving from whichever of several ranks sends first.

Ranks of one machine see on the status board which ranks have a message for them, and sleep on a
doorbell while none has (``labkit.comm.waiting``). Between machines gloo takes the first message of
any rank.
"""

from torch import Tensor

from labkit.comm.board import RECV_ANY
from labkit.comm.session import Session
from labkit.comm.source_lines import caller_location
from labkit.comm.tensors import describe
from labkit.comm.waiting import Doorbells
from labkit.errors import PeerLostError


class AnySource:
    """``recv_any`` of one rank; remembers which sources it has reported as lost."""

    def __init__(self, session: Session):
        self._session = session
        self._known_lost: set[int] = set()

    def recv(self, tensor: Tensor, landing: Tensor, sources: list[int]) -> int:
        """Receive a message like ``tensor`` into ``landing``; returns its source.

        Raises:
            PeerLostError: a source has ended (reported once for each), or all have.
            ValueError: the ranks share no board and do not use gloo; another rank has sent.
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
        """Sleep until the board shows a sender among ``sources``, and receive from that rank."""
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
        """Receive from any rank over gloo, where no shared board shows who sends."""
        session = self._session
        if not session.transport.receives_from_any:
            raise ValueError(
                f"recv_any from ranks {sources} needs a status board that these ranks share: "
                "between machines use gloo"
            )
        start = session.recorder.timer.mark()
        try:
            src = session.transport.recv_any(landing)
        except PeerLostError as error:
            raise PeerLostError(f"{RECV_ANY} broke off: {error}") from error
        if src not in sources:
            raise ValueError(
                f"rank {src} has sent to rank {session.rank}, which receives from {sources} only: "
                "between machines no other rank may send to it at the same time"
            )
        session.operations += 1
        session.record(start, 0, src)
        return src
