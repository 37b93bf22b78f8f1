"""The checks of page 16: from Horovod to DDP and back, and what an update means elsewhere.

The ranks of the two ports begin with different weights and buffers, as in a real program, and
rank 0 alone may have a checkpoint. Their trainings are compared with one device that plays all
ranks. Symbols: P ranks.
"""

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from labkit import horovod as hvd
from labkit.comm.comm import Comm
from labkit.horovod import negotiator
from labkit.horovod.optimizer import Distributed, WrongOrder
from workbook.exercises.elsewhere_judge import Trained, wrong_training
from workbook.exercises.elsewhere_steps import CONFUSIONS, GRADIENTS, STATISTICS, new_steps
from workbook.exercises.elsewhere_training import Setting
from workbook.exercises.grader import Case, Mistake, Verdict, grader, returns
from workbook.exercises.grader.compare import fit, plain
from workbook.exercises.grader.in_process import Question, ask, differs
from workbook.exercises.grader.report import told
from workbook.exercises.grader.watched import Watched

# Longer than anything between a gradient and the wait for it.
_LAZY_S = 2.0
_NO_GROUP = (
    "this is a call of torch.distributed, which has no process group in a program that Horovod "
    "has started: hvd has a counterpart, or takes the rank and the number of ranks"
)
_WORLD_SIZES = (1, 2, 3, 4)
_SIGNATURE = "model, dataset, batch_size, lr, epochs, start, save"
# How a port may go wrong without an error; see ``Ways``.
_DEVIATIONS: list[tuple[str, dict[str, Any]]] = [
    ("port.nothing_shared", {"weights": "fresh", "buffers": "fresh"}),
    ("port.nothing_shared", {"weights": "own", "buffers": "own"}),
    ("port.own_weights", {"weights": "fresh"}),
    ("port.own_weights", {"weights": "own"}),
    ("port.own_buffers", {"buffers": "fresh"}),
    ("port.own_buffers", {"buffers": "own"}),
    ("port.shared_early", {"weights": "early"}),
    ("port.lr_unscaled", {"power": 0}),
    ("port.lr_twice", {"power": 2}),
    ("port.sum", {"gradients": "sum"}),
    ("port.own_gradients", {"gradients": "own"}),
    ("port.divided_twice", {"gradients": "twice"}),
    ("port.not_loaded", {"loads": False}),
    ("port.no_momentum", {"momentum": ""}),
    ("port.first_momentum", {"momentum": "first"}),
]
_WITH_CLIPPING = [
    ("port.clipped_before", {"clip": "before"}),
    ("port.not_clipped", {"clip": ""}),
    ("port.not_halved", {"halved": False}),
]


def to_ddp(fn: Callable, *, world_sizes: tuple[int, ...] = _WORLD_SIZES) -> Verdict:
    """Grade ``fn``, a port of ``programs.with_horovod.train`` to torch.distributed.

    ``fn(model, dataset, batch_size, lr, epochs, start, save)`` is called twice: to begin, and to
    go on from a checkpoint that rank 0 has.
    """
    return returns(
        fn,
        name="elsewhere.to_ddp",
        signature=_SIGNATURE,
        call=_ported_to_ddp,
        inputs=lambda rank, case: (case,),
        judge=partial(_judge, to_horovod=False),
        may_call=frozenset({"torch", "labkit", "workbook"}),
        world_sizes=world_sizes,
    )


def to_horovod(fn: Callable, *, world_sizes: tuple[int, ...] = _WORLD_SIZES) -> Verdict:
    """Grade ``fn``, a port of ``programs.with_ddp.train`` to Horovod.

    ``fn(model, dataset, batch_size, lr, max_norm, epochs, start, save)`` is called twice: to begin
    and to go on from a checkpoint. torch.distributed has no process group here, as in a program
    that Horovod has started.
    """
    return returns(
        fn,
        name="elsewhere.to_horovod",
        signature=_SIGNATURE.replace("lr", "lr, max_norm"),
        call=_ported_to_horovod,
        inputs=lambda rank, case: (case,),
        judge=partial(_judge, to_horovod=True),
        may_call=frozenset({"torch", "labkit", "workbook"}),
        world_sizes=world_sizes,
    )


# The trainings, on a rank


def _settings(case: Case, to_horovod: bool) -> list[Setting]:
    """The trainings of a call; none of a second one, since two show what a function keeps."""
    if case.call:
        return []
    passes = 2 if to_horovod else 1
    return [Setting(case, resumed, passes, clips=to_horovod) for resumed in (False, True)]


def _ported_to_ddp(fn: Watched, comm: Comm, case: Case) -> list[Trained] | Mistake:
    found = []
    with _made_already():
        for setting in _settings(case, to_horovod=False):
            found.append(_train(fn, setting, comm.rank, setting.lr, rank_0_alone=True))
            if used := sorted(name for name in fn.called if not name.startswith("torch.")):
                hvd.shutdown()
                return Mistake("port.still_horovod", name=used[0])
    return found


def _ported_to_horovod(fn: Watched, comm: Comm, case: Case) -> list[Trained] | Mistake:
    found = []
    # What is submitted stays as it is until somebody waits for it: then a program that uses its
    # gradients too early goes wrong in the same way each time.
    with mock.patch.object(negotiator, "CYCLE_S", _LAZY_S), _noted() as noted:
        for setting in _settings(case, to_horovod=True):
            hvd.init(comm)
            trained = _with_horovod(fn, setting, comm.rank, noted)
            hvd.shutdown()
            if isinstance(trained, Mistake):
                return trained
            found.append(trained)
    return found


