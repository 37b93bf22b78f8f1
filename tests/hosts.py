"""Ranks as torchrun starts them, on several hosts of one machine, without torchrun's imports.

They are forked from the tests' forkserver, which has torch: a run takes half a second, and under
a real torchrun ten. As its agents do, the test ends all ranks of a host when one has failed.
"""

import atexit
import contextlib
import io
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import cloudpickle
import torch.distributed as dist

from labkit.engine.runtime.preload import warm_up

_LOOK_S = 0.1
_PATIENCE_S = 120.0


@dataclass
class Host:
    """What has come of one host.

    Attributes:
        codes: by rank, the exit code of its process, in the order in which they ended.
        text: what its ranks have printed, on stdout and stderr.
        files: by rank, the error file that torchrun would show; empty if there is none.
    """

    codes: dict[int, int] = field(default_factory=dict)
    text: str = ""
    files: dict[int, str] = field(default_factory=dict)


def on_hosts(program, sizes, *args) -> list[Host]:
    """Run ``program(*args)`` in every rank of hosts with so many ranks."""
    warm_up()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    packed, context = cloudpickle.dumps((program, args)), multiprocessing.get_context("forkserver")
    common = {"WORLD_SIZE": str(sum(sizes)), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "test"}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    hosts, running = [Host() for _ in sizes], [{} for _ in sizes]
    with tempfile.TemporaryDirectory() as folder:
        for number, size in enumerate(sizes):
            for local in range(size):
                rank = sum(sizes[:number]) + local
                variables = common | {"RANK": str(rank), "LOCAL_RANK": str(local)}
                variables |= {"LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": str(number)}
                variables |= {"TORCHELASTIC_ERROR_FILE": f"{folder}/error-{rank}"}
                options = packed, variables, f"{folder}/out-{number}"
                running[number][rank] = context.Process(target=_be_rank, args=options)
                running[number][rank].start()
        kill_s = time.monotonic() + _PATIENCE_S
        while any(running):
            time.sleep(_LOOK_S)
            for host, ranks in zip(hosts, running):
                had_failed = any(host.codes.values())
                ended = [rank for rank, process in ranks.items() if process.exitcode is not None]
                host.codes |= {rank: ranks.pop(rank).exitcode for rank in ended}
                for process in ranks.values():
                    if any(host.codes.values()) and not had_failed:
                        process.terminate()
                    if time.monotonic() > kill_s:
                        process.kill()
        for number, host in enumerate(hosts):
            host.text = Path(folder, f"out-{number}").read_text()
            paths = {rank: Path(folder, f"error-{rank}") for rank in host.codes}
            host.files = {rank: p.read_text() if p.exists() else "" for rank, p in paths.items()}
    return hosts


def _be_rank(packed: bytes, variables: dict[str, str], out: str) -> None:
    """The rest of the life of a forked process: that of a program under torchrun."""
    code = 1
    try:
        file = os.open(out, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(file, descriptor)
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
