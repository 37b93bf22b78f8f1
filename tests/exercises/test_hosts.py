"""Checks over several hosts: the bytes over each card, and a rendezvous that is drawn."""

import contextlib
from types import SimpleNamespace

import torch.distributed as dist
from answers.hosts import around_all_ranks, as_on_the_page
from answers.rendezvous import as_on_the_page as meets, reads_the_environment

from workbook import check
from workbook.exercises import rendezvous


def test_an_all_reduce_over_hosts_is_drawn():
    run = check.hosts.all_reduce(as_on_the_page, world_sizes=(4,)).own_run()
    assert run.sentence.startswith("passed")
    assert run.figure is not None
    flat = check.hosts.all_reduce(around_all_ranks, world_sizes=(5,))
    assert "leave host 0 by its card" in flat.notes[0]
    assert flat.own_run(5).figure is not None


def test_a_rendezvous_is_drawn_with_its_waits():
    figure = check.rendezvous.meet(meets, world_sizes=(2,)).own_run(3).figure
    assert all(word in figure.alt for word in ("add", "set", "wait")), figure.alt
    failed = check.rendezvous.meet(reads_the_environment, world_sizes=(2,)).own_run(2)
    assert failed.sentence.startswith("it did not finish")


def without_attempt(store, address, world_size, attempt):
    return meets(store, address, world_size, 0)


def test_keys_of_the_attempt_before_are_noticed():
    met = check.rendezvous.meet(without_attempt, world_sizes=(2,))
    assert "in a later attempt" in met.notes[0]


def test_the_store_works_under_any_store_of_pytorch():
    comm = SimpleNamespace(span=lambda kind: contextlib.nullcontext())
    waits = []
    store = rendezvous.SharedStore(
        dist.HashStore(), comm, lambda: None, lambda: waits.append("waits")
    )
    own = dist.PrefixStore("mine", store)
    own.set("a", "1")
    assert own.get("a") == b"1"
    assert own.compare_set("b", "", "2") == b"2"
    assert own.check(["a", "b"])
    assert own.add("n", 3) == 3
    store.multi_set(["c"], ["4"])
    assert store.multi_get(["c", "mine/a"]) == [b"4", b"1"]
    assert store.delete_key("c")
    assert store.num_keys() >= 3
    assert store.keys == {"mine/a", "c"}
    assert not waits
