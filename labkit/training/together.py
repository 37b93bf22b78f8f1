"""What the ranks of torchrun must agree on before a run: each of them was started by itself.

``labkit.run`` checks a run's settings once, before it starts the ranks. torchrun starts a process
per rank, on machines that may have other code, other data, or another folder of the same name.
"""

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.config import RunConfig
from labkit.devices import versions
from labkit.runtime import rounds
from labkit.training.checkpoint import step_path, why_not_whole
from labkit.training.own import PARTS
from labkit.training.resolve import Resolved
from labkit.training.resume import Start

# What may differ between machines.
_OF_A_MACHINE = ("devices", "log_dir", "checkpoint_dir", "weights")
_RENDEZVOUS_S = 60.0
_NAMED = 3


def agreed(
    config: RunConfig,
    check: Callable[[], Resolved],
    find_start: Callable[[Resolved], Start],
    timeout_s: float,
) -> tuple[Resolved, Start]:
    """What ``check`` returns here, and where rank 0 begins, if all ranks are of the same run.

    Raises:
        ValueError: a rank has an error, or differs in what all must have in common.
        ConnectionError: another rank cannot be reached.
    """
    found = rounds.join(min(timeout_s, _RENDEZVOUS_S))
    checked, mine = _tried(check)
    everyone = exchange(found, mine | {"same": _in_common(config)}, "the checks before the run")
    first = everyone[0]["same"]
    for rank, one in enumerate(everyone):
        same = one["same"]
        names = [name for name in {**first, **same} if first.get(name) != same.get(name)]
        if names:
            differ = "; ".join(
                f"{name} {first.get(name, 'missing')} on rank 0 and {same.get(name, 'missing')} "
                f"on rank {rank}"
                for name in names[:_NAMED]
            )
            raise ValueError(
                f"rank {rank} on {found.hosts[rank]} is not of the same run as rank 0 on "
                f"{found.hosts[0]}: {differ}. Start torchrun with the same command, and the same "
                "version of labkit and torch, on every machine"
            )
    assert checked is not None, "an error has been raised on all ranks"
    if config.checkpoint_dir is None:
        return checked, Start()
    start, mine = _tried(lambda: find_start(checked)) if found.rank == 0 else (None, {"error": ""})
    path = start.path if start else None
    mine |= {"step": -1 if path is None else int(path.name.rpartition("-")[2])}
    step = exchange(found, mine, "the choice of a checkpoint")[0]["step"]
    chosen = None if step < 0 else step_path(config.checkpoint_dir, step)
    why = "" if chosen is None else why_not_whole(chosen)
    if why:
        why = f"cannot read what rank 0 has in {chosen}: {why}. All machines share checkpoint_dir"
    exchange(found, {"error": why}, "the checkpoints")
    return checked, Start(chosen, start.note if start else "")


def _tried(call: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    try:
        return call(), {"error": ""}
    except (ValueError, OSError) as error:
        return None, {"error": str(error)}


def exchange(found: rounds.Round, mine: dict[str, Any], what: str) -> list[dict[str, Any]]:
    """What all ranks have to say, as JSON, by rank.

    Raises:
        ValueError: on all ranks the same, the first ``error`` of a rank.
        ConnectionError: something that no rank has written.
    """
    everyone = []
    for rank, text in enumerate(found.exchange(json.dumps(mine), what)):
        one = None
        with contextlib.suppress(ValueError, RecursionError):
            one = json.loads(text)
        if not isinstance(one, dict) or any(
            not isinstance(one.get(name), type(value)) for name, value in mine.items()
        ):
            raise ConnectionError(
                f"the store of this run holds {text[:40]!r}, which labkit does not write "
                "(SECURITY.md)"
            )
        if one["error"]:
            raise ValueError(f"rank {rank} on {found.hosts[rank]}: {one['error']}")
        everyone.append(one)
    return everyone


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
