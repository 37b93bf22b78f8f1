"""The engine under ``labkit.run``: PyTorch's elastic agent in a thread, ranks from a forkserver.

In a thread the agent leaves the calling process's signal handlers alone, and the caller can watch,
print, and be stopped. The forkserver has torch imported already, so a rank starts in tenths of a
second; it is a fresh process all the same, which a CUDA context of the caller's cannot break.
"""

import dataclasses
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.synchronize import SemLock
from multiprocessing.util import _finalizer_registry
from typing import Any

from labkit.errors import WorkerError

# What the forkserver has imported before it forks ranks. The engine's own part of a rank, and what
# a script's ranks import again when they load it.
FOR_RANKS = ["labkit.worker", "torch.distributed.elastic.multiprocessing", "labkit.launch"]
# An optimizer imports torch._dynamo when the first one is made: seconds in every rank.
FOR_TRAINING = ["labkit.train", "labkit.checks", "torch._dynamo"]
_AGENT_THREAD = "labkit-agent"
_LOOPBACK = "127.0.0.1"
# Where Linux keeps semaphores that have a name: the engine makes two a rank, and an event's five.
_SEMAPHORES = "/dev/shm"
_THREAD_START_S = 1.0
_ENGINE_LOGGERS = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.multiprocessing.spawn",
)


def under_torchrun() -> bool:
    """Whether ``torchrun`` has started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def warm_up(*, training: bool = True) -> None:
    """Start the process that all ranks are forked from, in the background; returns at once.

    It imports torch (some seconds). A notebook calls this first, so that it is ready when the
    reader comes to the first run; a run starts it by itself otherwise.

    Args:
        training: import what training needs too. Without it the first run comes sooner, and every
            rank that makes an optimizer takes seconds for it.
    """
    if under_torchrun() or start_method() != "forkserver":
        return
    more = FOR_TRAINING if training else ()
    multiprocessing.forkserver.set_forkserver_preload([*FOR_RANKS, *more, "labkit.frozen"])
    # Ctrl-C and the stop button signal the whole process group; the server would die of it while
    # it imports. It inherits the mask of the thread that starts it.
    # (The resource tracker unblocks the signal when it starts: it has to be there before.)
    multiprocessing.resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # OpenMP's threads spin while they wait. With another program on the cores, the spinning takes
    # more time than the work: a rank of two threads was seen to slow down tenfold.
    chosen = os.environ.get("OMP_WAIT_POLICY")
    os.environ["OMP_WAIT_POLICY"] = chosen or "passive"
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if chosen is None:
            del os.environ["OMP_WAIT_POLICY"]


def start_method() -> str:
    """``forkserver`` with torch preloaded (0.1 s a start); ``spawn`` where the system has none."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    return "forkserver"


def check_room(world_size: int) -> None:
    """Refuse to start ranks that would not all get their semaphores.

    Raises:
        WorkerError: names the size needed, the size there, and the way round.
    """
    if not os.path.isdir(_SEMAPHORES):
        return
    there = os.statvfs(_SEMAPHORES)
    # A file system without a limit says 0.
    free_bytes = there.f_bavail * there.f_frsize if there.f_blocks else float("inf")
    needed_bytes = (2 * world_size + 5) * there.f_frsize
    if there.f_flag & os.ST_RDONLY:
        problem = "is read-only: remount it with  mount -o remount,rw /dev/shm"
    elif free_bytes < needed_bytes:
        size_kib = there.f_blocks * there.f_frsize // 1024
        problem = (
            f"has {free_bytes // 1024} KiB free of {size_kib} KiB: remove old files from it, or "
            "make it larger (docker run --shm-size=64m, or  mount -o remount,size=64m /dev/shm)"
        )
    else:
        return
    raise WorkerError(
        f"the ranks could not be started: {world_size} of them need {needed_bytes // 1024} KiB of "
        f"{_SEMAPHORES} for their semaphores, and it {problem}"
    )


def _semaphores(thing: Any) -> Iterator[SemLock]:
    """Those of multiprocessing's in a context of the engine."""
    if isinstance(thing, SemLock):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from _semaphores(value)
    elif type(thing).__module__.startswith("multiprocessing."):
        yield from _semaphores(vars(thing))


def _remove_names(context: Any) -> None:
    """Take a context's semaphores out of /dev/shm once all ranks have opened them.

    What is open stays so; what has no name cannot be left behind, however the program is killed.
    """
    names = {semaphore._semlock.name for semaphore in _semaphores(vars(context))}
    for finalizer in list(_finalizer_registry.values()):
        if finalizer._callback is SemLock._cleanup and finalizer._args[0] in names:
            finalizer()


def _quieten_engine() -> None:
    """Keep the engine's log of our agent out of the notebook: the supervisor says it better."""

    def not_ours(record: logging.LogRecord) -> bool:
        return record.threadName != _AGENT_THREAD

    for name in _ENGINE_LOGGERS:
        logger = logging.getLogger(name)
        if not any(getattr(f, "__name__", "") == not_ours.__name__ for f in logger.filters):
            logger.addFilter(not_ours)


