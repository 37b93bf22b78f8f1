"""A run on two hosts that stands still, and what PyTorch's own tools say about it.

The program is ``exercises/programs/early_stop.py``: which rank is to blame depends on a seed.
"""

import json
import re
import socket
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.runtime.agents import show_line, start_agents
from workbook.exercises.detective_dumps import Dumps, Entry, plain_entries
from workbook.exercises.grader.exercise import new_seed
from workbook.exercises.programs.early_stop import losses_of

HOSTS, RANKS_PER_HOST = 2, 2
# Nothing is printed for this long: the run stands still. (A step takes milliseconds.)
_QUIET_S = 2.0
_ANSWER_S, _AGAIN_S = 20.0, 0.3
# PyTorch's name of the default process group.
_DEFAULT_GROUP = "0"
# labkit tells the cause on every host, and in each rank that it ends that it does so.
_EXPLAINS = re.compile(r"(labkit: |labkit\.errors\.\w+: )(?!rank \d+ ends with)")
_PROGRAM = Path(__file__).parent / "programs" / "early_stop.py"
_WITH_LABKIT = _PROGRAM.with_name("early_stop_labkit.py")


@dataclass(frozen=True)
class HungRun:
    """What is known of a run that stood still, from the outside.

    Attributes:
        stacks: by rank, what each of its threads was doing, the newest call first.
        dumps: by rank, the entries of its flight recorder.
        seed: of the program.
    """

    stacks: dict[int, str]
    dumps: Dumps
    seed: int
    world_size: int = HOSTS * RANKS_PER_HOST
    ranks_per_host: int = RANKS_PER_HOST

    @property
    def culprit(self) -> int:
        losses = losses_of(self.seed, self.world_size)
        return int(losses.min(0).values.argmin())

    @property
    def host(self) -> int:
        return self.culprit // self.ranks_per_host

    @property
    def line(self) -> int:
        """Where the culprit stands."""
        return _line_with("dist.barrier()")

    @property
    def others_line(self) -> int:
        return _line_with("dist.all_reduce(")

    @property
    def cause_line(self) -> int:
        return _line_with("break")

    def show_stacks(self) -> None:
        """Print the lines of the program, and of PyTorch just above them, on which ranks stand."""
        for rank, stack in self.stacks.items():
            frames = [line for line in stack.splitlines() if "distributed_c10d" in line]
            frames += [line for line in stack.splitlines() if _PROGRAM.name in line]
            # A rank that did not answer has an error there instead.
            print(f"rank {rank}", *map(_short, frames or [stack.strip()]), sep="\n")


def _line_with(code: str) -> int:
    lines = _PROGRAM.read_text("utf-8").splitlines()
    return next(number for number, line in enumerate(lines, start=1) if code in line)


def _short(frame: str) -> str:
    return re.sub(r'File ".*/', 'File "', frame)


def hang(seed: int | None = None) -> HungRun:
    """Run the program on two hosts, show each host's output, and look into the ranks.

    While nothing moves, PyTorch's debug server is asked for all stacks and flight recorders. Then
    the ranks' timeouts end the run.

    Args:
        seed: decides which rank stops early; by default another one each time.

    Raises:
        RuntimeError: the program has ended instead.
        ConnectionError: the debug server does not answer.
    """
    seed, port = new_seed() if seed is None else seed, _free_port()
    lines: list[tuple[int, str]] = []

    def show_steps(host: int, line: str) -> None:
        lines.append((host, line))
        if ": step " in line:
            show_line(host, line)

    with start_agents(
        [_PROGRAM, str(seed), str(port)],
        hosts=HOSTS,
        ranks_per_host=RANKS_PER_HOST,
        environment={"TORCH_CPP_LOG_LEVEL": "ERROR"},
    ) as agents:
        while not any(": step " in line for _, line in lines):
            if agents.follow(quiet_s=_QUIET_S, show=show_steps):
                said = "\n".join(line for _, line in lines[-20:])
                raise RuntimeError(f"the program has ended, and was to stand still:\n{said}")
        print(f"... nothing for {_QUIET_S:g} s", flush=True)
        dumps, stacks = _dumps(port), _page(port, "stacks")
        agents.follow(show=lambda host, line: lines.append((host, line)))
    for host, line in errors_in(lines):
        show_line(host, line)
    return HungRun(dict(enumerate(stacks)), dumps, seed)


def _dumps(port: int) -> Dumps:
    """By rank, the entries of its flight recorder, once they do not change any more."""
    before: Dumps | None = None
    dumps: Dumps = {}
    while dumps != before:
        before = dumps
        dumps = dict(enumerate(map(_entries_in, _page(port, "fr_trace_json"))))
        time.sleep(_AGAIN_S)
    return dumps


def errors_in(lines: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """Of what ranks and agents print at the end: the errors, and whom torchrun calls the cause."""
    # Without the place in gloo's sources.
    found = [(host, re.sub(r"\[/\S+\] ", "", line)) for host, line in lines if "Error: " in line]
    for host in range(HOSTS):
        told = [line for one, line in lines if one == host]
        for number, line in enumerate(told):
            if line.startswith("Root Cause"):
                ranks = [one for one in told[number:] if one.startswith("  rank ")]
                found += [(host, line), *((host, one) for one in ranks[:1])]
    return found


def _entries_in(dump: str) -> list[Entry]:
    """The entries of one rank; none if it did not answer."""
    try:
        return plain_entries(json.loads(dump)["entries"], _DEFAULT_GROUP)
    except (ValueError, KeyError):
        return []


def explain(run: HungRun) -> None:
    """Run the same program with labkit on two hosts, and print what it says on each of them."""
    lines: list[list[str]] = [[] for _ in range(HOSTS)]
    with start_agents(
        [_WITH_LABKIT, str(run.seed)], hosts=HOSTS, ranks_per_host=RANKS_PER_HOST
    ) as agents:
        agents.follow(show=lambda host, line: lines[host].append(line))
    for host, told in enumerate(lines):
        for line in explanation_in(told):
            # Without the folder of this run.
            show_line(host, re.sub(r"/\S*/labkit-hosts-\w+/", "", line))


def explanation_in(lines: Sequence[str]) -> list[str]:
    """What labkit says in the output of a host: from its first sentence to the next step."""
    begins = (number for number, line in enumerate(lines) if _EXPLAINS.search(line))
    first = next(begins, len(lines))
    ends = (n for n, line in enumerate(lines[first:], start=first + 1) if "Next step" in line)
    return [*lines[first : next(ends, len(lines))]]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _page(port: int, name: str) -> list[str]:
    """What the debug server's page says, by rank."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}", timeout=_ANSWER_S) as page:
            text = page.read().decode()
    except OSError as error:
        raise ConnectionError(
            f"PyTorch's debug server in rank 0 does not answer at port {port} ({error}): run this "
            "again when the machine is less busy"
        ) from None
    return re.findall(r"<pre>(.*?)</pre>", text, re.DOTALL)
