"""Judge the values: name the first wrong rank and part, and say of what the value is made.

The inputs are random, so a linear fit tells how a value was put together: "0.5 x rank 0 + rank 2".
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.collectives.ring import split_chunks
from labkit.units import format_count
from workbook.exercises.grader.compare import (
    agree,
    beside,
    close,
    fit,
    other_kind,
    plain,
    sorted_inside,
)
from workbook.exercises.grader.exercise import Case, Exercise, Outcome, Problem, Tried, Wrong

# Values that were rounded to bfloat16 after every addition are still recognized.
_ROUNDED = 1e-2
# More parts, or larger factors, explain nothing.
_MOST_PARTS = 8
_LARGEST_FACTOR = 100
# So many different numbers have to show a factor.
_FEWEST_DRAWS = 3
_IN_PLACE = "write into it (+=, copy_, recv), because a = a + b makes a new tensor"


def value_problem(exercise: Exercise, tried: Tried) -> Problem | None:
    """Return the first problem with the values, over the cases in order."""
    for case, ranks in tried.items():
        values = [outcome.value for outcome in ranks]
        case_text = exercise.where(case)
        problem = None
        if noticed := [rank for rank, value in enumerate(values) if isinstance(value, Wrong)]:
            rank = f", rank {noticed[0]}" if len(ranks) > 1 else ""
            problem = _as_judged(f"{case_text}{rank}", values[noticed[0]])
        elif exercise.judge is None:
            problem = _first_wrong(exercise, tried, case)
        else:
            if objection := exercise.judge(case, values):
                problem = _as_judged(case_text, objection)
        changed = max(outcome.changed for outcome in ranks)
        if not problem and changed:
            problem = _as_judged(case_text, changed)
        if problem:
            # A judge may find in the data of one call what those of the other do not show.
            unjudged = exercise.judge is None and not noticed
            if unjudged and case.call and case_text == exercise.where(replace(case, call=0)):
                given = "other data" if exercise.nouns[0] else "the same arguments"
                facts = f"{problem.facts}. The first call, with {given}, went right"
                problem = problem._replace(facts=facts)
            return problem
    return None


def _as_judged(where: str, finding: str) -> Problem:
    """The problem that a judge has found. A sentence that compares nothing is its cause."""
    facts, _, cause = finding.partition("\n")
    if cause or "expected" in facts:
        return Problem(f"{where}: {facts}", cause)
    return Problem(where, facts)


def _first_wrong(exercise: Exercise, tried: Tried, case: Case) -> Problem | None:
    for rank, outcome in enumerate(tried[case]):
        wrong = wrong_part(exercise, case, rank, outcome.value)
        if wrong is None:
            continue
        text = exercise.where(case)
        if case.world_size > 1:
            text += f", rank {rank} is the first with a wrong result"
        if elsewhere := _right_elsewhere(exercise, case, rank, outcome):
            return Problem(text, elsewhere)
        if wrong.name:
            text += f", in {wrong.name} {wrong.index!r}"
        described, hint = _describe(exercise, case, wrong)
        return Problem(
            f"{text}: {described}",
            _mistake(exercise, tried, rank),
            _likeness(exercise, tried, rank, wrong) or hint,
        )
    return None


def _mistake(exercise: Exercise, tried: Tried, rank: int) -> str:
    """A mistake that explains all values of this rank."""
    for sentence, wrong in exercise.mistakes.items():
        if all(agree(ranks[rank].value, wrong(rank, case)) for case, ranks in tried.items()):
            return sentence
    if exercise.written is not None and _is_as_given(exercise, exercise.written, tried):
        return "it is as it was given: nothing has been written into it"
    return ""


def _is_as_given(exercise: Exercise, argument: int, tried: Tried) -> bool:
    """True if all ranks from which something is expected still have their argument's values."""
    for case, ranks in tried.items():
        for rank, outcome in enumerate(ranks):
            if exercise.expected(rank, case) is None:
                continue
            if not agree(outcome.value, exercise.inputs(rank, case)[argument]):
                return False
    return True


