"""Timetables on paper: the textbook's, and what must hold for any number of ranks."""

import pytest

from labkit.schedules.pipeline import (
    PIPELINES,
    Action,
    Hop,
    gpipe,
    in_flight,
    one_f_one_b,
    with_hops,
)
from labkit.schedules.ring import (
    chunk_bounds,
    owned_chunk,
    ring_all_reduce,
    ring_contributions,
    ring_share_only,
    ring_share_reduce,
)
from labkit.schedules.servers import server_turns, worker_turns
from labkit.schedules.tree import (
    binomial_broadcast,
    binomial_reduce,
    dissemination,
    pairwise_exchange,
    recursive_doubling,
    recursive_doubling_return,
)

WORLD_SIZES = [1, 2, 3, 4, 5, 7, 8, 13, 16]


def by_step(schedule, world_size, *args):
    """[{rank: Transfer}] by step, all ranks together."""
    steps = {}
    for rank in range(world_size):
        for transfer in schedule(rank, world_size, *args):
            steps.setdefault(transfer.step, {})[rank] = transfer
    assert sorted(steps) == list(range(min(steps, default=0), max(steps, default=-1) + 1))
    return [steps[step] for step in sorted(steps)]


def arrows(schedule, world_size, *args):
    """[step] -> "from>to" of every message, as the textbook prints it."""
    return [
        " ".join(f"{rank}>{t.dst}" for rank, t in row.items() if t.dst is not None)
        for row in by_step(schedule, world_size, *args)
    ]


def play(schedule, world_size, held, *args):
    """Who holds whose values after the schedule; a message carries all its sender holds."""
    for row in by_step(schedule, world_size, *args):
        before = dict(enumerate(held))
        for rank, transfer in row.items():
            if transfer.dst is not None:
                assert row[transfer.dst].src == rank, "a message nobody waits for"
            if transfer.src is not None:
                assert row[transfer.src].dst == rank, "waits for a message nobody sends"
                held[rank] = held[rank] | before[transfer.src]
    return held


def alone(world_size):
    return [frozenset({rank}) for rank in range(world_size)]


def rounds(world_size):
    """ceil(log2 P), in numbers that need no logarithm."""
    return next(s for s in range(world_size) if 2**s >= world_size)


def table(schedule, world_size):
    """[step] -> "rank sends chunk" for all ranks, as the textbook prints it."""
    rows = zip(*(schedule(rank, world_size) for rank in range(world_size)))
    return [" ".join(f"{r}:{step.send_chunk}" for r, step in enumerate(row)) for row in rows]


