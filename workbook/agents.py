"""Several hosts on this machine: one agent of ``torchrun`` for each, with its ranks.

To the agents they are hosts of a network: their ranks have global numbers, host by host, and meet
over a store. Only the kernel knows that they share a machine. The agents themselves meet in a file
of a private folder, so that none of them unpickles what comes over a socket (SECURITY.md).
"""

import contextlib
import logging
import math
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from labkit.engine.comm.shared_memory import kill_marked, loopback
from labkit.engine.comm.source_lines import is_ours

_MARK = "LABKIT_AGENTS"
_FOLDER = "LABKIT_AGENTS_FOLDER"
# Time for an agent to end its ranks; then they are killed.
_GRACE_S = 10.0
# Elsewhere the system's libraries may not survive a fork.
_START_METHOD = "fork" if sys.platform == "linux" else "spawn"


def show_line(host: int, line: str) -> None:
    """Print a line of a host's output, with the host's number."""
    print(f"host {host} | {line}", flush=True)


class Agents:
    """The agents of ``torchrun``, one a host, as ``start_agents`` has started them."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]):
        self._processes = processes
        self._num_open = len(processes)
        # (host, line); None for the end of a host's output.
        self._lines: queue.Queue[tuple[int, str | None]] = queue.Queue()
        for host in range(len(processes)):
            threading.Thread(target=self._read, args=(host,), daemon=True).start()

    def _read(self, host: int) -> None:
        for line in self._processes[host].stdout or ():
            self._lines.put((host, line.rstrip("\r\n")))
        self._lines.put((host, None))

    def follow(
        self,
        limit_s: float = 120.0,
        quiet_s: float = math.inf,
        show: Callable[[int, str], object] = show_line,
    ) -> bool:
        """Show the hosts' output, line by line as it comes, until all agents have ended.

        Returns after ``limit_s``, and once nothing has been printed for ``quiet_s`` after a line;
        whether all agents have ended.
        """
        until_s = end_s = time.monotonic() + limit_s
        while self._num_open:
            try:
                host, line = self._lines.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                return False
            if line is None:
                self._num_open -= 1
            else:
                show(host, line)
                until_s = min(end_s, time.monotonic() + quiet_s)
        for process in self._processes:
            process.wait()
        return True


@contextlib.contextmanager
def start_agents(
    program: Sequence[str | Path],
    *,
    hosts: int = 2,
    ranks_per_host: int = 2,
    forked: bool = False,
    options: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> Iterator[Agents]:
    """Start one agent of ``torchrun`` per host; at the end nothing of them is left.

    Also after Ctrl-C, or the death of this process. Each line that a rank prints begins with its
    number.

    Args:
        program: a script and its arguments, or ``-m``, a module and its arguments.
        hosts, ranks_per_host: the number of agents, and of the ranks that each of them starts.
        forked: whether ranks are forks of their agent, which has imported torch: then they start
            at once (on Linux), and no agent says how one has ended. The program is a file.
        options: more options of ``torchrun``, such as ``--max-restarts``, ``1``.
        environment: more variables for the ranks.
    """
    mark = secrets.token_hex(8)
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="labkit-hosts-", ignore_cleanup_errors=True) as folder:
        # torchrun would set OMP_NUM_THREADS, and say so at length.
        settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback()} | os.environ
        settings |= {"TMPDIR": folder, _FOLDER: folder, _MARK: mark, "PYTHONUNBUFFERED": "1"}
        settings |= {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "rank ${rank}: "}
        script, *arguments = map(str, program)
        if is_ours(os.path.abspath(script)) and os.path.isfile(script):
            # From a copy: explanations would take the lines of a script of labkit for internal.
            script = shutil.copy(script, folder)
        try:
            for host in range(hosts):
                # The hosts are numbered by their addresses, which are all this machine's own.
                words = f"""-m workbook.agents
                    --nnodes {hosts} --nproc-per-node {ranks_per_host} --tee 3
                    --rdzv-backend c10d --rdzv-conf store_type=file --rdzv-id labkit
                    --local-addr 127.0.0.{1 + host}""".split()
                words += ["--rdzv-endpoint", f"{folder}/store"]
                if forked:
                    words += ["--run-path", "--start-method", _START_METHOD]
                words += ["--log-dir", f"{folder}/host{host}", *options, script, *arguments]
                process = subprocess.Popen(
                    [sys.executable, *words],
                    env=settings | (environment or {}),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="backslashreplace",
                    # Ctrl-C in a terminal would reach the agents, too; this process ends them.
                    start_new_session=True,
                )
                processes.append(process)
            yield Agents(processes)
        finally:
            _end(processes, mark)


def _end(processes: Sequence[subprocess.Popen[str]], mark: str) -> None:
    """Ask the agents to end, by the end of their input; then kill what is left."""
    try:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in processes:
                process.wait(_GRACE_S)
    finally:
        for process in processes:
            process.kill()
        kill_marked(_MARK, mark, _GRACE_S, lambda: [process.poll() for process in processes])
        for process in processes:
            process.wait()


def main() -> None:
    """Be one agent: ``torchrun`` with the words of the command line; it ends with its caller."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    if "--run-path" in sys.argv:
        # PyTorch's logger imports its compiler to format a traceback, which takes seconds.
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").disabled = True
    parent = os.getppid()
    caller = os.dup(0)
    # The ranks get an empty input.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def end_with_caller() -> None:
        while os.read(caller, 1 << 10):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_caller, daemon=True).start()
    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        # torchrun's summary, without a traceback of the agent.
        sys.exit(str(error))
    finally:
        if os.getppid() != parent:
            # The caller was killed: nobody else is left to remove it.
            shutil.rmtree(os.environ[_FOLDER], ignore_errors=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # To take torch apart takes seconds.
    os._exit(0)