def _likeness(exercise: Exercise, tried: Tried, rank: int, wrong: "Part") -> str:
    """Describe what this rank's values have in common with the expected ones; "" for nothing.

    They differ only in their order, or by one factor, as far as at least three numbers show it.
    """
    values = [plain(ranks[rank].value) for ranks in tried.values()]
    expected = [plain(exercise.expected(rank, case)) for case in tried]
    if [*map(sorted_inside, values)] == [*map(sorted_inside, expected)]:
        return "the right values, but not in their places"
    value, right = values[0], expected[0]
    if isinstance(value, list) and isinstance(right, list):
        for index in range(len(right)):
            if agree(value, right[:index] + right[index + 1 :]):
                return f"what should be entry {index} is missing"
        for a, b in combinations(range(len(value)), 2):
            is_tensor = isinstance(value[a], Tensor) and value[a].numel() > 0
            differ = len(right) == len(value) and not agree(right[a], right[b])
            if is_tensor and differ and agree(value[a], value[b]):
                return f"entries {a} and {b} are equal, as if one tensor was in both places"
    if any(map(other_kind, values, expected)):
        return ""
    if wrong.name == "entry":
        # The same entry of each case, of those that have it.
        values = [entry[wrong.index] for entry in values if _has(entry, wrong.index)]
        expected = [entry[wrong.index] for entry in expected if _has(entry, wrong.index)]
    if not all(isinstance(entry, (int, float)) for entry in [*values, *expected]):
        return ""
    pairs = {(value, right) for value, right in zip(values, expected) if value or right}
    if len(pairs) < _FEWEST_DRAWS or not all(right for _, right in pairs):
        return ""
    factor = min(value / right for value, right in pairs)
    if factor == 0 or not all(agree(value, factor * right) for value, right in pairs):
        return ""
    times = f"{factor:.4g}"
    return "" if times == "1" else f"in each case it is {times} times the expected number"


def _has(entries: Any, index: Any) -> bool:
    if isinstance(entries, dict):
        return index in entries
    return isinstance(entries, list) and index < len(entries)


def _right_elsewhere(exercise: Exercise, case: Case, rank: int, outcome: Outcome) -> str:
    """A sentence on a value that is right in another place, or was right in the first call."""
    if case.call and not wrong_part(exercise, replace(case, call=0), rank, outcome.value):
        return "it is the result of the first call, although the values are others now"
    if outcome.stand_in is None or wrong_part(exercise, case, rank, outcome.stand_in):
        return ""
    return "the right values are in a new tensor, and the given one has not changed: " + _IN_PLACE


class Part(NamedTuple):
    """A part that is compared separately: an entry of a list, a chunk, or the value (no name)."""

    name: str
    index: Any  # a number, or a key
    value: Any
    expected: Any
    summands: list[Tensor]  # what may have been added up in it: inputs of the ranks


def wrong_part(exercise: Exercise, case: Case, rank: int, value: Any) -> Part | None:
    """The first part of a rank's value that is not as expected."""
    expected = plain(exercise.expected(rank, case))
    if expected is None:
        if exercise.written is not None or value is None:
            return None
        return Part("", 0, value, None, [])
    if other_kind(value, expected):
        return None if agree(value, expected) else Part("", 0, value, expected, [])
    value = fit(value, expected)
    if isinstance(expected, dict):
        key = next((k for k in expected if not agree(value[k], expected[k])), None)
        return None if key is None else Part("entry", key, value[key], expected[key], [])
    name = ""
    if exercise.chunked:
        name = "chunk"
    elif isinstance(expected, list):
        name = "entry"
    value = _pieces(exercise, case, value)
    expected = _pieces(exercise, case, expected)
    inputs = [_input_pieces(exercise, case, peer) for peer in range(case.world_size)]
    for index, (piece, expected_piece) in enumerate(zip(value, expected)):
        if exercise.chunked:
            candidates = [pieces[index] for pieces in inputs if index < len(pieces)]
        else:
            candidates = list(chain(*inputs))
        summands = [summand for summand in candidates if isinstance(summand, Tensor)]
        if expected_piece is None or agree(piece, expected_piece, summands):
            continue
        if exercise.parts:
            # Inputs of the same shape are not always summands: products of them may be.
            if agree(piece, expected_piece):
                continue
            summands = []
        return Part(name, index, piece, expected_piece, summands)
    return None


