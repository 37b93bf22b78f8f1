"""The rows of the status board, in the store of the run: what each host has written, for all.

Each host sets one key: a number that grows with every look at its own board, and its rows. Nothing
here is a pickle, and whatever is read is checked: the store of torchrun has no password
(SECURITY.md).
"""

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.comm.board import Board
from labkit.comm.meeting import SUSPICION
from labkit.comm.mirror import pack, unpack

# Mark, and the number of the look.
_HEAD = struct.Struct("!8sq")
_MARK = b"labkit-b"


@dataclass
class Beat:
    """What is known of another host: its latest look, how many were seen, and when the latest."""

    number: int = 0
    count: int = 0
    heard_s: float = 0.0


class Rows:
    """The exchange of rows between the boards of all hosts.

    Args:
        store: a connection to the run's store for this alone; no other run uses its prefix.
        board: this host's.
        hosts: the ranks of each host.
        host: this one; None for a board that is only looked at.
    """

    def __init__(self, store: Any, board: Board, hosts: Sequence[Sequence[int]], host: int | None):
        self._store, self._board, self._hosts, self._host = store, board, hosts, host
        now_s = time.monotonic()
        self.beats = {other: Beat(heard_s=now_s) for other in range(len(hosts)) if other != host}

    def exchange(self) -> None:
        """Publish this host's rows, and mirror those of all others.

        Raises:
            ConnectionError: the store holds what no host has written.
            RuntimeError: the store does not answer.
        """
        if self._host is not None:
            # Before the look: whoever sees the number knows that the rows are of now or later.
            data = _HEAD.pack(_MARK, time.monotonic_ns())
            data += pack(self._board, self._hosts[self._host])
            self._store.set(f"rows/{self._host}", data)
        there = [
            h for h, beat in self.beats.items() if beat.count or self._store.check([f"rows/{h}"])
        ]
        answers = self._store.multi_get([f"rows/{host}" for host in there]) if there else []
        for host, answer in zip(there, answers, strict=True):
            try:
                mark, number = _HEAD.unpack(answer[: _HEAD.size])
                if mark != _MARK:
                    raise ValueError(f"it begins with {answer[:20]!r}")
                if number != self.beats[host].number:
                    unpack(self._board, self._hosts[host], answer[_HEAD.size :])
            except (ValueError, struct.error) as error:
                raise ConnectionError(
                    f"the store holds what host {host} has not written: {error}. {SUSPICION}"
                ) from None
            beat = self.beats[host]
            if number != beat.number:
                beat.number, beat.heard_s, beat.count = number, time.monotonic(), beat.count + 1
