"""Pipelines on paper: the papers' pictures, the bubble's formula, streams that never end."""

import math

import pytest

from labkit.costs.link import Link
from labkit.costs.pipeline_timeline import (
    Slot,
    bubble,
    bubble_formula,
    micro_batches_for_bubble,
    predicted_slots,
    samples_that_hide_hop,
)
from labkit.schedules.pipeline import Action, pipeline_streams


def drawn(slots):
    """A row of text per rank, a column per second."""
    rows = [["."] * int(max(slot.end_s for slot in slots)) for _ in {slot.rank for slot in slots}]
    for slot in slots:
        for second in range(int(slot.start_s), int(slot.end_s)):
            rows[slot.rank][second] = str(Action(slot.kind, slot.micro_batch, slot.chunk))
    width = max(len(cell) for row in rows for cell in row)
    return [" ".join(f"{cell:{width}}" for cell in row).rstrip() for row in rows]


def test_one_forward_one_backward_with_backward_twice_as_long():
    slots = predicted_slots(pipeline_streams("1f1b", 3, 4), [1] * 3, [2] * 3)
    assert drawn(slots) == [
        "F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3",
        ".  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .",
        ".  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .",
    ]


def test_weights_fill_what_was_a_bubble():
    slots = predicted_slots(pipeline_streams("zero_bubble", 3, 4), [1] * 3, [2] * 3)
    assert drawn(slots) == [
        "F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3",
        ".  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        ".  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]


def test_short_stages_fill_and_drain_in_short_steps():
    slots = predicted_slots(pipeline_streams("interleaved", 2, 4), [1] * 4, [1] * 4)
    assert drawn(slots) == [
        "F0  F1  F0' F1' F2  B0' F3  B1' F2' B0  F3' B1  .   B2' .   B3' B2  B3",
        ".   F0  F1  F0' B0' F1' B1' F2  B0  F3  B1  F2' B2' F3' B3' B2  B3  .",
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_bubbles_of_the_papers(num_ranks):
    """Idle are (P - 1) (F + B - W) of the zero-bubble paper, and (P - 1) (F + B) / V."""
    for count in (4, 8, 12):
        streams = pipeline_streams("zero_bubble", num_ranks, count)
        equal = [[seconds] * num_ranks for seconds in (2.0, 4.0)]
        idle_s = (num_ranks - 1) * (2 + 2 - 2)
        slots = predicted_slots(streams, *equal)
        if count >= 2 * num_ranks:
            assert max(s.end_s for s in slots) == pytest.approx(count * 6 + idle_s)
        for chunks in (2, 3):
            streams = pipeline_streams("interleaved", num_ranks, count, 0, chunks)
            short = [[seconds] * num_ranks * chunks for seconds in (2.0, 4.0)]
            ends = max(slot.end_s for slot in predicted_slots(streams, *short))
            assert ends == pytest.approx(count * chunks * 6 + (num_ranks - 1) * 6)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_equal_stages_and_free_hops_have_the_bubble_of_the_formula(schedule, num_stages):
    for count in (1, 2, 4, 9):
        streams = pipeline_streams(schedule, num_stages, count)
        slots = predicted_slots(streams, [2] * num_stages, [4] * num_stages)
        assert bubble(slots) == pytest.approx(bubble_formula(num_stages, count))


def test_a_hop_delays_the_neighbor_and_occupies_no_stage():
    slots = predicted_slots(pipeline_streams("gpipe", 2, 2), [1, 1], [1, 1], hop_s=[0.5])
    assert slots[:2] == [Slot(0, "forward", 0, 0, 1), Slot(0, "forward", 1, 1, 2)]
    stage_1 = [(slot.start_s, slot.end_s) for slot in slots if slot.rank == 1]
    assert stage_1 == [(1.5, 2.5), (2.5, 3.5), (3.5, 4.5), (4.5, 5.5)]
    assert max(slot.end_s for slot in slots) == 7  # B1's gradient leaves at 5.5 and takes 0.5


@pytest.mark.parametrize("num_stages", [2, 3, 8])
def test_one_micro_batch_less_has_a_larger_bubble(num_stages):
    for most in (0.5, 1 / 3, 0.2, 0.01):
        count = micro_batches_for_bubble(num_stages, most)
        assert bubble_formula(num_stages, count) <= most + 1e-9
        assert count == 1 or bubble_formula(num_stages, count - 1) > most
    assert micro_batches_for_bubble(1, 0.01) == 1
    for share in (0, 1):
        with pytest.raises(ValueError, match="above 0 and below 1"):
            micro_batches_for_bubble(num_stages, share)


def test_a_hop_is_as_long_as_the_forward_beside_it_from_that_many_samples_on():
    link = Link(alpha_s=1e-3, beta_s_per_byte=1e-6)
    samples = samples_that_hide_hop(link, sample_bytes=300, sample_s=5e-4)
    assert samples * 5e-4 == pytest.approx(link.message_seconds(samples * 300))
    assert samples_that_hide_hop(link, sample_bytes=500, sample_s=5e-4) == math.inf


def test_gpipe_hides_a_hop_that_is_no_longer_than_a_forward_but_for_filling_and_draining():
    """P - 1 hops each way; 1F1B waits for more of them."""
    ends = {}
    for schedule in ("gpipe", "1f1b"):
        streams = pipeline_streams(schedule, 4, 16)
        slots = predicted_slots(streams, [1.0] * 4, [2.0] * 4, [1.0] * 3)
        ends[schedule] = max(slot.end_s for slot in slots)
    assert ends["gpipe"] == 3 * (16 + 3) + 2 * 3
    assert ends["1f1b"] > ends["gpipe"]
