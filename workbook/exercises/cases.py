"""Page 13: broken jobs that have run, what is asked of each, and why a wrong answer is wrong.

``broken_jobs`` runs them. Symbols: P ranks.
"""

import inspect
import random
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbook.exercises.grader import Verdict
from workbook.exercises.grader.compare import plain, short
from workbook.exercises.grader.report import NOT_ATTEMPTED, NOT_YET, PASSED, told


@dataclass(frozen=True)
class Case:
    """A broken job that has run.

    Attributes:
        program: the function that ran on each of the ``world_size`` ranks.
        clues: what one would have at work, by name.
        suspects: the causes that come into question, by letter.
        answer: what is to be named, in the order in which it is judged.
        against: what the evidence says against a wrong answer, by its name, and against a cause,
            by its letter; and the whole story as ``solved``.
    """

    program: Callable[..., Any] = field(repr=False)
    world_size: int
    clues: dict[str, Any] = field(repr=False)
    suspects: dict[str, str] = field(repr=False)
    answer: dict[str, Any] = field(repr=False)
    against: dict[str, str] = field(repr=False)

    def __repr__(self) -> str:
        causes = [f"  {letter}  {cause}" for letter, cause in self.suspects.items()]
        return "\n".join([f"To be named: {', '.join(self.answer)}. The suspects:", *causes])

    def objection(self, name: str, said: Any) -> str:
        """What the evidence says against an answer to ``name``; "" if right, a float within 5%."""
        right, said = self.answer[name], sorted(said, key=str) if isinstance(said, list) else said
        measured = isinstance(right, float) and isinstance(said, (int, float))
        if said == right or (measured and abs(said - right) <= 0.05 * right):
            return ""
        if name == "cause":
            if said not in self.suspects:
                return f"the suspects are {', '.join(self.suspects)}, not {short(said)}"
            return f"{said} ({self.suspects[said]}) is not the cause: {self.against[said]}"
        shown = f"{name} {short(said)}"
        if name == "rank" and said not in range(self.world_size):
            return f"{shown} is none of 0 to {self.world_size - 1}"
        if name == "line" and isinstance(said, int):
            lines = Path(inspect.getfile(self.program)).read_text("utf-8").splitlines()
            shown += f" ({'' if not 0 < said <= len(lines) else lines[said - 1].strip()})"
        return f"{shown} {self.against[name]}"


def case_of(
    program: Callable[..., Any],
    world_size: int,
    drawn: random.Random,
    text: str,
    clues: dict[str, Any],
    **answer: Any,
) -> Case:
    """Make a case. The answer ``line`` is a part of that line, the first in ``program``.

    ``text`` has entries, each begins on its own line: ``- cause: what is against it``, the
    first cause is the right one, and ``name: what is against a wrong answer``, or ``solved``.
    """
    if "line" in answer:
        lines, first = inspect.getsourcelines(program)
        answer["line"] = first + next(n for n, one in enumerate(lines) if answer["line"] in one)
    entries = re.split(r"\n(?=\S)", textwrap.dedent(text).strip())
    pairs = [" ".join(entry.split()).partition(": ")[::2] for entry in entries]
    causes = [cause for cause, _ in pairs if cause.startswith("- ")]
    letters = dict(zip(drawn.sample(causes, len(causes)), "abcdefgh"))
    suspects = {letter: cause.removeprefix("- ") for cause, letter in letters.items()}
    answer["cause"] = letters[causes[0]]
    against = {letters.get(name, name): why for name, why in pairs}
    return Case(program, world_size, clues, suspects, answer, against)


def check_of(title: str) -> Callable[..., Verdict]:
    """The check of a case: ``check.cases.drift(case, rank=2, step=4, line=30, cause="b")``.

    The first wrong answer is refused with what the evidence says against it.
    """

    def judge(case: Case, answers: dict[str, Any]) -> Verdict:
        if unknown := answers.keys() - case.answer.keys():
            raise ValueError(f"name {', '.join(case.answer)}, not {', '.join(unknown)}")
        given = {key: plain(one) for key in case.answer if (one := answers.get(key)) is not None}
        if not given:
            return Verdict(title, NOT_ATTEMPTED)
        wrong = [why for key in given if (why := case.objection(key, given[key]))]
        if left := case.answer.keys() - given.keys():
            wrong += [f"right so far: {', '.join(given)}. Still to name: {', '.join(left)}"]
        return Verdict(
            title, NOT_YET if wrong else PASSED, notes=[*wrong, case.against["solved"]][:1]
        )

    return lambda case, **answers: told(title, lambda: judge(case, answers))


mismatch, drift, straggler = map(check_of, ("cases.mismatch", "cases.drift", "cases.straggler"))
divisor, sampler = check_of("cases.divisor"), check_of("cases.sampler")
buffers, link = check_of("cases.buffers"), check_of("cases.link")
