"""Name the mistake behind wrong values: the page's solution with that mistake makes the same ones.

``mistakes`` makes one change of the solution at a time. To try a hundred of them takes a second,
since the ranks are threads of one process.
"""

import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import permutations
from queue import SimpleQueue
from threading import Thread
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from labkit.engine.comm.comm import Comm
from labkit.engine.comm.transport import Transport
from labkit.engine.errors import WorkerError
from labkit.engine.runtime.launch import run
from workbook.exercises.grader.compare import agree, plain
from workbook.exercises.grader.exercise import Case, Exercise, Tried
from workbook.exercises.grader.mistakes import with_one_mistake
from workbook.exercises.grader.on_ranks import call_once, draw_alike, limit_memory
from workbook.notebook.pages import page_files

# Then the search ends without a result (seconds of computing, seconds in all), a message counts as
# lost, a loop as endless.
_COMPUTING_S = 4.0
_TIMEOUT_S = 10.0
_MESSAGE_S = 0.15
_MOST_TURNS = 500
# Of more mistakes of a level that fit, none is likely. Such values may fit by chance.
_MOST_PHRASES = (4, 2, 1)
# Fewer answers of a few kinds, such as True and False, may be alike by chance.
_MANY_CHOICES = 16
# Results of the same mistake in other words may differ by more than right ones.
_ROUNDINGS = 256
_CHOICES = (bool, str, type(None))
_SOLUTION = re.compile(r"<summary>Solution</summary>.*?```python\n(.*?)```", re.DOTALL)


def likely_mistake(fn: Callable, exercise: Exercise, tried: Tried) -> str:
    """Return what explains the values of all ranks in all cases, in words; "" if in doubt."""
    values = {}
    results = []
    for case, ranks in tried.items():
        values[case] = [outcome.value for outcome in ranks]
        results += values[case]
    if all(type(result) in _CHOICES for result in results) and len(results) < _MANY_CHOICES:
        return ""
    # There may be no such page, a changed function may not end, a name may not travel.
    with suppress(LookupError, OSError, ValueError, WorkerError):
        solutions, words = _page_of(exercise.name)
        used = set(re.findall(r"\w+", " ".join(solutions)))
        names = {}
        for name, value in getattr(fn, "__globals__", {}).items():
            if name in used and (callable(value) or isinstance(value, ModuleType)):
                names[name] = value
        args = exercise.to_run(), solutions, words, names, values
        ran = run(_fitting, *args, world_size=1, device="cpu", timeout_s=_TIMEOUT_S)
        if ran.values[0]:
            return f"the same values come from a solution {', or '.join(ran.values[0])}"
    return ""


def _page_of(name: str) -> tuple[list[str], list[str]]:
    """The solutions on the exercise's page, its own the last, and the words of its text."""
    for path in page_files():
        solutions: list[str] = []
        words: list[str] = []
        for cell in json.loads(path.read_text())["cells"]:
            source = "".join(cell["source"])
            if f"check.{name}(" in source:
                return solutions, words
            if source.startswith("#"):
                words = []
            cell_solutions = _SOLUTION.findall(source)
            solutions += cell_solutions
            if not cell_solutions:
                words += re.findall(r"\w+", source)
    raise LookupError(name)


def _fitting(
    comm: Comm,
    exercise: Exercise,
    solutions: list[str],
    words: list[str],
    names: dict[str, Any],
    values: Mapping[Case, list[Any]],
) -> list[str]:
    """The phrases of the mistakes that fit, of the lowest level with any; none if in doubt."""
    end_s = time.process_time() + _COMPUTING_S
    torch.set_num_threads(1)
    limit_memory()
    for solution in solutions:
        exec(solution, names)
    *_, name = re.findall(r"^(?:def|class) (\w+)", solutions[-1], re.MULTILINE)
    right = {}
    values = {case: _with_zeros(of_case) for case, of_case in values.items()}
    for case, of_case in values.items():
        right[case] = agree(_played(names[name], exercise, case), of_case, (), _ROUNDINGS)
    # The calls that went wrong come first: they tell mistakes apart.
    calls = sorted(values.items(), key=lambda call: right[call[0]])
    counted = re.sub(r"\bwhile (.*):", r"while _count_turn() and (\1):", solutions[-1])
    fitting: list[list[str]] = [[], [], []]
    for phrase, level, code in with_one_mistake(counted, words):
        if time.process_time() > end_s:
            # What fits does so, but of the mistakes that tell less another one may fit, too.
            del fitting[1:]
            break
        if phrase in fitting[level]:
            continue
        changed = names | {"range": lambda *args: range(*args)[:_MOST_TURNS]}
        exec(code, changed)
        for case, of_case in calls:
            changed["_count_turn"] = iter(range(1, _MOST_TURNS)).__next__
            if not agree(_played(changed[name], exercise, case), of_case, (), _ROUNDINGS):
                break
        else:
            fitting[level].append(phrase)
    results = [value for of_case in values.values() for value in of_case]
    if all(type(result) in _CHOICES for result in results) and len(fitting[0]) > 1:
        return []  # Two kinds of answers may be alike by chance.
    for phrases, most in zip(fitting, _MOST_PHRASES):
        if phrases:
            return phrases[:2] if len(phrases) <= most else []
    return []


def _with_zeros(value: Any) -> Any:
    """The value with zeros where nothing was written: ``draw_alike`` has put NaN there."""
    value = plain(value)
    if isinstance(value, list):
        return [_with_zeros(entry) for entry in value]
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.nan_to_num(0.0, posinf=torch.inf, neginf=-torch.inf)
    return 0.0 if isinstance(value, float) and value != value else value


def _played(fn: Callable, exercise: Exercise, case: Case) -> list[Any]:
    """The values that ``fn`` leaves behind, by rank; [] if a rank raises or waits for ever."""
    ranks = range(case.world_size)
    queues = {edge: SimpleQueue() for edge in permutations(ranks, 2)}
    values: dict[int, Any] = {}

    def play(rank: int) -> None:
        with suppress(BaseException):  # a changed function may raise anything
            transport = _ThroughQueues(rank, queues)
            comm = Comm(rank, case.world_size, torch.device("cpu"), transport)
            values[rank] = call_once(comm, fn, exercise, exercise.inputs(rank, case)).value
        for peer in {*ranks} - {rank}:
            queues[rank, peer].put(None)  # so that nobody waits for more

    draw_alike(case)
    threads = [Thread(target=play, args=(rank,)) for rank in ranks[1:]]
    for thread in threads:
        thread.start()
    play(0)
    for thread in threads:
        thread.join()
    return [_with_zeros(values[rank]) for rank in ranks] if len(values) == len(ranks) else []


class _ThroughQueues(Transport):
    """The messages of a rank that is a thread. A send does not wait."""

    def __init__(self, rank: int, queues: Mapping[tuple[int, int], SimpleQueue]):
        super().__init__()
        self._rank = rank
        self._queues = queues

    def send(self, tensor: Tensor, dst: int) -> None:
        self._queues[self._rank, dst].put(tensor.clone())

    def recv(self, tensor: Tensor, src: int) -> None:
        message = self._queues[src, self._rank].get(timeout=_MESSAGE_S)
        if message is None or message.shape != tensor.shape or message.dtype != tensor.dtype:
            raise ValueError("no message comes, or it has another shape or dtype")
        tensor.copy_(message)

    def exchange(self, send: Tensor, dst: int, recv: Tensor, src: int) -> None:
        self.send(send, dst)
        self.recv(recv, src)

    def barrier(self) -> None:
        raise NotImplementedError
