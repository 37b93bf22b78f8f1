"""The ranks that torchrun has started together: one round of its rendezvous.

When a rank is lost, or a machine joins, torchrun ends all ranks and starts new ones, which may
find the store of those before them, and what these have written there. TORCHELASTIC_RESTART_COUNT
does not tell the two apart: each agent counts only the failures of its own ranks. So the ranks of
a round first agree on a number that none before them had, and put it before all their keys.

All of it is plain text, and checked: the store has no password.
"""

import contextlib
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from labkit.units import format_count

_PLACE = "labkit/round"
_POLL_S = 0.02
# How long ranks may take over their checks, such as reading a checkpoint, or loading data.
_CHECKS_S = 600.0
_LONGEST = 256


@dataclass(eq=False)
class Round:
    """One round, on one rank.

    Attributes:
        rank, world_size: as torchrun says.
        hosts: by rank, the name of its machine.
        store: what it holds is of this round alone.
    """

    rank: int
    world_size: int
    hosts: Sequence[str]
    store: Any
    _calls: int = 0

    def exchange(self, text: str, what: str) -> list[str]:
        """The texts of all ranks, by rank; called by all of them.

        Raises:
            ConnectionError: a rank has not come; ``what`` says to what.
        """
        self._calls += 1
        keys = [f"told/{self._calls}/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], text)
        try:
            self.store.wait(keys, timedelta(seconds=_CHECKS_S))
            return [self.store.get(key).decode(errors="replace") for key in keys]
        except dist.DistError as error:
            missing = [rank for rank, key in enumerate(keys) if not _is_there(self.store, key)]
            named = ", ".join(f"rank {rank} on {self.hosts[rank]}" for rank in missing[:4])
            raise ConnectionError(
                f"rank {self.rank} waited {_CHECKS_S:g} s for {named or 'the others'} to come to "
                f"{what}: see what torchrun says there ({_first_line(error)})"
            ) from None

    def connection(self) -> Any:
        """The round's store over a connection of its own, for another thread."""
        return self.store.clone()


_joined: Round | None = None


def join(timeout_s: float) -> Round:
    """The round for which torchrun has started this process; the same at every call.

    Args:
        timeout_s: how long to wait for the other ranks.

    Raises:
        ConnectionError: another rank cannot be reached.
    """
    global _joined
    if _joined is None:
        started_s = time.monotonic()
        timeout = timedelta(seconds=timeout_s)
        try:
            server, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
            meet = _as_first if rank == 0 else _as_other
            number, told = meet(dist.PrefixStore(_PLACE, server), rank, world_size, timeout_s)
        except dist.DistError as error:
            raise unreachable(error, time.monotonic() - started_s) from None
        store = dist.PrefixStore(f"{_PLACE}/{number}", server)
        _joined = Round(rank, world_size, [one["host"] for one in told], store)
    return _joined


def current() -> Round | None:
    """The round that this process has joined; None without one."""
    return _joined


def _as_first(store: Any, rank: int, world_size: int, timeout_s: float) -> Any:
    """Offer a number; the round has it when all other ranks have answered."""
    number, until_s = secrets.token_hex(8), time.monotonic() + timeout_s
    told = {0: _mine()}
    store.set("offer", number)
    while len(told) < world_size:
        for other in set(range(1, world_size)) - told.keys():
            if _is_there(store, f"{number}/{other}"):
                told[other] = _read(store.get(f"{number}/{other}"))[0]
        if time.monotonic() > until_s:
            raise _missing(set(range(world_size)) - told.keys(), rank, timeout_s)
        time.sleep(_POLL_S)
    ordered = [told[other] for other in range(world_size)]
    store.set(f"{number}/all", json.dumps(ordered))
    return number, ordered


def _as_other(store: Any, rank: int, world_size: int, timeout_s: float) -> Any:
    """Answer the offer of rank 0, and any later one: the first may be of an earlier round."""
    mine, number, until_s = _mine(), "", time.monotonic() + timeout_s
    while True:
        if _is_there(store, "offer") and (offer := store.get("offer").decode()) != number:
            number = offer
            store.set(f"{number}/{rank}", json.dumps(mine))
        if number and _is_there(store, f"{number}/all"):
            told = _read(store.get(f"{number}/all"))
            if len(told) == world_size and told[rank]["token"] == mine["token"]:
                return number, told
        if time.monotonic() > until_s:
            raise _missing({0} if not number else set(), rank, timeout_s)
        time.sleep(_POLL_S)


def _mine() -> dict[str, str]:
    return {"token": secrets.token_hex(8), "host": socket.gethostname()}


def _read(text: bytes) -> list[dict[str, Any]]:
    """What one rank has told of itself, or several of themselves."""
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        told = json.loads(text)
        told = [told] if isinstance(told, dict) else told
        found = [{name: one.get(name) for name in ("token", "host")} for one in told]
        texts = [one[name] for one in found for name in one]
        if found and all(isinstance(one, str) and len(one) < _LONGEST for one in texts):
            return found
    raise _forged(text)


def _forged(text: bytes) -> ConnectionError:
    return ConnectionError(
        f"the store of this run holds {text[:40]!r}, which labkit does not write: is it the same "
        "labkit on all machines? If so, another program writes there (SECURITY.md)"
    )


def _is_there(store: Any, key: str) -> bool:
    return store.check([key])


def _missing(ranks: set[int], rank: int, timeout_s: float) -> ConnectionError:
    named = ", ".join(map(str, sorted(ranks)[:8])) or "some"
    return ConnectionError(
        f"rank {rank} of {os.environ['WORLD_SIZE']} waited {timeout_s:g} s for "
        f"{format_count(max(1, len(ranks)), 'rank')} ({named}) that torchrun has started, too: "
        "see what torchrun says on the other machines"
    )


def unreachable(error: Exception, waited_s: float) -> ConnectionError:
    """The error of a rank that finds no store where torchrun says that it is."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    advice = ""
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        advice = (
            ". That is how the machine of rank 0 calls itself: give torchrun the --local-addr "
            "under which the others reach it"
        )
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            advice += (
                ". After the loss of a machine torchrun may still name its store: set "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where you start torchrun"
            )
    return ConnectionError(
        f"rank {os.environ['RANK']} could not join the others at {where} in {waited_s:.0f} s: "
        "check that rank 0 runs there and that no firewall blocks the connection "
        f"({_first_line(error)}){advice}"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def code() -> str:
    """A hash of labkit's code on this machine."""
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
