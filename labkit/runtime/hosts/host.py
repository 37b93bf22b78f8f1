"""The actor of one host: it starts the host's ranks and hands on what they say.

It does for its ranks what a launcher does for those of one machine: it holds the other ends of
their pipes, their status board and their processes. What it reads goes to the driver, unread.

This module does not import Ray: ``cluster`` makes an actor of the class.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait

import torch.distributed as dist

from labkit.comm import mirror
from labkit.comm.board import LOST, RUNNING
from labkit.comm.processes import loopback
from labkit.comm.shared_memory import Arena
from labkit.devices import Plan, num_cores, plan, versions
from labkit.runtime.connect import MeetingFile
from labkit.runtime.hosts.meeting_store import (
    MeetingStore,
    free_port,
    interface_of,
    serve_store,
)
from labkit.runtime.hosts.news import CONTROL, OUTPUT, News, Orders
from labkit.runtime.hosts.sent import Sent
from labkit.runtime.preload import warm_up
from labkit.runtime.shortages import remove_empty_segments
from labkit.runtime.start_ranks import Place, Ranks
from labkit.runtime.variables import set_variables
from labkit.runtime.worker import Job, run_rank

# How long a call of ``hear`` waits for something to happen.
HEARTBEAT_S = 0.25
_LOOK_S = 0.05
_READ_BYTES = 1 << 20
# A host that has not been asked for this long ends its ranks: its driver is out of reach.
_SILENCE_S = 30.0
_FOR_NETWORKS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@dataclass(frozen=True)
class Prepared:
    """What the driver has to know of a host before it can start a run.

    Attributes:
        plan: the devices of the host's ranks.
        cores: how many cores the host's ranks may use.
        meeting: where the ranks find each other; None unless this is the first host.
        master_port: a free port of the first host, for programs that read MASTER_PORT.
    """

    plan: Plan
    cores: int
    meeting: MeetingStore | None = None
    master_port: int = 0


class Host:
    """One node's part in the runs of one driver.

    Args:
        address: by which the other nodes reach this one.
    """

    def __init__(self, address: str):
        self._address = address
        self._runs: dict[str, HostRun] = {}
        self._stores: dict[str, dist.TCPStore] = {}
        self._variables: dict[str, str] = {}

    def settle_in(self, sent: Sent) -> dict[str, str]:
        """Make this process, which is the actor's alone, fit to start ranks; its versions.

        Args:
            sent: what the ranks get of the driver's process.
        """
        # A rank would run the main file of its parent, here Ray's own.
        vars(sys.modules["__main__"]).pop("__file__", None)
        # Ray gives a worker one core's worth of threads; ranks share the cores by themselves.
        os.environ.pop("OMP_NUM_THREADS", None)
        if interface := interface_of(self._address):
            for name in _FOR_NETWORKS:
                # Nobody on another host reaches a loopback interface, whoever has named it.
                if os.environ.get(name, loopback()) == loopback():
                    os.environ[name] = interface
        self.take(sent)
        warm_up()
        return versions()

    def prepare(
        self,
        run: str,
        num_ranks: int,
        where: tuple[str, str, str | Sequence[str] | None],
        is_first: bool,
    ) -> Prepared:
        """Plan this host's ranks; on the first host, open the store in which all ranks meet.

        Args:
            run: a name of the run, unlike those of others.
            num_ranks: how many ranks this host gets.
            where: device, transport and devices, see ``devices.plan``.
            is_first: whether this is the first host.

        Raises:
            ValueError: devices that this host does not have.
        """
        device, transport, devices = where
        chosen = plan(num_ranks, device, transport, devices=devices)
        if not is_first:
            return Prepared(chosen, num_cores())
        store = self._stores[run] = serve_store(self._address)
        meeting = MeetingStore(self._address, store.port)
        return Prepared(chosen, num_cores(), meeting, free_port(self._address))

    def start(self, run: str, job: Job, place: Place, meeting: MeetingStore, sent: Sent) -> None:
        """Start this host's ranks of a run."""
        self.take(sent)
        self._runs[run] = HostRun(job, place, meeting)

    def hear(self, run: str) -> News:
        """What has happened in a run since the last call; waits a moment for something new."""
        return self._runs[run].hear()

    def obey(self, run: str, orders: Orders) -> None:
        # Another call may end the run meanwhile.
        if (there := self._runs.get(run)) is not None:
            there.obey(orders)

    def forget(self, run: str) -> None:
        """End what is left of a run."""
        self._stores.pop(run, None)
        if (ended := self._runs.pop(run, None)) is not None:
            ended.close()

    def take(self, sent: Sent) -> None:
        """Set what the driver has set in its own process; unset what it has unset since."""
        gone = dict.fromkeys(self._variables.keys() - sent.variables.keys())
        set_variables(gone | sent.variables)
        self._variables = dict(sent.variables)
        with contextlib.suppress(OSError):
            os.chdir(sent.folder)


