"""Judge what leaves each host by its network card, where the ranks are those of several hosts.

Symbols: H hosts, P ranks, S bytes of a rank's tensor.
"""

from collections.abc import Iterable, Mapping

from labkit.units import format_bytes
from workbook.exercises.grader.exercise import Cards, Case, Exercise, Outcome, Problem, where
from workbook.exercises.grader.words import Mistake

ROW, FLAT = "card bytes", "flat ring"


def bytes_out(cards: Cards, sent_to: Iterable[Mapping[int, int]]) -> list[int]:
    """The bytes that leave each host. ``sent_to``: of each rank, the bytes to each other rank."""
    by_rank = list(sent_to)
    return [
        sum(n for rank in host for peer, n in by_rank[rank].items() if peer not in host)
        for host in cards.hosts
    ]


def card_problems(exercise: Exercise, case: Case, ranks: tuple[Outcome, ...]) -> list[Problem]:
    """Return the problem of the host that sends too much: a list of at most one."""
    if exercise.cards is None:
        return []
    cards = exercise.cards(case)
    spent, H = bytes_out(cards, [outcome.bytes_to for outcome in ranks]), len(cards.hosts)
    # Ranks may cut a tensor into up to P pieces before the ring of hosts cuts them into H.
    slack = 4 * 2 * (H - 1) * case.world_size
    for host, (found, due) in enumerate(zip(spent, cards.num_bytes)):
        if found > due + slack:
            sent, allowed = format_bytes(found), format_bytes(due)
            place, why = where(case, exercise), _look(cards, spent, host)
            words = {"place": place, "host": host, "spent": sent, "due": allowed}
            told = Mistake("cards.too_much", why, **words)
            return [Problem(ROW, f"{sent}, not {allowed}", told)]
    return []


def cell(numbers: list[int]) -> str:
    """The bytes of each host: one number if all have the same."""
    texts = [format_bytes(number) for number in numbers]
    return texts[0] if len({*texts}) == 1 else "  ".join(texts)


def _look(cards: Cards, spent: list[int], host: int) -> Mistake | None:
    if all(abs(found - flat) <= 4 for found, flat in zip(spent, cards.flat_bytes)):
        return Mistake("cards.flat")
    sizes = [len(ranks) for ranks in cards.hosts]
    if sizes[host] > 1 and all(n * due == f for n, due, f in zip(sizes, cards.num_bytes, spent)):
        return Mistake("cards.every_rank", count=sizes[host])
    # A rank's whole tensor is H / (2 (H - 1)) of the target.
    whole = cards.num_bytes[host] * len(cards.hosts) / (2 * (len(cards.hosts) - 1))
    if spent[host] % whole == 0:
        return Mistake("cards.whole", count=int(spent[host] / whole))
    return None
