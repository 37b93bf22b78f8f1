"""The ranks of a run on other hosts, as the driver's supervisor sees them.

For each rank the driver has the same pipes as for a rank of this machine. A thread per host asks
the host's actor what has happened, and writes it into the pipes and onto the driver's status
board. So the supervisor, its output, its errors and its figures are those of one machine.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from labkit.comm import mirror
from labkit.comm.board import Board
from labkit.runtime.agent import Agent
from labkit.runtime.between_hosts.verdict import with_hosts
from labkit.runtime.hosts.cluster import ANSWER_S, HostLostError, RemoteHost
from labkit.runtime.hosts.news import OUTPUT, News, Orders
from labkit.runtime.start_ranks import Place

_POLL_S = 0.05
_RETRY_S = 0.001
_READ_BYTES = 1 << 10


class RemoteRanks(Agent):
    """The ranks of one run on other hosts; see ``runtime.agent.Agent``.

    Args:
        run: the name of the run, which the hosts have prepared.
        hosts: in the order of their ranks.
        starts: by host, the further arguments of ``Host.start``.
        places: by host, its ranks.
        ends: ``(control, output)``, a rank's ends of its two pipes, by rank.
        board: the driver's status board.
    """

    # Ranks may notice that a host is lost long before it is known that it does not answer.
    settle_s = ANSWER_S + 1

    def __init__(
        self,
        run: str,
        hosts: Sequence[RemoteHost],
        starts: Sequence[tuple[Any, ...]],
        places: Sequence[Place],
        ends: list[tuple[Connection, Connection]],
        board: Board,
    ):
        self.exit_codes: Mapping[int, int | None] = {}
        self.error: BaseException | None = None
        self.finished = threading.Event()
        self._run, self._hosts, self._starts, self._places = run, hosts, starts, places
        self._ends, self._board = ends, board
        self._host_of = {rank: place.host for place in places for rank in place.ranks}
        self._pids: dict[int, int] = {}
        self._news = dict.fromkeys(range(len(hosts)), News())
        self._looks = dict.fromkeys(range(len(hosts)), 0)
        self._lost: dict[int, str] = {}
        self._told_lost: frozenset[int] = frozenset()
        # The hosts' threads change what is above; the supervisor's thread only reads it.
        self._changing = threading.Lock()
        self._left = set(range(len(hosts)))
        self._started = False
        self._stop_asked = threading.Event()

    # For the supervisor

    @property
    def pids(self) -> Mapping[int, int]:
        return self._pids

    def start(self) -> None:
        self._started = True
        for end in (end for pair in self._ends for end in pair):
            os.set_blocking(end.fileno(), False)
        threads = [threading.Thread(target=self._forward, daemon=True)]
        threads += [
            threading.Thread(target=self._follow, args=(number,), daemon=True)
            for number in range(len(self._hosts))
        ]
        for thread in threads:
            thread.start()

    def send_signal(self, rank: int, number: int) -> None:
        self._order([self._host_of[rank]], Orders(signals=[(rank, number)]))

    def is_stopped(self, rank: int) -> bool:
        return rank in self._news[self._host_of[rank]].stopped

    def any_runs(self) -> bool:
        return len(self.exit_codes) < len(self._ends)

    def fault(self) -> str:
        for number, host in enumerate(self._hosts):
            if told := self._news[number].error or self._news[number].fault:
                return f"{host}: {told}"
        return ""

    def lost_with(self, rank: int) -> str:
        return self._lost.get(self._host_of[rank], "")

    def with_hosts(self, text: str) -> str:
        names = {host.number: host.node.address for host in self._hosts}
        return with_hosts(text, [place.ranks for place in self._places], names)

    def looks(self) -> Mapping[int, int]:
        return {number: self._looks[number] for number in list(self._left)}

    def lose(self, ranks: frozenset[int]) -> None:
        if ranks != self._told_lost:
            self._told_lost = ranks
            self._order(self._left, Orders(lost=sorted(ranks)))

    def stop(self) -> None:
        if not self._stop_asked.is_set():
            self._stop_asked.set()
            self._order(self._left, Orders(end=True))

    def may_start_ranks(self) -> bool:
        return self._started and not self.finished.is_set()

    def _order(self, numbers: Iterable[int], orders: Orders) -> None:
        for number in list(numbers):
            # A host that is lost is found by its own thread.
            with contextlib.suppress(Exception):
                self._hosts[number].ask("obey", self._run, orders)

    # Of the threads

    def _forward(self) -> None:
        """Hand on what the supervisor writes to the ranks."""
        ranks = {control: rank for rank, (control, _) in enumerate(self._ends)}
        while not self.finished.is_set():
            ranks = {control: rank for control, rank in ranks.items() if not control.closed}
            found: Sequence[object] = []
            # The thread of a host may close a pipe meanwhile.
            with contextlib.suppress(OSError, ValueError):
                found = wait(list(ranks), _POLL_S)
            told: dict[int, list[tuple[int, bytes]]] = {}
            for control in cast(list[Connection], found):
                rank = ranks.pop(control)
                with contextlib.suppress(OSError):
                    if data := os.read(control.fileno(), _READ_BYTES):
                        told.setdefault(self._host_of[rank], []).append((rank, data))
                        ranks[control] = rank
            for number, data in told.items():
                self._order([number], Orders(data=data))

    def _follow(self, number: int) -> None:
        """Start the ranks of a host, and take its news until they have ended."""
        host = self._hosts[number]
        try:
            host.call("start", self._run, *self._starts[number])
            finished = False
            while not finished:
                news = host.call("hear", self._run)
                self._take(number, news)
                finished = news.finished
        except HostLostError as error:
            self._lose_host(number, str(error))
        except BaseException as error:
            self._lose_host(number, str(error))
            self.error = self.error or error
        finally:
            self._leave(number)

    def _take(self, number: int, news: News) -> None:
        ranks = self._places[number].ranks
        with self._changing:
            if news.board:
                mirror.unpack(self._board, ranks, news.board)
            now_s = time.perf_counter()
            for rank, age_s in news.ages_s.items():
                if not self._board.ranks["origin_s"][rank]:
                    self._board.ranks["origin_s"][rank] = now_s - age_s
            self._pids = {**self._pids, **news.pids}
            for rank in news.there:
                self._board.ranks["pid"][rank] = news.pids.get(rank, 0)
            self._news[number] = replace(news, data=())
        # The reports last: a rank has printed what it prints before it reports.
        for rank, kind, data in sorted(news.data, key=lambda part: part[1] != OUTPUT):
            self._write(self._ends[rank][kind], kind, data)
        with self._changing:
            # Last: a rank that has ended is not expected to send anything more.
            self.exit_codes = {**self.exit_codes, **news.exit_codes}
            self._looks[number] += 1
            if news.error and self.error is None:
                self.error = RuntimeError(news.error)

    def _write(self, end: Connection, kind: int, data: bytes) -> None:
        """Write what a rank has written; no data close the end."""
        if not data:
            end.close()
        part = memoryview(data)
        while part and not end.closed:
            # At the end of a run the supervisor still prints, and takes no more reports.
            if self._stop_asked.is_set() and kind != OUTPUT:
                return
            try:
                part = part[os.write(end.fileno(), part) :]
            except BlockingIOError:
                time.sleep(_RETRY_S)
            except OSError:
                return

    def _lose_host(self, number: int, why: str) -> None:
        with self._changing:
            self._lost[number] = why
            mine = [r for r in self._places[number].ranks if r not in self.exit_codes]
            self.exit_codes = {**self.exit_codes, **dict.fromkeys(mine)}

    def _leave(self, number: int) -> None:
        """Close the pipes of a host's ranks; the last host's thread ends the run on all hosts."""
        for rank in self._places[number].ranks:
            for end in self._ends[rank]:
                end.close()
        with self._changing:
            self._left.discard(number)
            is_last = not self._left
        if is_last:
            for host in self._hosts:
                with contextlib.suppress(Exception):
                    host.ask("forget", self._run)
            self.finished.set()
