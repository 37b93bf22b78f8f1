"""Page 16: from Horovod to DDP and back, and what an update means elsewhere.

The ranks of the two ports begin with different weights and buffers, as in a real program, and
rank 0 alone may have a checkpoint. Their trainings are compared with one device that plays all
ranks. Symbols: P ranks.
"""

import contextlib
import copy
import inspect
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any
from unittest import mock

import torch.distributed as dist

from labkit import horovod as hvd
from labkit.comm.comm import Comm
from labkit.horovod import negotiator
from workbook.exercises.elsewhere_training import Setting, Trained, wrong_training
from workbook.exercises.grader import Case, Check, Verdict, Wrong, judged
from workbook.exercises.grader.compare import fit, plain, short
from workbook.exercises.grader.exercise import Found
from workbook.exercises.grader.watched import Watched

# Longer than anything between a gradient and the wait for it.
_LAZY_S = 2.0


def _ported(passes: int, fn: Watched, comm: Comm, case: Case) -> list[Trained] | Wrong:
    """Call a port: to DDP with one pass of backward per update, to Horovod with two."""
    found = []
    for setting in settings(case, passes):
        with _made_already(), _as_by_horovod(comm) if passes > 1 else contextlib.nullcontext():
            found.append(trained(fn, setting, comm.rank))
        by_horovod = sorted(one for one in fn.called if not one.startswith("torch."))
        if passes == 1 and by_horovod:
            hvd.shutdown()
            return Wrong(f"the function calls {by_horovod[0]}, so it is not ported yet")
        if passes == 2 and "labkit.horovod.negotiator.init" not in by_horovod:
            return Wrong("the function never calls hvd.init()")
    return found


def _wrong_port(passes: int, case: Case, values: list[Any]) -> Found:
    trainings = [
        (setting, [Trained(*one) for one in ranks])
        for setting, ranks in zip(settings(case, passes), zip(*values))
    ]
    return wrong_training(trainings) if trainings else None


def settings(case: Case, passes: int) -> list[Setting]:
    """The trainings of a call; none of a second one, since two show what a function keeps."""
    return [] if case.call else [Setting(case, resumed, passes) for resumed in (False, True)]


def trained(fn: Callable, setting: Setting, rank: int) -> Trained:
    """Call a port on a rank, and note what it does."""
    model, saved = setting.model(rank), []
    # Horovod's script reads its checkpoint on rank 0, and DDP's on every rank.
    start = setting.checkpoint() if rank == 0 or setting.passes > 1 else None
    rates = [setting.lr, setting.max_norm][: setting.passes]
    rest = setting.epochs, start, lambda state: saved.append(copy.deepcopy(state))
    losses = fn(model, setting.samples, setting.batch_size, *rates, *rest)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return Trained(state, fit(losses, [0.0]), saved)


@contextlib.contextmanager
def _made_already() -> Iterator[None]:
    """Let a program make and destroy its process group, which exists in a run of labkit."""
    originals = [inspect.unwrap(f) for f in (dist.init_process_group, dist.destroy_process_group)]
    # By their code, since a program may have imported them by name.
    codes = [original.__code__ for original in originals]
    for original in originals:
        original.__code__ = (lambda *args, **options: None).__code__
    try:
        yield
    finally:
        for original, code in zip(originals, codes):
            original.__code__ = code


@contextlib.contextmanager
def _as_by_horovod(comm: Comm) -> Iterator[None]:
    """Horovod is there, and no process group of torch.distributed."""
    hvd.init(comm)
    group, dist.GroupMember.WORLD = dist.GroupMember.WORLD, None
    # What is submitted stays as it is until somebody waits for it: then a program that uses
    # its gradients too early goes wrong in the same way each time.
    try:
        with mock.patch.object(negotiator, "CYCLE_S", _LAZY_S):
            yield
    finally:
        dist.GroupMember.WORLD = group
    hvd.shutdown()


@dataclass(frozen=True, eq=False)
class _Port(Check):
    def __call__(self, fn: Callable, *, world_sizes: tuple[int, ...] = (1, 2, 3, 4)) -> Verdict:
        return super().__call__(fn, world_sizes=world_sizes)


_check = partial(
    _Port,
    inputs=lambda rank, case: (case,),
    written=None,
    sizes=(),
    may_call=frozenset({"torch", "labkit", "workbook"}),
)
# A port of ``programs.with_horovod.train`` to torch.distributed. It is called twice: to begin, and
# to go on from a checkpoint that rank 0 has.
to_ddp = _check(
    "elsewhere.to_ddp",
    signature="model, dataset, batch_size, lr, epochs, start, save",
    call=partial(_ported, 1),
    judge=partial(_wrong_port, 1),
)
# A port of ``programs.with_ddp.train`` to Horovod. It is called twice, without a process group.
to_horovod = _check(
    "elsewhere.to_horovod",
    signature="model, dataset, batch_size, lr, max_norm, epochs, start, save",
    call=partial(_ported, 2),
    judge=partial(_wrong_port, 2),
)

# What an update means: the conventions of Horovod and DDP (the mean of the replicas' means, or
# with ``op=Sum`` their sum; statistics of the rank's own, or of rank 0), of TensorFlow's
# strategies (a mean over the batch; the mean of the replicas' statistics), and of SyncBatchNorm.
GRADIENTS = ("mean of means", "mean over the batch", "sum of means")
STATISTICS = ("own", "rank 0", "mean of replicas", "whole batch")
# P shares -> how far the weight has moved, and the running mean on each replica.
Step = Callable[[Sequence[Sequence[float]]], tuple[float, list[float]]]


@judged("step", *itertools.product(GRADIENTS, STATISTICS))
def semantics(fn: Callable, gradients: str, statistics: str) -> Wrong | None:
    """Grade ``fn(step)``: (what becomes of the gradients, whose batch statistics are kept).

    ``step(shares)`` makes one update on ``len(shares)`` replicas, from the same start each time;
    a share is a list of samples, numbers, each of which is its own gradient. It returns how far
    the weight has moved, and each replica's running mean.
    """
    lr, momentum = random.uniform(0.1, 0.9), random.uniform(0.1, 0.9)
    found = plain(fn(step_of(gradients, statistics, lr, momentum)))
    if isinstance(found, list):
        found = [" ".join(x.lower().split()) if isinstance(x, str) else x for x in found]
    return None if found == [gradients, statistics] else Wrong(f"it returned {short(found)}")


def step_of(gradients: str, statistics: str, lr: float = 1.0, momentum: float = 1.0) -> Step:
    """One update, always from the same start: a weight and a running mean of 0."""

    def step(shares: Sequence[Sequence[float]]) -> tuple[float, list[float]]:
        numbers = [[float(sample) for sample in share] for share in shares]
        means = [fmean(share) for share in numbers]
        of_batch = fmean(itertools.chain(*numbers))
        moved = dict(zip(GRADIENTS, (fmean(means), of_batch, sum(means))))
        by_name = dict(zip(STATISTICS, (means, means[:1], [fmean(means)], [of_batch])))
        by_replica = by_name[statistics] * (1 if statistics == "own" else len(means))
        return lr * moved[gradients], [momentum * mean for mean in by_replica]

    return step
