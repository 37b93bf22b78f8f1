"""Answers to ``check.rendezvous``: (store, address, world_size, attempt)."""

from graded import Answers, ends

from workbook import check


def ticket(store, attempt):
    return store.add(f"{attempt}/count", 1) - 1


def all_of(store, attempt, ranks):
    return [store.get(f"{attempt}/{r}").decode() for r in ranks]


def as_on_the_page(store, address, world_size, attempt):
    rank = ticket(store, attempt)
    store.set(f"{attempt}/{rank}", address)
    return rank, all_of(store, attempt, range(world_size))


# Wrong ones


def adds_nothing_and_sets(store, address, world_size, attempt):
    rank = store.add(f"{attempt}/count", 0)
    store.set(f"{attempt}/count", str(rank + 1))
    store.set(f"{attempt}/{rank}", address)
    return rank, all_of(store, attempt, range(world_size))


def knows_those_who_came(store, address, world_size, attempt):
    rank = ticket(store, attempt)
    store.set(f"{attempt}/{rank}", address)
    return rank, all_of(store, attempt, range(store.add(f"{attempt}/count", 0)))


def reads_the_environment(store, address, world_size, attempt):
    import os

    return int(os.environ["RANK"]), [address] * world_size


ANSWERS = [
    Answers(
        check.rendezvous.meet,
        [as_on_the_page],
        [adds_nothing_and_sets, knows_those_who_came, ends(reads_the_environment)],
    )
]
