"""Ranks as torchrun starts them, on several hosts of one machine, without torchrun's imports.

Each host is a process that forks its ranks, as torchrun's agent starts its own: it looks at them
ten times a second, and ends all of them when one has failed. The store is in the test's process.
Forked from the tests' forkserver, which has torch, a run takes half a second; a real torchrun
takes ten.
"""

import atexit
import contextlib
import io
import json
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
        codes: by rank, the exit code of its process, in the order in which they ended.
        text: what its ranks have printed, on stdout and stderr.
        files: by rank, the error file that torchrun would show; empty if there is none.
    """

    codes: dict[int, int]
    text: str
    files: dict[int, str]


def on_hosts(program, sizes, *args) -> list[Host]:
    """Run ``program(*args)`` in every rank of hosts with so many ranks."""
    warm_up()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    packed, context = cloudpickle.dumps((program, args)), multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        common = {"WORLD_SIZE": str(sum(sizes)), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "test"}
        common |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        common |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        agents = [
            context.Process(target=_agent, args=(packed, number, sizes, common, Path(folder)))
            for number in range(len(sizes))
        ]
        for agent in agents:
            agent.start()
        for agent in agents:
            agent.join(_PATIENCE_S)
            agent.kill()
        return [_host(Path(folder), number) for number in range(len(sizes))]


def _host(folder: Path, number: int) -> Host:
    codes = {
        int(rank): code for rank, code in json.loads((folder / f"codes-{number}").read_text())
    }
    errors = {rank: folder / f"error-{rank}" for rank in codes}
    files = {rank: path.read_text() if path.exists() else "" for rank, path in errors.items()}
    return Host(codes, (folder / f"out-{number}").read_text(), files)


def _agent(packed: bytes, number: int, sizes, common, folder: Path) -> None:
    out = os.open(folder / f"out-{number}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    pids, codes, kill_s = {}, {}, time.monotonic() + _PATIENCE_S / 2
    for local in range(sizes[number]):
        rank = sum(sizes[:number]) + local
        variables = common | {"RANK": str(rank), "LOCAL_RANK": str(local)}
        variables |= {"LOCAL_WORLD_SIZE": str(sizes[number]), "GROUP_RANK": str(number)}
        variables |= {"TORCHELASTIC_ERROR_FILE": str(folder / f"error-{rank}")}
        if (pid := os.fork()) == 0:
            _be_rank(packed, variables, out)
        pids[rank] = pid
    while len(codes) < len(pids):
        time.sleep(_LOOK_S)
        have_failed = any(codes.values())
        for rank in pids.keys() - codes.keys():
            if (found := os.waitpid(pids[rank], os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(found[1])
        is_first = any(codes.values()) and not have_failed
        for rank in pids.keys() - codes.keys():
            if is_first:
                os.kill(pids[rank], signal.SIGTERM)
            if time.monotonic() > kill_s:
                os.kill(pids[rank], signal.SIGKILL)
    (folder / f"codes-{number}").write_text(json.dumps(list(codes.items())))


def _be_rank(packed: bytes, variables, out: int) -> None:
    """The rest of the life of a forked process: that of a program under torchrun."""
    code = 1
    try:
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(out, descriptor)
            # By line, as a terminal's: several ranks share the file.
            raw = os.fdopen(descriptor, "wb", closefd=False)
            setattr(sys, name, io.TextIOWrapper(raw, line_buffering=True))
        os.environ.update(variables)
        # A program under torchrun is nobody's worker.
        multiprocessing.process._parent_process = None
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
