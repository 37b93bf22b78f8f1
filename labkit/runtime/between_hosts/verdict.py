"""What ends a run that no launcher watches: one text for all ranks of all hosts."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from labkit.errors import DeadlockError, WorkerError

_KINDS = {kind.__name__: kind for kind in (WorkerError, DeadlockError)}
# The most bytes of a verdict as JSON: it has to fit into its place on the board.
MOST_BYTES = 16_000
_CUT = "\n... (cut)"


@dataclass(frozen=True)
class Verdict:
    """Why a run ends.

    Attributes:
        kind: the name of the error's class.
        text: the whole explanation.
        rank: which rank failed first; None if no single rank did.
        location: the learner's line; empty if unknown.
        is_raised: whether that rank's own exception is the cause, which Python prints there.
    """

    kind: str
    text: str
    rank: int | None = None
    location: str = ""
    is_raised: bool = False

    def to_bytes(self) -> bytes:
        """As JSON; a long text is cut."""
        text = self.text
        while len(data := json.dumps(asdict(self) | {"text": text}).encode()) > MOST_BYTES:
            text = text.removesuffix(_CUT)[: len(text) * 3 // 4] + _CUT
        return data

    @staticmethod
    def from_bytes(data: bytes, world_size: int) -> "Verdict":
        """Read what ``to_bytes`` has written.

        Raises:
            ValueError: it is something else.
        """
        found = json.loads(data[: MOST_BYTES + 1])
        if not isinstance(found, dict) or found.keys() != Verdict.__dataclass_fields__.keys():
            raise ValueError("the fields are not those of a verdict")
        texts = [found[name] for name in ("kind", "text", "location")]
        rank = found["rank"]
        is_rank = rank is None or (type(rank) is int and 0 <= rank < world_size)
        if not all(isinstance(text, str) for text in texts) or found["kind"] not in _KINDS:
            raise ValueError("the texts are not those of a verdict")
        if not is_rank or not isinstance(found["is_raised"], bool):
            raise ValueError("the numbers are not those of a verdict")
        kind, text, location = texts
        return Verdict(kind, plain(text), rank, plain(location), found["is_raised"])

    @staticmethod
    def of(error: WorkerError, is_raised: bool = False) -> "Verdict":
        return Verdict(type(error).__name__, str(error), error.rank, error.location, is_raised)

    def error(self) -> WorkerError:
        """The error to raise. ``is_told``: it is on stderr of this host already."""
        error = _KINDS[self.kind](self.text, rank=self.rank, location=self.location)
        error.is_told = True
        return error


def plain(text: str) -> str:
    """Without control characters, which a terminal would obey."""
    return "".join(char if char.isprintable() or char in "\n\t" else " " for char in text)


def with_hosts(text: str, hosts: Sequence[Sequence[int]], names: Mapping[int, str]) -> str:
    """``text`` with the host of each rank that it names, and a line with the hosts' names.

    The first mention of a rank becomes ``rank 3 (host 1)``. With one host nothing changes.
    """
    if len(hosts) < 2:
        return text
    said, gap, trace = text.partition("\n\nTraceback of rank")
    of_rank = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    named: set[int] = set()

    def name(match: re.Match[str]) -> str:
        rank = int(match[2])
        if rank in named or rank not in of_rank:
            return match[0]
        named.add(rank)
        return f"{match[0]} (host {of_rank[rank]})"

    said = re.sub(r"(?<!\()\b([Rr]ank) (\d+)\b", name, said)
    known = ", ".join(f"host {host} is {name}" for host, name in names.items())
    return f"{said}\nHosts: {known}.{gap}{trace}"


def ranks_of(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 2 and 3``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
