"""The nodes of a Ray cluster, and the actors of labkit on them. Only this module imports Ray.

An actor belongs to the driver that has made it: Ray ends it with that driver, however the driver
ends. It is kept for the driver's later runs, so that only the first one waits for its start. It
asks Ray for no cores, so that it never keeps other work from running, and for the GPUs of its
ranks.
"""

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.config import parse_hosts
from labkit.devices import versions
from labkit.errors import WorkerError
from labkit.runtime.hosts.host import Host
from labkit.runtime.hosts.sent import Sent
from labkit.units import format_count

# The first actor on a node starts a Python process, which imports torch.
_START_S = 120.0
# A host is asked several times a second; after this time without an answer it is lost.
ANSWER_S = 6.0
# Calls that an actor takes at the same time: one that listens and one that orders, per run.
_CALLS = 16
_LEFT = "this process has left its Ray cluster (ray.shutdown)"
_ASK_RAY = (
    "Next step: on the first machine run ray start --head, on the others ray start "
    "--address=FIRST:6379, and here ray.init(address='FIRST:6379') before the run, or set "
    "RAY_ADDRESS=FIRST:6379"
)


@dataclass(frozen=True)
class Node:
    """A node of the cluster: its id, its address, the names it goes by, and what it offers."""

    id: str
    address: str
    names: frozenset[str]
    cpus: float
    gpus: float


class HostLostError(Exception):
    """A host does not answer any more; the message says which, and why."""


# By connection of this driver to a cluster: {node id: (GPUs, actor)}.
_actors: dict[str, dict[str, tuple[float, Any]]] = {}
_lost_nodes: set[str] = set()


def _kept_actors() -> dict[str, tuple[float, Any]]:
    """The actors of this driver in the cluster to which it is connected now."""
    import ray

    context = ray.get_runtime_context()
    connection = f"{context.gcs_address} {context.get_job_id()}"
    if connection not in _actors:
        _actors.clear()
    return _actors.setdefault(connection, {})


def nodes_for(hosts: int | str | Sequence[str]) -> list[Node]:
    """The nodes of this process's cluster that ``hosts`` asks for, in the order of the ranks.

    Args:
        hosts: how many, or their addresses or names.

    Raises:
        ValueError: Ray is not installed or not connected; fewer nodes than asked for, or others.
    """
    wanted = parse_hosts(hosts)
    nodes = _nodes(hosts)
    known = ", ".join(sorted(node.address for node in nodes))
    if isinstance(wanted, int):
        if wanted > len(nodes):
            raise ValueError(
                f"hosts={wanted}: the cluster has {format_count(len(nodes), 'node')} ({known}): "
                "use fewer hosts, or add nodes with ray start --address=..."
            )
        return nodes[:wanted]
    chosen: list[Node] = []
    for name in wanted:
        found = [node for node in nodes if name in node.names]
        left = [node for node in found if node not in chosen]
        if not left:
            problem = "is named twice" if found else "is not a node of the cluster"
            raise ValueError(f"hosts: {name!r} {problem}, whose nodes are {known}")
        chosen.append(left[0])
    return chosen


def _nodes(hosts: object) -> list[Node]:
    """All nodes of the cluster, in the order in which runs take them."""
    ray = _connected(hosts)
    here = ray.get_runtime_context().get_node_id()
    nodes = [_node(facts) for facts in ray.nodes() if facts["Alive"]]
    # This process's own node is the first host. The last ones are nodes that offer no cores, and
    # those that did not answer: Ray takes some time to notice.
    nodes.sort(key=lambda n: (n.id in _lost_nodes, not n.cpus, n.id != here, n.address, n.id))
    return nodes


def look_around() -> list[str]:
    """The addresses of the cluster's nodes; a connection that this needs is closed again.

    Raises:
        ValueError: Ray is not installed or not connected.
    """
    was_connected = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    try:
        return [node.address for node in _nodes("...")]
    finally:
        if not was_connected and "ray" in sys.modules:
            sys.modules["ray"].shutdown()


