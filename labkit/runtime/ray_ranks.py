"""Ranks on the nodes of a Ray cluster: one actor per rank. Only this module imports Ray.

An actor's process is a rank as torchrun would have started it: it joins the others in a store, and
a ``Watch`` explains a deadlock, a mismatch or a lost rank on all hosts. The store is the driver's,
which so mirrors the status board. Ray ends an actor with its driver, however that ends.

The actors are kept for the driver's next run of the same size on the same nodes. A run that has
failed, or was interrupted, ends them.
"""

import contextlib
import io
import itertools
import logging
import os
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import torch.distributed as dist

from labkit.comm.board import RUNNING, Board
from labkit.comm.emulated_link import EmulatedLink
from labkit.comm.source_lines import cell_sources, install_sources
from labkit.config import parse_hosts
from labkit.devices import plan, print_once, versions
from labkit.errors import WorkerError
from labkit.runtime import torchrun
from labkit.runtime.between_hosts import reports
from labkit.runtime.between_hosts.rows import Rows
from labkit.runtime.between_hosts.verdict import Verdict, plain
from labkit.runtime.between_hosts.watch import Watch
from labkit.runtime.failures import Evidence, deadline_error
from labkit.runtime.hosts import MeetingStore, interface_of, serve_store, spread
from labkit.runtime.messages import Report, dump_call, trace_of
from labkit.runtime.output import Watcher
from labkit.runtime.worker import connect, group_connections, host_names
from labkit.units import format_count

_POLL_S = 0.2
# A first actor's process imports torch.
_START_S = 120.0
# After the end of a rank's process: until its peers, who see it too, have explained it.
_EXPLAIN_S = 12.0
_ASK_RAY = (
    "Next step: on the first machine run ray start --head, on the others ray start "
    "--address=FIRST:6379, and here ray.init(address='FIRST:6379') before the run, or set "
    "RAY_ADDRESS=FIRST:6379"
)
# Device, transport and devices, see ``devices.plan``.
Where = tuple[str, str, str | Sequence[str] | None]


class RankActor:
    """One rank. Its methods are called one after the other, in its main thread."""

    def join(self, variables: dict[str, str], folder: str) -> dict[str, str]:
        """Become the rank that ``variables`` describe; returns this host's versions."""
        # Ray gives an actor one core's worth of threads; ranks share the cores by themselves.
        os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.update(variables)
        with contextlib.suppress(OSError):
            os.chdir(folder)
        self._runs = itertools.count()
        return versions()

    def plan(self, where: Where) -> tuple[str, str]:
        """Backend and note of this host's plan."""
        device, transport, devices = where
        ranks_here = int(os.environ["LOCAL_WORLD_SIZE"])
        self._plan = plan(ranks_here, device, transport, devices=devices)
        return self._plan.backend, self._plan.note

    def call(
        self,
        call: bytes,
        sources: dict[str, list[str]],
        timeout_s: float,
        link: EmulatedLink | None,
    ) -> tuple[bytes, bytes]:
        """Run a function as this rank: (its report or b"", the verdict or b"").

        The report is plain data (``between_hosts.reports``), of which nothing is executed.
        """
        meeting = MeetingStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        run, rank = next(self._runs), os.environ["RANK"]
        lines = _Lines(dist.PrefixStore(f"lines/{run}/{rank}", meeting.store(0)))
        with contextlib.redirect_stdout(lines), contextlib.redirect_stderr(lines):
            try:
                report = self._run(call, sources, timeout_s, link, meeting, run)
                return reports.to_bytes(report), b""
            except BaseException as error:
                if not isinstance(error, _Explained):
                    text = f"rank {rank} raised {type(error).__name__}: {error}"
                    error = _Explained(Verdict.of(WorkerError(text)))
                return b"", error.verdict.to_bytes()
            finally:
                lines.end()

    def _run(
        self,
        call: bytes,
        sources: dict[str, list[str]],
        timeout_s: float,
        link: EmulatedLink | None,
        meeting: MeetingStore,
        run: int,
    ) -> Report:
        comm = connect(self._plan, timeout_s, meeting=meeting, link=link)
        hosts = comm.session.hosts

        def store() -> Any:
            return dist.PrefixStore(f"watch/{run}", meeting.store(comm.world_size))

        watch = Watch(
            comm.rank,
            comm.session.board,
            next(ranks for ranks in hosts if comm.rank in ranks),
            hosts,
            host_names,
            store if len(hosts) > 1 else None,
            f"{meeting.address}:{meeting.port}",
            group_connections,
            lambda: dist.distributed_c10d._get_default_group().abort(),
        )
        watch.start()
        try:
            install_sources(sources)
            fn, args = cloudpickle.loads(call)
            return torchrun.call(comm, fn, args, reports.dump_plain)
        except BaseException as error:
            watch.failed(error)
            if watch.verdict is None:
                raise
            raise _Explained(watch.verdict) from None
        finally:
            watch.close()


