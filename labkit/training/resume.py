"""Whether a run can go on from a checkpoint: what has to be equal, and what may differ.

A run that goes on with the same **arrangement** (technique, ranks, micro-batches) ends equal to
the bit to one that was never interrupted. With another one it ends where one device ends, within
the contract of ``training.state.tolerance``, unless the ranks had something that cannot be divided
anew: then it is refused.
"""

import contextlib
import hashlib
import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from labkit.config import RunConfig
from labkit.devices import versions
from labkit.runtime import rounds
from labkit.strategies.base import Strategy
from labkit.training.checkpoint.folder import check_folder, steps
from labkit.training.checkpoint.reading import read_tensors
from labkit.training.checkpoint.whole import Found, newest, read_facts
from labkit.training.own import Own
from labkit.training.work import Work, work_of
from labkit.units import format_count
from labkit.workload.samples import TensorSamples

# What decides who computes what, in which order.
_ARRANGEMENT = (
    *("strategy", "builtin", "world_size", "servers", "split_points", "devices", "bucket_mb"),
    *("backend", "accumulate", "micro_batches", "schedule"),
)
# What must be as it was, whoever computes it.
_MUST_EQUAL = (
    *("optimizer", "lr", "momentum", "weight_decay", "lr_schedule", "warmup_epochs", "scale_lr"),
    *("clip_norm", "loss", "dtype", "tf32", "amp", "batch_size", "seed", "train_size", "augment"),
    *("resize", "freeze", "sync_batch_norm", "compress", "max_staleness"),
)
# How long ranks whose launcher was killed may take to end.
_PATIENCE_S = 10.0
_NAMED = 3
_NEXT_STEP = "resume with the settings there, or choose another checkpoint_dir for a new run"
_HASHED = 64


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        path: of the checkpoint from which it goes on; None to begin at the beginning.
        told: this, in words; empty if nobody has asked for it.
    """

    path: Path | None = None
    told: str = ""


def arrangement(config: RunConfig) -> dict[str, Any]:
    """What decides which rank computes what, as JSON keeps it."""
    found = {name: getattr(config, name) for name in _ARRANGEMENT}
    # Which devices they are does not matter.
    devices = found.pop("devices")
    # Older checkpoints do not say it.
    over_hosts = {"hierarchical": True} if config.hierarchical else {}
    return found | {"devices": devices and len(devices.split(","))} | over_hosts


def facts_of(config: RunConfig, own: Own, work: Work, model: nn.Module) -> dict[str, Any]:
    """What a checkpoint says of its run, to be compared with the run that goes on from it."""
    return {
        "config": config.as_dict(),
        "arrangement": arrangement(config),
        "model": {name: list(tensor.shape) for name, tensor in _tensors(model).items()},
        "data": _data_of(work),
        "optimizer": _optimizer_of(config, own),
        "steps": math.ceil(len(work.train) / config.batch_size),
        "agents": agents(),
        "round": _round(),
        "versions": versions(),
    }


def agents() -> list[str]:
    """Those of torchrun that have started the ranks of this run; none without torchrun."""
    joined = rounds.current()
    return [] if joined is None else sorted(set(joined.agents))


def _round() -> str:
    joined = rounds.current()
    return "" if joined is None else joined.number


def find_start(
    config: RunConfig, own: Own, strategy: Strategy, agents: Collection[str] = ()
) -> Start:
    """Where the run begins: from the newest whole checkpoint, if it is to be resumed.

    A run is resumed if the config says so, or if the checkpoint was written by ranks of the same
    torchrun: it has lost some of them, and started all anew. Only reads.

    Args:
        config, own, strategy: of the run.
        agents: those of torchrun that have started this run's ranks.

    Raises:
        ValueError: the folder cannot be used; it has checkpoints that nobody has asked to resume,
            or none that is whole; or this run differs from the one that has written them.
    """
    if config.checkpoint_dir is None:
        return Start()
    folder = Path(config.checkpoint_dir)
    check_folder(folder, _PATIENCE_S if config.resume or agents else 0.0)
    if not strategy.can_be_kept:
        raise ValueError(
            f"{config.strategy} with builtin cannot be continued, because its state is divided "
            "among threads that do not stop together: leave checkpoint_dir out, or run it "
            "without builtin"
        )
    there = steps(folder)
    found = newest(folder) if config.resume or (there and agents) else Found(None, [])
    if not config.resume and not _has_written(agents, found.path):
        if there:
            raise ValueError(
                f"{folder} has checkpoints already, the newest {there[0][1].name}: choose resume "
                "to continue their run, or another checkpoint_dir for a new one"
            )
        return Start()
    if found.path is None and there:
        raise ValueError(
            f"no checkpoint in {folder} is whole: {'; '.join(found.skipped)}. They are as they "
            "were: choose another checkpoint_dir to begin again"
        )
    if found.path is None:
        return Start(told=f"no checkpoint in {folder} yet: the run begins at the beginning")
    path, skipped = _that_fits(config, own, found.path, older=bool(agents))
    told = _told(config, path, read_facts(path), [*found.skipped, *skipped])
    return Start(Path(os.path.abspath(path)), told)


def _has_written(agents: Collection[str], path: Path | None) -> bool:
    """Whether ranks have written this checkpoint that one of the agents had started earlier."""
    if path is None:
        return False
    facts = read_facts(path)
    return not set(agents).isdisjoint(facts.get("agents", ())) and facts.get("round") != _round()


def _that_fits(config: RunConfig, own: Own, path: Path, older: bool) -> tuple[Path, list[str]]:
    """The checkpoint, if the run can go on from it, and what was skipped.

    Args:
        config, own: of the run.
        path: of the newest whole checkpoint.
        older: whether an older one will do if these ranks cannot divide the newest between them:
            torchrun has other ranks than before, and nobody to ask.
    """
    try:
        _check_fits(config, own, path, read_facts(path))
        return path, []
    except _NotDividedError as error:
        before = newest(path.parent, below=int(path.name.rpartition("-")[2])) if older else None
        if before is None or before.path is None:
            raise
        with contextlib.suppress(_NotDividedError):
            found, skipped = _that_fits(config, own, before.path, older)
            return found, [f"{path.name}: {error.why}", *before.skipped, *skipped]
        raise


class _NotDividedError(ValueError):
    """Other ranks cannot divide between them what the ranks of a checkpoint had: ``why``."""

    def __init__(self, path: Path, why: str, next_step: str):
        super().__init__(f"cannot continue from {path}: {why}. Next step: {next_step}")
        self.why = why


def _told(config: RunConfig, path: Path, facts: Mapping[str, Any], skipped: Iterable[str]) -> str:
    epoch, step = facts["epoch"], facts["step"]
    if epoch >= config.epochs:
        told = f"the run in {path.parent} is finished ({path.name}, {epoch} of {config.epochs} "
        told += "epochs): this is its result. More epochs continue it"
    else:
        done = f"{epoch} of {config.epochs} epochs" + f" and {step} steps" * bool(step)
        told = f"continues from {path.name} in {path.parent}, after {done}; seconds and bytes are "
        told += "sums over the parts of the run"
        if facts["arrangement"] != arrangement(config):
            told += ", but for the bytes, which are those of this part on other ranks"
    return "; ".join([f"skipped {one}" for one in skipped] + [told])


def _check_fits(config: RunConfig, own: Own, path: Path, facts: Mapping[str, Any]) -> None:
    """Raise ValueError with all that differs from the run that wrote the checkpoint."""
    work = work_of(config, own)
    here = facts_of(config, own, work, work.make_model())
    differences = [
        *_settings_that_differ(facts["config"], here["config"]),
        *_shapes_that_differ(facts["model"], here["model"]),
        *_that_differ("optimizer", facts["optimizer"], here["optimizer"]),
    ]
    # Another dtype or seed makes other data, too.
    differences += [] if differences else _that_differ("data set", facts["data"], here["data"])
    epochs = facts["epoch"] + bool(facts["step"])
    if epochs > config.epochs:
        differences.append(f"epochs {epochs} begun there, {config.epochs} in all here")
    if facts["config"]["epochs"] != config.epochs and config.lr_schedule == "cosine":
        differences.append(
            f"epochs {facts['config']['epochs']} there, {config.epochs} here, on which the rates "
            "of lr_schedule cosine depend"
        )
    if differences:
        raise ValueError(
            f"cannot continue from {path}: {'; '.join(differences)}. Next step: {_NEXT_STEP}"
        )
    if facts["arrangement"] == here["arrangement"]:
        return
    if why := _why_not_divided(config, facts, path):
        raise _NotDividedError(path, why, _next_step(facts["config"]["world_size"]))


def _next_step(world_size: int) -> str:
    if not agents():
        return _NEXT_STEP
    return (
        f"start torchrun for {format_count(world_size, 'rank')}, with one number of machines and "
        "not MIN:MAX: it waits for a machine that was lost"
    )


def _settings_that_differ(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    pairs = [(name, there.get(name), here[name]) for name in _MUST_EQUAL]
    for name in ("model", "dataset"):
        # The learner's own may go by another name, and are compared themselves.
        if not any(_is_own(one[name]) for one in (there, here)):
            pairs.append((name, there[name], here[name]))
    return [
        f"{name} {old} there, {new} here" for name, old, new in pairs if _bare(old) != _bare(new)
    ]


def _is_own(name: str) -> bool:
    return ":" in name or name.endswith(" (own)")


def _bare(value: Any) -> Any:
    """A name without its module, and without the mark of an own part; else the value."""
    if not isinstance(value, str) or not _is_own(value) or value.startswith("step:"):
        return value
    return value.removesuffix(" (own)").rpartition(":")[2].rpartition(".")[2]


def _shapes_that_differ(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    # Those with two shapes say most.
    names.sort(key=lambda name: not (name in there and name in here))
    told = [
        f"{name} {there.get(name, 'missing')} there, {here.get(name, 'missing')} here"
        for name in names[:_NAMED]
    ]
    more = [f"and {len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return [f"the model: {', '.join(told + more)}"] if names else []


def _that_differ(what: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    return [
        f"{what}: {name} {there.get(name)} there, {here.get(name)} here"
        for name in {**there, **here}
        if there.get(name) != here.get(name)
    ]


def _why_not_divided(config: RunConfig, facts: Mapping[str, Any], path: Path) -> str:
    """Why the run cannot go on with other ranks, or another technique; empty if it can."""
    old, new = facts["arrangement"], arrangement(config)
    moved = ", ".join(_that_differ("", old, new)).replace(": ", "")
    if "async_parameter_server" in (old["strategy"], new["strategy"]):
        return f"{moved}: async_parameter_server counts the shares of each of its workers"
    ranks = read_tensors(path, ["ranks"])["ranks"]
    if any("residual" in rank.get("own", {}) for rank in ranks.values()):
        return f"{moved}: each rank has gradients that compress topk has not sent yet"
    for number, rank in ranks.items():
        if rank["progress"]["draws"]:
            return (
                f"{moved}: rank {number} has drawn random numbers in its steps (dropout), and "
                "other ranks would draw others"
            )
    if name := _that_varies(ranks):
        return (
            f"{moved}: {name} differs from rank to rank in the middle of an epoch, because each "
            "rank normalises its own share. Resume with these ranks; sync_batch_norm avoids it"
        )
    return ""


def merged_buffers(ranks: Mapping[str, Any]) -> dict[str, Tensor]:
    """The buffers of all ranks' parts of a checkpoint by name, those of the lowest rank first."""
    found: dict[str, Tensor] = {}
    for number in sorted(ranks, key=int):
        found = ranks[number].get("buffers", {}) | found
    return found


