"""Several hosts on this machine: one agent of ``torchrun`` for each, with its ranks.

To the agents they are hosts of a network: their ranks have global numbers, host by host, and meet
over a store. Only the kernel knows that they share a machine. The agents themselves meet in a file
of a private folder, so that none of them unpickles what comes over a socket (SECURITY.md).
"""

import contextlib
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from labkit.comm.processes import kill_marked, loopback
from labkit.comm.source_lines import is_ours
from labkit.units import check_integer

_MARK = "LABKIT_AGENTS"
_FOLDER = "LABKIT_AGENTS_FOLDER"
# Time for an agent to end its ranks; then they are killed.
_GRACE_S, _KILLED_S = 10.0, 10.0
# Each has an address that begins with 127.0.0.
_MOST_HOSTS = 200
_ENDED = 128 + signal.SIGTERM

Show = Callable[[int, str], object]


def show_line(host: int, line: str) -> None:
    """Print a line of a host's output, with the host's number."""
    print(f"host {host} | {line}", flush=True)


class Agents:
    """The agents of ``torchrun``, one a host, as ``start_agents`` has started them.

    Attributes:
        returncodes: of the agents, by host; None for one that still runs.
    """

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]):
        self._processes = processes
        self._selector = selectors.DefaultSelector()
        for host, process in enumerate(processes):
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            self._selector.register(process.stdout, selectors.EVENT_READ, host)
        self._unfinished = [b""] * len(processes)

    @property
    def returncodes(self) -> list[int | None]:
        return [process.poll() for process in self._processes]

    def follow(
        self, limit_s: float = 120.0, quiet_s: float | None = None, show: Show = show_line
    ) -> bool:
        """Show the hosts' output, line by line as it comes, until all agents have ended.

        Args:
            limit_s: return after this time at the latest.
            quiet_s: return when ranks have printed something, and then nothing for this long.
            show: called with the host and each line.

        Returns:
            Whether all agents have ended.
        """
        started_s, last_s = time.monotonic(), None
        while self._selector.get_map():
            for key, _ in self._selector.select(timeout=0.1):
                lines = self._read(key)
                last_s = time.monotonic() if lines else last_s
                for line in lines:
                    show(key.data, line)
            now_s = time.monotonic()
            is_quiet = quiet_s is not None and last_s is not None and now_s - last_s > quiet_s
            if is_quiet or now_s - started_s > limit_s:
                return False
        for process in self._processes:
            process.wait()
        return True

    def close(self) -> None:
        """Read no more output."""
        self._selector.close()

    def _read(self, key: selectors.SelectorKey) -> list[str]:
        host = key.data
        data = os.read(key.fd, 1 << 16)
        *whole, rest = (self._unfinished[host] + data).split(b"\n")
        if not data:
            self._selector.unregister(key.fileobj)
            whole, rest = ([rest] if rest else []), b""
        self._unfinished[host] = rest
        return [line.decode("utf-8", errors="backslashreplace").rstrip("\r") for line in whole]


@contextlib.contextmanager
def start_agents(
    program: Sequence[str | Path],
    *,
    hosts: int = 2,
    ranks_per_host: int = 2,
    options: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> Iterator[Agents]:
    """Start one agent of ``torchrun`` per host; at the end nothing of them is left.

    Whatever ends this (an error, Ctrl-C, the death of this process): the agents end their ranks,
    and the folder with their files is removed.

    Args:
        program: a script and its arguments, or ``-m``, a module and its arguments.
        hosts, ranks_per_host: how many agents, and how many ranks each of them starts.
        options: more options of ``torchrun``, such as ``--max-restarts``, ``1``.
        environment: more variables for the ranks.

    Raises:
        ValueError: an impossible number of hosts or ranks.

    Yields:
        The agents. Each line that a rank prints begins with its number.
    """
    check_integer("hosts", hosts, most=_MOST_HOSTS)
    check_integer("ranks_per_host", ranks_per_host)
    mark = secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="labkit-hosts-", ignore_cleanup_errors=True)
        )
        settings = os.environ | _settings(folder) | (environment or {}) | {_MARK: mark}
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, processes, mark)
        words = _outside_labkit(program, folder)
        for host in range(hosts):
            said = [*_options(folder, host, hosts, ranks_per_host), *options, *words]
            processes.append(_start(said, settings))
        agents = Agents(processes)
        stack.callback(agents.close)
        yield agents


def _settings(folder: str) -> dict[str, str]:
    return {
        "TMPDIR": folder,
        _FOLDER: folder,
        # Otherwise torchrun sets it, and says so at length.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback()),
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "rank ${rank}: ",
        "PYTHONUNBUFFERED": "1",
    }


def _outside_labkit(program: Sequence[str | Path], folder: str) -> list[str]:
    """The program's words. A script of labkit is run from a copy, or explanations, which name
    the learner's lines, would take its lines for internal ones.
    """
    script, *arguments = map(str, program)
    if is_ours(os.path.abspath(script)) and os.path.isfile(script):
        script = shutil.copy(script, folder)
    return [script, *arguments]


def _options(folder: str, host: int, hosts: int, ranks_per_host: int) -> list[str]:
    """The hosts are numbered by their addresses, all of which are this machine's own."""
    return [
        *("--nnodes", str(hosts), "--nproc-per-node", str(ranks_per_host)),
        *("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file"),
        *("--rdzv-endpoint", f"{folder}/store", "--rdzv-id", "labkit"),
        *("--local-addr", f"127.0.0.{1 + host}", "--log-dir", f"{folder}/host{host}"),
        *("--tee", "3"),
    ]


def _start(words: Sequence[str], settings: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "labkit.runtime.agents", *words],
        env=settings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # Ctrl-C in a terminal would reach the agents as well, while this process ends them.
        start_new_session=True,
    )


def _end(processes: Sequence[subprocess.Popen[bytes]], mark: str) -> None:
    try:
        for process in processes:
            if process.stdin is not None:
                process.stdin.close()
        deadline_s = time.monotonic() + _GRACE_S
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline_s - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
        kill_marked(_MARK, mark, _KILLED_S, lambda: [process.poll() for process in processes])
        for process in processes:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


# In the agent's process


def main() -> int:
    """Be one agent: ``torchrun`` with the words of the command line.

    It ends with its caller. A failure of a rank is told in torchrun's summary, without the
    traceback of the agent.
    """
    # Until torchrun has a handler of its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_ENDED))
    caller = _Caller()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        print(error, flush=True)
        return 1
    except SignalException:
        return _ENDED
    finally:
        if caller.is_gone:
            # Nobody else is left to remove it. (The last agent does it for all of them.)
            shutil.rmtree(os.environ[_FOLDER], ignore_errors=True)
    return 0


class _Caller(threading.Thread):
    """Ends this agent when its caller closes the other end of its standard input, or dies."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.is_gone = False
        # The ranks get an empty input.
        self._pipe, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        self.start()

    def run(self) -> None:
        while os.read(self._pipe, 1 << 10):
            pass
        self.is_gone = True
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
