"""Page 13: a run on two hosts that stands still, and who is to blame for it.

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
from workbook.exercises.detective_dumps import Dumps, Entry, culprit, plain_entries
from workbook.exercises.grader import Verdict
from workbook.exercises.grader.compare import plain, short
from workbook.exercises.grader.exercise import new_seed
from workbook.exercises.grader.report import NOT_ATTEMPTED, NOT_YET, PASSED, told
from workbook.exercises.programs.early_stop import losses_of

__all__ = ["HungRun", "culprit", "explain", "hang", "named"]

HOSTS, RANKS_PER_HOST = 2, 2
# Nothing is printed for this long: the run stands still. (A step takes milliseconds.)
_QUIET_S = 2.0
_ANSWER_S, _AGAIN_S = 20.0, 0.3
# PyTorch's name of the default process group.
_DEFAULT_GROUP = "0"
# labkit tells the cause on every host, and in each rank that it ends that it does so.
_EXPLAINS = re.compile(r"(labkit: |labkit\.errors\.\w+: )(?!rank \d+ ends with)")
_PROGRAM = Path(__file__).parent / "programs" / "early_stop.py"
_WRONG = (
    "rank {} is not the one that does something else than the others",
    "the rank is right, but it is not on host {}, counted from 0",
    "rank and host are right, but it does not stand at line {}: take the newest line of the "
    "program itself, not of PyTorch",
)


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

    @property
    def due(self) -> tuple[int, int, int]:
        """The culprit, its host, and the line at which it stands."""
        losses, lines = losses_of(self.seed, HOSTS * RANKS_PER_HOST), _PROGRAM.read_text("utf-8")
        rank = int(losses.min(0).values.argmin())
        return rank, rank // RANKS_PER_HOST, lines[: lines.index("dist.barrier()")].count("\n") + 1

    def show_stacks(self) -> None:
        """Print the lines of the program, and of PyTorch just above them, on which ranks stand."""
        for rank, stack in self.stacks.items():
            frames = [line for line in stack.splitlines() if "distributed_c10d" in line]
            frames += [line for line in stack.splitlines() if _PROGRAM.name in line]
            # A rank that did not answer has an error there instead.
            shown = [re.sub(r'File ".*/', 'File "', frame) for frame in frames]
            print(f"rank {rank}", *(shown or [stack.strip()]), sep="\n")


def named(
    run: HungRun, rank: int | None = None, host: int | None = None, line: int | None = None
) -> Verdict:
    """Judge who is to blame for a run of ``hang``.

    Args:
        run: the run.
        rank: the rank that does not do what the others do.
        host: the host that it is on.
        line: the line of the program at which it stands.
    """

    def judge() -> Verdict:
        found = [plain(one) for one in (rank, host, line)]
        if found == [None] * 3:
            return Verdict("detective.named", NOT_ATTEMPTED)
        for one, due, wrong in zip(found, run.due, _WRONG):
            if one != due:
                return Verdict("detective.named", NOT_YET, notes=[wrong.format(short(one))])
        text = "rank {} on host {} waits at line {}, in a barrier, and the others in an all-reduce"
        return Verdict("detective.named", PASSED, notes=[text.format(*run.due)])

    return told("detective.named", judge)


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
    seed = new_seed() if seed is None else seed
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
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
    before, dumps = None, {}
    while dumps != before:
        before = dumps
        dumps = dict(enumerate(map(_entries_in, _page(port, "fr_trace_json"))))
        time.sleep(_AGAIN_S)
    return dumps


def _entries_in(dump: str) -> list[Entry]:
    """The entries of one rank; none if it did not answer."""
    try:
        return plain_entries(json.loads(dump)["entries"], _DEFAULT_GROUP)
    except (ValueError, KeyError):
        return []


def _page(port: int, name: str) -> list[str]:
    """What the debug server's page says, by rank."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}", timeout=_ANSWER_S) as page:
            return re.findall(r"<pre>(.*?)</pre>", page.read().decode(), re.DOTALL)
    except OSError as error:
        raise ConnectionError(
            f"PyTorch's debug server in rank 0 does not answer at port {port} ({error}): run this "
            "again when the machine is less busy"
        ) from None


def errors_in(lines: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """Of what ranks and agents print at the end: the errors, and whom torchrun calls the cause."""
    found, asked = [], set()
    for host, line in lines:
        is_cause = host in asked and line.startswith("  rank ")
        if "Error: " in line or line.startswith("Root Cause") or is_cause:
            # Without the place in gloo's sources.
            found.append((host, re.sub(r"\[/\S+\] ", "", line)))
            asked = asked - {host} if is_cause else asked
        if line.startswith("Root Cause"):
            asked.add(host)
    return found


def explain(run: HungRun) -> None:
    """Run the same program with labkit on two hosts, and print what it says on each of them."""
    lines: list[list[str]] = [[] for _ in range(HOSTS)]
    program = [_PROGRAM.with_name("early_stop_labkit.py"), str(run.seed)]
    with start_agents(program, hosts=HOSTS, ranks_per_host=RANKS_PER_HOST) as agents:
        agents.follow(show=lambda host, line: lines[host].append(line))
    for host, told_there in enumerate(lines):
        for line in explanation_in(told_there):
            # Without the folder of this run.
            show_line(host, re.sub(r"/\S*/labkit-hosts-\w+/", "", line))


def explanation_in(lines: Sequence[str]) -> list[str]:
    """What labkit says in the output of a host: from its first sentence to the next step."""
    begins = (number for number, line in enumerate(lines) if _EXPLAINS.search(line))
    first = next(begins, len(lines))
    ends = (n for n, line in enumerate(lines[first:], start=first + 1) if "Next step" in line)
    return [*lines[first : next(ends, len(lines))]]
