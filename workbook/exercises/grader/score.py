"""The score of a puzzle: one number, the less the better, beside the best that is known."""

from typing import NamedTuple

from labkit.units import format_count
from workbook.exercises.grader.exercise import (
    Case,
    Exercise,
    Problem,
    Ranks,
    Score,
    where,
)
from workbook.exercises.grader.words import Mistake


class Scored(NamedTuple):
    """A score and the best known, as numbers and in words."""

    number: float
    best_number: float
    yours: str
    best: str


def score_problems(score: Score, exercise: Exercise, tried: dict[Case, Ranks]) -> list[Problem]:
    """Return what keeps right values from the best score: a list of at most one problem."""
    for case, ranks in tried.items():
        best, number = score.best(case), score.of(case, ranks)
        if broken := score.rule(case, ranks):
            place = where(case, exercise)
            return [Problem("rules", "broken", Mistake("told.place", place=place, what=broken))]
        if best is None:
            continue
        if number is None:
            return [Problem("score", "untold", Mistake("score.untold"))]
        if number > best * (1 + score.slack):
            yours, known = score.shown(number), score.shown(best)
            words = {"place": where(case, exercise), "source": score.source}
            look = _look(case, ranks) if score.of_rounds else None
            told = Mistake("score.above", look, yours=yours, best=known, **words)
            return [Problem("score", yours, told)]
    return []


def scored(score: Score, tried: dict[Case, Ranks]) -> Scored | None:
    """The score in the first case that is scored; None if it cannot be told."""
    for case, ranks in tried.items():
        best, number = score.best(case), score.of(case, ranks)
        if best is not None and number is not None:
            return Scored(number, best, score.shown(number), score.shown(best))
    return None


def praise_score(score: Score, world_size: int, found: Scored) -> str:
    """What to say of a score that is as good as the best known, or better."""
    said = f"{found.yours} on {format_count(world_size, 'rank')}"
    if found.number < found.best_number * (1 - score.slack):
        return f"{said}: less than the best that this page knows, {found.best}!"
    return f"{said}: as good as the best known ({score.source})."


def _look(case: Case, ranks: Ranks) -> Mistake | None:
    """Why the score is not as good, where the pattern of the messages shows it."""
    if case.world_size < 4:
        return None
    pairs = [{rank, peer} for rank, outcome in enumerate(ranks) for peer in outcome.bytes_to]
    hubs = set.intersection(*pairs) if pairs else set()
    if len(hubs) == 1:
        return Mistake("score.through_one", hub=hubs.pop())
    to_right = [set(o.bytes_to) <= {(r + 1) % case.world_size} for r, o in enumerate(ranks)]
    return Mistake("score.neighbours") if all(to_right) else None