class _Explained(Exception):
    def __init__(self, verdict: Verdict):
        self.verdict = verdict


class _Lines(io.TextIOBase):
    """What a rank prints, line by line, in the store, from which the driver prints it."""

    def __init__(self, store: dist.Store):
        self._store, self._rest, self._count = store, "", 0
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in lines:
                with contextlib.suppress(RuntimeError):
                    self._store.set(str(self._count), line.rpartition("\r")[2])
                self._count += 1
        return len(text)

    def end(self) -> None:
        if self._rest:
            self.write("\n")


def _show_lines(store: dist.Store, shown: list[int]) -> None:
    """Print the lines of each rank from number ``shown`` on, as far as they have come."""
    for rank, number in enumerate(shown):
        while store.check([f"{rank}/{number}"]):
            line = store.get(f"{rank}/{number}").decode(errors="replace")
            print(f"[rank {rank}] {plain(line)}")
            number += 1
        shown[rank] = number


class _Ranks:
    """The actors of a run, and the store in which they meet.

    Args:
        ray: the module, connected to a cluster.
        nodes: by host, its id, address and number of GPUs.
        places: by host, its ranks.
    """

    def __init__(
        self, ray: Any, nodes: list[tuple[str, str, float]], places: list[range], device: str
    ):
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.ray, self.places, self.runs = ray, places, itertools.count()
        self.names = [address for _, address, _ in nodes]
        self.host_of = {rank: host for host, ranks in enumerate(places) for rank in ranks}
        self.store = serve_store(ray.util.get_node_ip_address())
        self.actors = []
        joined = []
        for host, ((node, address, gpus), ranks) in enumerate(zip(nodes, places)):
            options = {
                # It keeps no cores from other work. All ranks of a host see the host's GPUs.
                "num_cpus": 0,
                "num_gpus": 0 if device == "cpu" else min(1, gpus / len(ranks)),
                "runtime_env": {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            }
            for local, rank in enumerate(ranks):
                variables = {
                    "RANK": rank,
                    "WORLD_SIZE": sum(map(len, places)),
                    "LOCAL_RANK": local,
                    "LOCAL_WORLD_SIZE": len(ranks),
                    "GROUP_RANK": host,
                    "GROUP_WORLD_SIZE": len(places),
                    "MASTER_ADDR": self.store.host,
                    "MASTER_PORT": self.store.port,
                }
                if len(places) > 1 and (interface := interface_of(address)):
                    # Nobody on another host reaches a loopback interface, whoever has named it.
                    variables["GLOO_SOCKET_IFNAME"] = interface
                texts = {name: str(value) for name, value in variables.items()}
                made = ray.remote(RankActor).options(**options)
                actor = made.remote()
                self.actors.append(actor)
                joined.append(actor.join.remote(texts, os.getcwd()))
        try:
            found = ray.get(joined, timeout=_START_S)
        except Exception as error:
            self.end()
            why = str(error).strip().splitlines()[0]
            raise ValueError(f"labkit could not be started on {self.names}: {why}") from None
        for rank, theirs in enumerate(found):
            if theirs != versions():
                self.end()
                raise ValueError(
                    f"{self.names[self.host_of[rank]]} has {theirs}, this machine {versions()}: "
                    "install the same versions on all hosts"
                )

    def end(self) -> None:
        for actor in self.actors:
            with contextlib.suppress(Exception):
                self.ray.kill(actor)


# Those of this process's latest run, with what they are for.
_latest: tuple[Any, _Ranks] | None = None


def run_on(
    hosts: int | str | Sequence[str],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    where: Where,
    timeout_s: float,
    link: EmulatedLink | None,
) -> list[Report]:
    """Run ``fn`` on the nodes of the cluster to which this process is connected.

    Args:
        hosts: how many nodes, or their addresses; see ``labkit.run`` for the others.

    Raises:
        ValueError: nodes that the cluster does not have, or settings that they cannot fulfil.
        WorkerError: or a subclass of it, if the run has failed.
    """
    global _latest
    ray = connected(hosts)
    nodes = _nodes_for(ray, hosts)
    places = spread(world_size, len(nodes))
    if where[1] == "shared" and len(nodes) > 1:
        raise ValueError(
            f"transport 'shared' is for ranks of one host, and these are on {len(nodes)}: use "
            "'auto' (shared memory within each host) or 'gloo'"
        )
    with _local_modules_by_value():
        call = dump_call(fn, args)
    cluster = ray.get_runtime_context().gcs_address, ray.get_runtime_context().get_job_id()
    key = cluster, nodes, world_size, where[0], os.getcwd()
    if _latest is not None and _latest[0] != key:
        _latest[1].end()
        _latest = None
    ranks = _latest[1] if _latest is not None else _Ranks(ray, nodes, places, where[0])
    _latest = None
    is_well = False
    try:
        planned = ray.get([actor.plan.remote(where) for actor in ranks.actors], timeout=_START_S)
        if len({backend for backend, _ in planned}) > 1:
            raise ValueError(
                "some hosts have GPUs, and others have none: their ranks cannot talk to each "
                "other, so use device 'cpu'"
            )
        for rank, (_, note) in enumerate(planned):
            name = ranks.names[ranks.host_of[rank]]
            print_once(f"host {name}: {note}" if note else "")
        found = _watch(ranks, (call, cell_sources(), timeout_s, link), timeout_s)
        is_well = True
        return found
    except ray.exceptions.RayError as error:
        raise WorkerError(f"the ranks' hosts are lost: {error}") from None
    finally:
        if is_well:
            _latest = key, ranks
        else:
            ranks.end()


def _watch(ranks: _Ranks, settings: tuple[Any, ...], timeout_s: float) -> list[Report]:
    """Start the function on all ranks, and show them until all have returned."""
    ray, world_size = ranks.ray, len(ranks.actors)
    board = Board(world_size)
    watcher = Watcher(board)
    run, shown = next(ranks.runs), [0] * world_size
    rows = Rows(dist.PrefixStore(f"watch/{run}", ranks.store), board, ranks.places, None)
    lines = dist.PrefixStore(f"lines/{run}", ranks.store)
    waiting = {actor.call.remote(*settings): r for r, actor in enumerate(ranks.actors)}
    came: dict[int, tuple[bytes, bytes]] = {}
    lost: dict[int, str] = {}
    began_s, lost_s, error = time.monotonic(), 0.0, None
    while waiting and error is None:
        for one in ray.wait(list(waiting), timeout=_POLL_S)[0]:
            rank = waiting.pop(one)
            try:
                came[rank] = ray.get(one)
            except ray.exceptions.RayError as gone:
                lost[rank] = str(gone).strip().splitlines()[0]
                lost_s = lost_s or time.monotonic()
        if len(ranks.places) > 1:
            # What one rank writes at a moment may be half there: the next look has it.
            with contextlib.suppress(RuntimeError, ConnectionError):
                rows.exchange()
            starts = (board.ranks["state"] == RUNNING) & (board.ranks["origin_s"] == 0)
            board.ranks["origin_s"][starts] = time.perf_counter()
            watcher.update()
        _show_lines(lines, shown)
        now_s = time.monotonic()
        verdicts = [verdict for _, verdict in came.values() if verdict]
        if verdicts:
            error = Verdict.from_bytes(verdicts[0], world_size).error()
        elif lost and now_s - lost_s > _EXPLAIN_S:
            rank = min(lost)
            host = ranks.host_of[rank]
            error = WorkerError(
                f"rank {rank} (host {host}) was lost in mid-run: host {host} is "
                f"{ranks.names[host]}. Ray says: {lost[rank]}",
                rank=rank,
            )
        elif now_s - began_s > timeout_s:
            error = deadline_error(Evidence(board), timeout_s, {})
    if error is not None and waiting:
        # What the others have said, too.
        for one in ray.wait(list(waiting), num_returns=len(waiting), timeout=1)[0]:
            with contextlib.suppress(Exception):
                came[waiting[one]] = ray.get(one)
    _show_lines(lines, shown)
    found = None
    if error is None:
        found = [reports.from_bytes(came[rank][0], rank) for rank in range(world_size)]
    watcher.close(None if found is None else trace_of(found))
    if found is None:
        raise error or WorkerError("the ranks have ended without a report")
    return found


def connected(hosts: object) -> Any:
    """The module ``ray``, with this process connected to a cluster.

    Raises:
        ValueError: Ray is not installed, or not connected.
    """
    # Ray would report its use to its makers, from the clusters that this process starts.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ValueError(
            f"hosts={hosts!r} needs Ray, which is not installed here ({error}): pip install "
            "'labkit[cluster]' on every host (in a clone of the repository: make cluster)"
        ) from None
    if ray.is_initialized():
        return ray
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        raise ValueError(
            f"hosts={hosts!r}: this process is connected to no Ray cluster. {_ASK_RAY}"
        )
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise ValueError(
            f"hosts={hosts!r}: no Ray cluster answers at RAY_ADDRESS={address} "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0]}). {_ASK_RAY}"
        ) from None
    return ray


