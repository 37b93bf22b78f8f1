"""Ranks on the nodes of a Ray cluster: one actor per rank. Only this module imports Ray.

An actor's process is a rank as torchrun would have started it: it joins the others in a store,
and a ``Watch`` explains what goes wrong. The store is the driver's, which so shows what the ranks
are doing. Ray prints what they print, notices when one is gone, and ends all with their driver.
They stay for the driver's next run of the same kind; a run that fails or is interrupted ends them.
"""

import contextlib
import itertools
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import psutil
import torch.distributed as dist

from labkit.engine.comm.board import RUNNING
from labkit.engine.comm.emulated_link import EmulatedLink
from labkit.engine.comm.source_lines import cell_sources, install_sources
from labkit.engine.comm.torch_transport import first_line
from labkit.engine.devices import plan, print_once, versions
from labkit.engine.errors import WorkerError
from labkit.engine.runtime.failures import Evidence, deadline_error, failure_error
from labkit.engine.runtime.messages import Report, dump_call, trace_of
from labkit.engine.runtime.output import Watcher
from labkit.engine.runtime.plain import (
    dump_error,
    dump_plain,
    dump_report,
    load_error,
    load_report,
)
from labkit.engine.runtime.rank_watch import Rows, Watch, with_hosts
from labkit.engine.runtime.torchrun import watched
from labkit.engine.runtime.worker import call as run_as, connect
from labkit.engine.started import MARK, RUN
from labkit.schedules.ring import chunk_bounds
from labkit.units import check_integer, format_count

_POLL_S = 0.2
# A first actor's process imports torch.
_START_S = 120.0
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_VARIABLES += ("GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# (device, transport, devices), see ``devices.plan``.
DeviceChoice = tuple[str, str, str | Sequence[str] | None]


class RankActor:
    """One rank. Its methods are called one after the other, in its main thread."""

    def __init__(self, variables: dict[str, str]):
        # Ray gives an actor one core's worth of threads; ranks share the cores by themselves.
        os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.update(variables)

    def __repr__(self) -> str:
        """As Ray names it before each line that it prints."""
        return f"rank {os.environ['RANK']}"

    def join(
        self, choice: DeviceChoice, address: str, folder: str
    ) -> tuple[str, str, dict[str, str]]:
        """Prepare for runs; returns backend and note of this host's plan, and its versions."""
        with contextlib.suppress(OSError):
            os.chdir(folder)
        sys.path.insert(0, folder)
        if os.environ["GROUP_WORLD_SIZE"] != "1":
            # gloo would take the address of the machine's name, which others may not reach.
            for name, interface in psutil.net_if_addrs().items():
                if any(entry.address == address for entry in interface):
                    os.environ["GLOO_SOCKET_IFNAME"] = name
        device, transport, devices = choice
        ranks_here = int(os.environ["LOCAL_WORLD_SIZE"])
        self._plan = plan(ranks_here, device, transport, devices=devices)
        return self._plan.backend, self._plan.note, versions()

    def store(self, world_size: int) -> dist.TCPStore:
        """Connect to the driver's store."""
        port = int(os.environ["MASTER_PORT"])
        return dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)

    def call(
        self, run: int, call: bytes, sources: Any, timeout_s: float, link: EmulatedLink | None
    ) -> tuple[bytes, str]:
        """Run a function as this rank; returns its report, or an error."""
        watch = None
        try:
            comm = connect(self._plan, timeout_s, rendezvous=self, link=link)
            watch = Watch(comm, dist.PrefixStore(f"watch/{run}", self.store(0)))
            with watched(watch):
                install_sources(sources)
                fn, args = cloudpickle.loads(call)
                return dump_report(run_as(comm, fn, args, dump_plain)), ""
        except BaseException as error:
            explained = watch and watch.error
            if explained is None:
                rank = os.environ["RANK"]
                explained = WorkerError(f"rank {rank} raised {type(error).__name__}: {error}")
            return b"", dump_error(explained)


class _Ranks:
    """The actors of a run, and the store in which they meet."""

    def __init__(self, ray: Any, nodes: list[Any], world_size: int, choice: DeviceChoice):
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.ray = ray
        self.runs = itertools.count()
        # It listens on the address by which the nodes know this one, and on no other.
        address = ray.util.get_node_ip_address()
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        options = {"is_master": True, "wait_for_workers": False}
        self.store = dist.TCPStore(address, port, **options, master_listen_fd=listener.detach())
        # As evenly as possible, host by host: 5 ranks on 2 hosts are 3 and 2.
        self.hosts = [range(*bounds) for bounds in chunk_bounds(world_size, len(nodes))]
        self.names = [node["NodeManagerAddress"] for node in nodes]
        self.actors: list[Any] = []
        for host, ranks in enumerate(self.hosts):
            node = nodes[host]
            gpus = 0 if choice[0] == "cpu" else node["Resources"].get("GPU", 0)
            actor_class = ray.remote(RankActor).options(
                # It keeps no cores from other work. All ranks of a host see the host's GPUs.
                num_cpus=0,
                num_gpus=min(1, gpus / len(ranks)),
                runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            )
            for local_rank, rank in enumerate(ranks):
                numbers = rank, world_size, local_rank, len(ranks), host, len(nodes), address, port
                variables = dict(zip(_VARIABLES, map(str, numbers)))
                self.actors.append(actor_class.remote(variables | {MARK: RUN}))

    def join(self, choice: DeviceChoice) -> None:
        """Prepare all ranks; ValueError if their hosts do not go together."""
        names = []
        pending = []
        for name, ranks in zip(self.names, self.hosts):
            for rank in ranks:
                names.append(name)
                pending.append(self.actors[rank].join.remote(choice, name, os.getcwd()))
        answers = self.ray.get(pending, timeout=_START_S)
        first_backend, _, _ = answers[0]
        for name, (backend, note, host_versions) in zip(names, answers):
            if host_versions != versions() or backend != first_backend:
                raise ValueError(
                    f"host {name} has {host_versions}, backend {backend}, and this machine "
                    f"{versions()}, rank 0 {first_backend}: install the same versions on all "
                    "hosts, and use device 'cpu' if only some have GPUs"
                )
            if note:
                print_once(f"host {name}: {note}")

    def end(self) -> None:
        for actor in self.actors:
            with contextlib.suppress(Exception):
                self.ray.kill(actor)


