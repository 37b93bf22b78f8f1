"""Page 15: broken jobs that have run, the answers to find, and the evidence against wrong ones.

``broken_jobs`` runs them. Symbols: P ranks.
"""

import functools
import inspect
import random
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from labkit.units import format_count
from workbook.exercises.grader import Verdict
from workbook.exercises.grader.compare import plain, short
from workbook.exercises.grader.exercise import new_seed
from workbook.exercises.grader.report import NOT_ATTEMPTED, NOT_YET, PASSED, show_verdict
from workbook.notebook.display import show_source


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
        choices: the answers that come into question, by name, where they are few.
        tries: the different answers that were given so far, the oldest first.
    """

    program: Callable[..., Any] = field(repr=False)
    world_size: int
    clues: dict[str, Any] = field(repr=False)
    suspects: dict[str, str] = field(repr=False)
    answer: dict[str, Any] = field(repr=False)
    against: dict[str, str] = field(repr=False)
    choices: dict[str, list[Any]] = field(repr=False, default_factory=dict)
    tries: list[dict[str, Any]] = field(repr=False, default_factory=list)

    def __repr__(self) -> str:
        causes = [f"  {letter}  {cause}" for letter, cause in self.suspects.items()]
        return "\n".join([f"To be named: {', '.join(self.answer)}. The suspects:", *causes])

    def objection(self, name: str, answer: Any) -> str:
        """Evidence against an answer to ``name``; "" if it is right, a float within 5%."""
        right = self.answer[name]
        if isinstance(right, list) and isinstance(answer, (str, set, tuple)):
            answer = [answer] if isinstance(answer, str) else list(answer)
        if isinstance(answer, list):
            answer = sorted(answer, key=str)
        measured = isinstance(right, float) and isinstance(answer, (int, float))
        if answer == right or (measured and abs(answer - right) <= 0.05 * right):
            return ""
        if name == "cause":
            if isinstance(answer, str) and answer.lower() == right:
                return ""
            if answer not in self.suspects:
                return f"the suspects are {', '.join(self.suspects)}, not {short(answer)}"
            return f"{answer} ({self.suspects[answer]}) is not the cause: {self.against[answer]}"
        text = f"{name} {short(answer)}"
        choices = self.choices.get(name, [])
        parts = answer if isinstance(answer, list) else [answer]
        if choices and any(part not in choices for part in parts):
            return f"{text}: choose from {', '.join(map(str, choices))}"
        if name == "line" and isinstance(answer, int):
            lines = Path(inspect.getfile(self.program)).read_text("utf-8").splitlines()
            line = lines[answer - 1].strip() if 0 < answer <= len(lines) else ""
            text += f" ({line})"
        return f"{text} {self.against[name]}"


def seeded(seed: int | None) -> tuple[int, random.Random]:
    """A seed, a new one in place of None, and what draws numbers with it."""
    if seed is None:
        seed = new_seed()
    return seed, random.Random(seed)


def with_torch_seed(make: Callable[[int], "Case"]) -> Callable[..., "Case"]:
    """Make the case of a seed with PyTorch's numbers of that seed; those of the page stay."""

    @functools.wraps(make)
    def seeded_make(seed: int | None = None) -> Case:
        seed, _ = seeded(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make(seed)

    return seeded_make


def case_of(
    program: Callable[..., Any],
    world_size: int,
    drawn: random.Random,
    text: str,
    clues: dict[str, Any],
    choices: dict[str, list[Any]] | None = None,
    right: int = 0,
    **answer: Any,
) -> Case:
    """Make a case. The answer ``line`` is a part of that line, the first in ``program``.

    ``text`` has entries, each begins on its own line: ``- cause: what is against it``, of which
    number ``right`` is the right one; ``name: what is against a wrong answer``; and ``solved``.
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
    answer["cause"] = letters[causes[right]]
    against = {letters.get(name, name): words for name, words in evidence.items()}
    choices = {"rank": list(range(world_size)), **(choices or {})}
    return Case(program, world_size, clues, suspects, answer, against, choices)


def check_of(title: str, hides_program: bool = False) -> Callable[..., Verdict]:
    """The check of a case: ``check.cases.drift(case, rank=2, step=4, line=30, cause="b")``.

    The first wrong answer is refused with what the evidence says against it. A hidden program is
    shown as soon as all is named that can be named without it: all but line and cause.
    """

    def judge(case: Case, answers: dict[str, Any]) -> Verdict:
        from IPython.display import display

        if unknown := answers.keys() - case.answer.keys():
            raise ValueError(f"name {', '.join(case.answer)}, not {', '.join(unknown)}")
        given = {name: plain(answers[name]) for name in case.answer if name in answers}
        given = {name: answer for name, answer in given.items() if answer is not None}
        if not given:
            return Verdict(title, NOT_ATTEMPTED)
        if given not in case.tries:
            case.tries.append(given)
        objections = {name: case.objection(name, answer) for name, answer in given.items()}
        named = [name for name, objection in objections.items() if not objection]
        if len(named) == len(case.answer):
            count = f"It took {format_count(len(case.tries), 'answer')}."
            return Verdict(title, PASSED, notes=[case.against["solved"], count])
        if hides_program and case.answer.keys() - named <= {"line", "cause"}:
            display(show_source(case.program, numbered=True))
        left = case.answer.keys() - given.keys()
        note = f"right so far: {', '.join(given)}. Still to name: {', '.join(left)}"
        notes = [*filter(None, objections.values()), note]
        return Verdict(title, NOT_YET, notes=notes[:1])

    return lambda case, **answers: show_verdict(title, lambda: judge(case, answers))


mismatch, drift = check_of("cases.mismatch"), check_of("cases.drift")
straggler = check_of("cases.straggler")
divisor = check_of("cases.divisor", hides_program=True)
sampler = check_of("cases.sampler", hides_program=True)
buffers = check_of("cases.buffers", hides_program=True)
link = check_of("cases.link")
tokens = check_of("cases.tokens", hides_program=True)
blocks = check_of("cases.blocks", hides_program=True)
muon = check_of("cases.muon", hides_program=True)
last_bits = check_of("cases.last_bits", hides_program=True)
