"""A provisioner of kernels for Jupyter: it lets the warm process fork them, see ``warm``.

What a fork cannot become (with other variables, say) starts as by Jupyter's own provisioner.
"""

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import warnings
from typing import Any

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning import LocalProvisioner

LAUNCHER = "ipykernel_launcher"
GO = b"g"  # the last word to a fork
# The program of the warm process: nothing is imported from the folder in which it starts.
PROGRAM = "import sys; del sys.path[0]; from workbook.kernels import warm; warm.main({})"
# Variables that no import reads (one sets the last). Another one has to be read by a new Python.
READ_LATER = ("JPY_", "PYTEST_", "LABKIT_LIVE", "LABKIT_PROGRESS", "TORCHINDUCTOR_CACHE_DIR")
# The kernel spec's, for its debugger. A fork does as well without.
_FLAG = "-Xfrozen_modules=off"


class WarmProcess:
    """The warm process of this one, with which it ends, however that ends."""

    def __init__(self, executable: str):
        self.environment = os.environ.copy()
        self.channel, child_end = socket.socketpair()
        with child_end:
            self.process = subprocess.Popen(
                [executable, "-c", PROGRAM.format(child_end.fileno())],
                env={
                    # What imports read: as labkit.engine.runtime.server and ipykernel set it.
                    "OMP_WAIT_POLICY": "passive",
                    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
                    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
                    **self.environment,
                    # Otherwise ipykernel ends with its parent. Ours ends with this process.
                    "JPY_PARENT_PID": "1",
                },
                stdin=subprocess.DEVNULL,
                pass_fds=[child_end.fileno()],
                start_new_session=True,
            )

    async def fork(self, request: dict[str, Any], files: list[int]) -> "ForkedKernel":
        """Return the kernel that a request describes; OSError if there is no process to fork."""
        connection, child_end = socket.socketpair()
        connection.setblocking(False)
        try:
            with child_end:
                socket.send_fds(self.channel, [b"!"], [child_end.fileno(), *files])
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(120):  # It may still import.
                await loop.sock_sendall(connection, json.dumps(request).encode() + b"\n")
                pid = await loop.sock_recv(connection, 32)
            if not pid:
                raise ConnectionError("the process with the imports has ended")
            return ForkedKernel(int(pid), connection)
        except BaseException:
            connection.close()
            raise


class ForkedKernel:
    """A kernel's process with a Popen's names. How it has ended, only its parent knows."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int, connection: socket.socket):
        self.pid = pid
        self._connection = connection
        # It is there: it waits for the last word.
        self._pidfd = os.pidfd_open(pid)
        connection.send(GO)

    def poll(self) -> int | None:
        """Return None while the kernel runs, then 0."""
        return 0 if select.select([self._pidfd], [], [], 0)[0] else None

    def wait(self) -> int:
        """Close what belongs to a kernel that has ended: Jupyter polls until then."""
        self._connection.close()
        os.close(self._pidfd)
        return 0

    def send_signal(self, number: int) -> None:
        """Send the kernel a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)


class WarmProvisioner(LocalProvisioner):
    """Starts kernels as forks of this process's warm process, which the first one starts."""

    warm: WarmProcess | None = None
    executable = sys.executable

    @classmethod
    def warm_up(cls) -> WarmProcess | None:
        """Start the warm process if there is none, and return it at once; None off Linux."""
        if cls.warm is not None and cls.warm.process.poll() is not None:
            cls.warm.channel.close()
            cls.warm = None
        if cls.warm is None and sys.platform.startswith("linux"):
            cls.warm = WarmProcess(cls.executable)
        return cls.warm

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Launch a kernel with a command: as a fork where that can be, or as a new process."""
        try:
            self.process = await self._fork(cmd, **self._scrub_kwargs(kwargs))
        except (TypeError, ValueError, OSError) as error:
            # Python says the same once.
            warnings.warn(f"A kernel starts as a new process: {error}", stacklevel=2)
            return await super().launch_kernel(cmd, **kwargs)
        self.pid: int | None = self.process.pid
        self.pgid: int | None = self.process.pid
        self.cwd = kwargs.get("cwd") or os.getcwd()
        return self.connection_info

    async def _fork(
        self, cmd: list[str], *, env: Any, cwd: Any = None, stdout: Any = None, stderr: Any = None
    ) -> ForkedKernel:
        """The kernel as a fork; an error says why it has to be a new process."""
        words = [word for word in cmd[1:] if word != _FLAG]
        # (An environment's Python is a link to one outside.)
        folders = {os.path.realpath(os.path.dirname(path)) for path in (cmd[0], sys.executable)}
        if len(folders) > 1 or words[:2] != ["-m", LAUNCHER]:
            raise ValueError(f"{' '.join(cmd[:3])} is not this environment's")
        warm = self.warm_up()
        if warm is None:
            raise OSError("only on Linux a process with torch may fork")
        environment = env | {"JPY_PARENT_PID": str(os.getpid())}
        for name, _ in sorted(environment.items() ^ warm.environment.items()):
            if not name.startswith(READ_LATER):
                raise ValueError(f"torch was imported with another value of {name}")
        request = {"command": cmd, "environment": environment, "folder": str(cwd or os.getcwd())}
        with open(os.devnull, "r+b") as nothing:
            null = nothing.fileno()
            # What a Popen inherits, or is asked for.
            out = {None: 1, subprocess.DEVNULL: null}.get(stdout, stdout)
            err = {None: 2, subprocess.DEVNULL: null}.get(stderr, stderr)
            files = []
            for file in (null, out, err):
                files.append(file if isinstance(file, int) else file.fileno())
            return await warm.fork(request, files)