def _pieces(exercise: Exercise, case: Case, value: Any) -> list:
    """The chunks of a tensor, if it is judged by chunks; a list as it is."""
    if isinstance(value, list):
        return value
    return split_chunks(value.flatten(), case.world_size) if exercise.chunked else [value]


def _input_pieces(exercise: Exercise, case: Case, rank: int) -> list:
    """The inputs of a rank, by chunk or entry."""
    pieces = []
    for value in exercise.inputs(rank, case):
        if isinstance(value, (Tensor, list)):
            pieces += _pieces(exercise, case, value)
    return pieces


def _describe(exercise: Exercise, case: Case, wrong: Part) -> tuple[str, str]:
    """A wrong part in words: its kind, of what it is made, or its first difference.

    And what may lead to the mistake, or "".
    """
    if kind := other_kind(wrong.value, wrong.expected):
        value = plain(wrong.value)
        is_turned = (
            isinstance(value, Tensor) and value.dim() == 2 and agree(value.T, wrong.expected)
        )
        if value is not None and wrong.expected is None:
            return kind, "this rank has to return None"
        return kind, "it is transposed" if is_turned else ""
    value = _flat(wrong.value)
    expected = _flat(wrong.expected)
    if value is None or expected is None or value.shape != expected.shape:
        return f"it is {beside(wrong.value, wrong.expected)}", ""
    if not torch.isfinite(value).all():
        given = _flat([x.double() for x in exercise.inputs(0, case) if isinstance(x, Tensor)])
        if given is not None and not torch.isfinite(given).all():
            return f"it is {beside(wrong.value, wrong.expected)}", ""
        hint = "a tensor from torch.empty may have been read before it was filled"
        return "it holds NaN or infinity, expected numbers", hint
    basis = _basis(exercise, case, wrong)
    factors = made_of(value, basis)
    expected_factors = made_of(expected, basis)
    if expected_factors and factors and factors != expected_factors:
        text = f"it is {in_words(factors)}, expected {in_words(expected_factors)}"
        return text, _difference(factors, expected_factors, case.world_size)
    if not expected_factors or not factors:
        multiple = made_of(value, {"the expected values": expected})
        if multiple and set(multiple.values()) != {1}:
            return f"it is {in_words(multiple)}", _factor_in_words(
                exercise, case, *multiple.values()
            )
    first = 0
    if isinstance(wrong.expected, Tensor):
        alike = close(wrong.value, wrong.expected, wrong.summands)
        first = int((~alike).flatten().nonzero()[0])
    almost = "almost right: " if factors and factors == expected_factors else ""
    pair = beside(float(value[first]), float(expected[first]))
    return f"it is {almost}{pair} at place {first}", ""


def _factor_in_words(exercise: Exercise, case: Case, factor: float) -> str:
    """Say so if a result is multiplied or divided by the number of ranks or of elements."""
    for noun, count in zip(exercise.nouns, (case.world_size, case.size)):
        for word, by_count in (
            ("multiplied", factor / max(count, 1)),
            ("divided", factor * count),
        ):
            if noun and count > 1 and abs(by_count - 1) <= _ROUNDED:
                return f"it is {word} by {count}: there are {format_count(count, noun)}"
    return ""


