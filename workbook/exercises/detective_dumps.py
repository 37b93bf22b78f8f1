"""What PyTorch's flight recorder holds of runs that went wrong: made on real ranks, over gloo.

Each case has a process group of its own. Its collectives go well at first, then one rank, the
culprit, does something else than the others. The dumps are taken while the others wait.

Source: torch/csrc/distributed/c10d/FlightRecorder.hpp (format 2.10).
"""

import contextlib
import json
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labkit.comm.comm import Comm
from labkit.runtime.launch import run

WORLD_SIZE = 4
# What an unfinished collective may take, and how long a finished one may need to be noted.
_WAIT_S, _NOTED_S = 1.5, 2.0
# Of an entry of the recorder: what says when, on which thread and in which process is left out.
_KEPT = ("collective_seq_id", "profiling_name", "input_sizes", "input_dtypes", "state", "retired")

Entry = dict[str, Any]
Dumps = dict[int, list[Entry]]


class Fault(NamedTuple):
    """A case: what goes wrong after ``before`` collectives that go well, and ``after`` more.

    Attributes:
        kind: ``behind`` (the culprit does not come), ``alone`` (only the culprit comes), ``other``
            (it calls another collective), ``size`` (it sends fewer elements), ``none``.
        culprit: a rank.
        before, after: numbers of collectives that all ranks call; none come after a wait.
        kept: so many of the newest entries are in the dumps, as in a small buffer.
        lost: a rank whose dump is missing.
    """

    kind: str
    culprit: int
    before: int
    after: int = 0
    kept: int = 2000
    lost: int | None = None

    @property
    def due(self) -> tuple[int, int] | None:
        """The culprit, and the number of the collective at which it differs first."""
        return None if self.kind == "none" else (self.culprit, self.before + 1)


def faults(rng: Random) -> list[Fault]:
    """The cases of one check: each rank is the culprit at least once."""
    ranks = [0, *rng.sample(range(1, WORLD_SIZE), WORLD_SIZE - 1)]

    def before() -> int:
        return rng.randint(3, 7)

    return [
        Fault("behind", ranks[1], before()),
        Fault("none", 0, before()),
        Fault("other", ranks[0], before()),
        Fault("size", ranks[2], before(), after=2),
        Fault("alone", ranks[3], before()),
        Fault("behind", ranks[0], before(), kept=3),
        Fault("other", ranks[2], before(), kept=2, lost=ranks[1]),
        Fault("size", ranks[0], before()),
        Fault("none", 0, before(), kept=2),
    ]


@cache
def recorded(seed: int) -> list[tuple[Fault, Dumps]]:
    """The cases of ``faults`` with their dumps, by rank: made by one run, once per seed.

    Raises:
        RuntimeError: TORCH_FR_BUFFER_SIZE has switched the recorder off.
    """
    rng = Random(seed)
    cases = faults(rng)
    values = run(_record, cases, seed, world_size=WORLD_SIZE, device="cpu", timeout_s=60.0).values
    found = []
    for number, fault in enumerate(cases):
        ranks = [rank for rank in range(WORLD_SIZE) if rank != fault.lost]
        rng.shuffle(ranks)
        found.append((fault, {rank: values[rank][number][-fault.kept :] for rank in ranks}))
    return found


def entries_of(group: str) -> list[Entry]:
    """This process's entries of one process group, in their order."""
    from torch._C import _distributed_c10d as c10d

    dump = json.loads(c10d._dump_fr_trace_json())
    if "entries" not in dump:
        raise RuntimeError(
            "PyTorch's flight recorder holds nothing: is TORCH_FR_BUFFER_SIZE (or "
            "TORCH_NCCL_TRACE_BUFFER_SIZE) 0? Unset it, and restart the kernel"
        )
    return plain_entries(dump["entries"], group)


def plain_entries(entries: Sequence[Entry], group: str) -> list[Entry]:
    """The entries of one process group, with what tells collectives apart."""
    return [
        {key: entry[key] for key in _KEPT}
        for entry in entries
        if entry["process_group"][0] == group and not entry["is_p2p"]
    ]


# On a rank


def _record(comm: Comm, cases: Sequence[Fault], seed: int) -> list[list[Entry]]:
    """This rank's dump of each case; what still waits then is left to its timeout."""
    timeout = timedelta(seconds=_WAIT_S)
    groups: list[Any] = [dist.new_group(backend="gloo", timeout=timeout) for _ in cases]
    waiting, dumps = [], []
    for number, (fault, group) in enumerate(zip(cases, groups)):
        work = _run_case(comm, fault, group, Random(seed + number))
        comm.barrier()
        dumps.append(_settled(group.group_name, int(work is not None)))
        waiting += [work] if work else []
        comm.barrier()
    for work in waiting:
        # All of these fail, as they have to.
        with contextlib.suppress(RuntimeError):
            work.wait()
    return dumps


def _settled(group: str, waiting: int) -> list[Entry]:
    """The entries, once all are marked as retired but for ``waiting`` of them."""
    until_s = time.monotonic() + _NOTED_S
    while True:
        entries = entries_of(group)
        if sum(not entry["retired"] for entry in entries) <= waiting:
            return entries
        if time.monotonic() > until_s:
            return entries
        time.sleep(0.01)


def _run_case(comm: Comm, fault: Fault, group: Any, rng: Random) -> dist.Work | None:
    """Call this rank's collectives of a case; return the one that it is left waiting in."""
    for _ in range(fault.before):
        _call(rng, group)
    size, is_culprit = rng.randint(20, 90), comm.rank == fault.culprit
    joins = {"behind": not is_culprit, "alone": is_culprit, "other": not is_culprit}
    work = None
    if fault.kind == "size":
        # A root that sends too little: nobody notices.
        dist.broadcast(torch.ones(size - 7 * is_culprit), fault.culprit, group=group)
    elif fault.kind == "other" and is_culprit:
        # As the root it would be done at once.
        root = (comm.rank + 1) % WORLD_SIZE
        work = dist.broadcast(torch.ones(size), root, group=group, async_op=True)
    elif joins.get(fault.kind):
        work = dist.all_reduce(torch.ones(size), group=group, async_op=True)
    for _ in range(fault.after):
        _call(rng, group)
    return work


def _call(rng: Random, group: Any) -> None:
    """One collective, the same on all ranks, of a random kind and size."""
    size = rng.randint(20, 90)
    if rng.random() < 0.6:
        dist.all_reduce(torch.ones(size), group=group)
    else:
        dist.broadcast(torch.ones(size), rng.randrange(WORLD_SIZE), group=group)
