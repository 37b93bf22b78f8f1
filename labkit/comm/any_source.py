"""``recv_any``: receiving from whichever of several ranks sends first.

Ranks of one host see on the status board which ranks have a message for them, and sleep on a
doorbell while none has (``labkit.comm.waiting``). Of messages from other hosts one is received
ahead from each source, where the transport can do so (gloo), and rings the same bell.
"""

from functools import partial

from torch import Tensor

from labkit.comm.board import RECV_ANY
from labkit.comm.session import Session
from labkit.comm.source_lines import caller_location
from labkit.comm.tensors import describe
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
            ValueError: a source shares no board with this rank, and the transport is not gloo.
        """
        left = [source for source in sources if source not in self._known_lost]
        if not left:
            raise PeerLostError(f"all the sources have ended: ranks {sources}")
        session, what = self._session, describe(tensor)
        far = [source for source in left if not session.doorbells.has(source)]
        if far:
            self._expect(landing, far)
        start = session.recorder.timer.mark()
        session.board.enter_any(session.rank, left, what, caller_location())
        try:
            arrived = partial(session.transport.arrived, landing, far)
            src = session.doorbells.wait_for_sender(left, arrived)
            with session.operation(RECV_ANY, expected=(src, what), start=start):
                session.transport.recv(landing, src)
        except PeerLostError as error:
            session.board.leave(session.rank)
            if error.rank is not None:
                self._known_lost.add(error.rank)
            raise
        return src

    def _expect(self, landing: Tensor, far: list[int]) -> None:
        session = self._session
        if not session.transport.receives_from_any:
            raise ValueError(
                f"recv_any from ranks {far} needs a status board that these ranks share: "
                "between machines use gloo"
            )
        session.transport.expect(landing, far, session.doorbells.ring_mine)
