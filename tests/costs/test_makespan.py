"""The length of a step alone against its slots: equal to the bit."""

import random

import pytest

from labkit.costs.makespan import makespan_s, pipeline_streams
from labkit.costs.pipeline_timeline import predicted_slots


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 6])
def test_it_ends_with_the_last_slot(schedule, num_stages):
    draw = random.Random(num_stages)
    for micro_batches in (1, 2, 3, 8):
        for first_trained in range(num_stages + 1):
            forward_s, backward_s = ([draw.random() for _ in range(num_stages)] for _ in range(2))
            hop_s = [draw.random() for _ in range(num_stages - 1)]
            streams = pipeline_streams(schedule, num_stages, micro_batches, first_trained)
            slots = predicted_slots(streams, forward_s, backward_s, hop_s)
            end_s = makespan_s(
                schedule, micro_batches, forward_s, backward_s, hop_s, first_trained
            )
            assert end_s == max(slot.end_s for slot in slots)


def test_the_formula_of_gpipe_for_any_stages():
    """Sum of all times of a micro-batch, and M - 1 times the longest forward and backward."""
    forward_s, backward_s, hop_s = [2.0, 5.0, 3.0], [4.0, 6.0, 9.0], [1.0, 0.5]
    for micro_batches in (1, 2, 10):
        once = sum(forward_s) + sum(backward_s) + 2 * sum(hop_s)
        expected = once + (micro_batches - 1) * (5 + 9)
        assert makespan_s("gpipe", micro_batches, forward_s, backward_s, hop_s) == expected


def test_frozen_stages_have_no_backward():
    streams = pipeline_streams("1f1b", 3, 2, first_trained=1)
    assert [" ".join(map(str, stream)) for stream in streams] == [
        "F0 F1",
        "F0 F1 B0 B1",
        "F0 B0 F1 B1",
    ]
    # Two forwards on stage 0, a hop, stage 1, a hop, stage 2, and back to stage 1 only.
    assert makespan_s("gpipe", 1, [1, 1, 1], [7, 2, 2], [0.5, 0.5], first_trained=1) == 8.5
