"""The ranks that a launcher has started together: one round of torchrun's rendezvous.

When a rank is lost, or a machine joins, torchrun ends all ranks and starts new ones, which may
find what those before them have written in the store. (TORCHELASTIC_RESTART_COUNT does not tell
the two apart: each agent counts only the failures of its own ranks.) So the ranks of a round first
agree on a number that none before them had, and put it before all their keys. Ranks that another
launcher has started do the same; the store is then rank 0's.

All of it is plain text: the store has no password.
"""

import hashlib
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from labkit.engine.comm.torch_transport import first_line as _first_line
from labkit.engine.started import fill_in, started_as_rank

_PREFIX = "labkit/round"
_POLL_S = 0.02
# For the checks of all ranks, such as reading a checkpoint, or loading data.
_CHECKS_S = 600.0
# For the ranks to come, at most.
_LONGEST_S = 60.0
# Beyond its time limit, for PyTorch to end its search for the store.
_GRACE_S = 5.0


@dataclass(eq=False)
class Round:
    """One round, on one rank.

    Attributes:
        rank, world_size: as the launcher says.
        hosts: by rank, the name of its machine.
        store: what it holds is of this round alone.
    """

    rank: int
    world_size: int
    hosts: Sequence[str]
    store: Any
    _calls: int = 0

    def exchange(self, text: str, purpose: str) -> list[str]:
        """The texts of all ranks, by rank; ConnectionError if one does not come to ``purpose``."""
        self._calls += 1
        keys = [f"told/{self._calls}/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], text)
        try:
            self.store.wait(keys, timedelta(seconds=_CHECKS_S))
            return [self.store.get(key).decode(errors="replace") for key in keys]
        except dist.DistError as error:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            named = ", ".join(f"rank {rank} on {self.hosts[rank]}" for rank in missing[:4])
            raise ConnectionError(
                f"rank {self.rank} waited {_CHECKS_S:g} s for {named or 'the others'} to come to "
                f"{purpose}: see what is printed there ({_first_line(error)})"
            ) from None


_joined: Round | None = None


def join(timeout_s: float) -> Round:
    """Return the round for which a launcher has started this process; the same at every call.

    The environment is complete from then on, as torchrun would have set it.
    """
    global _joined
    if _joined is None:
        started_s = time.monotonic()
        timeout_s = min(timeout_s, _LONGEST_S)
        try:
            server, rank, world_size = _find_store(timeout_s)
            rendezvous = dist.PrefixStore(_PREFIX, server)
            number, hosts = agree(rendezvous, rank, world_size, timeout_s)
        except dist.DistError as error:
            raise unreachable(error, time.monotonic() - started_s) from None
        fill_in(rank, hosts)
        store = dist.PrefixStore(f"{_PREFIX}/{number}", server)
        _joined = Round(rank, world_size, hosts, store)
    return _joined


def _find_store(timeout_s: float) -> tuple[Any, int, int]:
    """Return the launcher's store, or rank 0's; this rank; and the number of ranks.

    Another program at the port may never answer, and PyTorch would wait for it without a limit.
    """
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def find() -> None:
        try:
            answers.put(next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=find, name="labkit-rendezvous", daemon=True).start()
    try:
        answer = answers.get(timeout=timeout_s + _GRACE_S)
    except queue.Empty:
        answer = dist.DistNetworkError("what listens there does not answer: another program?")
    if isinstance(answer, Exception):
        raise answer
    return answer


def agree(store: Any, rank: int, world_size: int, timeout_s: float) -> tuple[str, list[str]]:
    """Return a number that no earlier ranks had, and the names of all hosts, by rank.

    Rank 0 offers a number, and the others answer, also to any later one: what they find first may
    be an earlier round's. When all have answered, rank 0 repeats all answers.
    """
    answer = [secrets.token_hex(8), socket.gethostname()]
    until_s = time.monotonic() + timeout_s
    number = ""
    if rank == 0:
        number = secrets.token_hex(8)
        store.set("offer", number)
    answer_keys = [f"{number}/{other}" for other in range(1, world_size)]
    while time.monotonic() < until_s:
        if rank == 0 and all(store.check([key]) for key in answer_keys):
            answers = [answer, *(_read(store, key) for key in answer_keys)]
            store.set(f"{number}/all", json.dumps(answers))
        elif rank > 0 and store.check(["offer"]):
            # Again and again: it costs less than to remember which has been answered.
            number = store.get("offer").decode()
            store.set(f"{number}/{rank}", json.dumps(answer))
        if number and store.check([f"{number}/all"]):
            answers = _read(store, f"{number}/all")
            if len(answers) == world_size and answers[rank] == answer:
                return number, [str(host) for _, host in answers]
        time.sleep(_POLL_S)
    raise ConnectionError(
        f"rank {rank} of {world_size} waited {timeout_s:g} s for the others that were started "
        "with it: see what they print. (Two with the same RANK wait in vain, and so does a "
        "program that has inherited the variables of a rank)"
    )


def _read(store: Any, key: str) -> Any:
    text = store.get(key)
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if isinstance(values, list):
        return values
    raise ConnectionError(
        f"the store of this run holds {text[:40]!r}, which labkit does not write: is it the same "
        "labkit on all machines? If so, another program writes there (SECURITY.md)"
    )


def unreachable(error: Exception, waited_s: float) -> ConnectionError:
    """The error of a rank that finds no store, or no others, at its launcher's address."""
    started = started_as_rank()
    assert started is not None
    text = (
        f"rank {started.rank} could not join the others at {started.address} in {waited_s:.0f} s: "
    )
    if started.is_server:
        text += (
            f"{_first_line(error)}. Check that all {started.world_size} ranks were started, and "
            "that the port is free: else choose another MASTER_PORT for all of them"
        )
    else:
        text += (
            "check that rank 0 runs there and that no firewall blocks the connection "
            f"({_first_line(error)})"
        )
    if started.launcher == "torchrun":
        text += (
            ". On several machines give torchrun the --local-addr under which the others reach "
            "it, and set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )
    return ConnectionError(text)


def code() -> str:
    """Return a hash of labkit's code on this machine."""
    paths = sorted(Path(__file__).resolve().parents[2].rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]
