"""Micro-batches, mixed precision and stragglers: what they change, and what they must not."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from ranks import travel_by_value
from torch import nn

from labkit import train_with
from labkit.strategies import local_gradients
from labkit.strategies.local_gradients import LocalGradients

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


def test_a_straggler_sleeps_for_the_rest_of_its_factor(monkeypatch):
    naps = []
    # The first micro-batch, two of 3 samples, a pause of the system, one of 6 samples.
    times_s = [0.0, *(10.0, 12.0), *(20.0, 22.0), *(30.0, 130.0), *(200.0, 204.0)]
    device = torch.device("cpu")
    for rank in (0, 1):
        clock = iter(times_s)
        fake = SimpleNamespace(perf_counter=lambda clock=clock: next(clock), sleep=naps.append)
        monkeypatch.setattr(local_gradients, "time", fake)
        comm = SimpleNamespace(rank=rank, device=device, span=lambda kind: nullcontext())
        gradients = LocalGradients(comm, nn.Linear(2, 2), straggler=(0, 4.0))
        for count in (3, 3, 3, 3, 6):
            gradients.add(torch.ones(count, 2), torch.zeros(count, dtype=torch.long), 1)
    assert naps == pytest.approx([6.0, 6.0, 6.0, 12.0])
