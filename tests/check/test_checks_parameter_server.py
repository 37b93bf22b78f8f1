"""The parameter server's checks by mutation: the references pass, each mistake is named."""

from functools import partial

import pytest
import torch
from graded import in_shared_runs
from ranks import travel_by_value

from labkit import check
from labkit.collectives import naive_all_reduce, share_only, share_reduce
from labkit.collectives.ring import split_chunks
from labkit.schedules.ring import chunk_bounds

travel_by_value(__name__)


def workers(comm):
    return range(1, comm.world_size)


# The server: (comm, values, batch_size)


def serves(comm, values, batch_size, divisor=None, uphill=False, overwrite=False, first=0.0):
    total, incoming = first * values, torch.empty_like(values)
    for rank in workers(comm):
        comm.recv(incoming, rank)
        total = incoming.clone() if overwrite else total + incoming
    values += (0.1 if uphill else -0.1) * total / (divisor or batch_size)
    for rank in workers(comm):
        comm.send(values, rank)


def overwrites(comm, values, batch_size):
    serves(comm, values, batch_size, overwrite=True)


def never_divides(comm, values, batch_size):
    serves(comm, values, batch_size, divisor=1)


def divides_by_workers(comm, values, batch_size):
    serves(comm, values, batch_size, divisor=comm.world_size - 1)


def goes_uphill(comm, values, batch_size):
    serves(comm, values, batch_size, uphill=True)


def starts_from_the_parameters(comm, values, batch_size):
    serves(comm, values, batch_size, first=1.0)


def collected(comm, values):
    total, incoming = torch.zeros_like(values), torch.empty_like(values)
    for rank in workers(comm):
        total += comm.recv(incoming, rank)
    return total


def sends_the_old_ones(comm, values, batch_size):
    old = values.clone()
    values -= 0.1 * collected(comm, values) / batch_size
    for rank in workers(comm):
        comm.send(old, rank)


def sends_the_sum(comm, values, batch_size):
    total = collected(comm, values)
    values -= 0.1 * total / batch_size
    for rank in workers(comm):
        comm.send(total, rank)


def waits_for_nobody(comm, values, batch_size):
    incoming = torch.empty_like(values)
    for rank in workers(comm):
        values -= 0.1 * comm.recv(incoming, rank) / batch_size
        comm.send(values, rank)


def updates_at_every_push(comm, values, batch_size):
    total, incoming = torch.zeros_like(values), torch.empty_like(values)
    for rank in workers(comm):
        total += comm.recv(incoming, rank)
        values -= 0.1 * total / batch_size
    for rank in workers(comm):
        comm.send(values, rank)


def makes_new_parameters(comm, values, batch_size):
    values = values - 0.1 * collected(comm, values) / batch_size
    for rank in workers(comm):
        comm.send(values, rank)


def serves_the_first_worker_alone(comm, values, batch_size):
    incoming = comm.recv(torch.empty_like(values), 1)
    values -= 0.1 * incoming / batch_size
    comm.send(values, 1)


# A worker: (comm, gradient, values, servers)


def works(comm, gradient, values, servers, pushed=slice(None), pulled=slice(None)):
    bounds = chunk_bounds(len(gradient), servers)
    for server, (start, end) in enumerate(bounds[pushed]):
        comm.send(gradient[start:end], server)
    for server, (start, end) in enumerate(bounds[pulled]):
        comm.recv(values[start:end], server)


def interleaves(comm, gradient, values, servers):
    """Right, and slower: one server's pull goes before the next one's push."""
    for server, (start, end) in enumerate(chunk_bounds(len(gradient), servers)):
        comm.send(gradient[start:end], server)
        comm.recv(values[start:end], server)


def pushes_to_the_wrong_server(comm, gradient, values, servers):
    works(comm, gradient, values, servers, pushed=slice(None, None, -1))


def puts_slices_elsewhere(comm, gradient, values, servers):
    works(comm, gradient, values, servers, pulled=slice(None, None, -1))


def pulls_into_nothing(comm, gradient, values, servers):
    works(comm, gradient, values.clone(), servers)


def adds_what_it_pulls(comm, gradient, values, servers):
    new = values.clone()
    works(comm, gradient, new, servers)
    values += new


def pushes_parameters(comm, gradient, values, servers):
    works(comm, values.clone(), values, servers)


def pushes_an_update(comm, gradient, values, servers):
    works(comm, 0.1 * gradient, values, servers)


def updates_again(comm, gradient, values, servers):
    works(comm, gradient, values, servers)
    values -= 0.1 * gradient


def pushes_everything_everywhere(comm, gradient, values, servers):
    for server in range(servers):
        comm.send(gradient, server)


