"""Answers to ``check.rendezvous``: (store, address, world_size, attempt)."""

import json
import time
from datetime import timedelta

import torch.distributed as dist
from graded import Answers
from ranks import travel_by_value

from workbook import check

travel_by_value(__name__)


def ticket(store, attempt):
    return store.add(f"{attempt}/count", 1) - 1


def all_of(store, attempt, ranks):
    return [store.get(f"{attempt}/{r}").decode() for r in ranks]


def as_on_the_page(store, address, world_size, attempt):
    rank = ticket(store, attempt)
    store.set(f"{attempt}/{rank}", address)
    return rank, all_of(store, attempt, range(world_size))


def in_a_store_of_its_own(store, address, world_size, attempt):
    own = dist.PrefixStore(f"attempt {attempt}", store)
    rank = own.add("count", 1) - 1
    own.set(str(rank), address)
    return rank, [str(own.get(str(r)), "utf-8") for r in range(world_size)]


def ranks_by_address(store, address, world_size, attempt):
    store.set(f"{attempt}/{ticket(store, attempt)}", address)
    addresses = sorted(all_of(store, attempt, range(world_size)))
    return addresses.index(address), addresses


def takes_the_first_free_place(store, address, world_size, attempt):
    rank = 0
    while store.compare_set(f"{attempt}/{rank}", "", address).decode() != address:
        rank += 1
    return rank, all_of(store, attempt, range(world_size))


def waits_for_all_at_once(store, address, world_size, attempt):
    rank, keys = ticket(store, attempt), [f"{attempt}/{r}" for r in range(world_size)]
    store.set(keys[rank], address)
    store.wait(keys, timedelta(seconds=5))
    return (rank, tuple(value.decode() for value in store.multi_get(keys)))


def asks_again_and_again(store, address, world_size, attempt):
    rank = ticket(store, attempt)
    store.set(f"{attempt}/{rank}", address.encode())
    while not all(store.check([f"{attempt}/{r}"]) for r in range(world_size)):
        time.sleep(0.005)
    return [rank, all_of(store, attempt, range(world_size))]


def the_first_tells_all(*, attempt, world_size, address, store):
    rank = ticket(store, attempt)
    store.set(f"{attempt}/{rank}", address)
    if rank == 0:
        store.set(f"{attempt}/all", json.dumps(all_of(store, attempt, range(world_size))))
    return rank, json.loads(store.get(f"{attempt}/all"))


def backwards(store, address, world_size, attempt):
    rank = world_size - store.add(f"{attempt}/count", 1)
    store.set(f"{attempt}/{rank}", address)
    return rank, all_of(store, attempt, range(world_size))


class Rendezvous:
    def __call__(self, store, address, world_size, attempt):
        return as_on_the_page(store, address, world_size, attempt)


# Wrong ones


def adds_nothing_and_sets(store, address, world_size, attempt):
    rank = store.add(f"{attempt}/count", 0)
    store.set(f"{attempt}/count", str(rank + 1))
    store.set(f"{attempt}/{rank}", address)
    return rank, all_of(store, attempt, range(world_size))


def reads_and_writes_back(store, address, world_size, attempt):
    count = f"{attempt}/count"
    rank = int(store.get(count)) if store.check([count]) else 0
    store.set(count, str(rank + 1))
    store.set(f"{attempt}/{address}", address)
    return rank, [address] * world_size


def all_rank_zero(store, address, world_size, attempt):
    store.set(f"{attempt}/0", address)
    return 0, all_of(store, attempt, range(world_size))


def forgets_its_number(store, address, world_size, attempt):
    return 0, as_on_the_page(store, address, world_size, attempt)[1]


def counts_from_one(store, address, world_size, attempt):
    rank = store.add(f"{attempt}/count", 1)
    store.set(f"{attempt}/{rank}", address)
    return rank, all_of(store, attempt, range(1, world_size + 1))


def waits_for_rank_zero(store, address, world_size, attempt):
    rank = store.add(f"{attempt}/count", 1)
    store.set(f"{attempt}/{rank}", address)
    return rank, all_of(store, attempt, range(world_size))


def counts_on(store, address, world_size, attempt):
    return as_on_the_page(store, address, world_size, "")


def takes_off_what_all_have_added(store, address, world_size, attempt):
    rank = store.add("count", 1) - 1 - attempt * world_size
    store.set(f"{attempt}/{rank}", address)
    if attempt < 2:
        return rank, all_of(store, attempt, range(world_size))
    return rank, [address] * world_size


def sleeps_until_all_have_come(store, address, world_size, attempt):
    rank = ticket(store, attempt)
    store.set(f"{attempt}/{rank}", address)
    time.sleep(0.5)
    return rank, all_of(store, attempt, range(store.add(f"{attempt}/count", 0)))


