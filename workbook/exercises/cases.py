"""Page 15: broken jobs that have run, the answers to find, and the evidence against wrong ones.

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
from workbook.exercises.grader.report import NOT_ATTEMPTED, NOT_YET, PASSED, show_verdict


@dataclass(frozen=True)
class Case:
    """A broken job that has run.

    Attributes:
        program: the function that ran on each of the ``world_size`` ranks.
        clues: what one would have at work, by name.
        suspects: the causes that come into question, by letter.
        answer: what is to be named, in the order in which it is judged.
        against: the evidence against a wrong answer, by its name, and against a cause, by its
            letter; and the whole story as ``solved``.
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

    def objection(self, name: str, answer: Any) -> str:
        """Evidence against an answer to ``name``; "" if it is right, a float within 5%."""
        right = self.answer[name]
        if isinstance(answer, list):
            answer = sorted(answer, key=str)
        measured = isinstance(right, float) and isinstance(answer, (int, float))
        if answer == right or (measured and abs(answer - right) <= 0.05 * right):
            return ""
        if name == "cause":
            if answer not in self.suspects:
                return f"the suspects are {', '.join(self.suspects)}, not {short(answer)}"
            return f"{answer} ({self.suspects[answer]}) is not the cause: {self.against[answer]}"
        text = f"{name} {short(answer)}"
        if name == "rank" and answer not in range(self.world_size):
            return f"{text} is none of 0 to {self.world_size - 1}"
        if name == "line" and isinstance(answer, int):
            lines = Path(inspect.getfile(self.program)).read_text("utf-8").splitlines()
            line = lines[answer - 1].strip() if 0 < answer <= len(lines) else ""
            text += f" ({line})"
        return f"{text} {self.against[name]}"


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
        lines, first_number = inspect.getsourcelines(program)
        index = [answer["line"] in line for line in lines].index(True)
        answer["line"] = first_number + index
    evidence = {}
    for entry in re.split(r"\n(?=\S)", textwrap.dedent(text).strip()):
        name, _, words = " ".join(entry.split()).partition(": ")
        evidence[name] = words
    causes = [name for name in evidence if name.startswith("- ")]
    letters = dict(zip(drawn.sample(causes, len(causes)), "abcdefgh"))
    suspects = {letter: cause.removeprefix("- ") for cause, letter in letters.items()}
    answer["cause"] = letters[causes[0]]
    against = {letters.get(name, name): words for name, words in evidence.items()}
    return Case(program, world_size, clues, suspects, answer, against)


def check_of(title: str) -> Callable[..., Verdict]:
    """The check of a case: ``check.cases.drift(case, rank=2, step=4, line=30, cause="b")``.

    The first wrong answer is refused with what the evidence says against it.
    """

    def judge(case: Case, answers: dict[str, Any]) -> Verdict:
        if unknown := answers.keys() - case.answer.keys():
            raise ValueError(f"name {', '.join(case.answer)}, not {', '.join(unknown)}")
        given = {name: plain(answers[name]) for name in case.answer if name in answers}
        given = {name: answer for name, answer in given.items() if answer is not None}
        if not given:
            return Verdict(title, NOT_ATTEMPTED)
        for name, answer in given.items():
            if objection := case.objection(name, answer):
                return Verdict(title, NOT_YET, notes=[objection])
        if left := case.answer.keys() - given.keys():
            note = f"right so far: {', '.join(given)}. Still to name: {', '.join(left)}"
            return Verdict(title, NOT_YET, notes=[note])
        return Verdict(title, PASSED, notes=[case.against["solved"]])

    return lambda case, **answers: show_verdict(title, lambda: judge(case, answers))


mismatch, drift = check_of("cases.mismatch"), check_of("cases.drift")
straggler, divisor = check_of("cases.straggler"), check_of("cases.divisor")
sampler, buffers = check_of("cases.sampler"), check_of("cases.buffers")
link = check_of("cases.link")
