"""Page 15: a run on two hosts that stands still, and flight recorders to read.

The program is ``exercises/programs/early_stop.py``: which rank is to blame depends on a seed.
"""

import copy
import json
import random
import re
import socket
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from workbook.agents import show_line, start_agents
from workbook.exercises.cases import Case, case_of, check_of
from workbook.exercises.grader import Wrong, judged
from workbook.exercises.grader.compare import agree, fit, short
from workbook.exercises.grader.exercise import new_seed
from workbook.exercises.programs import early_stop
from workbook.exercises.programs.early_stop import TIMEOUT_S, losses_of

HOSTS, RANKS_PER_HOST = 2, 2
WORLD_SIZE = HOSTS * RANKS_PER_HOST
# Nothing is printed for this long: the run stands still. (A step takes milliseconds.)
_QUIET_S = 1.0
_ANSWER_S = 20.0
_AGAIN_S = 0.3
# PyTorch's name of the default process group.
_DEFAULT_GROUP = "0"
# The fields of an entry of the recorder that are shown: not its times, threads and process.
_KEPT = ("collective_seq_id", "profiling_name", "input_sizes", "input_dtypes", "state", "retired")
_PROGRAM = Path(__file__).parent / "programs" / "early_stop.py"

# By rank, the entries of its flight recorder.
Dumps = dict[int, list[dict[str, Any]]]


named = check_of("detective.named")


def case_of_run(
    seed: int,
    stacks: dict[int, str],
    dumps: Dumps,
    errors: Sequence[tuple[int, str]],
) -> Case:
    """Make a case of a run that stood still: by rank its stacks, the newest call first, and the
    entries of its flight recorder; the errors, each with its host.
    """
    losses = losses_of(seed, WORLD_SIZE)
    rank = int(losses.min(0).values.argmin())
    host = rank // RANKS_PER_HOST
    sizes = [entries[-1]["input_sizes"] for other, entries in dumps.items() if other != rank]
    failed = [(host, line) for host, line in errors if "Timed out" in line]
    roots = [line.split()[2] for _, line in errors if line.startswith("  rank ")]
    text = f"""
    - a rank decides by its own loss to stop
    - what torchrun calls the root cause: it names {len(roots)}, rank {" and rank ".join(roots)}
    - a rank is slow: no step took {_QUIET_S:g} s, and in {TIMEOUT_S:g} s the next one has not come
    - a rank was killed: {len(stacks)} of {WORLD_SIZE} ranks have shown their stacks
    - a host is out of reach: {len(failed)} ranks have failed, on {len(dict(failed))} hosts
    - a rank brings another size: those in an all-reduce bring {sizes[:3]}, the other one nothing
    rank: stands in an all-reduce, as most ranks do
    host: is not where rank {rank} is: ranks are numbered host by host, {RANKS_PER_HOST} on each
    line: is not the newest line of the program, and not of PyTorch, in the stack of rank {rank}
    solved: rank {rank} on host {host} waits in a barrier, and the others in an all-reduce
    """
    clues = {"seed": seed, "stacks": stacks, "dumps": dumps}
    answer = {"rank": rank, "host": host, "line": "dist.barrier()"}
    return case_of(early_stop.train, WORLD_SIZE, random.Random(seed), text, clues, **answer)


def show_stacks(case: Case) -> None:
    """Print the lines of the program, and of PyTorch just above them, on which ranks stand."""
    for rank, stack in case.clues["stacks"].items():
        frames = [line for line in stack.splitlines() if "distributed_c10d" in line]
        frames += [line for line in stack.splitlines() if _PROGRAM.name in line]
        # A rank that did not answer has an error there instead.
        shown = [re.sub(r'File ".*/', 'File "', frame) for frame in frames] or [stack.strip()]
        print(f"rank {rank}", *shown, sep="\n")


