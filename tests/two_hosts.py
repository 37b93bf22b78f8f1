"""Two hosts for the tests that need root: why there are none here; ranks on both of them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from labkit.bench.two_hosts.hosts import NAMES, TwoHosts, check_two_hosts

ROOT = Path(__file__).resolve().parents[1]


def why_not() -> str:
    """What two hosts lack on this machine, in words; empty if they can be made."""
    try:
        check_two_hosts()
    except ValueError as error:
        return str(error)
    return ""


class Torchrun:
    """``torchrun`` on both hosts, with so many ranks on each; its lines by host.

    Args:
        words: the program with its arguments.
        options: of torchrun, on both hosts.
    """

    def __init__(
        self, hosts: TwoHosts, ranks: int, words: list[str], port: int, options: list[str] = ()
    ):
        self.agents = []
        for host in (0, 1):
            rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{NAMES[0]}:{port}"]
            launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", *rendezvous]
            agent = hosts.popen(
                host,
                [*launch, "--nproc-per-node", str(ranks), *options, *words],
                env={"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/tests"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            self.agents.append(agent)

    def line(self, start: str) -> str:
        """The rest of the first host's next line that begins so.

        Raises:
            AssertionError: it has ended without; the message is what it said.
        """
        before = []
        for line in self.agents[0].stdout:
            if line.startswith(start):
                return line.removeprefix(start).strip()
            before.append(line)
        raise AssertionError("".join(before))

    def said(self, timeout_s: float = 60) -> list[str]:
        """All that is left to say, by host, at the end."""
        return [agent.communicate(timeout=timeout_s)[0] for agent in self.agents]


def end_session(process: subprocess.Popen) -> None:
    """Kill a program that was started in a session of its own, with its children."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