def _nodes_for(ray: Any, hosts: int | str | Sequence[str]) -> list[tuple[str, str, float]]:
    """The nodes that ``hosts`` asks for, in the order of the ranks: id, address, GPUs."""
    wanted, here = parse_hosts(hosts), ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    # This process's own node is the first host; nodes that offer no cores come last.
    nodes.sort(key=lambda n: (not n["Resources"].get("CPU"), n["NodeID"] != here, n["NodeID"]))
    known = ", ".join(sorted(node["NodeManagerAddress"] for node in nodes))
    if isinstance(wanted, int):
        if wanted > len(nodes):
            raise ValueError(
                f"hosts={wanted}: the cluster has {format_count(len(nodes), 'node')} ({known}): "
                "use fewer hosts, or add nodes with ray start --address=..."
            )
        chosen = nodes[:wanted]
    else:
        chosen = []
        for name in wanted:
            names = ("NodeManagerAddress", "NodeManagerHostname", "NodeName", "NodeID")
            found = [node for node in nodes if name in {node[key] for key in names}]
            left = [node for node in found if node not in chosen]
            if not left:
                problem = "is named twice" if found else "is not a node of the cluster"
                raise ValueError(f"hosts: {name!r} {problem}, whose nodes are {known}")
            chosen.append(left[0])
    return [
        (node["NodeID"], node["NodeManagerAddress"], node["Resources"].get("GPU", 0.0))
        for node in chosen
    ]


@contextlib.contextmanager
def _local_modules_by_value() -> Iterator[None]:
    """Within the block, cloudpickle sends what is defined in modules that are not installed."""
    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    places |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[2])}
    places |= set(map(os.path.realpath, places))
    roots = tuple(os.path.join(place, "") for place in places)
    known = cloudpickle.list_registry_pickle_by_value()
    mine = [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        and module.__name__ == name
        and name not in known
        and name != "__main__"
        and (path := getattr(module, "__file__", None))
        and not path.startswith(roots)
    ]
    for module in mine:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in mine:
            cloudpickle.unregister_pickle_by_value(module)
