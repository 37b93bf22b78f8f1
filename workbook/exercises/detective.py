"""The checks of page 12's second half: who is to blame for a run on two hosts that stands still.

The run of ``named`` is that of ``detective_run``; the dumps of ``culprit`` are made on real ranks
by ``detective_dumps``, once per session.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from workbook.exercises.detective_dumps import Dumps, Entry, recorded
from workbook.exercises.detective_run import HungRun, explain, hang
from workbook.exercises.grader import Mistake, Verdict
from workbook.exercises.grader.compare import plain
from workbook.exercises.grader.exercise import new_seed
from workbook.exercises.grader.in_process import Question, ask
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
    return told("detective.named", partial(_judge_named, run, rank, host, line))


def _judge_named(run: HungRun, rank: Any, host: Any, line: Any) -> Verdict:
    given = [plain(one) for one in (rank, host, line)]
    if given == [None] * 3:
        return Verdict("detective.named", NOT_ATTEMPTED)
    wrong = _wrong_rank(run, given[0]) or _wrong_host(run, given[1]) or _wrong_line(run, given[2])
    if wrong:
        return Verdict("detective.named", NOT_YET, notes=[wrong])
    right = (
        f"rank {run.culprit} on host {run.host} waits at line {run.line}, in a barrier, and the "
        f"others at line {run.others_line}, in an all-reduce"
    )
    return Verdict("detective.named", PASSED, notes=[right])


def _wrong_rank(run: HungRun, rank: Any) -> Mistake | None:
    if rank == run.culprit:
        return None
    if rank not in range(run.world_size):
        return Mistake("named.no_rank", rank=rank, last=run.world_size - 1)
    if rank == run.culprit % run.ranks_per_host:
        return Mistake("named.local_rank", rank=rank)
    return Mistake("named.waits", rank=rank)


def _wrong_host(run: HungRun, host: Any) -> Mistake | None:
    return None if host == run.host else Mistake("named.host", host=host)


def _wrong_line(run: HungRun, line: Any) -> Mistake | None:
    if line == run.line:
        return None
    if line == run.others_line:
        return Mistake("named.others_line", line=line)
    if line == run.cause_line:
        return Mistake("named.cause", line=line)
    return Mistake("named.line", line=line)


# culprit(dumps)


def culprit(fn: Callable) -> Verdict:
    """Grade ``fn(dumps)``: who is the first to do something else, by flight recorder dumps.

    ``dumps``: {rank: list of entries}. Expected is (rank, ``collective_seq_id``), or None where
    all ranks agree. One rank differs; the others are the majority.
    """
    return told("detective.culprit", partial(_judge_culprit, fn))


@cache
def _cases() -> list[tuple[Dumps, Answer]]:
    return [(dumps, fault.due) for fault, dumps in recorded(new_seed())]


def _judge_culprit(fn: Callable) -> Verdict:
    questions = [
        Question((dumps,), f"in case {number}", due)
        for number, (dumps, due) in enumerate(_cases(), start=1)
    ]
    return ask(
        "detective.culprit",
        fn,
        questions,
        _other_culprit,
        mistakes=_MISTAKES.items(),
        signature="dumps",
    )


def _other_culprit(question: Question, answer: Any) -> Mistake | None:
    (dumps,), due = question.args, question.due
    answer = plain(answer)
    answer = answer.tolist() if hasattr(answer, "tolist") else answer
    if answer == (None if due is None else list(due)):
        return None
    place, facts = {"place": question.words}, {"facts": _in_words(dumps, due)}
    if due is None:
        return Mistake("culprit.nobody", answer=answer, **place)
    if answer is None:
        return Mistake("culprit.missed", **place, **facts)
    if not isinstance(answer, list) or len(answer) != 2:
        return Mistake("culprit.kind", answer=f"{answer!r:.60}", **place)
    if answer[0] == due[0]:
        return Mistake("culprit.number", number=answer[1], **place, **facts)
    return Mistake("culprit.rank", rank=answer[0], **place, **facts)


def _ranks(ranks: list[int]) -> str:
    *before, last = map(str, ranks)
    return f"ranks {', '.join(before)} and {last}" if before else f"rank {last}"


def _in_words(dumps: Dumps, due: Answer) -> str:
    """What each rank has at the collective in question."""
    number = due[1] if due else 0
    ranks_by_what: dict[str, list[int]] = {}
    for rank in sorted(dumps):
        entry = _by_number(dumps[rank]).get(number)
        size = "" if entry is None else f" {entry['input_sizes'][0]}"
        what = "nothing" if entry is None else entry["profiling_name"] + size
        ranks_by_what.setdefault(what, []).append(rank)
    parts = [f"{what} on {_ranks(ranks)}" for what, ranks in ranks_by_what.items()]
    return f"collective number {number} is {', '.join(parts)}"


# The rule, and what goes wrong with it


def _by_number(entries: list[Entry]) -> dict[int, Entry]:
    return {entry["collective_seq_id"]: entry for entry in entries}


def _by_place(entries: list[Entry]) -> dict[int, Entry]:
    return dict(enumerate(entries, start=1))


def _all_of(entry: Entry) -> Any:
    return entry["profiling_name"], entry["input_sizes"], entry["input_dtypes"]


def _rarest(found: Mapping[int, Any]) -> int:
    counts = Counter(map(repr, found.values()))
    return min(found, key=lambda rank: counts[repr(found[rank])])


def _unlike_the_first(found: Mapping[int, Any]) -> int:
    """As PyTorch's analyzer does: the first rank is taken to be right."""
    first = min(found)
    return next(rank for rank in sorted(found) if found[rank] != found[first])


