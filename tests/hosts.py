"""Ranks as torchrun starts them, on several hosts of one machine, without torchrun's imports.

Each host is a process that forks its ranks, as torchrun's agent starts its own: it looks at them
ten times a second, and ends all of them when one has failed. The store is in the test's process.
Forked from the tests' forkserver, which has torch, a run takes half a second; a real torchrun
takes ten.
"""

import contextlib
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import torch.distributed as dist

from labkit.runtime.preload import warm_up

_LOOK_S = 0.1
_PATIENCE_S = 40.0


@dataclass
class Host:
    """What has come of one host.

    Attributes:
        codes: by rank, the exit code of its process.
        text: what its ranks have printed, on stdout and stderr.
        files: by rank, the error file that torchrun would show; empty if there is none.
        seconds: how long its ranks lived.
    """

    codes: dict[int, int]
    text: str
    files: dict[int, str]
    seconds: float


def on_hosts(program, sizes, *args, meanwhile=None, **variables) -> list[Host]:
    """Run ``program(*args)`` in every rank of hosts with so many ranks.

    Args:
        meanwhile: called with the pids by rank, once all ranks have begun.
        variables: further environment variables.
    """
    warm_up()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    packed = cloudpickle.dumps((program, args))
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        common = {"WORLD_SIZE": str(sum(sizes)), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "test"}
        common |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        common |= {"TORCHELASTIC_USE_AGENT_STORE": "True"} | variables
        agents = [
            context.Process(target=_agent, args=(packed, number, sizes, common, folder))
            for number in range(len(sizes))
        ]
        for agent in agents:
            agent.start()
        if meanwhile is not None:
            meanwhile(_pids(Path(folder), sum(sizes)))
        for agent in agents:
            agent.join(_PATIENCE_S)
            if agent.is_alive():
                agent.kill()
        return [_host(Path(folder), number, sizes) for number in range(len(sizes))]


def _pids(folder: Path, count: int) -> dict[int, int]:
    until_s = time.monotonic() + _PATIENCE_S
    while len(found := list(folder.glob("pid-*"))) < count:
        assert time.monotonic() < until_s
        time.sleep(0.02)
    return {int(path.name[4:]): int(path.read_text()) for path in found}


def _host(folder: Path, number: int, sizes) -> Host:
    ranks = range(sum(sizes[:number]), sum(sizes[: number + 1]))
    codes, seconds = eval((folder / f"codes-{number}").read_text())
    errors = {rank: folder / f"error-{rank}" for rank in ranks}
    files = {rank: path.read_text() if path.exists() else "" for rank, path in errors.items()}
    return Host(codes, (folder / f"out-{number}").read_text(), files, seconds)


def _agent(packed: bytes, number: int, sizes, common, folder: str) -> None:
    out = os.open(f"{folder}/out-{number}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    first, started_s = sum(sizes[:number]), time.monotonic()
    pids = {}
    for local in range(sizes[number]):
        rank = first + local
        variables = common | {"RANK": str(rank), "LOCAL_RANK": str(local)}
        variables |= {"LOCAL_WORLD_SIZE": str(sizes[number]), "GROUP_RANK": str(number)}
        variables |= {"TORCHELASTIC_ERROR_FILE": f"{folder}/error-{rank}"}
        if (pid := os.fork()) == 0:
            _be_rank(packed, variables, out, f"{folder}/pid-{rank}")
        pids[rank] = pid
    codes, asked_s = {}, None
    while len(codes) < len(pids):
        time.sleep(_LOOK_S)
        for rank, pid in pids.items():
            if rank not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(found[1])
        left = [pid for rank, pid in pids.items() if rank not in codes]
        if any(codes.values()) and asked_s is None:
            asked_s = time.monotonic()
            for pid in left:
                os.kill(pid, signal.SIGTERM)
        too_late = asked_s is not None and time.monotonic() - asked_s > 5
        if too_late or time.monotonic() - started_s > _PATIENCE_S:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
    seconds = time.monotonic() - started_s
    Path(f"{folder}/codes-{number}").write_text(repr((codes, seconds)))


def _be_rank(packed: bytes, variables, out: int, pid_file: str) -> None:
    """The rest of the life of a forked process: that of a program under torchrun."""
    import atexit

    code = 1
    try:
        for descriptor in (1, 2):
            os.dup2(out, descriptor)
        for name in ("stdout", "stderr"):
            # By line, as a terminal's: several ranks share the file.
            raw = os.fdopen({"stdout": 1, "stderr": 2}[name], "wb", closefd=False)
            setattr(sys, name, io.TextIOWrapper(raw, line_buffering=True))
        os.environ.update(variables)
        # (The forkserver blocks it.)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # A program under torchrun is nobody's worker.
        multiprocessing.process._parent_process = None
        partial = Path(f"{pid_file}.part")
        partial.write_text(str(os.getpid()))
        partial.rename(pid_file)
        program, args = cloudpickle.loads(packed)
        program(*args)
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        os._exit(code)
