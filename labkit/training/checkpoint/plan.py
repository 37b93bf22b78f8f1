"""Which rank writes which tensor, agreed by all ranks, and copies of them in host memory."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

# A tensor's path in the nested dict, with its dtype and shape: what JSON can hold.
Described = list[tuple[list[str], str, list[int]]]


def flattened(tensors: Mapping[str, Any]) -> dict[tuple[str, ...], Tensor]:
    """The tensors of a nested dict by their paths.

    Raises:
        ValueError: a key is not a text, a value neither a dict nor a dense tensor, or two paths
            have the same name, in which torch.distributed.checkpoint joins their parts by dots.
    """
    found: dict[tuple[str, ...], Tensor] = {}
    _collect(tensors, (), found)
    count = Counter(".".join(path) for path in found)
    if twice := [name for name, times in count.items() if times > 1]:
        paths = [path for path in found if ".".join(path) == twice[0]]
        raise ValueError(f"two tensors of a checkpoint have the name {twice[0]}: at {paths}")
    return found


def _collect(
    part: Mapping[str, Any], above: tuple[str, ...], found: dict[tuple[str, ...], Tensor]
) -> None:
    for key, value in part.items():
        path = (*above, key)
        name = ".".join(map(str, path))
        if not isinstance(key, str):
            raise ValueError(f"a key of a checkpoint must be a string, got {key!r} in {name}")
        if isinstance(value, Mapping):
            _collect(value, path, found)
        elif not isinstance(value, Tensor):
            raise ValueError(
                f"a checkpoint holds tensors: {name} is of type {type(value).__name__}, which "
                "belongs to its facts"
            )
        elif value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise ValueError(f"a checkpoint holds dense tensors: {name} is not one")
        else:
            found[path] = value


def described(tensors: Mapping[tuple[str, ...], Tensor]) -> str:
    """The tensors' paths, dtypes and shapes, as text."""
    rows = [
        (path, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for path, tensor in tensors.items()
    ]
    return json.dumps(rows)


@dataclass(frozen=True)
class Plan:
    """What this rank writes, and what all ranks write together.

    Attributes:
        mine: this rank's part, for ``FileSystemWriter.write_data``.
        paths: of the tensors in it.
        metadata: of the whole checkpoint, without where its tensors are.
        num_bytes: of all tensors together.
    """

    mine: SavePlan
    paths: list[tuple[str, ...]]
    metadata: Metadata
    num_bytes: int


def plan_of(rank: int, texts: list[str]) -> Plan:
    """Divide the tensors over the ranks; every rank computes the same.

    Ranks with the same tensor hold the same value, and the one that has the least to write so far
    writes it, see ``torch.distributed.checkpoint._dedup_save_plans``.

    Args:
        rank: this rank.
        texts: what ``described`` said on each rank.

    Raises:
        ValueError: two ranks have different tensors of the same name.
    """
    by_rank: list[Described] = [json.loads(text) for text in texts]
    _check_same(by_rank)
    planner, plans = DefaultSavePlanner(), []
    for rows in by_rank:
        planner.set_up_planner(_nested(rows), is_coordinator=True)
        plans.append(planner.create_local_plan())
    plans, metadata = planner.create_global_plan(plans)
    # It names each rank's file, and writes nothing yet.
    mine = FileSystemWriter(Path()).prepare_global_plan(plans)[rank]
    paths = {".".join(path): tuple(path) for path, _, _ in by_rank[rank]}
    num_bytes = sum(item.tensor_storage_size() or 0 for plan in plans for item in plan.items)
    return Plan(mine, [paths[item.index.fqn] for item in mine.items], metadata, num_bytes)


def _check_same(by_rank: list[Described]) -> None:
    seen: dict[str, tuple[int, Any]] = {}
    for rank, rows in enumerate(by_rank):
        for path, *kind in rows:
            name = ".".join(path)
            first, known = seen.setdefault(name, (rank, (path, kind)))
            if known != (path, kind):
                raise ValueError(
                    f"{name} of a checkpoint differs between ranks: {known[1]} on rank {first}, "
                    f"{kind} on rank {rank}"
                )


def _nested(rows: Described) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, dtype, shape in rows:
        branch = tree
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
        branch[path[-1]] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    return tree


class Copies(DefaultSavePlanner):
    """Copies of this rank's tensors in host memory, which is reused from checkpoint to checkpoint.

    A copy has memory of its own, so that a view of a large tensor is stored as what it shows.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[str, Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @torch.no_grad()
    def take(
        self, tensors: Mapping[tuple[str, ...], Tensor], paths: list[tuple[str, ...]]
    ) -> None:
        """Copy these tensors; those on a GPU are copied when ``wait`` returns.

        What the GPU computes later, on the stream that is current now, waits for the copies.
        """
        kept, self._copies = self._copies, {}
        for device in {tensors[path].device for path in paths} - self._streams.keys():
            if device.type == "cuda":
                self._streams[device] = torch.cuda.Stream(device)
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))
        for path in paths:
            name, tensor = ".".join(path), tensors[path].detach()
            on_gpu, copy = tensor.device.type == "cuda", kept.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
            with torch.cuda.stream(self._streams.get(tensor.device)):
                self._copies[name] = copy.copy_(tensor, non_blocking=on_gpu)
        # What the GPU does next may change the tensors, and must wait for the copies.
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def wait(self) -> None:
        """Wait until the GPUs have made the copies."""
        for stream in self._streams.values():
            stream.synchronize()

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._copies[write_item.index.fqn]