def _node(facts: dict[str, Any]) -> Node:
    names = ("NodeManagerAddress", "NodeManagerHostname", "NodeName", "NodeID")
    offers = facts["Resources"]
    return Node(
        facts["NodeID"],
        facts["NodeManagerAddress"],
        frozenset(facts[name] for name in names),
        offers.get("CPU", 0),
        offers.get("GPU", 0),
    )


def _connected(hosts: object) -> Any:
    """The module ``ray``, with this process connected to a cluster."""
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


class RemoteHost:
    """One host of a run, as the driver calls it.

    Args:
        number: of the host in the run, from 0.
        node: the node of the cluster.
    """

    def __init__(self, number: int, node: Node):
        self.number, self.node = number, node
        self._actor: Any = None

    def __str__(self) -> str:
        return f"host {self.number} ({self.node.address})"

    def take_actor(self, gpus: float, sent: Sent, *, renew: bool = False) -> None:
        """Use this driver's actor on the node, or make one.

        Raises:
            ValueError: it cannot be started; the host has another version of something.
        """
        import ray

        kept = _kept_actors()
        has, actor = kept.pop(self.node.id, (0.0, None))
        if actor is not None and (renew or has != gpus):
            ray.kill(actor)
            actor = None
        self._actor = actor or self._new_actor(gpus, sent)
        _lost_nodes.discard(self.node.id)
        kept[self.node.id] = gpus, self._actor

    def _new_actor(self, gpus: float, sent: Sent) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        made = ray.remote(Host).options(
            num_cpus=0,
            num_gpus=gpus,
            max_concurrency=_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(self.node.id, soft=False),
        )
        self._actor = made.remote(self.node.address)
        try:
            theirs, mine = self.call("settle_in", sent, timeout_s=_START_S), versions()
        except HostLostError as error:
            _lost_nodes.add(self.node.id)
            asked = f" It asks for {gpus:g} GPUs of {self.node.gpus:g}." if gpus else ""
            raise ValueError(f"labkit could not be started on a host: {error}.{asked}") from None
        if theirs != mine:
            told = [f"{name} {theirs[name]} (here {mine[name]})" for name in mine]
            raise ValueError(
                f"{self} has {', '.join(told)}: install the same versions on all hosts"
            )
        return self._actor

    def call(self, method: str, *args: Any, timeout_s: float = ANSWER_S) -> Any:
        """Call a method of the host's actor, and wait for its result.

        Raises:
            HostLostError: no answer in time, or none will ever come.
            ValueError, WorkerError: the call itself has failed.
        """
        return self.result(self.ask(method, *args), timeout_s)

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method of the host's actor without waiting; ``result`` takes what is returned."""
        import ray

        if not ray.is_initialized():
            # Ray would connect this process again.
            raise HostLostError(f"{self} is lost: {_LEFT}")
        called = getattr(self._actor, method)
        return called.remote(*args)

    def result(self, asked: Any, timeout_s: float = ANSWER_S) -> Any:
        import ray
        from ray.exceptions import GetTimeoutError, RayTaskError

        try:
            return ray.get(asked, timeout=timeout_s)
        except GetTimeoutError:
            _lost_nodes.add(self.node.id)
            raise HostLostError(
                f"{self} has not answered for {timeout_s:g} s: it was killed, or it is cut off "
                "from the network"
            ) from None
        except RayTaskError as error:
            kind = ValueError if isinstance(error.cause, ValueError) else WorkerError
            raise kind(f"{self}: {error.cause}") from None
        except (Exception, SystemExit) as error:
            # Ray's errors, and whatever its waits raise when this process leaves the cluster.
            _lost_nodes.add(self.node.id)
            raise HostLostError(_why_lost(str(self), error)) from None


def _why_lost(host: str, error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (
        f"{host} is lost: its node or its process was killed, or it is cut off from the network "
        f"(Ray says: {type(error).__name__}: {lines[0] if lines else ''})"
    )
