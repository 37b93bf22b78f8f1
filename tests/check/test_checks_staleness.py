"""The checks of page 05: each accepts its solution, and names the mistake in each wrong answer."""

from functools import partial

import pytest
import torch
from graded import default_sizes, in_shared_runs
from ranks import travel_by_value

from labkit import check
from labkit.schedules.staleness import in_time

travel_by_value(__name__)


def told(verdict, capsys):
    capsys.readouterr()
    assert not verdict
    return " ".join(verdict.notes)


# From a list of events


def staleness_of(events):
    version, pulled, late = 0, {}, []
    for kind, worker in events:
        if kind == "pull":
            pulled[worker] = version
        else:
            late.append(version - pulled[worker])
            version += 1
    return late


def counts_itself(events):
    return [late + 1 for late in staleness_of(events)]


def since_the_push(events):
    version, pushed, late = 0, {}, []
    for kind, worker in events:
        if kind == "push":
            late.append(version - pushed.get(worker, 0))
            version += 1
            pushed[worker] = version
    return late


def since_the_first_pull(events):
    version, pulled, late = 0, {}, []
    for kind, worker in events:
        if kind == "pull":
            pulled.setdefault(worker, version)
        else:
            late.append(version - pulled[worker])
            version += 1
    return late


def one_for_all(events):
    return staleness_of([(kind, 0) for kind, _ in events])


def counts_pulls(events):
    pulled, late = {}, []
    for number, (kind, worker) in enumerate(events):
        if kind == "push":
            late.append(number - pulled[worker])
        else:
            pulled[worker] = number + 1
    return late


def by_others_only(events):
    since, late = {}, []
    for kind, worker in events:
        if kind == "pull":
            since[worker] = []
        else:
            late.append(sum(other != worker for other in since[worker]))
            for pushes in since.values():
                pushes.append(worker)
    return late


WRONG_BOOKS = [
    (counts_itself, "the update itself is counted, too"),
    (since_the_push, "from the worker's latest push"),
    (since_the_first_pull, "from the worker's first pull"),
    (one_for_all, "one version is kept for all workers"),
    (counts_pulls, "pulls are counted as well"),
    (by_others_only, "a worker's own update between its pull and its push"),
    (lambda events: [i for i, (kind, _) in enumerate(events) if kind == "push"], "is \\[0, 0\\]"),
    (lambda events: list(range(len(staleness_of(events)))), "which version was reached"),
    (lambda events: {}["worker"], "raised KeyError"),
    (lambda events: 3, "raised TypeError"),
]


def test_the_books_pass():
    assert check.staleness.bookkeeping(staleness_of)


@pytest.mark.parametrize(("wrong", "sentence"), WRONG_BOOKS)
def test_wrong_books_are_named(wrong, sentence, capsys):
    assert sentence.replace("\\", "") in told(check.staleness.bookkeeping(wrong), capsys)


# The rule of a bound


def others(worker, pulled):
    return [version for other, version in pulled.items() if other != worker]


def may_apply(worker, version, pulled, bound):
    oldest_first = sorted(others(worker, pulled))
    return all(version + 1 + k - v <= bound for k, v in enumerate(oldest_first))


WRONG_RULES = [
    (lambda w, version, pulled, bound: True, "that lets everything in"),
    (lambda w, version, pulled, bound: version - pulled[w] <= bound, "that lets everything in"),
    (
        lambda w, version, pulled, bound: all(version + 1 - v <= bound for v in others(w, pulled)),
        "it looks one update ahead",
    ),
    (
        lambda w, version, pulled, bound: may_apply(w, version, pulled, bound - 1),
        "a staleness equal to the bound is allowed",
    ),
    (
        lambda w, version, pulled, bound: may_apply(w, version - 1, pulled, bound),
        "whether they still can once the version is one higher",
    ),
    (
        lambda w, version, pulled, bound: in_time(pulled.values(), version + 1, bound),
        "only the others still have to come",
    ),
    (
        lambda w, version, pulled, bound: all(
            version + 1 + k - v <= bound
            for k, v in enumerate(sorted(others(w, pulled), reverse=True))
        ),
        "the oldest has least time left",
    ),
    (lambda w, version, pulled, bound: False, "is True, and yours says False"),
    (lambda w, version, pulled: True, "raised TypeError"),
]