def _difference(factors: Mapping[str, float], expected: Mapping[str, float], ranks: int) -> str:
    """The terms that a sum lacks, has twice, or divided by P; "" if that is not all."""
    missing = [name for name in expected if name not in factors]
    times = {name: factors[name] / expected[name] for name in expected if name in factors}
    changed = {name: factor for name, factor in times.items() if abs(factor - 1) > _ROUNDED}
    if not factors.keys() <= expected.keys() or (missing and changed):
        return ""
    if missing:
        return f"missing: {', '.join(missing)}"
    if all(abs(factor * ranks - 1) <= _ROUNDED for factor in changed.values()):
        return f"divided by {ranks}, the number of ranks: {', '.join(changed)}"
    is_twice = all(abs(factor - 2) <= _ROUNDED for factor in changed.values())
    return f"counted twice: {', '.join(changed)}" if is_twice else ""


def _basis(exercise: Exercise, case: Case, wrong: Part) -> dict[str, Tensor | None]:
    """The parts of which a wrong value may be made, by name, each in one row."""
    if exercise.parts:
        parts = {name: _flat(part) for name, part in exercise.parts(case).items()}
        if exercise.chunked:
            parts = {k: _pieces(exercise, case, part)[wrong.index] for k, part in parts.items()}
        return parts
    basis: dict[str, Tensor | None] = {}
    for rank in range(case.world_size):
        for index, piece in enumerate(_input_pieces(exercise, case, rank)):
            name = f"rank {rank}"
            if exercise.chunked and index != wrong.index:
                name = f"chunk {index} of rank {rank}"
            basis.setdefault(name, _flat(piece))
    return basis


def _flat(value: Any) -> Tensor | None:
    """A tensor, or a list of tensors, in one row; None for anything else."""
    is_list = isinstance(value, (list, tuple)) and len(value) > 0
    if is_list and all(isinstance(entry, Tensor) for entry in value):
        value = torch.cat([entry.flatten() for entry in value])
    if isinstance(value, Tensor) and value.dtype != torch.bool:
        return value.flatten()
    return None


def made_of(value: Tensor, basis: Mapping[str, Tensor | None]) -> dict[str, float]:
    """The factors by which the parts, [n], add up to a value, [n]; {} if there are none."""
    parts = {}
    for name, part in basis.items():
        if part is not None and part.shape == value.shape and part.any():
            parts[name] = part
    # A fit over as many parts as there are numbers would explain anything.
    if 2 * len(parts) > value.numel():
        parts = {name: part for name, part in parts.items() if not name.startswith("chunk")}
    if not parts or len(parts) >= value.numel():
        return {}
    matrix = torch.stack([part.double() for part in parts.values()], dim=1)
    target = value.detach().double().reshape(-1, 1)
    if not torch.isfinite(torch.cat([matrix, target], dim=1)).all():
        return {}
    solution, _, rank, _ = torch.linalg.lstsq(matrix, target, rcond=1e-5)
    if rank < len(parts):
        return {}  # other factors would fit as well
    # Multiples of 1 / 12 where they fit: whole numbers, also divided by 2, 3 or 4 ranks.
    for rounded in ((solution * 12).round() / 12, (solution * 1000).round() / 1000):
        near = bool((matrix @ rounded - target).abs().max() <= _ROUNDED * target.abs().max())
        # A part that is small beside the others does not show in the sum.
        allowed = 2 * _ROUNDED * rounded.abs().clamp(0.25)
        near &= bool(((solution - rounded).abs() <= allowed).all())
        factors = dict(zip(parts, rounded.flatten().tolist()))
        factors = {name: factor for name, factor in factors.items() if factor}
        if near and 0 < len(factors) <= _MOST_PARTS:
            return factors if max(map(abs, factors.values())) < _LARGEST_FACTOR else {}
    return {}


def in_words(factors: Mapping[str, float]) -> str:
    """``0.5 x rank 0 + rank 2``."""
    summands = [name if x == 1 else f"{x:.3g} x {name}" for name, x in factors.items()]
    return " + ".join(summands).replace(" + -", " - ")
