"""Predicted steps and all-reduces on the two hosts: the alpha-beta model beside what is measured.

The inputs of the model are measured apart from what it predicts: the seconds that a worker needs
between its messages (with the cable unlimited), single messages inside a host and over the cable,
and additions.
"""

from collections.abc import Mapping
from dataclasses import replace

from labkit.costs.ddp_step import bucket_times
from labkit.costs.hosts import hosts_all_reduce_seconds
from labkit.costs.link import Link
from labkit.schedules.bucket_assignment import assign_buckets
from labkit.schedules.top_k import kept_elements
from workbook.measure.two_hosts import work

Hosts = tuple[tuple[int, ...], ...]
# Two thirds of a step's computing are backward.
_BACKWARD = 2 / 3


def hosts_of(world_size: int, num_hosts: int, dealt_out: bool = False) -> Hosts:
    """The ranks of each host, numbered host by host or dealt out in turn."""
    if dealt_out:
        return tuple(tuple(range(host, world_size, num_hosts)) for host in range(num_hosts))
    each = world_size // num_hosts
    return tuple(tuple(range(host * each, (host + 1) * each)) for host in range(num_hosts))


def dealt_out_order(world_size: int, num_hosts: int = 2) -> list[int]:
    """Ranks that are numbered host by host, in the order in which the hosts take turns.

    Schedulers number ranks host by host (Slurm: ``--distribution=block``) or so (``cyclic``); then
    every message of a ring crosses the cable. Of 4 ranks on 2 hosts: [0, 2, 1, 3].
    """
    return [rank for place in zip(*hosts_of(world_size, num_hosts)) for rank in place]


def all_reduce_s(name: str, world_size: int, inside: Link, between: Link) -> float:
    """Predicted seconds of an all-reduce of ``work.GRADIENT_BYTES``, by its contender's name."""
    hosts = hosts_of(world_size, 2, dealt_out=name == work.DEALT_OUT)
    algorithm = "hierarchical" if name == work.HIERARCHICAL else "ring"
    return hosts_all_reduce_seconds(algorithm, work.GRADIENT_BYTES, hosts, inside, between)


def step_s(name: str, local_s: Mapping[str, float], inside: Link, between: Link) -> float:
    """Predicted seconds of a step of a contender of the main table.

    Args:
        name: in ``work.CONTENDERS``.
        local_s: what a worker spends between its messages, by kind: ``compute``, ``update`` and,
            where it compresses, ``compress``.
        inside, between: a message inside a host, and over the cable.
    """
    contender = work.CONTENDERS[name]
    if contender.strategy == "ddp":
        return _overlapped_s(name, local_s, inside, between)
    sync_s = _sync_s(name, work.GRADIENT_BYTES, inside, between)
    return sum(local_s.values()) + sync_s


def _sync_s(name: str, num_bytes: float, inside: Link, between: Link) -> float:
    """Seconds to sum gradients of so many bytes as this contender does."""
    contender = work.CONTENDERS[name]
    num_hosts = max(1, contender.world_size // 2)
    hosts = hosts_of(contender.world_size, num_hosts, contender.dealt_out)
    hierarchical = bool(contender.options.get("hierarchical"))
    compress = contender.options.get("compress")
    if compress == "topk":
        # All ranks gather values and indices of 4 bytes each, step by step along the ring.
        kept_bytes = 8 * kept_elements(int(num_bytes) // 4)
        return (contender.world_size - 1) * between.message_seconds(kept_bytes)
    if hierarchical:
        if compress:  # only what crosses the cable
            between = replace(between, beta_s_per_byte=between.beta_s_per_byte / 2)
        return hosts_all_reduce_seconds("hierarchical", num_bytes, hosts, inside, between)
    return hosts_all_reduce_seconds(
        "ring", num_bytes / 2 if compress else num_bytes, hosts, inside, between
    )


def _overlapped_s(name: str, local_s: Mapping[str, float], inside: Link, between: Link) -> float:
    """A step of DDP: each bucket is summed as soon as it has its gradients."""
    sizes = work.block_bytes()
    backward_s = _BACKWARD * local_s["compute"]
    # The last block's gradient comes at once, and each other one a tenth of backward later.
    ready_s = [backward_s * (len(sizes) - 1 - block) / len(sizes) for block in range(len(sizes))]
    buckets = assign_buckets(sizes, work.BUCKET_BYTES)
    reduce_s = [
        _sync_s(name, sum(sizes[block] for block in bucket), inside, between) for bucket in buckets
    ]
    end_s = max(time.end_s for time in bucket_times(buckets, ready_s, reduce_s))
    forward_s = local_s["compute"] - backward_s
    return forward_s + max(backward_s, end_s) + local_s.get("update", 0.0)
