"""The rows of the status board, in the store of the run: what each host has written, for all.

Each host sets two keys: a beat, some bytes that change with every look at its own board, and its
rows, whenever they have changed. Nothing here is a pickle, and whatever is read is checked: the
store of torchrun has no password (SECURITY.md).
"""

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.comm.board import Board
from labkit.comm.meeting import SUSPICION
from labkit.comm.mirror import pack, unpack

# Mark, a number that grows with every look, a number that changes with the rows.
_BEAT = struct.Struct("!8sqq")
_MARK = b"labkit-b"


@dataclass
class Beat:
    """What is known of another host.

    Attributes:
        number, version: of its latest beat.
        count: how many beats were seen.
        heard_s: when the latest was seen.
    """

    number: int = 0
    version: int = 0
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
        self._packed, self._version = b"", 0

    def exchange(self) -> None:
        """Publish this host's rows, and mirror those of all others.

        Raises:
            ConnectionError: the store holds what no host has written.
            RuntimeError: the store does not answer.
        """
        if self._host is not None:
            self._publish(self._host)
        now_s = time.monotonic()
        for host, answer in self._answers("beat", [*self.beats]).items():
            number, version = self._read_beat(host, answer)
            beat, is_new = self.beats[host], False
            if number != beat.number:
                is_new = version != beat.version
                beat.number, beat.version, beat.heard_s = number, version, now_s
                beat.count += 1
            if is_new:
                self._mirror(host)

    def _publish(self, host: int) -> None:
        # Before the look: whoever sees the next beat knows that these rows are of now or later.
        number = time.monotonic_ns()
        packed = pack(self._board, self._hosts[host])
        if packed != self._packed:
            self._store.set(f"rows/{host}", packed)
            self._packed, self._version = packed, number
        self._store.set(f"beat/{host}", _BEAT.pack(_MARK, number, self._version))

    def _answers(self, kind: str, hosts: list[int]) -> dict[int, bytes]:
        """The values of some hosts' keys, of those that have set one."""
        missing = [host for host in hosts if not self.beats[host].count]
        there = [h for h in hosts if h not in missing or self._store.check([f"{kind}/{h}"])]
        keys = [f"{kind}/{host}" for host in there]
        return dict(zip(there, self._store.multi_get(keys) if keys else [], strict=True))

    def _read_beat(self, host: int, answer: bytes) -> tuple[int, int]:
        mark, number, version = _BEAT.unpack(answer) if len(answer) == _BEAT.size else (b"", 0, 0)
        if mark != _MARK:
            raise self._strange(host, f"its beat is {answer[:20]!r}")
        return number, version

    def _mirror(self, host: int) -> None:
        try:
            unpack(self._board, self._hosts[host], self._store.get(f"rows/{host}"))
        except ValueError as error:
            raise self._strange(host, str(error)) from None

    def _strange(self, host: int, what: str) -> ConnectionError:
        return ConnectionError(
            f"the store holds what host {host} has not written: {what}. {SUSPICION}"
        )