def test_the_textbooks_timetable_for_four_ranks():
    assert table(ring_share_reduce, 4) == [
        "0:0 1:1 2:2 3:3",
        "0:3 1:0 2:1 3:2",
        "0:2 1:3 2:0 3:1",
    ]
    assert table(ring_share_only, 4) == [
        "0:1 1:2 2:3 3:0",
        "0:0 1:1 2:2 3:3",
        "0:3 1:0 2:1 3:2",
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_what_one_sends_the_next_receives(world_size):
    for row in zip(*(ring_all_reduce(rank, world_size) for rank in range(world_size))):
        for rank, step in enumerate(row):
            assert step.dst == (rank + 1) % world_size
            assert row[step.src].dst == rank
            assert row[step.src].send_chunk == step.recv_chunk


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_each_rank_owns_one_complete_chunk_then_has_all(world_size):
    states = ring_contributions(world_size)
    everyone = frozenset(range(world_size))
    assert len(states) == 2 * (world_size - 1) + 1
    for rank in range(world_size):
        middle = states[world_size - 1][rank]
        complete = [chunk for chunk, held in enumerate(middle) if held == everyone]
        if world_size > 1:
            assert complete == [owned_chunk(rank, world_size)]
        assert states[-1][rank] == [everyone] * world_size
    assert sorted(owned_chunk(r, world_size) for r in range(world_size)) == sorted(everyone)


@pytest.mark.parametrize("num_elements", [0, 1, 3, 4, 10, 17])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_chunks_cover_everything_and_differ_by_one_at_most(num_elements, world_size):
    bounds = chunk_bounds(num_elements, world_size)
    sizes = [end - start for start, end in bounds]
    assert len(bounds) == world_size
    assert sum(sizes) == num_elements
    assert max(sizes) - min(sizes) <= 1
    assert [start for start, _ in bounds] == [sum(sizes[:i]) for i in range(world_size)]


def test_the_textbooks_trees_for_eight_ranks_and_for_six():
    assert arrows(binomial_broadcast, 8) == ["0>1", "0>2 1>3", "0>4 1>5 2>6 3>7"]
    assert arrows(binomial_reduce, 8) == ["4>0 5>1 6>2 7>3", "2>0 3>1", "1>0"]
    assert arrows(binomial_broadcast, 4, 2) == ["2>3", "2>0 3>1"]
    assert arrows(recursive_doubling, 4) == ["0>1 1>0 2>3 3>2", "0>2 1>3 2>0 3>1"]
    assert arrows(recursive_doubling, 6) == ["4>0 5>1", "0>1 1>0 2>3 3>2", "0>2 1>3 2>0 3>1"]
    assert arrows(recursive_doubling_return, 6) == ["0>4 1>5"]
    assert arrows(recursive_doubling_return, 8) == []


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_binomial_tree_reaches_everyone_once_and_backwards_collects_everyone(world_size):
    everyone = frozenset(range(world_size))
    for root in {0, 1 % world_size, world_size - 1}:
        start = [frozenset({root}) if rank == root else frozenset() for rank in range(world_size)]
        assert play(binomial_broadcast, world_size, start, root) == [{root}] * world_size
        assert play(binomial_reduce, world_size, alone(world_size), root)[root] == everyone
        for schedule in (binomial_broadcast, binomial_reduce):
            steps = by_step(schedule, world_size, root)
            assert len(steps) == rounds(world_size)
            sent = [t for row in steps for t in row.values() if t.dst is not None]
            assert len(sent) == world_size - 1


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_recursive_doubling_adds_every_rank_exactly_once(world_size):
    inner = 2 ** (world_size.bit_length() - 1)
    held = [{rank: 1} for rank in range(world_size)]
    for row in by_step(recursive_doubling, world_size):
        before = [dict(counts) for counts in held]
        for rank, transfer in row.items():
            for value, times in before[transfer.src].items() if transfer.src is not None else ():
                held[rank][value] = held[rank].get(value, 0) + times
    assert held[:inner] == [dict.fromkeys(range(world_size), 1)] * inner
    complete = [frozenset(counts) for counts in held]
    everyone = [frozenset(range(world_size))] * world_size
    assert play(recursive_doubling_return, world_size, complete) == everyone
    assert len(by_step(recursive_doubling, world_size)) == rounds(inner) + (inner < world_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_word_gets_to_everyone_in_the_barrier(world_size):
    everyone = frozenset(range(world_size))
    assert play(dissemination, world_size, alone(world_size)) == [everyone] * world_size
    assert len(by_step(dissemination, world_size)) == rounds(world_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_pairwise_exchange_meets_each_rank_once_and_one_at_a_time(world_size):
    for rank in range(world_size):
        others = [other for other in range(world_size) if other != rank]
        steps = list(pairwise_exchange(rank, world_size))
        assert sorted(step.dst for step in steps) == others
        assert sorted(step.src for step in steps) == others
    for row in by_step(pairwise_exchange, world_size):
        assert sorted(transfer.dst for transfer in row.values()) == list(range(world_size))
    play(pairwise_exchange, world_size, alone(world_size))


@pytest.mark.parametrize(("servers", "workers"), [(1, 3), (2, 3), (3, 3), (3, 2), (4, 1)])
def test_in_a_turn_no_server_and_no_worker_meets_two(servers, workers):
    """Ranks that go through their turns in order, each meeting both need: M turns for everyone."""
    of_server = {s: server_turns(s, servers, workers) for s in range(servers)}
    of_worker = {w: worker_turns(w, servers, workers) for w in range(workers)}
    turns = 0
    while any(of_server.values()):
        pairs = [
            (s, row[0]) for s, row in of_server.items() if row and of_worker[row[0]][:1] == [s]
        ]
        assert pairs, "everyone waits for somebody else"
        for server, worker in pairs:
            of_server[server].pop(0)
            of_worker[worker].pop(0)
        turns += 1
    assert turns == max(servers, workers)
    assert not any(of_worker.values())
    assert sorted(server_turns(0, servers, workers)) == list(range(workers))


def test_with_one_server_workers_come_in_the_order_of_their_numbers():
    assert server_turns(0, 1, 4) == [0, 1, 2, 3]
    assert [server_turns(server, 2, 3) for server in range(2)] == [[0, 1, 2], [1, 2, 0]]


def words(actions):
    return " ".join(map(str, actions))


def test_fill_and_drain_on_paper():
    for stage in range(3):
        assert words(gpipe(stage, 3, 3)) == "F0 F1 F2 B0 B1 B2"


def test_one_forward_one_backward_on_paper():
    assert words(one_f_one_b(0, 3, 4)) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert words(one_f_one_b(1, 3, 4)) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert words(one_f_one_b(2, 3, 4)) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_fewer_micro_batches_than_stages():
    assert words(one_f_one_b(0, 4, 2)) == "F0 F1 B0 B1"
    assert words(one_f_one_b(3, 4, 2)) == "F0 B0 F1 B1"


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 4, 7, 12])
def test_a_stage_runs_each_action_once_and_holds_what_its_schedule_promises(
    name, num_micro_batches
):
    for num_stages in (1, 2, 3, 4, 6):
        for stage in range(num_stages):
            actions = list(PIPELINES[name](stage, num_stages, num_micro_batches))
            every = {
                Action(k, m) for k in ("forward", "backward") for m in range(num_micro_batches)
            }
            assert len(actions) == len(every)
            assert set(actions) == every
            promised = {
                "gpipe": num_micro_batches,
                "1f1b": min(num_micro_batches, num_stages - stage),
            }
            assert in_flight(actions) == promised[name]


def test_what_a_middle_stage_executes():
    found = list(with_hops(one_f_one_b(1, 3, 2), stage=1, num_stages=3))
    told = [
        " ".join(
            f"{way} {message.kind}{message.micro_batch}"
            for way, message in (("send", step.send), ("recv", step.recv))
            if message
        )
        if isinstance(step, Hop)
        else str(step)
        for step in found
    ]
    assert told == [
        "recv activation0", "F0", "send activation0",
        "recv activation1", "F1", "send activation1 recv gradient0",
        "B0", "send gradient0", "recv gradient1", "B1", "send gradient1",
    ]  # fmt: skip


def finishes(programs):
    """Play the stages' programs where a message passes only when both ends are at it."""
    programs = [list(program) for program in programs]
    while any(programs):
        offers, wants = {}, {}
        for stage, program in enumerate(programs):
            while program and isinstance(program[0], Action):
                program.pop(0)
            if program:
                hop = program[0]
                if hop.send:
                    offers[stage, hop.send.peer] = hop.send[:2]
                if hop.recv:
                    wants[hop.recv.peer, stage] = hop.recv[:2]
        met = offers.keys() & wants.keys()
        if not met and any(programs):
            return False
        for edge in met:
            source, destination = edge
            assert offers[edge] == wants[edge], "the two ends speak of different messages"
            programs[source][0] = programs[source][0]._replace(send=None)
            programs[destination][0] = programs[destination][0]._replace(recv=None)
        for program in programs:
            if program and program[0] == (None, None):
                program.pop(0)
    return True


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 6])
def test_no_circle_of_stages_waits_though_a_send_waits_for_its_receive(name, num_stages):
    for num_micro_batches in (1, 2, 3, 5, 8):
        for first_trained in range(num_stages):
            streams = [
                PIPELINES[name](stage, num_stages, num_micro_batches)
                for stage in range(num_stages)
            ]
            assert finishes(
                with_hops(stream, stage, num_stages, first_trained)
                for stage, stream in enumerate(streams)
            )


def test_nothing_goes_back_to_stages_that_are_not_trained():
    for stage, sends in ((0, 0), (1, 0), (2, 4)):
        steps = list(with_hops(gpipe(stage, 3, 4), stage, 3, first_trained=1))
        hops = [step for step in steps if isinstance(step, Hop)]
        assert sum(hop.send is not None and hop.send.kind == "gradient" for hop in hops) == sends
        assert any(step[0] == "backward" for step in steps) == (stage >= 1)
