"""Start the processes of the ranks, watch and end them: PyTorch's elastic agent in a thread.

It serves the ranks of one machine, which are all ranks of a run or those of one of its hosts, and
opens no socket.

In a thread the agent cannot replace the calling process's signal handlers, and the caller can
watch, print, and be interrupted. PyTorch's ``SimpleElasticAgent`` is made to be extended: it
numbers the ranks and runs the loop; this module starts, watches and ends the processes.
(PyTorch's ``LocalElasticAgent`` may wait forever for a rank that was killed while it ended, makes
semaphores that stay in /dev/shm after a kill, and looks up host names.)

Source: ``torch.distributed.elastic.agent.server``, "Extending the Agent".
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from torch.distributed import HashStore
from torch.distributed.elastic import events, rendezvous
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from labkit.comm.processes import is_running, is_stopped, kill_group
from labkit.runtime.agent import Agent
from labkit.runtime.forkserver import (
    end_stopped_server,
    removed_variables,
    server_fault,
    start_method,
)
from labkit.runtime.preload import warm_up
from labkit.runtime.variables import variables_now

_LOOPBACK = "127.0.0.1"
# The longest time between two checks whether the agent has to stop.
_LOOK_S = 0.1
# PyTorch sleeps this long between two checks; short, because a check itself waits for events.
_PAUSE_S = 0.001
_THREAD_START_S = 1.0
# Time for killed ranks to disappear; only the kernel's uninterruptible sleep takes longer.
_END_PATIENCE_S = 5.0
# The exit code that Python gives to a child whose end the forkserver could not report.
_UNKNOWN_CODE = 255


@dataclass(frozen=True)
class Place:
    """Which ranks of a run one host has; ranks are numbered host by host.

    Attributes:
        ranks: the host's ranks.
        world_size: the number of all ranks, P.
        host, num_hosts: the number of the host, from 0, and of all hosts.
        master: address and free port of the first host, for programs that read MASTER_ADDR and
            MASTER_PORT; None on one machine.
    """

    ranks: range
    world_size: int
    host: int = 0
    num_hosts: int = 1
    master: tuple[str, int] | None = None


class Ranks(api.SimpleElasticAgent, Agent):
    """The ranks of one host: started once, never restarted, and watched in a thread.

    Args:
        target: a rank's body, ``target(rank, environment, control, output, *args)``.
        ends: ``(control, output)``, a rank's ends of its two pipes to the launcher, by rank.
        args: further arguments, the same for all ranks.
        place: which ranks of the run these are; None for all of them.

    Attributes:
        exit_codes: {rank: exit code} in the order in which ranks ended; None if unknown.
        error: why the ranks could not be started; None if there was no error.
        finished: set once no rank is left and none will be started.
        settle_s: time for the ranks' reports and exit codes to arrive after the first of them.
    """

    settle_s = 0.5

    def __init__(
        self,
        target: Callable[..., None],
        ends: list[tuple[Connection, Connection]],
        args: tuple[Any, ...],
        place: Place | None = None,
    ):
        spec = api.WorkerSpec(
            role="labkit",
            local_world_size=len(ends),
            entrypoint=target,
            rdzv_handler=OneMachine(),
            max_restarts=0,
            monitor_interval=_PAUSE_S,
        )
        super().__init__(spec)
        self._place = place or Place(range(len(ends)), len(ends))
        self.exit_codes = {}
        self.error: BaseException | None = None
        self.finished = threading.Event()
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._target, self._ends, self._args = target, ends, args
        self._thread = threading.Thread(target=self._watch, name="labkit-agent", daemon=True)
        self._asked_s: float | None = None
        self._stop_asked = threading.Event()

    def start(self) -> None:
        """Start the thread, which starts the ranks."""
        self._asked_s = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to kill the ranks and to finish; return at once."""
        self._stop_asked.set()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the ranks that were started, by rank."""
        return dict(zip(self._place.ranks, map(_pid, list(self._processes))))

    def may_start_ranks(self) -> bool:
        """Whether ranks are running or may still be started.

        ``Thread.is_alive`` is not enough: an interrupt of ``start`` can leave a thread that is
        running, or about to run, and is not yet marked as alive.
        """
        if self._asked_s is None or self.finished.is_set():
            return False
        return self._thread.ident is not None or time.monotonic() - self._asked_s < _THREAD_START_S

    def kill(self) -> None:
        """Kill the ranks that have not ended, and a stopped server, which would not report it."""
        for rank, pid in self.pids.items():
            if rank not in self.exit_codes:
                kill_group(pid)
        end_stopped_server()

    # For a supervisor, which has another agent for ranks on other hosts

    def warm_up(self) -> None:
        """Start the process that ranks are forked from."""
        warm_up()

    def send_signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank, unless it has ended."""
        with contextlib.suppress(ProcessLookupError, KeyError):
            os.kill(self.pids[rank], number)

    def is_stopped(self, rank: int) -> bool:
        """Whether a signal has suspended a rank."""
        return rank in self.pids and is_stopped(self.pids[rank])

    def any_runs(self) -> bool:
        """Whether a process of some rank is left."""
        return any(map(is_running, self.pids.values()))

    def fault(self) -> str:
        """Why ranks can neither be started nor be known to have ended; empty if they can."""
        return server_fault()

    # Of the thread

    def _watch(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self.error = self.error or error
        finally:
            self.finished.set()

    def _start_workers(self, worker_group: api.WorkerGroup) -> dict[int, int]:
        context: Any = multiprocessing.get_context(start_method())
        for rank, ends in zip(self._place.ranks, self._ends):
            if self._stop_asked.is_set():
                break
            environment = _environment(rank, self._place, worker_group)
            process = context.Process(
                target=self._target,
                args=(rank, environment, *ends, *self._args),
                name=f"labkit-rank-{rank}",
            )
            try:
                process.start()
            except BaseException as error:
                # Recorded first: the ranks that have started are ended because of this error.
                self.error = error
                raise
            self._processes.append(process)
            # The rank's pipes must close when it ends, so no other process may hold them open.
            for end in ends:
                end.close()
        # PyTorch numbers them by host.
        return dict(enumerate(self.pids.values()))

    def _monitor_workers(self, worker_group: api.WorkerGroup) -> api.RunResult:
        started = zip(self._place.ranks, self._processes)
        running = [process for rank, process in started if rank not in self.exit_codes]
        if any(process.exitcode == _UNKNOWN_CODE for process in running):
            # Without the forkserver, a sentinel does not say when its rank ends.
            time.sleep(_LOOK_S / 5)
        else:
            wait([process.sentinel for process in running], _LOOK_S)
        self._look()
        if self._stop_asked.is_set():
            return api.RunResult(state=api.WorkerState.FAILED)
        if len(self.exit_codes) < len(self._processes):
            return api.RunResult(state=api.WorkerState.HEALTHY)
        codes = {rank - self._place.ranks.start: code for rank, code in self.exit_codes.items()}
        return api.RunResult(state=api.WorkerState.SUCCEEDED, return_values=codes)

    def _look(self) -> None:
        for rank, process in zip(self._place.ranks, self._processes):
            code = process.exitcode
            if rank in self.exit_codes or code is None:
                continue
            if code == _UNKNOWN_CODE and is_running(_pid(process)):
                # A rank survives its server, and then only the system knows when the rank ends.
                continue
            known = None if code == _UNKNOWN_CODE and server_fault() else code
            # A new dict: the caller's thread may be reading the old one.
            self.exit_codes = {**self.exit_codes, rank: known}

    def _stop_workers(self, worker_group: api.WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 30) -> None:
        """Kill the ranks that are left: they have returned, or have to end at once."""
        until_s = time.monotonic() + _END_PATIENCE_S
        for rank, process in zip(self._place.ranks, self._processes):
            # By process id: a rank that has lost its server is no longer a child. Processes that
            # a rank has started are killed with its group, even if the rank itself has ended.
            if rank not in self.exit_codes or self._has_left_a_group(_pid(process)):
                kill_group(_pid(process))
        for process in self._processes:
            process.join(max(0.0, until_s - time.monotonic()))
            while is_running(_pid(process)) and time.monotonic() < until_s:
                time.sleep(_PAUSE_S)
        self._look()

    def _has_left_a_group(self, leader: int) -> bool:
        # As long as a group has members, the system does not give its id to a new process.
        try:
            os.killpg(leader, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _construct_event(self, state: str, source: Any, *args: Any, **kwargs: Any) -> events.Event:
        # PyTorch's own method asks a name server for this machine's full name.
        return events.Event(state, source)


class OneMachine(StaticTCPRendezvous):
    """A rendezvous of one agent with itself: no other machine, and no listening socket.

    PyTorch's own rendezvous classes make a store that listens, and ``c10d`` also waits and polls
    for other machines, which takes 0.1 to 0.3 s per launch.
    """

    use_agent_store = False

    def __init__(self):
        super().__init__(_LOOPBACK, 0, rank=0, world_size=1, run_id=uuid.uuid4().hex, timeout=0)

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        # A free port, for programs that read MASTER_PORT; the ranks meet in a ``MeetingFile``.
        with socket.socket() as probe:
            probe.bind((_LOOPBACK, 0))
            where = rendezvous.RendezvousStoreInfo(_LOOPBACK, probe.getsockname()[1])
        return rendezvous.RendezvousInfo(HashStore(), 0, 1, where)


def _pid(process: multiprocessing.process.BaseProcess) -> int:
    assert process.pid is not None, "it has been started"
    return process.pid


def _environment(rank: int, place: Place, group: api.WorkerGroup) -> dict[str, str | None]:
    """The caller's variables as they are now, and what torchrun sets for a rank."""
    address, port = place.master or (group.master_addr or _LOOPBACK, group.master_port)
    return {
        **dict.fromkeys(removed_variables()),
        **variables_now(),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - place.ranks.start),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(len(place.ranks)),
        "GROUP_RANK": str(place.host),
        "GROUP_WORLD_SIZE": str(place.num_hosts),
        "ROLE_NAME": group.spec.role,
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
    }