def pulls_first(comm, gradient, values, servers):
    bounds = chunk_bounds(len(gradient), servers)
    for server, (start, end) in enumerate(bounds):
        comm.recv(values[start:end], server)


# Both at once: (comm, gradient, values, batch_size)


def does_both(comm, gradient, values, batch_size, divisor=None, sign=1, own=1, share=True):
    chunks, mine = split_chunks(gradient, comm.world_size), (comm.rank + own) % comm.world_size
    share_reduce(comm, chunks)
    pieces = split_chunks(values, comm.world_size)
    pieces[mine] -= sign * 0.1 * chunks[mine] / (divisor or batch_size)
    if share:
        share_only(comm, pieces)


def both_never_divide(comm, gradient, values, batch_size):
    does_both(comm, gradient, values, batch_size, divisor=1)


def both_divide_by_ranks(comm, gradient, values, batch_size):
    does_both(comm, gradient, values, batch_size, divisor=comm.world_size)


def both_go_uphill(comm, gradient, values, batch_size):
    does_both(comm, gradient, values, batch_size, sign=-1)


def updates_another_chunk(comm, gradient, values, batch_size):
    does_both(comm, gradient, values, batch_size, own=0)


def nobody_pulls(comm, gradient, values, batch_size):
    does_both(comm, gradient, values, batch_size, share=False)


def everyone_for_itself(comm, gradient, values, batch_size):
    values -= 0.1 * gradient / batch_size


def through_one_rank(comm, gradient, values, batch_size):
    values -= 0.1 * naive_all_reduce(comm, gradient) / batch_size


MISTAKES = {
    "server": [
        (overwrites, "never added"),
        (never_divides, "not divided by batch_size"),
        (divides_by_workers, "divided by the number of workers"),
        (goes_uphill, "goes uphill"),
        (starts_from_the_parameters, "the parameters are in the sum"),
        (sends_the_old_ones, "from before the update"),
        (sends_the_sum, "get the sum of the gradients"),
        (waits_for_nobody, "asynchronous"),
        (updates_at_every_push, "then update once"),
        (makes_new_parameters, "update values in place"),
        (serves_the_first_worker_alone, "rank 2"),
    ],
    "worker": [
        (pushes_to_the_wrong_server, "does not fit"),
        (puts_slices_elsewhere, "does not fit"),
        (pulls_into_nothing, "values is unchanged"),
        (adds_what_it_pulls, "take their place"),
        (pushes_parameters, "the parameters were pushed"),
        (pushes_an_update, "scaled before the push"),
        (updates_again, "once more after the pull"),
        (pushes_everything_everywhere, "float32 [96]"),
        (pulls_first, "wait"),
    ],
    "shards": [
        (both_never_divide, "not divided by batch_size"),
        (both_divide_by_ranks, "divided by the number of ranks"),
        (both_go_uphill, "goes uphill"),
        (updates_another_chunk, "nothing has changed"),
        (nobody_pulls, "nobody has pulled"),
        (everyone_for_itself, "own gradient alone"),
        (through_one_rank, "bytes"),
    ],
}
RIGHT = [("server", serves), ("worker", works), ("worker", interleaves), ("shards", does_both)]
# What raises or stands still ends its run; all others share one.
BREAK_OFF = {serves_the_first_worker_alone, pushes_to_the_wrong_server, puts_slices_elsewhere}
BREAK_OFF |= {pushes_everything_everywhere, pulls_first}


def grading(name, fn, world_size):
    return partial(getattr(check.parameter_server, name), fn, world_sizes=(world_size,))


@pytest.fixture(scope="module")
def verdicts():
    found = {(fn, size): grading(name, fn, size) for name, fn in RIGHT for size in (2, 3, 4)}
    for name, mistakes in MISTAKES.items():
        found |= {fn: grading(name, fn, 3) for fn, _ in mistakes if fn not in BREAK_OFF}
    return in_shared_runs(found)


@pytest.mark.parametrize(("name", "fn"), RIGHT)
def test_a_right_answer_passes(name, fn, verdicts):
    for world_size in (2, 3, 4):
        assert verdicts[fn, world_size].passed, verdicts[fn, world_size]


@pytest.mark.parametrize(
    ("name", "fn", "mistake"),
    [(name, *mistake) for name, mistakes in MISTAKES.items() for mistake in mistakes],
)
def test_a_mistake_is_named(name, fn, mistake, verdicts):
    verdict = grading(name, fn, 3)() if fn in BREAK_OFF else verdicts[fn]
    assert not verdict.passed
    assert mistake in f"{verdict}\n{' '.join(verdict.notes)}"
