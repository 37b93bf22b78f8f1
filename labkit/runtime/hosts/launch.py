"""Prepare a run on several hosts: choose them, plan their ranks, and make its supervisor."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from labkit.comm.emulated_link import EmulatedLink
from labkit.devices import Plan, print_once
from labkit.runtime.hosts.cluster import HostLostError, Node, RemoteHost, nodes_for
from labkit.runtime.hosts.host import Prepared
from labkit.runtime.hosts.remote_ranks import RemoteRanks
from labkit.runtime.hosts.sent import Sent, local_modules_by_value, of_this_process, sources
from labkit.runtime.hosts.spread import spread
from labkit.runtime.objects import kernel
from labkit.runtime.pickling import dump_call
from labkit.runtime.start_ranks import Place
from labkit.runtime.supervisor import Supervisor
from labkit.runtime.worker import Job

# Device, transport and devices, see ``devices.plan``.
Where = tuple[str, str, str | Sequence[str] | None]
_PREPARE_S = 60.0


def supervisor_on(
    hosts: int | str | Sequence[str],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    where: Where,
    timeout_s: float,
    may_lose: frozenset[int],
    link: EmulatedLink | None,
) -> Supervisor:
    """The supervisor of a run whose ranks are on ``hosts``; see ``labkit.run``.

    Raises:
        ValueError: hosts that the cluster does not have, or settings that they cannot fulfil.
        HostLostError: a host that was there is not there any more.
    """
    nodes = nodes_for(hosts)
    places = spread(world_size, len(nodes))
    if where[1] == "shared" and len(nodes) > 1:
        raise ValueError(
            "transport 'shared' is for ranks of one host, and these are on "
            f"{len(nodes)}: use 'auto' (shared memory within each host) or 'gloo'"
        )
    with local_modules_by_value():
        call = dump_call(fn, args)
    sent, run = of_this_process(), secrets.token_hex(8)
    remote, prepared = _prepared(run, nodes, places, where, bool(may_lose), sent)
    _tell(remote, prepared, places)
    first = prepared[0]
    assert first.meeting is not None
    master = first.meeting.address, first.master_port
    whole = [Place(ranks, world_size, n, len(nodes), master) for n, ranks in enumerate(places)]
    shared = call, sources(), first.plan, world_size, timeout_s, may_lose
    job = Job(*shared, link=link, in_notebook=kernel() is not None)
    starts = [
        (replace(job, plan=one.plan), place, first.meeting, sent)
        for one, place in zip(prepared, whole)
    ]

    def elsewhere(job: Job, ends: Any, board: Any) -> RemoteRanks:
        return RemoteRanks(run, remote, starts, whole, ends, board)

    return Supervisor(job, elsewhere)


def _prepared(
    run: str,
    nodes: list[Node],
    places: list[range],
    where: Where,
    may_lose_some: bool,
    sent: Sent,
) -> tuple[list[RemoteHost], list[Prepared]]:
    """The hosts, and their plans, which agree on how the ranks talk."""
    remote = [RemoteHost(number, node) for number, node in enumerate(nodes)]
    for host, ranks in zip(remote, places):
        host.take_actor(_num_gpus(host.node, len(ranks), where), sent)
    ask = partial(_prepare, run, remote, places, sent)
    prepared = ask(where)
    device, transport, devices = where
    backends = {one.plan.backend for one in prepared}
    # A group of NCCL does not outlive any of its ranks, and needs a GPU for each of them.
    if transport == "auto" and (len(backends) > 1 or (may_lose_some and backends == {"nccl"})):
        prepared = ask((device, "gloo", devices))
    if len({one.plan.backend for one in prepared}) > 1:
        told = ", ".join(f"{h}: {one.plan.backend}" for h, one in zip(remote, prepared))
        raise ValueError(f"the hosts' ranks cannot talk to each other ({told}): use device 'cpu'")
    return remote, prepared


def _prepare(
    run: str, remote: list[RemoteHost], places: list[range], sent: Sent, where: Where
) -> list[Prepared]:
    asked = [
        host.ask("prepare", run, len(ranks), where, host.number == 0)
        for host, ranks in zip(remote, places)
    ]
    prepared = []
    for host, ranks, answer in zip(remote, places, asked):
        try:
            prepared.append(host.result(answer, _PREPARE_S))
        except HostLostError:
            # Its actor has died since the last run.
            host.take_actor(_num_gpus(host.node, len(ranks), where), sent, renew=True)
            mine = (run, len(ranks), where, host.number == 0)
            prepared.append(host.call("prepare", *mine, timeout_s=_PREPARE_S))
    return prepared


def _num_gpus(node: Node, num_ranks: int, where: Where) -> float:
    """The GPUs that a host's actor asks Ray for: one per rank, or all if some are named."""
    device, _, devices = where
    if device == "cpu":
        return 0
    return node.gpus if devices is not None else min(node.gpus, num_ranks)


def _tell(remote: list[RemoteHost], prepared: list[Prepared], places: list[range]) -> None:
    """Say what the learner has to know of the hosts, each of them once."""
    for host, one, ranks in zip(remote, prepared, places):
        plan: Plan = one.plan
        if plan.note:
            print_once(f"{host}: {plan.note}")
        if len(ranks) > 4 * one.cores:
            told = f"{host} has {one.cores} cores for {len(ranks)} ranks: they take turns"
            print_once(told)
