"""The checks of page 09: each accepts its solution, and names the mistake in each wrong answer."""

import itertools

import pytest
import torch
from ranks import travel_by_value

from labkit import check
from labkit.costs.pipeline_timeline import bubble, bubble_formula
from labkit.schedules.pipeline import Action, gpipe

travel_by_value(__name__)


def told(verdict, capsys):
    capsys.readouterr()
    assert not verdict
    return " ".join(verdict.notes)


# The bubble of a timetable


def busy(slots):
    return sum(slot.end_s - slot.start_s for slot in slots)


def bounds(slots):
    return min(slot.start_s for slot in slots), max(slot.end_s for slot in slots)


def stages_of(slots):
    return max(slot.stage for slot in slots) + 1


def idle_share(slots):
    start_s, end_s = bounds(slots)
    return 1 - busy(slots) / (stages_of(slots) * (end_s - start_s))


def by_gaps(slots):
    gaps = 0.0
    for stage in range(stages_of(slots)):
        row = sorted((s for s in slots if s.stage == stage), key=lambda s: s.start_s)
        gaps += sum(after.start_s - one.end_s for one, after in itertools.pairwise(row))
    start_s, end_s = bounds(slots)
    return gaps / (stages_of(slots) * (end_s - start_s))


WRONG_BUBBLES = [
    (lambda slots: 1 - idle_share(slots), "the share of work"),
    (lambda slots: idle_share(slots) / (1 - idle_share(slots)), "by the working time"),
    (lambda slots: idle_share(slots) * stages_of(slots), "P times as much"),
    (
        lambda slots: bubble_formula(stages_of(slots), len({s.micro_batch for s in slots})),
        "the formula for equal stages",
    ),
    (
        lambda slots: 1 - busy(slots) / (stages_of(slots) * bounds(slots)[1]),
        "need not be at second 0",
    ),
    (
        lambda slots: 1 - busy(slots) / (stages_of(slots) * (slots[-1].end_s - bounds(slots)[0])),
        "whichever slot ends last",
    ),
    (by_gaps, "before its first slot and after its last one"),
    (lambda slots: 100 * idle_share(slots), "in percent"),
    (
        lambda slots: 0.25,
        "GPipe, 3 stages, 4 micro-batches the bubble is 0.3333, and yours says 0.25",
    ),
    (lambda slots: None, "returned nothing"),
    (lambda slots: slots["end_s"], "raised TypeError"),
]


def test_the_bubble_passes():
    assert check.pipeline.bubble(idle_share)
    assert check.pipeline.bubble(bubble)


@pytest.mark.parametrize(("wrong", "sentence"), WRONG_BUBBLES)
def test_wrong_bubbles_are_named(wrong, sentence, capsys):
    assert sentence in told(check.pipeline.bubble(wrong), capsys)


# The 1F1B stream


def with_warm_up(ahead):
    """1F1B with ``ahead(stage, P)`` forwards before the first turn."""

    def fn(stage, P, M):
        warm_up = min(ahead(stage, P), M)
        for micro_batch in range(warm_up):
            yield Action("forward", micro_batch)
        for micro_batch in range(M):
            if micro_batch + warm_up < M:
                yield Action("forward", micro_batch + warm_up)
            yield Action("backward", micro_batch)

    return fn


def in_words(stage, P, M):
    """Another right answer: a list of strings."""
    return [str(action) for action in with_warm_up(lambda s, P: P - 1 - s)(stage, P, M)]


def without_min(stage, P, M):
    ahead = P - 1 - stage
    yield from (Action("forward", m) for m in range(ahead))
    for micro_batch in range(M):
        if micro_batch + ahead < M:
            yield Action("forward", micro_batch + ahead)
        yield Action("backward", micro_batch)


def without_drain(stage, P, M):
    for action in in_words(stage, P, M):
        if action[0] == "F" or int(action[1:]) < M - (P - 1 - stage):
            yield action


def forwards_again(stage, P, M):
    ahead = P - 1 - stage
    yield from (f"F{m}" for m in range(ahead))
    yield from (f"{kind}{m}" for m in range(M) for kind in "FB")


def backward_first(stage, P, M):
    """In each turn the backward comes before the forward."""
    ahead = min(P - 1 - stage, M)
    yield from (f"F{m}" for m in range(ahead))
    for m in range(M):
        yield f"B{m}"
        if m + ahead < M:
            yield f"F{m + ahead}"


def last_backward_first(stage, P, M):
    actions = in_words(stage, P, M)
    return actions[: -(P - stage)] + actions[-(P - stage) :][::-1] if stage == 0 else actions


def right_on_stage_0_alone(stage, P, M):
    return in_words(stage, P, M) if stage == 0 else map(str, gpipe(stage, P, M))


def without_end(stage, P, M):
    return map(str, itertools.cycle([Action("forward", 0), Action("backward", 0)]))


