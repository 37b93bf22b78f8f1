"""Jobs on the two hosts: ranks that ``torchrun`` has started, and that take turns as told.

All jobs of a measurement live at the same time, asleep between their turns, so that one worker,
two on one host and four on two hosts can be compared turn by turn.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Any

from labkit.errors import WorkerError
from workbook.measure.two_hosts.hosts import NAMES, TwoHosts
from workbook.measure.two_hosts.work import ANSWER

_FIRST_PORT = 29400
_SHOWN_LINES = 30


class Job:
    """A job of ``ranks_per_host`` ranks on each of the first ``num_hosts`` hosts.

    Args:
        number: of the job, from 0; jobs of the same hosts need different ones.
    """

    def __init__(self, hosts: TwoHosts, num_hosts: int, ranks_per_host: int, number: int = 0):
        self.world_size = num_hosts * ranks_per_host
        # Inside the hosts nothing else listens, so ports need not be looked for.
        port = _FIRST_PORT + number
        self._complaints = [tempfile.TemporaryFile() for _ in range(num_hosts)]  # noqa: SIM115
        self._agents: list[subprocess.Popen[str]] = []
        for host in range(num_hosts):
            words = ["--nnodes", str(num_hosts), "--node-rank", str(host)]
            words += ["--master-addr", NAMES[0], "--master-port", str(port)]
            words += ["--nproc-per-node", str(ranks_per_host)]
            words += ["-m", "workbook.measure.two_hosts.ranks"]
            self._agents.append(
                hosts.popen(
                    host,
                    [sys.executable, "-m", "torch.distributed.run", *words],
                    # As many threads as labkit gives a rank; torchrun would say that it sets one.
                    env={"OMP_NUM_THREADS": "1"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._complaints[host],
                    text=True,
                )
            )

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for agent, complaints in zip(self._agents, self._complaints):
            try:
                # With its input, rank 0 ends, and the others with it. In the middle of a turn the
                # ranks are left to the end of the hosts.
                agent.communicate(timeout=None if kind is None else 0)
            except subprocess.TimeoutExpired:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
            finally:
                complaints.close()
                for stream in filter(None, (agent.stdin, agent.stdout)):
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()

    def wait_until_ready(self) -> None:
        """Wait until all ranks have joined."""
        self._answer()

    def turn(self, words: str) -> dict[str, Any]:
        """Take a turn; returns its ``seconds`` and rank 0's ``spent_s`` by kind.

        Raises:
            WorkerError: the job has ended; the message holds what it said.
        """
        stream = self._agents[0].stdin
        assert stream is not None
        try:
            stream.write(f"{words}\n")
            stream.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        stream = self._agents[0].stdout
        assert stream is not None
        for line in stream:
            before, mark, answer = line.partition(ANSWER)
            if mark and not before:
                return json.loads(answer)
            print(line, end="")
        raise self._ended()

    def _ended(self) -> WorkerError:
        said = []
        for name, complaints in zip(NAMES, self._complaints):
            complaints.seek(0)
            lines = complaints.read().decode(errors="replace").splitlines()[-_SHOWN_LINES:]
            said += [f"{name}: {line}" for line in lines]
        return WorkerError("\n".join(["the ranks on the two hosts have ended early", *said]))
