"""Page 12's second half: who is to blame for a run on two hosts that stands still.

The run of ``named`` is that of ``detective_run``; the dumps of ``culprit`` are made on real ranks
by ``detective_dumps``, once per session.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from workbook.exercises.detective_dumps import Dumps, Entry, recorded
from workbook.exercises.detective_run import HungRun, explain, hang
from workbook.exercises.grader import Verdict
from workbook.exercises.grader.compare import plain, short
from workbook.exercises.grader.exercise import Found, new_seed
from workbook.exercises.grader.in_process import Question, verdict_of
from workbook.exercises.grader.report import NOT_ATTEMPTED, NOT_YET, PASSED, told

__all__ = ["HungRun", "culprit", "explain", "hang", "named"]

Answer = tuple[int, int] | None


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
        wrong = None
        if found[0] != run.culprit:
            wrong = f"rank {short(found[0])} is no rank of all {run.world_size} over both hosts"
            if found[0] in range(run.world_size):
                wrong = f"rank {found[0]} waits where most ranks wait: one differs"
        elif found[1] != run.host:
            wrong = f"the rank is right, but it is not on host {short(found[1])}, counted from 0"
        elif found[2] in (run.others_line, run.cause_line):
            where = "where the others stand" if found[2] == run.others_line else "that is past"
            wrong = f"rank and host are right, but line {found[2]} is {where}"
        elif found[2] != run.line:
            text = (
                f"rank and host are right, but it does not stand at line {short(found[2])}: take"
            )
            wrong = f"{text} the newest line of the program itself, not of PyTorch"
        if wrong:
            return Verdict("detective.named", NOT_YET, notes=[wrong])
        text = (
            f"rank {run.culprit} on host {run.host} waits at line {run.line}, in a barrier, and "
        )
        text += f"the others at line {run.others_line}, in an all-reduce"
        return Verdict("detective.named", PASSED, notes=[text])

    return told("detective.named", judge)


def culprit(fn: Callable) -> Verdict:
    """Grade ``fn(dumps)``: who is the first to do something else, by flight recorder dumps.

    ``dumps``: {rank: list of entries}. Expected is (rank, ``collective_seq_id``), or None where
    all ranks agree. One rank differs; the others are the majority.
    """

    def judge() -> Verdict:
        questions = [
            Question((dumps,), f"in case {number}", expected)
            for number, (dumps, expected) in enumerate(_cases(), start=1)
        ]
        return verdict_of(
            "detective.culprit",
            fn,
            questions,
            _other_culprit,
            mistakes=_MISTAKES,
            signature="dumps",
        )

    return told("detective.culprit", judge)


@cache
def _cases() -> list[tuple[Dumps, Answer]]:
    return [(dumps, fault.due) for fault, dumps in recorded(new_seed())]


def _other_culprit(question: Question, answer: Any) -> Found:
    (dumps,), expected = question.args, question.expected
    found = plain(answer)
    found = found.tolist() if hasattr(found, "tolist") else found
    if found == (None if expected is None else list(expected)):
        return None
    text = f"{question.words}, the function returned {short(found)}, but "
    if expected is None:
        return f"{text}all ranks have called the same collectives: return None"
    # What each rank has at the collective in question.
    ranks_by_what: dict[str, list[str]] = {}
    for rank in sorted(dumps):
        entry = _by_number(dumps[rank]).get(expected[1])
        what = (
            "nothing" if entry is None else f"{entry['profiling_name']} {entry['input_sizes'][0]}"
        )
        ranks_by_what.setdefault(what, []).append(str(rank))
    parts = [f"{what} on {', '.join(ranks)}" for what, ranks in ranks_by_what.items()]
    return f"{text}collective number {expected[1]} is, by ranks, {'; '.join(parts)}"


def _by_number(entries: list[Entry]) -> dict[int, Entry]:
    return {entry["collective_seq_id"]: entry for entry in entries}


def _rarest(found: Mapping[int, Any]) -> int:
    counts = Counter(map(repr, found.values()))
    return min(found, key=lambda rank: counts[repr(found[rank])])


def _find(
    dumps: Dumps,
    numbered: Callable[[list[Entry]], dict[int, Entry]] = _by_number,
    who: Callable[[Mapping[int, Any]], int] = _rarest,
) -> Answer:
    """The first collective that is not the same on all ranks; each option makes a mistake."""
    columns = {rank: numbered(entries) for rank, entries in dumps.items()}
    # What the ring buffer of one rank has overwritten cannot be compared.
    first = max(min(column) for column in columns.values())
    last = max(max(column) for column in columns.values())
    for number in range(first, last + 1):
        found = {}
        for rank, column in columns.items():
            entry = column.get(number)
            names = ("profiling_name", "input_sizes", "input_dtypes")
            found[rank] = entry and [entry[name] for name in names]
        if len(set(map(repr, found.values()))) > 1:
            return who(found), number
    return None


def _by_the_wait(dumps: Dumps) -> Answer:
    for rank in sorted(dumps):
        for entry in dumps[rank]:
            if not entry["retired"]:
                return rank, entry["collective_seq_id"]
    return None


_MISTAKES: dict[str, Callable[[Dumps], Answer]] = {
    "a rank that waits (retired is False) has done what it should: the one it waits for has not": (
        _by_the_wait
    ),
    "one rank's list may begin later than another's: pair entries by collective_seq_id": partial(
        _find, numbered=lambda entries: dict(enumerate(entries, start=1))
    ),
    "each rank is compared with the first one, but the majority decides": partial(
        _find, who=lambda found: next(r for r in sorted(found) if found[r] != found[min(found)])
    ),
}