class Agent(threading.Thread):
    """PyTorch's local elastic agent in a thread of its own, which can be told to stop."""

    def __init__(
        self,
        context,
        world_size: int,
        args: tuple,
        done: Connection,
        may_lose: frozenset[int] = frozenset(),
    ):
        super().__init__(name=_AGENT_THREAD, daemon=True)
        self.failures: dict[int, Any] = {}
        # Exit codes of ranks in may_lose that ended before their function had returned.
        self.losses: dict[int, int] = {}
        self._may_lose = may_lose
        self.error: BaseException | None = None
        self._done = done
        self._asked_s: float | None = None
        self.finished = threading.Event()
        self._stop_asked = threading.Event()
        self._settings = (context.get_start_method(), world_size, args)

    def start(self) -> None:
        self._asked_s = time.monotonic()
        super().start()

    def stop(self) -> None:
        self._stop_asked.set()

    def may_start_ranks(self) -> bool:
        """Whether it still has, or may get, running ranks.

        An interrupt of ``start`` can leave a thread that runs, or is about to, and yet has not
        said so: ``is_alive`` would be False.
        """
        if self._asked_s is None or self.finished.is_set():
            return False
        return self.ident is not None or time.monotonic() - self._asked_s < _THREAD_START_S

    def run(self) -> None:
        try:
            self._run_agent()
        except BaseException as error:
            self.error = error
        finally:
            self._done.close()
            self.finished.set()

    def _run_agent(self) -> None:
        from torch.distributed.elastic.agent.server.api import RunResult as AgentResult
        from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
        from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

        from labkit.worker import run_rank

        method, world_size, args = self._settings
        stop_asked, may_lose, losses = self._stop_asked, self._may_lose, self.losses
        arena = args[1]

        class StoppableAgent(LocalElasticAgent):
            named = True

            def _monitor_workers(self, worker_group):
                if self.named and all(arena.board.ranks["pid"]):
                    _remove_names(self._pcontext)
                    self.named = False
                if stop_asked.is_set():
                    return AgentResult(state=WorkerState.FAILED)
                if may_lose:
                    return self._monitor_what_is_left()
                return super()._monitor_workers(worker_group)

            def _monitor_what_is_left(self):
                """The engine's own look, save that a rank in may_lose that ended is done.

                Those that have returned wait for each other, which the engine ends by an event: a
                process killed while it waits would hang it. Here they are ended by closing them.
                """
                context = self._pcontext
                returned = context._return_values
                for rank, process in enumerate(context._pc.processes):
                    if rank in returned:
                        continue
                    # Looked at in this order: what it returned before its end counts.
                    code = process.exitcode
                    if not context._ret_vals[rank].empty():
                        returned[rank] = context._ret_vals[rank].get()
                    elif code is not None and rank in may_lose:
                        returned[rank] = None
                        losses[rank] = code
                    elif code:
                        files = context.error_files
                        failure = ProcessFailure(rank, process.pid, code, files[rank])
                        return AgentResult(WorkerState.FAILED, failures={rank: failure})
                done = len(returned) == len(context._pc.processes)
                state = WorkerState.SUCCEEDED if done else WorkerState.HEALTHY
                return AgentResult(state, return_values=dict(returned))

        spec = WorkerSpec(
            role="labkit",
            local_world_size=world_size,
            entrypoint=run_rank,
            args=args,
            rdzv_handler=one_machine(),
            max_restarts=0,
            monitor_interval=0.02,
            local_addr=_LOOPBACK,
        )
        _quieten_engine()
        self.failures = dict(StoppableAgent(spec, no_logs(), start_method=method).run().failures)


def no_logs():
    """Where the engine writes what ranks print: nowhere, since the launcher has their pipes.

    PyTorch's own follows even /dev/null, with two threads a rank that look ten times a second: a
    launch waits 0.1 s for them at its end.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    class NoLogs(DefaultLogsSpecs):
        def reify(self, envs):
            return dataclasses.replace(super().reify(envs), tee_stdouts={}, tee_stderrs={})

    return NoLogs(log_dir=os.devnull)


def one_machine():
    """A rendezvous of one agent with itself: it needs a store for the ranks, and nobody to meet.

    PyTorch's own (``c10d``) waits and polls for other machines: 0.1 to 0.3 s of each launch.
    """
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.elastic import rendezvous

    class OneMachine(rendezvous.RendezvousHandler):
        use_agent_store = True

        def __init__(self):
            self.run_id = uuid.uuid4().hex

        def next_rendezvous(self):
            # Port 0: the system picks a free one, so that two courses never meet on 29500.
            store = TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
            where = rendezvous.RendezvousStoreInfo(_LOOPBACK, store.port)
            return rendezvous.RendezvousInfo(PrefixStore(self.run_id, store), 0, 1, where)

        def get_backend(self) -> str:
            return "one-machine"

        def get_run_id(self) -> str:
            return self.run_id

        def num_nodes_waiting(self) -> int:
            return 0

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass

        def shutdown(self) -> bool:
            return True

    return OneMachine()
