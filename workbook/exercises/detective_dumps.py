"""Page 13's flight recorder: who is the first to do something else, by dumps of real ranks.

Each case has a process group of its own, over gloo. Its collectives go well at first, then one
rank, the culprit, does something else than the others. The dumps are taken while the others wait.

Source: torch/csrc/distributed/c10d/FlightRecorder.hpp (format 2.10).
"""

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labkit.comm.comm import Comm
from labkit.runtime.launch import run
from workbook.exercises.grader import Verdict
from workbook.exercises.grader.exercise import new_seed
from workbook.exercises.grader.in_process import Question, differs, verdict_of
from workbook.exercises.grader.report import told

WORLD_SIZE = 4
# What an unfinished collective may take, and how long a finished one may need to be noted.
_WAIT_S, _NOTED_S = 1.5, 2.0
# Of an entry of the recorder: what says when, on which thread and in which process is left out.
_KEPT = ("collective_seq_id", "profiling_name", "input_sizes", "input_dtypes", "state", "retired")
_KINDS = {"behind": "does not come", "alone": "comes alone", "size": "brings another size"}
_KINDS |= {"other": "calls another collective", "none": ""}

Entry = dict[str, Any]
Dumps = dict[int, list[Entry]]


class Fault(NamedTuple):
    """A case: what goes wrong after ``before`` collectives that go well, and ``after`` more.

    ``kept`` of the newest entries are in the dumps, as in a small buffer; that of ``lost`` is
    missing.
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

    @property
    def words(self) -> str:
        who = f"rank {self.culprit} {_KINDS[self.kind]}" if self.due else "all ranks agree"
        short = f", and only the newest {self.kept} entries are there" if self.kept < 9 else ""
        return who + short


def culprit(fn: Callable) -> Verdict:
    """Grade ``fn(dumps)``: who is the first to do something else, by flight recorder dumps.

    ``dumps``: {rank: list of entries}. Expected is (rank, ``collective_seq_id``), or None where
    all ranks agree. One rank differs; the others are the majority.
    """
    why = "a rank that waits (retired is False) has done what it should: the one it waits for not"
    options: dict[str, Any] = {"mistakes": {why: _first_that_waits}, "signature": "dumps"}
    name = "detective.culprit"
    return told(name, lambda: verdict_of(name, fn, _questions(), differs, **options))


def _first_that_waits(dumps: Dumps) -> tuple[int, int] | None:
    waits = ((r, one) for r in sorted(dumps) for one in dumps[r] if not one["retired"])
    return next(((rank, entry["collective_seq_id"]) for rank, entry in waits), None)


def faults(rng: Random) -> list[Fault]:
    """The cases of one check: each rank is the culprit at least once."""
    ranks = [0, *rng.sample(range(1, WORLD_SIZE), WORLD_SIZE - 1)]
    before = [rng.randint(3, 7) for _ in range(9)]
    return [
        Fault("behind", ranks[1], before[0]),
        Fault("none", 0, before[1]),
        Fault("other", ranks[0], before[2]),
        Fault("size", ranks[2], before[3], after=2),
        Fault("alone", ranks[3], before[4]),
        Fault("behind", ranks[0], before[5], kept=3),
        Fault("other", ranks[2], before[6], kept=2, lost=ranks[1]),
        Fault("size", ranks[0], before[7]),
        Fault("none", 0, before[8], kept=2),
    ]


@cache
def _questions() -> list[Question]:
    """The cases of ``faults`` with their dumps: made by one run, once per session."""
    rng = Random(seed := new_seed())
    cases, found = faults(rng), []
    values = run(_record, cases, seed, world_size=WORLD_SIZE, device="cpu", timeout_s=60.0).values
    for number, fault in enumerate(cases):
        ranks = [rank for rank in range(WORLD_SIZE) if rank != fault.lost]
        rng.shuffle(ranks)
        dumps = {rank: values[rank][number][-fault.kept :] for rank in ranks}
        words = f"in case {number + 1} ({fault.words}) the function"
        found.append(Question((dumps,), words, fault.due))
    return found


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
        work = _run_case(comm.rank, fault, group, Random(seed + number))
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
    """This process's entries, once all are marked as retired but for ``waiting`` of them."""
    from torch._C import _distributed_c10d as c10d

    until_s = time.monotonic() + _NOTED_S
    while True:
        dump = json.loads(c10d._dump_fr_trace_json())
        if "entries" not in dump:
            raise RuntimeError(
                "PyTorch's flight recorder holds nothing: is TORCH_FR_BUFFER_SIZE (or "
                "TORCH_NCCL_TRACE_BUFFER_SIZE) 0? Unset it, and restart the kernel"
            )
        entries = plain_entries(dump["entries"], group)
        unfinished = sum(not entry["retired"] for entry in entries)
        if unfinished <= waiting or time.monotonic() > until_s:
            return entries
        time.sleep(0.01)


def _run_case(rank: int, fault: Fault, group: Any, rng: Random) -> dist.Work | None:
    """Call this rank's collectives of a case; return the one that it is left waiting in."""

    def both_alike() -> None:
        tensor, root = torch.ones(rng.randint(20, 90)), rng.randrange(WORLD_SIZE)
        if rng.random() < 0.6:
            dist.all_reduce(tensor, group=group)
        else:
            dist.broadcast(tensor, root, group=group)

    for _ in range(fault.before):
        both_alike()
    is_culprit, tensor, work = rank == fault.culprit, torch.ones(rng.randint(20, 90)), None
    if fault.kind == "size":
        # A root that sends too little: nobody notices.
        dist.broadcast(tensor[7 * is_culprit :], fault.culprit, group=group)
    elif fault.kind == "other" and is_culprit:
        # As the root it would be done at once.
        work = dist.broadcast(tensor, (rank + 1) % WORLD_SIZE, group=group, async_op=True)
    elif fault.kind != "none" and is_culprit == (fault.kind == "alone"):
        work = dist.all_reduce(tensor, group=group, async_op=True)
    for _ in range(fault.after):
        both_alike()
    return work