def _with_horovod(fn: Watched, setting: Setting, rank: int, noted: set) -> Trained | Mistake:
    try:
        with _made_already(), _no_group():
            rates = setting.lr, setting.max_norm
            trained = _train(fn, setting, rank, *rates, rank_0_alone=False)
    except WrongOrder:
        if noted == {"update"}:
            return Mistake("port.old_optimizer")
        raise
    return trained if "labkit.horovod.operations.init" in fn.called else Mistake("port.no_init")


@contextlib.contextmanager
def _noted() -> Iterator[set[str]]:
    """Whether any optimizer made an "update", and a DistributedOptimizer a "wait"."""
    noted, wait = set[str](), Distributed.synchronize

    def waits(self: Distributed) -> None:
        noted.add("wait")
        wait(self)

    hook = register_optimizer_step_post_hook(lambda *_: noted.add("update"))
    try:
        with mock.patch.object(Distributed, "synchronize", waits):
            yield noted
    finally:
        hook.remove()


def _train(fn: Watched, setting: Setting, rank: int, *rates: float, rank_0_alone: bool) -> Trained:
    """Call the learner's function on a rank, and note what it does."""
    model, seen, saved = setting.model(rank), [], []
    names = {row: i for i, row in enumerate(setting.samples.inputs[:, 0].tolist())}

    def note(module: nn.Module, inputs: tuple) -> None:
        if torch.is_grad_enabled():
            seen.append(_rows(inputs, names))

    model.register_forward_pre_hook(note)
    start = setting.checkpoint() if rank == 0 or not rank_0_alone else None
    rest = setting.epochs, start, lambda state: saved.append(copy.deepcopy(state))
    losses = fn(model, setting.samples, setting.batch_size, *rates, *rest)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return Trained(state, fit(losses, [0.0]), saved, seen)


def _rows(inputs: tuple, names: dict[float, int]) -> list[int]:
    """Which samples these are; -1 for others."""
    try:
        return [names.get(row, -1) for row in inputs[0][:, 0].tolist()]
    except (IndexError, RuntimeError):  # not in order, or a tensor of torch.func.vmap
        return [-1]


@contextlib.contextmanager
def _made_already() -> Iterator[None]:
    """Let a program make and destroy its process group, which exists in a run of labkit."""
    originals = [inspect.unwrap(f) for f in (dist.init_process_group, dist.destroy_process_group)]
    # By their code, since a program may have imported them by name.
    kept = [original.__code__ for original in originals]
    for original in originals:
        original.__code__ = _nothing.__code__
    try:
        yield
    finally:
        for original, code in zip(originals, kept):
            original.__code__ = code


def _nothing(*args: Any, **options: Any) -> None:
    pass


@contextlib.contextmanager
def _no_group() -> Iterator[None]:
    """Hide the default process group, which a program has not got that Horovod has started."""
    kept, dist.GroupMember.WORLD = dist.GroupMember.WORLD, None
    try:
        yield
    except ValueError as error:
        if "Default process group" in str(error):
            error.args = (_NO_GROUP,)
        raise
    finally:
        dist.GroupMember.WORLD = kept


# What is wrong


def _judge(case: Case, values: list[Any], *, to_horovod: bool) -> Mistake | None:
    trainings = list(zip(_settings(case, to_horovod), zip(*values)))
    return wrong_training(trainings, _DEVIATIONS + (_WITH_CLIPPING if to_horovod else []))


# Two semantics


def semantics(fn: Callable) -> Verdict:
    """Grade ``fn(step)``: (what becomes of the gradients, whose batch statistics are kept).

    ``step(shares)`` makes one update on ``len(shares)`` replicas, from the same start each time;
    a share is a list of samples, numbers, each of which is its own gradient. It returns how far
    the weight has moved, and each replica's running mean. Runs in another process.
    """
    truth = new_steps(Random(grader.new_seed()))
    name = getattr(fn, "__name__", "the function")
    questions = [
        Question((step,), f"{name}(step), with {' and '.join(map(repr, pair))},", pair)
        for step, pair in truth.items()
    ]
    judge = partial(
        *(ask, "elsewhere.semantics", fn, questions, _unlike),
        mistakes=[(id, lambda step, way=way: way(*truth[step])) for id, way in CONFUSIONS],
        call=_in_plain_words,
        right=lambda answers: f"all {len(answers)} steps are told apart",
        signature="step",
    )
    return told("elsewhere.semantics", judge)


def _in_plain_words(fn: Callable, step: Callable) -> Any:
    found = plain(fn(step))
    if not isinstance(found, list):
        return found
    return [" ".join(x.lower().split()) if isinstance(x, str) else x for x in found]


def _unlike(question: Question, answer: Any) -> Mistake | None:
    if isinstance(answer, list) and len(answer) == 2:
        words = (*GRADIENTS, *STATISTICS)
        if strange := [x for x in answer if x not in words]:
            return Mistake("semantics.words", found=strange[0], words=", ".join(map(repr, words)))
    return differs(question, answer)