def hang(seed: int | None = None) -> Case:
    """Run the program on two hosts, show each host's output, and look into the ranks.

    While nothing moves, PyTorch's debug server is asked for all stacks and flight recorders. Then
    the ranks' timeouts end the run. ``seed`` decides which rank stops early.

    Raises:
        RuntimeError: the program has ended instead.
        OSError: the debug server does not answer.
    """
    if seed is None:
        seed = new_seed()
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    lines: list[tuple[int, str]] = []

    def show_steps(host: int, line: str) -> None:
        lines.append((host, line))
        if ": step " in line:
            show_line(host, line)

    def page(name: str) -> list[str]:
        """The texts on a page of the debug server, by rank."""
        url = f"http://127.0.0.1:{port}/{name}"
        with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
            return re.findall(r"<pre>(.*?)</pre>", answer.read().decode(), re.DOTALL)

    with start_agents(
        [_PROGRAM, str(seed), str(port)],
        hosts=HOSTS,
        ranks_per_host=RANKS_PER_HOST,
        environment={"TORCH_CPP_LOG_LEVEL": "ERROR"},
    ) as agents:
        while not any(": step " in line for _, line in lines):
            if agents.follow(quiet_s=_QUIET_S, show=show_steps):
                raise RuntimeError(f"the program has ended, and was to stand still: {lines[-20:]}")
        print(f"... nothing for {_QUIET_S:g} s", flush=True)
        before = None
        dumps = Dumps()
        while dumps != before:
            before = dumps
            dumps = dict(enumerate(map(entries_in, page("fr_trace_json"))))
            time.sleep(_AGAIN_S)
        stacks = dict(enumerate(page("stacks")))
        agents.follow(show=lambda host, line: lines.append((host, line)))
    errors = errors_in(lines)
    for host, line in errors:
        show_line(host, line)
    return case_of_run(seed, stacks, dumps, errors)


def entries_in(dump: str | bytes, group: str = _DEFAULT_GROUP) -> list[dict[str, Any]]:
    """The entries of a group in one rank's recorder; none if the rank did not answer."""
    entries = []
    try:
        for entry in json.loads(dump)["entries"]:
            if entry["process_group"][0] == group and not entry["is_p2p"]:
                entries.append({key: entry[key] for key in _KEPT})
    except (ValueError, KeyError):
        return []
    return entries


