"""Joining a group of NCCL ranks and leaving it: settings, errors, and what happens at the end."""

import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from labkit.comm import reads
from labkit.comm.torch_transport import TorchTransport, means_loss
from labkit.devices import plan
from labkit.runtime import connect as joining
from labkit.runtime.failures import report_of_failure

NCCL_LOST = (
    "NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited or there was a network error\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely."
)


class FakeGroup:
    """Stands for a process group of NCCL."""

    def __init__(self):
        self.calls = []

    def abort(self):
        self.calls.append("abort")


@pytest.fixture
def joined(monkeypatch):
    """connect() as rank 1 of 2 with these GPUs: how the group was made, and what was called."""
    made, group = {}, FakeGroup()
    finalizers = []

    def join(gpus, transport="auto"):
        for name, value in {"RANK": "1", "LOCAL_RANK": "1"}.items():
            monkeypatch.setenv(name, value)
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, "2")
        for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_MULTI_RANK_GPU_ENABLE"):
            # Set and then removed, so that what connect() sets does not outlive the test.
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.update(device=device))
        monkeypatch.setattr(
            dist, "init_process_group", lambda *args, **settings: made.update(settings, args=args)
        )
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: group)
        monkeypatch.setattr(joining, "meet", lambda *args: None)
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: None)
        monkeypatch.setattr(joining, "flush_before_reads", lambda session: None)
        monkeypatch.setattr(joining, "_leaving", [])
        monkeypatch.setattr(
            joining, "Finalize", lambda obj, call, exitpriority: finalizers.append(call)
        )
        monkeypatch.setattr("labkit.comm.device_timers.CudaTimer", lambda device: FakeTimer())
        meeting = SimpleNamespace(store=lambda size: SimpleNamespace(set_timeout=lambda s: None))
        chosen = plan(2, "cuda", transport, gpus=gpus)
        return joining.connect(chosen, 60.0, None, meeting), made, group, finalizers

    return join


class FakeTimer:
    def mark(self):
        return 0.0

    def calibrate(self):
        pass