def _without_an_entry(found: Mapping[int, Any]) -> int:
    """A rank that lacks the entry is blamed, though all but one may lack it."""
    lacking = sorted(rank for rank, what in found.items() if what is None)
    return lacking[0] if lacking else _rarest(found)


def _find(
    dumps: Dumps,
    *,
    what: Callable[[Entry], Any] = _all_of,
    numbered: Callable[[list[Entry]], dict[int, Entry]] = _by_number,
    who: Callable[[Mapping[int, Any]], int] = _rarest,
    shift: int = 0,
) -> Answer:
    """The first collective that is not the same on all ranks; each option makes a mistake."""
    columns = {rank: numbered(entries) for rank, entries in dumps.items()}
    # What the ring buffer of one rank has overwritten cannot be compared.
    first = max(min(column) for column in columns.values())
    last = max(max(column) for column in columns.values())
    for number in range(first, last + 1):
        found = {
            rank: what(column[number]) if number in column else None
            for rank, column in columns.items()
        }
        if len(set(map(repr, found.values()))) > 1:
            return who(found), number + shift
    return None


def _by_the_wait(dumps: Dumps) -> Answer:
    """The first rank that waits is taken for the culprit."""
    for rank in sorted(dumps):
        for entry in dumps[rank]:
            if not entry["retired"]:
                return rank, entry["collective_seq_id"]
    return None


def _by_the_state(dumps: Dumps) -> Answer:
    """With gloo, the state of all entries is "scheduled"."""
    rank = min(dumps)
    return rank, dumps[rank][0]["collective_seq_id"]


def _by_the_last_numbers(dumps: Dumps) -> Answer:
    """Only how far each rank has come is compared, not what it has called."""
    last = {rank: max(_by_number(entries)) for rank, entries in dumps.items()}
    if len(set(last.values())) == 1:
        return None
    rank = min(sorted(last), key=lambda rank: last[rank])
    return rank, last[rank] + 1


_MISTAKES: dict[str, Callable[[Dumps], Answer]] = {
    "culprit.waits": _by_the_wait,
    "culprit.state": _by_the_state,
    "culprit.last_numbers": _by_the_last_numbers,
    "culprit.names_alone": partial(_find, what=lambda entry: entry["profiling_name"]),
    "culprit.presence_alone": partial(_find, what=lambda entry: True),
    "culprit.sizes_alone": partial(_find, what=lambda entry: entry["input_sizes"]),
    "culprit.by_place": partial(_find, numbered=_by_place),
    "culprit.first_is_right": partial(_find, who=_unlike_the_first),
    "culprit.lacks": partial(_find, who=_without_an_entry),
    "culprit.last_in_common": partial(_find, shift=-1),
}
