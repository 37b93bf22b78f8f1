"""Page 13: broken jobs that have run, what is asked of each, and why a wrong answer is wrong.

``broken_jobs`` runs them. Here is also the finder of replicas that differ.
"""

import inspect
import random
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit import RunResult
from workbook.exercises.grader import Verdict, Wrong, judged
from workbook.exercises.grader.compare import plain, short
from workbook.exercises.grader.report import NOT_ATTEMPTED, NOT_YET, PASSED, told

# Of a measured number.
_TOLERANCE = 0.05


@dataclass(frozen=True)
class Case:
    """A broken job that has run, with what one would have at work.

    Attributes:
        program: the function that ran on each rank.
        run: its result: values, timeline, messages and bytes by rank.
        clues: what else there is to look at, by name.
        suspects: the causes that come into question, by letter.
        answer: what is to be named, in the order in which it is judged.
        against: what the evidence says against a wrong answer, by its name; against a cause, by
            its letter.
    """

    program: Callable[..., Any] = field(repr=False)
    run: RunResult = field(repr=False)
    clues: dict[str, Any] = field(repr=False)
    suspects: dict[str, str] = field(repr=False)
    answer: dict[str, Any] = field(repr=False)
    against: dict[str, str] = field(repr=False)

    def __repr__(self) -> str:
        causes = [f"  {letter}  {cause}" for letter, cause in self.suspects.items()]
        return "\n".join([f"To be named: {', '.join(self.answer)}. The suspects:", *causes])

    def objection(self, name: str, said: Any) -> str:
        """What the evidence says against an answer to ``name``; "" if it is right."""
        right = self.answer[name]
        if name == "cause":
            if said not in self.suspects:
                return f"the suspects are {', '.join(self.suspects)}, not {short(said)}"
            why = f"{said} ({self.suspects[said]}) is not the cause: {self.against[said]}"
            return "" if said == right else why
        if isinstance(right, float) and isinstance(said, (int, float)):
            said = right if abs(said - right) <= _TOLERANCE * abs(right) else said
        if said == right:
            return ""
        shown = f"{name} {short(said)}"
        if name == "rank" and said not in range(len(self.run.values)):
            return f"{shown} is none of 0 to {len(self.run.values) - 1}"
        if name == "line" and isinstance(said, int):
            lines = Path(inspect.getfile(self.program)).read_text("utf-8").splitlines()
            shown += f" ({'' if not 0 < said <= len(lines) else lines[said - 1].strip()})"
        return f"{shown} {self.against[name]}"


def case_of(
    program: Callable[..., Any],
    result: RunResult,
    drawn: random.Random,
    clues: dict[str, Any],
    answer: dict[str, Any],
    text: str,
) -> Case:
    """Make a case. The answer ``line`` is a part of that line, the first in ``program``.

    ``text`` has entries, each begins on a line of its own: ``- cause: what is against it``, the
    first cause is the right one, and ``name: what is against a wrong answer``, or ``solved``.
    """
    lines, first = inspect.getsourcelines(program)
    if "line" in answer:
        answer["line"] = first + next(n for n, one in enumerate(lines) if answer["line"] in one)
    entries = re.split(r"\n(?=\S)", textwrap.dedent(text).strip())
    pairs = [" ".join(entry.split()).partition(": ")[::2] for entry in entries]
    causes = [cause for cause, _ in pairs if cause.startswith("- ")]
    suspects = dict(zip("abcdefgh", drawn.sample(causes, len(causes))))
    letters = {cause: letter for letter, cause in suspects.items()}
    against = {letters.get(name, name): why for name, why in pairs}
    named = {letter: cause.removeprefix("- ") for letter, cause in suspects.items()}
    return Case(program, result, clues, named, answer | {"cause": letters[causes[0]]}, against)


def check_of(name: str) -> Callable[..., Verdict]:
    """The check of a case: ``check.cases.drift(case, rank=2, step=4, line=30, cause="b")``.

    The first wrong answer is refused with what the evidence says against it.
    """

    def check(case: Case, **answers: Any) -> Verdict:
        def judge() -> Verdict:
            if unknown := answers.keys() - case.answer.keys():
                raise ValueError(f"name {', '.join(case.answer)}, not {', '.join(unknown)}")
            given = {
                key: plain(one) for key in case.answer if (one := answers.get(key)) is not None
            }
            if not given:
                return Verdict(title, NOT_ATTEMPTED)
            if wrong := [why for key in given if (why := case.objection(key, given[key]))]:
                return Verdict(title, NOT_YET, notes=wrong[:1])
            if left := case.answer.keys() - given.keys():
                right = f"right so far: {', '.join(given)}. Still to name: {', '.join(left)}"
                return Verdict(title, NOT_YET, notes=[right])
            return Verdict(title, PASSED, notes=[case.against["solved"]])

        title = f"cases.{name}"
        return told(title, judge)

    return check


mismatch, drift, divisor = map(check_of, ("mismatch", "drift", "divisor"))


@judged(
    "checksums",
    *(("one rank differs",), ("no rank differs",), ("no two ranks agree",)),
    *(("two ranks differ alike",), ("one rank differs once",)),
)
def differing(fn: Callable, kind: str) -> Wrong | None:
    """Grade ``fn(checksums)``: when replicas begin to differ, and which of them.

    ``checksums``: {rank: [{name: checksum} by step]}. Expected is (step, sorted ranks), those that
    have not what most ranks have in common, all if no two agree; None if none differs.
    """
    drawn = random.SystemRandom()
    P, step = drawn.choice((3, 4) if "alike" not in kind else (5,)), drawn.randrange(6)
    many = {"no rank differs": 0, "no two ranks agree": P, "two ranks differ alike": 2}.get(
        kind, 1
    )
    which, places = drawn.sample(range(P), many), ["0.weight", "0.bias", "2.weight", "2.bias"]
    place = drawn.choice(places)
    checksums: dict[int, list[dict[str, int]]] = {rank: [] for rank in drawn.sample(range(P), P)}
    for now in range(step + 3):
        usual = {name: drawn.getrandbits(32) for name in places}
        for rank, by_step in checksums.items():
            differs = rank in which and (now == step or (now > step and "once" not in kind))
            other = 1 if "alike" in kind else 1 + rank
            by_step.append(usual | ({place: usual[place] ^ other} if differs else {}))
    found, expected = plain(fn(checksums)), [step, sorted(which)] if which else None
    if found == expected:
        return None
    return Wrong(f"the function returned {short(found)}, expected {short(expected)}")
