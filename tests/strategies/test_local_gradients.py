"""Micro-batches, mixed precision and stragglers: what they change, and what they must not."""

from ranks import travel_by_value

from labkit import train_with

travel_by_value(__name__)

SMALL = {"epochs": 1, "train_size": 107, "lr": 0.02, "batch_size": 35, "model": "mlp"}


def test_accumulation_equals_the_large_batch_and_costs_no_message():
    # Shares of 35, 18, 17 and 2 samples in 4 micro-batches: 9 + 9 + 9 + 8, ..., 1 + 1.
    settings = SMALL | {"dtype": "float64"}
    whole = train_with("single", **settings)
    parts = train_with("single", accumulate=4, **settings)
    ring = train_with("ring_all_reduce", world_size=2, **settings)
    parts_on_ring = train_with("ring_all_reduce", world_size=2, accumulate=4, **settings)
    assert 0 < parts.difference_from(whole) < parts.tolerance(whole)
    assert parts_on_ring.difference_from(whole) < parts_on_ring.tolerance(whole)
    assert parts_on_ring.replicas_agree
    assert parts_on_ring.messages == ring.messages
    assert parts_on_ring.bytes_sent == ring.bytes_sent
    assert len(whole.trace.of(0, "compute")) == 4
    assert len(parts.trace.of(0, "compute")) == 4 + 4 + 4 + 2
