"""What the ranks of torchrun must agree on before a run: each of them was started by itself.

``labkit.run`` checks a run's settings once, before it starts the ranks. torchrun starts a process
per rank, on machines that may have other code, other data, or another folder of the same name.
"""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from labkit.config import RunConfig
from labkit.devices import versions
from labkit.runtime import rounds
from labkit.runtime.preload import under_torchrun
from labkit.strategies.base import Strategy
from labkit.training.checkpoint import step_path, why_not_whole
from labkit.training.own import PARTS, Own
from labkit.training.resolve import Resolved, Work
from labkit.training.resume import Start, find_start
from labkit.units import format_count

# What may differ between machines.
_OF_A_MACHINE = ("devices", "log_dir", "checkpoint_dir", "weights")
_RENDEZVOUS_S = 60.0
# torchrun's agents compare the clocks of machines, and take one for lost after some 15 s.
_CLOCKS_S = 5.0


class Ready(NamedTuple):
    """A run whose settings are checked: its technique, what is to be noted, where it begins."""

    strategy: Strategy
    note: str
    start: Start


Check = Callable[[], Resolved]


def ready(config: RunConfig, own: Own, check: Check, timeout_s: float) -> Ready:
    """The run that ``check`` has found possible here, and under torchrun on all other ranks.

    Args:
        config, own: of the run.
        check: of the settings; returns the technique, and a note.
        timeout_s: the run's deadline.

    Raises:
        The errors of ``check``.
        ValueError: another rank has an error, or differs in what all must have in common.
        ConnectionError: another rank cannot be reached.
    """
    if not under_torchrun():
        strategy, work, note = check()
        start = find_start(config, own, strategy, work)
        return Ready(strategy, note, _said(start))
    _check_world_size(config)
    found = rounds.join(min(timeout_s, _RENDEZVOUS_S))
    strategy, work, note = _checked_on_all(found, config, check)
    if found.rank == 0:
        _warn(found, config)
    if config.checkpoint_dir is None:
        return Ready(strategy, note, Start())
    return Ready(strategy, note, _agreed_start(found, config, own, strategy, work))


def _said(start: Start) -> Start:
    if start.note:
        print(start.note, file=sys.stderr)
    return start


def _check_world_size(config: RunConfig) -> None:
    started = int(os.environ["WORLD_SIZE"])
    if config.world_size != started and config.devices is None:
        raise ValueError(
            f"world_size is {config.world_size}, but torchrun started "
            f"{format_count(started, 'rank')}: leave world_size out, and it is what torchrun "
            "starts, or use another --nproc-per-node"
        )


def _checked_on_all(found: rounds.Round, config: RunConfig, check: Check) -> Any:
    """What ``check`` returns here, if it returns on all ranks, and they run the same."""
    checked, error = None, None
    try:
        checked = check()
    except (ValueError, OSError) as raised:
        error = raised
    mine = {"error": str(error or ""), "same": _in_common(config)}
    told = found.exchange(json.dumps(mine), "the checks before the run")
    if error is not None:
        raise error
    everyone = [_read(text, {"error": str, "same": dict}) for text in told]
    for rank, one in enumerate(everyone):
        if one["error"]:
            raise ValueError(f"rank {rank} on {found.hosts[rank]}: {one['error']}")
    _check_equal(found, [one["same"] for one in everyone])
    return checked


def _in_common(config: RunConfig) -> dict[str, str]:
    """What must be the same on all ranks, as texts."""
    same = {k: v for k, v in config.as_dict().items() if k not in _OF_A_MACHINE}
    same["checkpoint_dir"] = config.checkpoint_dir is not None
    found = {name: json.dumps(value) for name, value in same.items()}
    here = versions()
    python = here["python"].rpartition(".")[0]
    found |= {"Python": python, "torch": here["torch"], "labkit's code": rounds.code()}
    paths = [path for name in PARTS if ":" in (path := getattr(config, name))]
    for name in ("__main__", *(path.partition(":")[0] for path in paths)):
        if file := getattr(sys.modules.get(name), "__file__", None):
            digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
            found[f"the code of {name}"] = digest
    return found


def _read(text: str, kinds: dict[str, type]) -> dict[str, Any]:
    """What another rank has told, as JSON; ConnectionError if no rank has written that."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, dict) and all(isinstance(found.get(k), t) for k, t in kinds.items()):
            return found
    raise ConnectionError(
        f"the store of this run holds {text[:40]!r}, which labkit does not write (SECURITY.md)"
    )


def _check_equal(found: rounds.Round, everyone: Sequence[dict[str, str]]) -> None:
    """Raise ValueError, on all ranks the same, if a rank differs from rank 0."""
    first = everyone[0]
    for rank, same in enumerate(everyone):
        names = [name for name in {**first, **same} if first.get(name) != same.get(name)]
        if names:
            told = "; ".join(
                f"{name} {first.get(name, 'missing')} on rank 0 and {same.get(name, 'missing')} "
                f"on rank {rank}"
                for name in names[:3]
            )
            raise ValueError(
                f"rank {rank} on {found.hosts[rank]} is not of the same run as rank 0 on "
                f"{found.hosts[0]}: {told}. Start torchrun with the same command, and the same "
                "version of labkit and torch, on every machine"
            )


def _warn(found: rounds.Round, config: RunConfig) -> None:
    for rank, behind_s in enumerate(found.behind_s):
        if abs(behind_s) > _CLOCKS_S:
            print(
                f"the clocks of {found.hosts[0]} and {found.hosts[rank]} differ by "
                f"{abs(behind_s):.0f} s: by such clocks torchrun decides that a machine has been "
                "silent for too long, and is lost. Let both follow a time server",
                file=sys.stderr,
            )
            break
    if config.checkpoint_dir is None and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        print(
            "torchrun has started the ranks anew, and without checkpoint_dir the training begins "
            "at the beginning",
            file=sys.stderr,
        )


def _agreed_start(
    found: rounds.Round, config: RunConfig, own: Own, strategy: Strategy, work: Work
) -> Start:
    """Where rank 0 begins, if all ranks can read it there."""
    mine: dict[str, Any] = {"error": "", "told": "", "step": -1}
    if found.rank == 0:
        try:
            start = _said(find_start(config, own, strategy, work))
            step = -1 if start.path is None else int(start.path.name.rpartition("-")[2])
            mine |= {"step": step, "told": start.note}
        except (ValueError, OSError) as error:
            mine["error"] = str(error)
    text = found.exchange(json.dumps(mine), "the choice of a checkpoint")[0]
    chosen = _read(text, {name: type(value) for name, value in mine.items()})
    if chosen["error"]:
        raise ValueError(chosen["error"])
    path = step_path(config.checkpoint_dir or "", chosen["step"]) if chosen["step"] >= 0 else None
    why = "" if path is None else why_not_whole(path)
    for rank, problem in enumerate(found.exchange(why, "the checkpoints")):
        if problem:
            raise ValueError(
                f"rank {rank} on {found.hosts[rank]} cannot read what rank 0 on {found.hosts[0]} "
                f"has in {path}: {problem}. Give a checkpoint_dir that all machines share"
            )
    return Start(path, chosen["told"])
