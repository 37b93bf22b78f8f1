"""Joining a group of NCCL ranks and leaving it, with a group that stands for NCCL's."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from labkit.comm.torch_transport import means_loss
from labkit.devices import plan
from labkit.runtime import connect as joining
from labkit.runtime.failures import report_of_failure

NCCL_LOST = (
    "NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited or there was a network error\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely."
)


@pytest.fixture
def rank_1_of_2(monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    # Set and then removed, so that what connect() sets does not outlive the test.
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")


def join(monkeypatch, gpus, make_group):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(joining, "check_usable", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", make_group)
    store = SimpleNamespace(set_timeout=lambda patience: None)
    meeting = SimpleNamespace(store=lambda size: store)
    joining.connect(plan(2, "cuda", gpus=gpus), 60.0, None, meeting)


@pytest.mark.parametrize(("gpus", "backend"), [(2, "nccl"), (1, "gloo")])
def test_a_gpu_for_each_rank_is_nccl_and_one_for_both_is_gloo(
    gpus, backend, rank_1_of_2, monkeypatch
):
    made = {}

    def make_group(name, **settings):
        made.update(settings, name=name)
        raise torch.OutOfMemoryError("enough is known")

    with pytest.raises(torch.OutOfMemoryError):
        join(monkeypatch, gpus, make_group)
    assert made["name"] == backend
    assert made["device_id"] == (torch.device("cuda:1") if backend == "nccl" else None)
    # PyTorch's default would kill the process before it can tell what was wrong.
    is_set = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "2"
    assert is_set == (backend == "nccl")


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (
            dist.DistBackendError("NCCL error\nMultiple Ranks\nException raised from x.cpp"),
            RuntimeError,
            "rank 1 could not start nccl: NCCL error\nMultiple Ranks$",
        ),
        (dist.DistStoreError("wait timeout"), ConnectionError, "could not connect to the other"),
        (RuntimeError("gloo/transport/tcp: closed"), ConnectionError, "could not connect to"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_an_error_keeps_its_cause(error, kind, said, rank_1_of_2, monkeypatch):
    def fails(*args, **settings):
        raise error

    with pytest.raises(kind, match=said) as caught:
        join(monkeypatch, 2, fails)
    assert isinstance(caught.value, ConnectionError) == (kind is ConnectionError)


@pytest.mark.parametrize(
    ("error", "is_loss"),
    [
        (RuntimeError("[/x/gloo/transport/tcp/pair.cc:5] Connection closed by peer"), True),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting"), True),
        (dist.DistBackendError(NCCL_LOST), True),
        (RuntimeError("NCCL communicator was aborted on rank 1."), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), False),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (dist.DistBackendError("ncclInvalidUsage: invalid usage"), False),
    ],
    ids=lambda value: str(value)[:30],
)
def test_only_a_connection_that_has_ended_is_a_lost_peer(error, is_loss):
    assert means_loss(error) == is_loss
    assert (report_of_failure(0, error).kind == "peer_lost") == is_loss


def test_memory_of_a_gpu_keeps_request_and_what_is_free():
    said = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB "
        "of which 1.00 GiB is free.\nException raised from malloc at x.cpp:1\nframe #0"
    )
    summary = report_of_failure(0, torch.OutOfMemoryError(said)).summary
    assert "raised OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB" in summary
    assert summary.endswith("of which 1.00 GiB is free.")