class HostRun:
    """The ranks of one host in one run.

    Its methods are called in several threads: whoever uses the pipes holds a lock, and ``close``
    waits for them.
    """

    def __init__(self, job: Job, place: Place, meeting: MeetingStore):
        self._place = place
        self._arena = Arena(place.world_size)
        # Ranks that are all on one host need no store that others can reach.
        self._file = MeetingFile() if place.num_hosts == 1 else None
        controls = [Pipe() for _ in place.ranks]
        outputs = [Pipe(duplex=False) for _ in place.ranks]
        self._controls = {rank: mine for rank, (mine, _) in zip(place.ranks, controls)}
        self._open = {mine: (rank, CONTROL) for rank, mine in self._controls.items()}
        self._open |= {mine: (rank, OUTPUT) for rank, (mine, _) in zip(place.ranks, outputs)}
        ends = [(control, out) for (_, control), (_, out) in zip(controls, outputs)]
        self._ranks = Ranks(run_rank, ends, (job, self._arena, self._file or meeting), place)
        self._board, self._told = b"", News()
        self._made_s, self._heard_s = time.time(), time.monotonic()
        self._error = ""
        self._hearing, self._obeying = threading.Lock(), threading.Lock()
        self._closing, self._closed = threading.Lock(), threading.Event()
        threading.Thread(
            target=self._watch_driver, name="labkit-driver-watch", daemon=True
        ).start()
        self._ranks.warm_up()
        self._ranks.start()

    def hear(self) -> News:
        with self._hearing:
            return self._hear()

    def _hear(self) -> News:
        until_s = time.monotonic() + HEARTBEAT_S
        while True:
            self._heard_s = time.monotonic()
            codes = self._ranks.exit_codes
            data = self._read(_LOOK_S)
            # There may be more of a rank that has just been read from.
            spoke = {rank for rank, kind, part in data if kind == CONTROL and part}
            news = self._news(data, {r: code for r, code in codes.items() if r not in spoke})
            if data or time.monotonic() > until_s or self._differs(news):
                self._told = news
                return news

    def _read(self, timeout_s: float) -> list[tuple[int, int, bytes]]:
        if not self._open:
            self._ranks.finished.wait(timeout_s)
            return []
        data = []
        for found in wait(list(self._open), timeout_s):
            assert isinstance(found, Connection)
            try:
                part = os.read(found.fileno(), _READ_BYTES)
            except OSError:
                part = b""
            data.append((*self._open[found], part))
            if not part:
                del self._open[found]
        return data

    def _news(self, data: list[tuple[int, int, bytes]], exit_codes: dict[int, int | None]) -> News:
        # Before the processes are looked at: what a rank has written before its end is included.
        ended = self._ranks.finished.is_set()
        rows, now_s = self._arena.board.ranks, time.perf_counter()
        packed = mirror.pack(self._arena.board, self._place.ranks)
        changed = packed if packed != self._board else b""
        self._board = packed
        error = self._ranks.error
        return News(
            data=data,
            board=changed,
            ages_s={r: now_s - s for r in self._place.ranks if (s := float(rows["origin_s"][r]))},
            pids=self._ranks.pids,
            there=[rank for rank in self._place.ranks if rows["pid"][rank]],
            stopped=[rank for rank in self._place.ranks if self._ranks.is_stopped(rank)],
            exit_codes=exit_codes,
            error=self._error or (f"{type(error).__name__}: {error}" if error else ""),
            fault=self._ranks.fault(),
            finished=ended and not data and len(exit_codes) == len(self._ranks.exit_codes),
        )

    def _differs(self, news: News) -> bool:
        names = ("pids", "there", "stopped", "exit_codes", "error", "fault", "finished")
        return bool(news.board) or any(getattr(news, n) != getattr(self._told, n) for n in names)

    def obey(self, orders: Orders) -> None:
        self._heard_s = time.monotonic()
        with self._obeying:
            for rank, data in orders.data:
                with contextlib.suppress(OSError):
                    os.write(self._controls[rank].fileno(), data)
        for rank, number in orders.signals:
            self._ranks.send_signal(rank, number)
        for rank in orders.lost:
            if self._arena.board.ranks[rank]["state"] == RUNNING or rank not in self._place.ranks:
                self._arena.board.ranks[rank]["state"] = LOST
        if orders.end:
            self._end()

    def _end(self) -> None:
        self._ranks.stop()
        self._ranks.kill()

    def _watch_driver(self) -> None:
        """End the ranks if the driver is not heard any more."""
        while not self._closed.wait(1.0):
            if time.monotonic() - self._heard_s > _SILENCE_S:
                self._error = f"its driver was not heard for {_SILENCE_S:g} s"
                self.close()

    def close(self) -> None:
        """End the ranks, and let go of all that the run has used."""
        self._closed.set()
        self._end()
        if self._ranks.may_start_ranks():
            self._ranks.finished.wait(10)
        with self._closing:
            # The number of a closed pipe may be that of another file soon.
            with self._hearing, self._obeying:
                for end in [*self._open, *self._controls.values()]:
                    end.close()
                self._open.clear()
            remove_empty_segments(self._made_s - 0.1)
            if self._file is not None:
                self._file.close()
