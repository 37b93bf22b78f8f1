"""Times on a GPU are true: kernels of a known length against what the trace and results say.

A kernel that only waits (``torch.cuda._sleep``) is queued in microseconds and runs for tenths of a
second: whoever reads the host's clock too early sees nothing of it.
"""

import needs
import pytest
import torch
from torch import nn

from labkit import run, train_with

pytestmark = [needs.gpus(1), needs.real]

CYCLES = 200_000_000
# The clock of a GPU changes with its load.
LEAST, MOST = 0.6, 1.6


def sleep_s(comm):
    """Seconds that the kernel takes, by events; after one that wakes the GPU."""
    times = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(CYCLES)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times)


@pytest.fixture(scope="module")
def kernel_s():
    (found,) = run(sleep_s, world_size=1, device="cuda").values
    assert found > 0.01
    return found


def test_a_span_is_as_long_as_its_kernels_and_not_as_their_launch(kernel_s):
    def spans(comm):
        sleep_s(comm)
        with comm.span("compute"):
            torch.cuda._sleep(CYCLES)
        with comm.span("update"):
            torch.ones(10, device=comm.device)

    result = run(spans, world_size=1, device="cuda")
    (compute,), (update,) = (result.trace.of(0, kind) for kind in ("compute", "update"))
    assert LEAST * kernel_s < compute.duration_s < MOST * kernel_s
    assert update.duration_s < 0.3 * kernel_s
    assert update.start_s >= compute.end_s - 1e-3


class Sleeps(nn.Module):
    def forward(self, images):
        torch.cuda._sleep(CYCLES)
        return images


def test_the_seconds_of_an_epoch_contain_its_kernels(kernel_s):
    model = nn.Sequential(Sleeps(), nn.Flatten(), nn.Linear(64, 10))
    settings = {"device": "cuda", "batch_size": 32, "train_size": 96, "epochs": 2}
    result = train_with("single", model=model, **settings)
    for epoch in result.epochs:
        assert epoch["seconds"] > 3 * LEAST * kernel_s
    assert result.phases_s["compute"] > 6 * LEAST * kernel_s


@pytest.mark.parametrize("devices", needs.placed(2))
def test_waiting_for_a_slow_rank_is_not_a_transfer(devices, kernel_s):
    def waits(comm):
        landing = torch.zeros(1000, device=comm.device)
        comm.exchange(landing.clone(), 1 - comm.rank, landing, 1 - comm.rank)
        comm.barrier()
        if comm.rank == 0:
            torch.cuda._sleep(2 * CYCLES)
            comm.send(landing, 1)
        else:
            comm.recv(landing, 0)

    trace = run(waits, world_size=2, devices=devices).trace
    seconds = trace.seconds_by_kind(1)
    assert seconds["wait"] > 2 * LEAST * kernel_s
    assert seconds["communicate"] < LEAST * kernel_s


def test_a_hop_does_not_contain_the_queue_of_its_target(kernel_s):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), Sleeps(), nn.Linear(64, 10))
    settings = {"batch_size": 32, "train_size": 128, "split_points": "2"}
    for devices in ("cuda:0,cpu", "cpu,cuda:0", *["cuda:0,cuda:1"] * (needs.GPUS > 1)):
        placed = train_with("model_parallel", model=model, devices=devices, **settings)
        for kind in ("hop", "hop back"):
            assert all(h.duration_s < 0.3 * kernel_s for h in placed.trace.of(0, kind)[1:])