class TestJoining:
    def test_a_gpu_for_each_rank(self, joined):
        comm, made, *_ = joined(2)
        assert made["args"] == ("nccl",)
        assert made["device_id"] == made["device"] == comm.device == torch.device("cuda:1")
        assert made["timeout"] == timedelta(seconds=60 + joining.PATIENCE_S)
        assert comm.session.queue is not None
        # PyTorch's default would kill the process before it can tell what was wrong.
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
        assert "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ

    def test_what_is_set_by_hand_stays(self, joined, monkeypatch):
        joined(8)
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        joining.connect(plan(2, "cuda", gpus=8), 60.0, None, fake_meeting())
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"

    def test_one_gpu_for_both_is_gloo_and_nccl_on_request(self, joined):
        comm, made, *_ = joined(1)
        assert (made["args"], made["device_id"]) == (("gloo",), None)
        assert comm.session.queue is None
        comm, made, *_ = joined(1, "nccl")
        assert (made["args"], made["device_id"]) == (("nccl",), torch.device("cuda:0"))
        assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"

    @pytest.mark.parametrize(
        ("error", "kind", "said"),
        [
            (torch.OutOfMemoryError("CUDA out of memory."), torch.OutOfMemoryError, "out of mem"),
            (
                dist.DistBackendError(
                    "NCCL error\nMultiple Ranks are using the same GPU\nframe #0"
                ),
                RuntimeError,
                "rank 1 could not start nccl: NCCL error\nMultiple Ranks are using the same GPU$",
            ),
            (dist.DistNetworkError("no route"), ConnectionError, "could not join the others at"),
            (dist.DistStoreError("wait timeout"), ConnectionError, "could not join the others at"),
            (RuntimeError("gloo/transport/tcp: closed"), ConnectionError, "could not connect to"),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
    )
    def test_an_error_keeps_its_cause(self, error, kind, said, monkeypatch):
        def fails(*args, **settings):
            raise error

        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setattr(dist, "init_process_group", fails)
        store = SimpleNamespace(set_timeout=lambda patience: None)
        with pytest.raises(kind, match=said) as caught:
            joining._join_group("nccl", 1.0, torch.device("cuda:0"), store)
        assert isinstance(caught.value, ConnectionError) == (kind is ConnectionError)


def fake_meeting():
    return SimpleNamespace(store=lambda size: SimpleNamespace(set_timeout=lambda patience: None))


class TestLeaving:
    @pytest.fixture
    def left(self, monkeypatch, joined):
        """Leave the group: what was called on it."""

        def leave(close, is_initialized=True):
            comm, _, group, (leave_group,) = joined(2)
            monkeypatch.setattr(dist, "is_initialized", lambda: is_initialized)
            monkeypatch.setattr(
                dist, "destroy_process_group", lambda: group.calls.append("destroy")
            )
            if close:
                comm.session.close()
            leave_group()
            return group.calls

        return leave

    def test_in_good_order_after_a_run_that_has_ended_well(self, left):
        assert left(close=True) == ["destroy"]

    def test_after_a_failure_it_is_aborted_and_not_waited_for(self, left):
        assert left(close=False) == ["abort"]

    def test_a_program_that_has_left_it_already(self, left):
        assert left(close=True, is_initialized=False) == []


class TestAbort:
    def test_an_abort_that_hangs_does_not_hold_up_the_program(self, monkeypatch):
        import threading

        from labkit.comm import torch_transport

        held = threading.Event()
        group = SimpleNamespace(abort=lambda: held.wait(30))
        monkeypatch.setattr(torch_transport, "ABORT_PATIENCE_S", 0.05)
        TorchTransport("nccl", torch.device("cuda:0"), group).abort()
        held.set()

    def test_an_abort_that_fails_is_told(self, capsys):
        def fails():
            raise RuntimeError("no such group\nException raised from abort")

        group = SimpleNamespace(abort=fails)
        TorchTransport("nccl", torch.device("cuda:0"), group).abort()
        assert "could not be aborted: no such group\n" in capsys.readouterr().err


class TestWhatAnErrorMeans:
    @pytest.mark.parametrize(
        ("error", "is_loss"),
        [
            (RuntimeError("[/x/gloo/transport/tcp/pair.cc:5] Connection closed by peer"), True),
            (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting"), True),
            (dist.DistBackendError(NCCL_LOST), True),
            (dist.DistNetworkError("Connection reset by peer"), True),
            (RuntimeError("NCCL communicator was aborted on rank 1."), True),
            (RuntimeError("NCCL operation timed out"), True),
            (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), False),
            (torch.AcceleratorError("CUDA error: device-side assert triggered"), False),
            (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
            (RuntimeError("Tensors must be CUDA and dense"), False),
            (
                dist.DistBackendError("ncclInvalidUsage: invalid usage"),
                False,
            ),
        ],
        ids=lambda value: str(value)[:30],
    )
    def test_only_a_connection_that_has_ended_is_a_lost_peer(self, error, is_loss):
        assert means_loss(error) == is_loss

        def fails(*args):
            raise error

        group = SimpleNamespace(send=fails, recv=fails)
        transport = TorchTransport("gloo", torch.device("cpu"), group)
        for call in (transport.send, transport.recv):
            with pytest.raises(ConnectionError if is_loss else type(error)):
                call(torch.ones(2), 1)
        assert (report_of_failure(0, error).kind == "peer_lost") == is_loss

    def test_memory_of_a_gpu_keeps_request_and_what_is_free(self):
        said = (
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 "
            "GiB of which 1.00 GiB is free.\nException raised from malloc at x.cpp:1\nframe #0"
        )
        summary = report_of_failure(0, torch.OutOfMemoryError(said)).summary
        assert "raised OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB" in summary
        assert "of which 1.00 GiB is free. Next step: a smaller batch" in summary
        assert "frame #0" not in summary

    def test_memory_that_pytorch_has_not_allocated_is_asked_for(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**33))
        error = torch.AcceleratorError("CUDA error: out of memory")
        summary = report_of_failure(0, error).summary
        assert "out of memory (1 GiB of the GPU's 8 GiB are free.) Next step:" in summary

    def test_a_kernel_that_failed_names_the_variable_that_shows_its_line(self):
        said = (
            "CUDA error: device-side assert triggered\nCUDA kernel errors might be "
            "asynchronously reported at some other API call, so the stacktrace below might be "
            "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
        )
        summary = report_of_failure(0, torch.AcceleratorError(said)).summary
        assert "AcceleratorError: CUDA error: device-side assert triggered. The GPU" in summary
        assert 'os.environ["CUDA_LAUNCH_BLOCKING"] = "1" before the run' in summary


class TestReads:
    def test_a_value_elsewhere_or_after_the_run_waits_for_nothing(self, monkeypatch):
        flushed = []
        session = SimpleNamespace(
            device=torch.device("cuda"),
            is_closed=False,
            flush=lambda name, mine: flushed.append(name),
        )
        monkeypatch.setattr(reads, "_session", session)
        item = reads._after_flush(torch.Tensor.item, "item()")
        wait = reads._after_flush(lambda: "waited", "synchronize()")
        assert item(torch.tensor(3)) == 3
        assert flushed == []
        assert wait() == "waited"
        assert flushed == ["synchronize()"]
        session.is_closed = True
        wait()
        assert flushed == ["synchronize()"]