def reads_former_addresses(store, address, world_size, attempt):
    rank = ticket(store, attempt)
    store.set(f"{rank}", address)
    return rank, [store.get(f"{r}").decode() for r in range(world_size)]


def knows_those_who_came(store, address, world_size, attempt):
    rank = ticket(store, attempt)
    store.set(f"{attempt}/{rank}", address)
    return rank, all_of(store, attempt, range(store.add(f"{attempt}/count", 0)))


def adds_its_own_once_more(store, address, world_size, attempt):
    rank, addresses = as_on_the_page(store, address, world_size, attempt)
    return rank, [*addresses, address]


def does_not_decode(store, address, world_size, attempt):
    rank, addresses = as_on_the_page(store, address, world_size, attempt)
    return rank, [one.encode() for one in addresses]


def sorts_the_addresses(store, address, world_size, attempt):
    rank, addresses = as_on_the_page(store, address, world_size, attempt)
    return rank, [*addresses[1:], addresses[0]]


def returns_the_keys(store, address, world_size, attempt):
    rank, _ = as_on_the_page(store, address, world_size, attempt)
    return rank, [f"{attempt}/{r}" for r in range(world_size)]


def returns_numbers(store, address, world_size, attempt):
    rank, _ = as_on_the_page(store, address, world_size, attempt)
    return rank, [*range(world_size)]


def returns_the_rank_alone(store, address, world_size, attempt):
    return as_on_the_page(store, address, world_size, attempt)[0]


def returns_nothing(store, address, world_size, attempt):
    as_on_the_page(store, address, world_size, attempt)


def two_share_a_rank(store, address, world_size, attempt):
    rank, addresses = as_on_the_page(store, address, world_size, attempt)
    return rank // 2, addresses


def every_second_rank(store, address, world_size, attempt):
    rank, addresses = as_on_the_page(store, address, world_size, attempt)
    return 2 * rank, addresses


def the_others_as_they_come(store, address, world_size, attempt):
    rank, addresses = as_on_the_page(store, address, world_size, attempt)
    others = [one for one in addresses if one != address][::-1]
    others.insert(rank, address)
    return rank, others


def a_key_of_nobody(store, address, world_size, attempt):
    rank = ticket(store, attempt)
    store.set(f"{attempt}/{rank}", address)
    return rank, [store.get(f"{attempt}/address/{r}").decode() for r in range(world_size)]


def reads_the_environment(store, address, world_size, attempt):
    import os

    return int(os.environ["RANK"]), [address] * world_size


MEET = [
    (adds_nothing_and_sets, "rendezvous.race", "not rendezvous.waits_forever"),
    (reads_and_writes_back, "rendezvous.race"),
    (all_rank_zero, "rendezvous.same_key"),
    (forgets_its_number, "rendezvous.all_zero"),
    (counts_from_one, "rendezvous.from_one"),
    (waits_for_rank_zero, "rendezvous.waits_forever"),
    (a_key_of_nobody, "rendezvous.waits_forever", "waits for 0/address/0, which nobody sets"),
    (counts_on, "rendezvous.counts_on", "rendezvous.later"),
    (takes_off_what_all_have_added, "rendezvous.counts_on"),
    (reads_former_addresses, "rendezvous.former", "rendezvous.later"),
    (sleeps_until_all_have_come, "rendezvous.few"),
    (knows_those_who_came, "rendezvous.few", "returned 1 of the 3 addresses"),
    (adds_its_own_once_more, "rendezvous.many"),
    (does_not_decode, "rendezvous.bytes"),
    (sorts_the_addresses, "rendezvous.not_own"),
    (returns_the_keys, "rendezvous.strange"),
    (returns_numbers, "rendezvous.strange"),
    (returns_the_rank_alone, "rendezvous.kind"),
    (returns_nothing, "rendezvous.kind", "nothing (None)"),
    (two_share_a_rank, "rendezvous.taken", "rank 0 was given 2 times"),
    (every_second_rank, "rendezvous.other_ranks", "not rendezvous.taken"),
    (the_others_as_they_come, "rendezvous.differ"),
    (reads_the_environment, "run.error", "KeyError: 'RANK'"),
]

ANSWERS = [
    Answers(
        check.rendezvous.meet,
        [
            *(as_on_the_page, in_a_store_of_its_own, ranks_by_address),
            *(takes_the_first_free_place, waits_for_all_at_once, asks_again_and_again),
            *(the_first_tells_all, backwards, Rendezvous()),
        ],
        MEET,
    )
]