def test_the_rule_passes():
    assert check.staleness.admission(may_apply)


def test_an_answer_may_change_what_it_is_given(capsys):
    def takes_out(worker, version, pulled, bound):
        del pulled[worker]
        return in_time(pulled.values(), version + 1, bound)

    assert check.staleness.admission(takes_out)
    assert check.staleness.admission(takes_out)


def test_a_missing_return_is_told(capsys):
    for verdict in (
        check.staleness.admission(lambda *_: None),
        check.staleness.bookkeeping(lambda *_: None),
    ):
        assert "returned nothing: return the answer" in told(verdict, capsys)


@pytest.mark.parametrize(("wrong", "sentence"), WRONG_RULES)
def test_wrong_rules_are_named(wrong, sentence, capsys):
    assert sentence in told(check.staleness.admission(wrong), capsys)


# The server


def workers_of(comm):
    return range(1, comm.world_size)


def serve(comm, parameters, num_updates):
    gradient = torch.empty_like(parameters)
    for _ in range(num_updates):
        worker = comm.recv_any(gradient, workers_of(comm))
        parameters -= gradient
        comm.send(parameters, worker)


def in_turns(comm, parameters, num_updates):
    gradient = torch.empty_like(parameters)
    for number in range(num_updates):
        worker = 1 + number % (comm.world_size - 1)
        comm.recv(gradient, worker)
        parameters -= gradient
        comm.send(parameters, worker)


def all_then_update(comm, parameters, num_updates):
    gradient = torch.empty_like(parameters)
    for _ in range(num_updates):
        for worker in workers_of(comm):
            comm.recv(gradient, worker)
            parameters -= gradient
        for worker in workers_of(comm):
            comm.send(parameters, worker)


def answers_first(comm, parameters, num_updates):
    gradient = torch.empty_like(parameters)
    for _ in range(num_updates):
        worker = comm.recv_any(gradient, workers_of(comm))
        comm.send(parameters, worker)
        parameters -= gradient


def variant(update=lambda p, g, n: p.sub_(g), sources=workers_of, answer=True, rounds=0):
    def fn(comm, parameters, num_updates):
        gradient = torch.empty_like(parameters)
        for _ in range(num_updates + rounds):
            worker = comm.recv_any(gradient, sources(comm))
            update(parameters, gradient, comm.world_size - 1)
            if answer:
                comm.send(parameters, worker)

    return fn


WRONG_SERVERS = [
    (in_turns, "rank 1 has returned and never came"),
    (all_then_update, "has returned and never came"),
    (answers_first, "pulls parameters from before its own push"),
    (variant(answer=False), "waiting for rank 0 to send"),
    (variant(rounds=1), "have returned and never came|has returned and never came"),
    (variant(rounds=-1), "rank 0 has returned and never came"),
    (variant(sources=lambda comm: range(comm.world_size)), "cannot receive from itself"),
    (variant(lambda p, g, n: p.add_(g)), "an update goes against the gradient"),
    (variant(lambda p, g, n: p.sub_(g / n)), "divided by the number of workers"),
    (variant(lambda p, g, n: p - g), "the parameters have not changed"),
]
# The others raise or stand still, and end the run they are in.
FINISH = ("pulls parameters", "against the gradient", "divided by", "have not changed")


def finishes(sentence):
    return any(words in sentence for words in FINISH)


@pytest.fixture(scope="module")
def verdicts():
    checker = check.staleness.server
    found = {size: partial(checker, serve, world_sizes=(size,)) for size in default_sizes(checker)}
    for wrong, sentence in WRONG_SERVERS:
        if finishes(sentence):
            found[wrong] = partial(checker, wrong, world_sizes=(3,))
    return in_shared_runs(found)


def test_the_server_passes(verdicts):
    for size in default_sizes(check.staleness.server):
        assert verdicts[size].passed, verdicts[size]
        assert "messages" in repr(verdicts[size])


@pytest.mark.parametrize(("wrong", "sentence"), WRONG_SERVERS)
def test_wrong_servers_are_named(wrong, sentence, verdicts, capsys):
    alone = partial(check.staleness.server, wrong, world_sizes=(3,))
    note = told(verdicts[wrong] if finishes(sentence) else alone(), capsys)
    assert any(part in note for part in sentence.split("|")), note
