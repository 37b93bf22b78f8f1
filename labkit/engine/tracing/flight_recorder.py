"""Dumps of PyTorch's flight recorder and debug server: who holds up a run, and in which call.

A recorder numbers the collectives of each process group. The first number at which ranks called
different collectives, or brought other sizes or types, is a mismatch; else the others wait for the
ranks whose last number is lower. On gloo all collectives stay in the state "scheduled": there it
is ``retired`` that tells whether one is over.

Source: PyTorch's ``FlightRecorder.hpp``, and ``torch.distributed.debug``.
"""

import html
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

# By rank the dump, or None where the debug server got no answer.
Dumps = dict[int, dict[str, Any] | None]
_Entries = dict[int, dict[str, Any]]
_RANK_AT_END = re.compile(r"(\d+)(?:\.\w+)*$")
# Collectives to which ranks may bring different sizes.
_UNEVEN = re.compile(r"all_?to_?all|_v\b|_v_|:_?(?:gather|scatter)")
_OF_RANK = re.compile(r"(?:<h2>|=== )Rank (\d+): (.*?)(?=<h2>Rank|=== Rank|\Z)", re.DOTALL)


def explain_dumps(contents: dict[Path, Any]) -> str:
    """Return who holds up the run; a dump or the end of its file's name says its rank.

    Raises:
        ValueError: two dumps are of one rank, or they have no collectives.
    """
    dumps: Dumps = {}
    for path, dump in contents.items():
        rank = len(dumps)
        at_end = _RANK_AT_END.search(path.name)
        if at_end:
            rank = int(at_end[1])
        rank = int(dump.get("rank", rank))
        if rank in dumps:
            raise ValueError(f"{path} is of rank {rank} again: give one dump per rank, of one run")
        dumps[rank] = dump
    return _explain_ranks(dumps)


def explain_pages(contents: dict[Path, Any]) -> str:
    """Return who holds up the run, by the last of the debug server's pages that has dumps.

    Raises:
        ValueError: there is none.
    """
    for page in reversed(contents.values()):
        if '"entries"' not in page:
            continue
        dumps: Dumps = {}
        for rank, text in _OF_RANK.findall(page):
            match = re.search(r"\{.*\}", html.unescape(text), re.DOTALL)
            dumps[int(rank)] = json.loads(match[0]) if match else None
        if dumps:
            return _explain_ranks(dumps)
    raise ValueError(
        f"cannot judge {next(iter(contents))}: of the debug server's pages /fr_trace_json shows "
        "who waits for whom; stacks alone do not"
    )


def _explain_ranks(dumps: Dumps) -> str:
    """Return the worst of what is wrong with a process group."""
    groups: dict[str, dict[int, _Entries]] = defaultdict(lambda: defaultdict(dict))
    members: dict[str, set[int]] = defaultdict(set)
    try:
        for rank, dump in dumps.items():
            for entry in (dump or {}).get("entries") or []:
                if not entry.get("is_p2p"):
                    groups[entry["process_group"][0]][rank][entry["collective_seq_id"]] = entry
            for group, about in ((dump or {}).get("pg_config") or {}).items():
                members[group] |= set(map(int, re.findall(r"\d+", str(about["ranks"]))))
        verdicts = [_verdict(group, groups[group], members[group]) for group in sorted(groups)]
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"cannot read the flight recorder's dumps: {error!r}") from None
    if not verdicts:
        raise ValueError("the flight recorders have no collectives: set TORCH_FR_BUFFER_SIZE=2000")
    worst = min(badness for badness, _ in verdicts)
    text = " ".join(sentence for badness, sentence in verdicts if badness == worst)
    silent = [rank for rank, dump in dumps.items() if dump is None]
    if silent:
        text += f" No answer came from {_named(silent)}."
    return text


def _verdict(group: str, calls: dict[int, _Entries], members: set[int]) -> tuple[int, str]:
    """Return how bad it is, 0 the worst, and a sentence; ``calls`` are by rank and number."""
    for number in sorted(set().union(*calls.values())):
        ranks_by_call: dict[str, list[int]] = defaultdict(list)
        for rank in sorted(calls):
            if number in calls[rank]:
                ranks_by_call[_call(calls[rank][number])].append(rank)
        if len(ranks_by_call) > 1:
            calls_named = [f"{call} on {_named(ranks)}" for call, ranks in ranks_by_call.items()]
            listed = ", ".join(calls_named)
            return 0, f"Collective {number} of group {group} does not match: it is {listed}."
    newest = max(max(entries) for entries in calls.values())
    waiting = []
    behind = []
    for rank, entries in sorted(calls.items()):
        if newest in entries:
            waiting.append(rank)
        else:
            behind.append(f"rank {rank}, after {max(entries)}")
    absent = sorted(members - calls.keys())
    entry = calls[waiting[0]][newest]
    collective = f"collective {newest} of group {group}, {_call(entry)}"
    if behind:
        return 1, f"In {collective}: {_named(waiting)}. Not yet there: {'; '.join(behind)}."
    if entry.get("retired") or entry["state"] == "completed":
        return 3, f"Nothing stands still: {_named(waiting)} completed {collective}."
    text = f"In {collective}: {_named(waiting)}"
    if absent:
        return 2, f"{text}. Of {_named(absent)} no collective of this group is here."
    if len(calls) == 1:
        return 2, f"{text}. For whom, only the dumps of the other ranks show."
    return 2, f"{text}. No rank is behind: perhaps a connection or a device is slow or lost."


def _call(entry: dict[str, Any]) -> str:
    """A collective as all ranks of a group have to call it: name, sizes and types."""
    name = str(entry["profiling_name"])
    if _UNEVEN.search(name) or not entry["input_sizes"]:
        return name
    return f"{name} of {entry['input_sizes']} {' '.join(entry['input_dtypes'])}"


def _named(ranks: list[int]) -> str:
    *first, last = map(str, ranks)
    if first:
        return f"ranks {', '.join(first)} and {last}"
    return f"rank {last}"
