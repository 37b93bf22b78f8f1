"""Whether a run can go on from a checkpoint: what has to be equal, and what may differ.

A run that goes on with the same **arrangement** (technique, ranks, micro-batches) ends equal to
the bit to one that was never interrupted. With another one it ends where one device ends, within
the contract of ``training.state.tolerance``, unless the ranks had something that cannot be divided
anew: then it is refused.
"""

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from labkit.config import RunConfig
from labkit.strategies.base import OwnPaceStrategy, Strategy
from labkit.training.checkpoint import Facts, Stored, newest, steps
from labkit.training.resolve import Own, Work
from labkit.workload.samples import TensorSamples

# What decides who computes what, in which order.
_ARRANGEMENT = (
    *("strategy", "builtin", "world_size", "servers", "split_points", "devices", "bucket_mb"),
    *("backend", "accumulate", "micro_batches", "schedule", "hierarchical"),
)
# What must be as it was, whoever computes it.
_MUST_EQUAL = (
    *("model", "dataset", "optimizer", "lr", "weight_decay", "lr_schedule"),
    *("warmup_epochs", "clip_norm", "loss", "dtype", "amp", "batch_size", "seed"),
    *("train_size", "augment", "resize", "freeze", "sync_batch_norm", "compress"),
)
_NAMED = 5
_NEXT_STEP = "resume with the settings there, or choose another checkpoint_dir for a new run"
_HASHED = 64


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        path: of the checkpoint from which it goes on; None to begin at the beginning.
        note: this, in words; empty if nobody has asked for it.
    """

    path: Path | None = None
    note: str = ""


def arrangement(config: Mapping[str, Any]) -> dict[str, Any]:
    """What decides which rank computes what; which devices they are does not matter."""
    found = {name: config.get(name) for name in _ARRANGEMENT}
    return found | {"devices": len((found["devices"] or "").split(","))}


def facts_of(config: RunConfig, own: Own, work: Work, model: nn.Module) -> Facts:
    """What a checkpoint says of its run, to be compared with the run that goes on from it."""
    state = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    data: dict[str, Any] = {"samples": len(work.train)}
    data["held-out samples"] = 0 if work.test is None else len(work.test)
    if isinstance(work.train, TensorSamples):
        digest = hashlib.sha256()
        for tensor in (work.train.targets, work.train.inputs[:_HASHED]):
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        data["SHA-256 of targets and first inputs"] = digest.hexdigest()[:12]
    optimizer: dict[str, Any] = {}
    if own.optimizer is not None:
        made = own.optimizer([nn.Parameter(torch.zeros(1))])
        numbers = {k: v for k, v in made.defaults.items() if isinstance(v, int | float | tuple)}
        optimizer = {"class": type(made).__name__} | numbers
        optimizer = {k: list(v) if isinstance(v, tuple) else v for k, v in optimizer.items()}
    return Facts(
        *(0, 0, math.ceil(len(work.train) / config.batch_size), []),
        config=config.as_dict(),
        model={name: list(tensor.shape) for name, tensor in state.items()},
        data=data,
        optimizer=optimizer,
        files={},
    )


def find_start(config: RunConfig, own: Own, strategy: Strategy, work: Work) -> Start:
    """Where the run begins: with ``resume``, from the newest whole checkpoint. Only reads.

    Raises:
        ValueError: the folder cannot be used; it has checkpoints that nobody has asked to resume,
            or none that is whole; or this run differs from the one that has written them.
    """
    if config.checkpoint_dir is None:
        return Start()
    folder = Path(config.checkpoint_dir)
    there = next(one for one in (folder, *folder.absolute().parents) if os.path.lexists(one))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"cannot write checkpoints to {folder}: {there} is no folder of yours")
    if isinstance(strategy, OwnPaceStrategy):
        raise ValueError(
            f"{config.strategy} takes no checkpoint_dir, because its workers never stop together: "
            "leave it out, or use parameter_server"
        )
    found = steps(folder)
    if not config.resume:
        if found:
            raise ValueError(
                f"{folder} has checkpoints already, the newest {found[0][1].name}: choose resume "
                "to continue their run, or another checkpoint_dir for a new one"
            )
        return Start()
    path, skipped = newest(folder)
    if path is None and found:
        raise ValueError(
            f"no checkpoint in {folder} is whole: {'; '.join(skipped)}. They are as they were: "
            "choose another checkpoint_dir to begin again"
        )
    if path is None:
        return Start(note=f"no checkpoint in {folder} yet: the run begins at the beginning")
    stored = Stored(path)
    _check_fits(config, own, work, stored)
    epoch, step = stored.facts.epoch, stored.facts.step
    if epoch >= config.epochs:
        note = f"the run in {folder} is finished ({path.name}, {epoch} of {config.epochs} epochs)"
        note += ": this is its result. More epochs continue it"
    else:
        done = f"{epoch} of {config.epochs} epochs" + f" and {step} steps" * bool(step)
        note = f"continues from {path.name} in {folder}, after {done}; seconds and bytes are sums "
        note += "over the parts of the run"
    return Start(path.absolute(), "; ".join([*(f"skipped {one}" for one in skipped), note]))


def _check_fits(config: RunConfig, own: Own, work: Work, stored: Stored) -> None:
    """Raise ValueError with all that differs from the run that wrote the checkpoint."""
    facts, here = stored.facts, facts_of(config, own, work, work.make_model())
    old, new = _comparable(facts), _comparable(here)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    # Another model, dtype or seed makes other data, too.
    names = [name for name in names if not name.startswith("data set")] or names
    # Those with two values say most.
    names.sort(key=lambda name: not (name in old and name in new))
    differ = [
        f"{name} {old.get(name, 'missing')} there, {new.get(name, 'missing')} here"
        for name in names
    ]
    if len(differ) > _NAMED:
        differ[_NAMED:] = [f"and {len(differ) - _NAMED} more"]
    begun = facts.epoch + bool(facts.step)
    if begun > config.epochs:
        differ.append(f"epochs {begun} begun there, {config.epochs} in all here")
    if facts.config.get("epochs") != config.epochs and config.lr_schedule == "cosine":
        differ.append(
            f"epochs {facts.config.get('epochs')} there, {config.epochs} here, on which the rates "
            "of lr_schedule cosine depend"
        )
    then, now = arrangement(facts.config), arrangement(config.as_dict())
    if not differ and then != now and (why := _why_not_divided(stored)):
        moved = [f"{n} {then[n]} there, {now[n]} here" for n in then if then[n] != now[n]]
        differ.append(f"{', '.join(moved)}: {why}")
    if differ:
        raise ValueError(
            f"cannot continue from {stored.path}: {'; '.join(differ)}. Next step: {_NEXT_STEP}"
        )


def _comparable(facts: Facts) -> dict[str, Any]:
    # The learner's own parts may go by another name, and are compared themselves.
    found = {name: _bare(name, facts.config.get(name)) for name in _MUST_EQUAL}
    found |= {f"model: {name}": shape for name, shape in facts.model.items()}
    found |= {f"data set: {name}": value for name, value in facts.data.items()}
    return found | {f"optimizer: {name}": value for name, value in facts.optimizer.items()}


def _bare(name: str, value: Any) -> Any:
    """A name of an own part without its module and its mark; else the value."""
    is_own = isinstance(value, str) and (value.endswith(" (own)") or ":" in value)
    if not is_own or value.startswith("step:"):
        return value
    if name in ("model", "dataset"):
        return "(own)"
    return value.removesuffix(" (own)").rpartition(":")[2].rpartition(".")[2]


def _why_not_divided(stored: Stored) -> str:
    """Why the run cannot go on with other ranks, or another technique; empty if it can."""
    merged = stored.of_all("buffers")
    for rank, numbers in enumerate(stored.numbers):
        if "residual" in stored.of_rank(rank, "own"):
            return "each rank has gradients that compress topk has not sent yet"
        if numbers["draws"]:
            return (
                f"rank {rank} has drawn random numbers in its steps (dropout), and other ranks "
                "would draw others"
            )
        for name, buffer in stored.of_rank(rank, "buffers").items():
            if not torch.equal(buffer, merged[name]):
                return (
                    f"{name} differs from rank to rank in the middle of an epoch, because each "
                    "rank normalises its own share. Resume with these ranks; sync_batch_norm "
                    "avoids it"
                )
    return ""