WRONG_STREAMS = [
    (gpipe, "fill and drain, which holds all micro-batches"),
    (with_warm_up(lambda s, P: 0), "the stream of the last one, so it is right there alone"),
    (with_warm_up(lambda s, P: P - 1), "the stream of stage 0, so it is right there alone"),
    (with_warm_up(lambda s, P: s), "from the wrong end"),
    (with_warm_up(lambda s, P: s), "these streams can never finish"),
    (with_warm_up(lambda s, P: P - s), "one forward too long"),
    (with_warm_up(lambda s, P: P - s), "stage 0 holds 5 micro-batches at once, where 4 suffice"),
    (with_warm_up(lambda s, P: max(P - 2 - s, 0)), "one forward too short"),
    (with_warm_up(lambda s, P: max(P - 2 - s, 0)), "a step takes 54 where 33 suffice"),
    (
        without_min,
        "and 2 micro-batches, stage 0 runs F2, but micro-batches are numbered 0 to 1",
    ),
    (without_drain, "never runs B5, B6, B7: after the last forward, the backwards"),
    (forwards_again, "stage 0 runs F0, F1, F2 more than once (stage 3 alone is right)"),
    (backward_first, "stage 3 runs B0 before F0"),
    (last_backward_first, "stages 0 and 1 run their backwards in different orders"),
    (right_on_stage_0_alone, "(stage 0 alone is right)"),
    (without_end, "stage 0 runs F0, B0 more than once"),
    (lambda stage, P, M: [], "stage 0 never runs F0, F1"),
    (
        lambda stage, P, M: None,
        "with 4 stages and 8 micro-batches, it returned nothing: yield the actions",
    ),
    (lambda stage, P, M: [3], "8 micro-batches, 3 is no action"),
    (lambda stage, P: [], "raised TypeError"),
    (7, "a function is needed, got int"),
]


def test_the_stream_passes_and_trains(capsys):
    assert check.pipeline.one_f_one_b(with_warm_up(lambda s, P: P - 1 - s))
    assert "4 ranks" in capsys.readouterr().out
    assert check.pipeline.one_f_one_b(in_words, world_sizes=(3,))


@pytest.mark.parametrize(("wrong", "sentence"), WRONG_STREAMS)
def test_wrong_streams_are_named(wrong, sentence, capsys):
    assert sentence in told(check.pipeline.one_f_one_b(wrong), capsys)


def test_a_stream_right_on_paper_is_trained_with_on_ranks(capsys):
    calls = []

    def right_at_first(stage, P, M):
        """Right while it is looked at on paper; on a rank, M = 5 with P = 2 comes first here."""
        calls.append(stage)
        return in_words(stage, P, M) if (P, M) != (2, 5) else map(str, gpipe(stage, P, M + 1))

    note = told(check.pipeline.one_f_one_b(right_at_first, world_sizes=(2,)), capsys)
    assert len(calls) == 4 + 3 + 2 + 2 + 4
    assert "rank" in note


# The hop


def carry_out(comm, hop, outgoing, landing):
    if hop.send and hop.recv:
        comm.exchange(outgoing, hop.send.peer, landing, hop.recv.peer)
    elif hop.send:
        comm.send(outgoing, hop.send.peer)
    else:
        comm.recv(landing, hop.recv.peer)


def send_first(comm, hop, outgoing, landing):
    if hop.send:
        comm.send(outgoing, hop.send.peer)
    if hop.recv:
        comm.recv(landing, hop.recv.peer)


def receive_first(comm, hop, outgoing, landing):
    if hop.recv:
        comm.recv(landing, hop.recv.peer)
    if hop.send:
        comm.send(outgoing, hop.send.peer)


def even_stages_send_first(comm, hop, outgoing, landing):
    (receive_first if comm.rank % 2 else send_first)(comm, hop, outgoing, landing)


def into_another(comm, hop, outgoing, landing):
    carry_out(comm, hop, outgoing, None if landing is None else torch.empty_like(landing))


def exchange_only(comm, hop, outgoing, landing):
    comm.exchange(outgoing, hop.send.peer, landing, hop.recv.peer)


def to_the_next_stage(comm, hop, outgoing, landing):
    if hop.send and hop.recv:
        comm.exchange(outgoing, comm.rank + 1, landing, comm.rank + 1)
    elif hop.send:
        comm.send(outgoing, comm.rank + 1)
    else:
        comm.recv(landing, comm.rank - 1)


def only_sends(comm, hop, outgoing, landing):
    if hop.send:
        comm.send(outgoing, hop.send.peer)


def own_tensor_back(comm, hop, outgoing, landing):
    carry_out(comm, hop, outgoing, landing)
    if hop.send and hop.recv:
        landing.copy_(outgoing)


def test_the_hop_passes(capsys):
    assert check.pipeline.hop(carry_out)
    assert "messages" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (send_first, "each waits for the next"),
        (receive_first, "each waits for the next"),
        (even_stages_send_first, "calls of comm for"),
        (into_another, "never landed: receive into landing, in place"),
        (exchange_only, "'NoneType' object has no attribute 'peer'"),
        (to_the_next_stage, "rank 2 cannot send to rank 3"),
        (only_sends, "waiting for rank 1 to receive"),
        (own_tensor_back, "is instead the activation of micro-batch"),
        (lambda comm, hop: None, "is called with (comm, hop, outgoing, landing)"),
    ],
)
def test_wrong_hops_are_named(wrong, sentence, capsys):
    assert sentence in told(check.pipeline.hop(wrong, world_sizes=(3,)), capsys)