def errors_in(lines: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    """The errors in the printed lines, by host, and the ranks that torchrun calls the cause."""
    errors: list[tuple[int, str]] = []
    for host, line in sorted(lines, key=lambda host_and_line: host_and_line[0]):
        is_cause = line.startswith("  rank ") and errors and errors[-1][1].startswith("Root Cause")
        if "Error: " in line or line.startswith("Root Cause") or is_cause:
            # Without the location in gloo's sources.
            errors.append((host, re.sub(r"\[/\S+\] ", "", line)))
    return errors


_CALL = ("profiling_name", "input_sizes")
# What one may overlook, and how a dump is read then.
_MISREADINGS: dict[str, dict[str, Any]] = {
    "a rank that does not come has fewer entries: go on to the largest number": {"end": min},
    "old entries may be gone: begin where all ranks have theirs": {"begin": min},
    "sizes may differ where names agree": {"fields": _CALL[:1]},
    "names may differ where sizes agree": {"fields": _CALL[1:]},
    "no rank is right beforehand: the culprit is the one that is alone": {"first_is_right": True},
}


def _read(
    dumps: Dumps,
    begin: Callable = max,
    end: Callable = max,
    fields: tuple[str, ...] = _CALL,
    first_is_right: bool = False,
) -> tuple[int, int] | None:
    """The culprit as ``culprit`` asks for it, read in a possibly mistaken way."""
    calls: dict[int, dict[int, list[Any]]] = {}
    for rank, entries in sorted(dumps.items()):
        calls[rank] = {}
        for entry in entries:
            calls[rank][entry["collective_seq_id"]] = [entry[field] for field in fields]
    first = begin(min(called) for called in calls.values())
    for number in range(first, end(max(called) for called in calls.values()) + 1):
        calls_of_number = [called.get(number) for called in calls.values()]
        for rank, call in zip(calls, calls_of_number):
            is_alone = calls_of_number.count(call) == 1
            if first_is_right:
                is_alone = call != calls_of_number[0]
            if is_alone:
                return rank, number
    return None


# By case: the fault, its rank, how many collectives before it go well, and how many after it do
# not; how many of the newest entries are kept, as in a small buffer; the rank whose dump is lost.
@judged(
    "dumps",
    *(("does not come", 1, 4, 0, 99, None), ("all agree", 0, 6, 0, 99, None)),
    *(("calls another collective", 0, 5, 0, 99, None), ("brings another size", 2, 3, 2, 99, None)),
    *(("comes alone", 3, 7, 0, 99, None), ("does not come", 0, 5, 0, 3, None)),
    *(("calls another collective", 2, 6, 0, 2, 1), ("brings another size", 0, 4, 0, 99, None)),
    *(("all agree", 0, 7, 0, 2, None), ("calls another collective", 1, 0, 0, 99, None)),
    in_words=lambda fault, *_: f"the dumps of a job ({fault})",
)
def culprit(
    fn: Callable, kind: str, rank: int, before: int, after: int, kept: int, lost: int | None
) -> Wrong | None:
    """Grade ``fn(dumps)``: the first rank to do something else, by flight recorder dumps.

    ``dumps``: {rank: list of entries}. Expected is (rank, ``collective_seq_id``), or None where
    all ranks agree. One rank differs; the others are the majority.
    """
    # The contents of PyTorch 2.10's recorders with gloo while the others wait, by rank.
    dumps = Dumps()
    num_calls = before + 1 + after
    names = random.choices(["all_reduce", "broadcast"], [3, 2], k=num_calls)
    # The last number of a shape is the one that differs.
    shapes = [random.choices(range(20, 90), k=random.randint(1, 3)) for _ in range(num_calls)]
    for dumped_rank in random.sample(range(WORLD_SIZE), WORLD_SIZE):
        is_culprit = dumped_rank == rank
        entries = []
        for number, (name, shape) in enumerate(zip(names, shapes), start=1):
            fault = kind if number > before else ""
            if fault == "all agree":
                continue
            if (fault == "comes alone" and not is_culprit) or (
                fault == "does not come" and is_culprit
            ):
                continue
            if fault == "calls another collective":
                name = "broadcast" if is_culprit else "all_reduce"
            # A root that sends too little: nobody notices.
            if fault == "brings another size":
                name = "broadcast"
                shape = [*shape[:-1], shape[-1] - 7 * is_culprit]
            done = fault in ("", "brings another size")
            if number >= before:
                # The newest entries are retired on some ranks, and not yet on others.
                done = done and random.random() < 0.5
            values = (number, f"gloo:{name}", [shape], ["Float"], "scheduled", done)
            entries.append(dict(zip(_KEPT, values)))
        if dumped_rank != lost:
            dumps[dumped_rank] = entries[-kept:]
    answer = fit(fn(copy.deepcopy(dumps)), [0, 0])
    expected = None if kind == "all agree" else (rank, before + 1)
    if agree(answer, expected):
        return None
    text = f"the function returned {short(answer)}, expected {expected}"
    causes = []
    for words, options in _MISREADINGS.items():
        if agree(answer, _read(dumps, **options)):
            causes.append(words)
    if expected and agree(answer, expected[::-1]):
        causes = ["first the rank, then the number"]
    elif isinstance(answer, list) and answer[-1:] and answer[-1] in range(1, before + 1):
        causes.append(f"number {answer[-1]} is the same call on all ranks, retired or not")
    return Wrong("\n".join([text, *causes[:1]]))