def _that_varies(ranks: Mapping[str, Any]) -> str:
    """A buffer that differs between ranks; empty if there is none."""
    merged = merged_buffers(ranks)
    for rank in ranks.values():
        for name, buffer in rank.get("buffers", {}).items():
            if not torch.equal(buffer, merged[name]):
                return name
    return ""


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}


def _data_of(work: Work) -> dict[str, Any]:
    """Sizes of the data, and of what is in memory a hash that other data would not have."""
    found: dict[str, Any] = {"samples": len(work.train)}
    found["held-out samples"] = 0 if work.test is None else len(work.test)
    if isinstance(work.train, TensorSamples):
        digest = hashlib.sha256(_bytes_of(work.train.targets))
        digest.update(_bytes_of(work.train.inputs[:_HASHED]))
        found["SHA-256 of targets and first inputs"] = digest.hexdigest()[:12]
    return found


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _optimizer_of(config: RunConfig, own: Own) -> dict[str, Any]:
    """The class and the numbers of an own optimizer; the settings say those of labkit's."""
    if own.optimizer is None:
        return {}
    made = own.optimizer([nn.Parameter(torch.zeros(1))])
    numbers = {k: v for k, v in made.defaults.items() if isinstance(v, (bool, int, float, tuple))}
    told = {name: list(v) if isinstance(v, tuple) else v for name, v in numbers.items()}
    return {"class": type(made).__name__} | told