# The ranks of this process's latest run, after the settings that they were started with.
_kept: tuple[Any, _Ranks] | None = None


def run_on(
    hosts: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    choice: DeviceChoice,
    timeout_s: float,
    link: EmulatedLink | None,
) -> list[Report]:
    """Run ``fn`` on the nodes of the cluster to which this process is connected; see ``run``."""
    global _kept
    ray = connected(hosts)
    nodes = _nodes_for(ray, hosts, world_size)
    job = dump_call(fn, args), cell_sources(), timeout_s, link
    node_ids = [node["NodeID"] for node in nodes]
    job_id = ray.get_runtime_context().get_job_id()
    settings = job_id, node_ids, world_size, choice, os.getcwd()
    ranks = None
    if _kept is not None:
        kept_settings, kept_ranks = _kept
        _kept = None
        if kept_settings == settings:
            ranks = kept_ranks
        else:
            kept_ranks.end()
    try:
        if ranks is None:
            ranks = _Ranks(ray, nodes, world_size, choice)
            ranks.join(choice)
        reports = _watch(ranks, job, timeout_s)
    except BaseException as error:
        if ranks is not None:
            ranks.end()
        # What a rank's own check has refused is a ValueError, too.
        if isinstance(error, ray.exceptions.RayError) and not isinstance(error, ValueError):
            raise WorkerError(f"Ray could not run the ranks: {first_line(error)}") from None
        raise
    _kept = settings, ranks
    return reports


def _watch(ranks: _Ranks, job: tuple[Any, ...], timeout_s: float) -> list[Report]:
    """Start the function on all ranks, and show them until all have returned."""
    ray = ranks.ray
    run = next(ranks.runs)
    world_size = len(ranks.actors)
    rows = Rows(dist.PrefixStore(f"watch/{run}", ranks.store), world_size)
    board = rows.board
    watcher = Watcher(board)
    running = {}
    for rank, actor in enumerate(ranks.actors):
        running[actor.call.remote(run, *job)] = rank
    reports: dict[int, Report] = {}
    end_s = time.monotonic() + timeout_s
    trace = None
    try:
        while running:
            if time.monotonic() > end_s:
                raise deadline_error(Evidence(board), timeout_s, {})
            ended, _ = ray.wait(list(running), timeout=_POLL_S)
            for call in ended:
                rank = running.pop(call)
                try:
                    report, error = ray.get(call)
                except ray.exceptions.RayError as gone:
                    lost = failure_error(Evidence(board, exit_codes={rank: None}))
                    lost.args = (f"{lost} Ray says: {first_line(gone)}",)
                    raise with_hosts(lost, ranks.hosts, ranks.names) from None
                if error:
                    raise load_error(error.encode())
                reports[rank] = load_report(report, rank)
            with contextlib.suppress(RuntimeError):
                rows.read()
            # Clocks do not travel.
            starts = (board.ranks["state"] == RUNNING) & (board.ranks["origin_s"] == 0)
            board.ranks["origin_s"][starts] = time.perf_counter()
            watcher.update()
        trace = trace_of(reports.values())
    finally:
        watcher.close(trace)
    return [reports[rank] for rank in range(world_size)]


def connected(hosts: object) -> Any:
    """Return the module ``ray``, with this process connected to a cluster, or ValueError."""
    # Ray would report its use to its makers, and print a line that several ranks have only once.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    try:
        import ray

        if not ray.is_initialized():
            ray.init("auto", logging_level=logging.ERROR)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"hosts={hosts!r} needs Ray, which is not installed here ({error}): run make cluster "
            "in the clone of labkit on every host (or pip install -e '.[cluster]')"
        ) from None
    except Exception as error:
        raise ValueError(
            f"hosts={hosts!r}: this process is connected to no Ray cluster ({first_line(error)}). "
            "Next step: on the first machine run ray start --head, on the others ray start "
            "--address=FIRST:6379, and set RAY_ADDRESS=FIRST:6379 here"
        ) from None
    return ray


def _nodes_for(ray: Any, hosts: int, world_size: int) -> list[Any]:
    """The nodes of the run, in the order of the ranks."""
    own_id = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    # This process's own node is the first host; nodes that offer no cores come last.
    nodes.sort(key=lambda n: (not n["Resources"].get("CPU"), n["NodeID"] != own_id, n["NodeID"]))
    check_integer("hosts", hosts)
    if hosts > min(len(nodes), world_size):
        raise ValueError(
            f"hosts={hosts!r}: the cluster has {format_count(len(nodes), 'node')}, and the run "
            f"{format_count(world_size, 'rank')}: use fewer hosts, or add nodes with ray start"
        )
    return nodes[:hosts]
