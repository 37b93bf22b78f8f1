"""Runs on GPUs: how they start, how they fail, and that nothing of them remains."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import needs
import pytest
import torch
from ranks import session_of, travel_by_value, wait_until, write_program_that_never_ends

from labkit import DeadlockError, WorkerError, run
from labkit.devices import hardware

travel_by_value(__name__)
ROOT = Path(__file__).resolve().parents[2]
# What a context or a run may leave for a moment; other programs may use the GPU as well.
SLACK_BYTES = 64 * 2**20


def add_neighbours(comm):
    mine = torch.full((1000,), float(comm.rank), device=comm.device)
    theirs = torch.zeros_like(mine)
    with comm.span("compute"):
        mine = mine * 2
    if comm.world_size > 1:
        right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        comm.exchange(mine, right, theirs, left)
    comm.barrier()
    return (mine + theirs)[0].item()


def python(source, *words, **options):
    """Run a program in a process of its own; its outcome."""
    command = [sys.executable, "-c", textwrap.dedent(source), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)


def free_bytes(gpu=0):
    """The memory of a GPU that nobody uses, asked by a process that then ends."""
    source = f"import torch; print(torch.cuda.mem_get_info({gpu})[0])"
    return int(python(source, check=True).stdout)


@needs.gpus(1)
def test_one_rank_has_the_gpu_and_the_caller_never_initialises_cuda():
    result = run(add_neighbours, world_size=1, device="cuda")
    assert result.values == [0.0]
    (compute,) = result.trace.of(0, "compute")
    assert 0 < compute.duration_s < 10
    assert len(hardware()["gpus"]) == needs.GPUS
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("world_size", [2, 3])
@needs.gpus(1)
def test_ranks_share_a_gpu(world_size):
    devices = ",".join(["cuda:0"] * world_size)
    result = run(add_neighbours, world_size=world_size, devices=devices)
    expected = [2.0 * rank + 2.0 * ((rank - 1) % world_size) for rank in range(world_size)]
    assert result.values == expected
    assert result.bytes_sent == [4000] * world_size


@needs.gpus(2)
def test_each_rank_has_a_gpu_and_talks_over_nccl():
    def where(comm):
        return str(comm.device), torch.distributed.get_backend(), add_neighbours(comm)

    found = run(where, world_size=2, device="cuda").values
    assert found == [("cuda:0", "nccl", 2.0), ("cuda:1", "nccl", 2.0)]


@needs.gpus(2)
def test_named_devices_are_the_ranks_in_order():
    def where(comm):
        return str(comm.device), torch.cuda.current_device()

    found = run(where, world_size=2, devices="cuda:1,cuda:0").values
    assert found == [("cuda:1", 1), ("cuda:0", 0)]


@needs.gpus(3)
def test_more_ranks_than_two_over_nccl():
    world_size = needs.GPUS
    found = run(add_neighbours, world_size=world_size, device="cuda").values
    assert found == [2.0 * r + 2.0 * ((r - 1) % world_size) for r in range(world_size)]


@needs.gpus(1)
def test_a_rank_is_not_in_a_bad_fork():
    """An import that had asked for CUDA in the forkserver would spoil every rank."""

    def forked(comm):
        return torch.cuda._is_in_bad_fork(), torch.ones(2, device=comm.device).sum().item()

    assert run(forked, world_size=1, device="cuda").values == [(False, 2.0)]


@needs.gpus(1)
def test_it_works_after_the_caller_has_initialised_cuda(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import torch
        from labkit import run

        def device(comm):
            return str(torch.ones(1, device=comm.device).device)

        if __name__ == "__main__":
            torch.ones(1, device="cuda")
            print(run(device, world_size=2, devices="cuda:0,cuda:0").values)
        """)
    )
    done = subprocess.run([sys.executable, program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "['cuda:0', 'cuda:0']", done.stderr


@pytest.mark.parametrize("devices", needs.placed(2))
def test_a_deadlock_ends_and_is_explained(devices):
    def both_receive(comm):
        comm.recv(torch.zeros(4, device=comm.device), 1 - comm.rank)

    with pytest.raises(DeadlockError) as caught:
        run(both_receive, world_size=2, devices=devices, timeout_s=30)
    assert "recv" in str(caught.value)
    assert run(add_neighbours, world_size=2, devices=devices).values == [2.0, 2.0]


@pytest.mark.parametrize("devices", needs.placed(2))
def test_a_killed_rank_is_named_and_the_next_run_works(devices):
    def dies(comm):
        received = torch.zeros(2**22, device=comm.device)
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.recv(received, 1)
        return received.sum().item()

    with pytest.raises(WorkerError, match="rank 1") as caught:
        run(dies, world_size=2, devices=devices, timeout_s=60)
    assert caught.value.rank == 1
    assert run(add_neighbours, world_size=2, devices=devices).values == [2.0, 2.0]


@pytest.mark.parametrize("devices", needs.placed(2))
def test_an_error_of_a_rank_keeps_its_kind(devices):
    def takes_too_much(comm):
        if comm.rank == 0:
            torch.empty(2**50, dtype=torch.uint8, device=comm.device)
        comm.barrier()

    with pytest.raises(WorkerError, match=r"(?i)memory") as caught:
        run(takes_too_much, world_size=2, devices=devices, timeout_s=60)
    assert caught.value.rank == 0


@needs.gpus(1)
def test_ctrl_c_ends_all_ranks(tmp_path):
    script = write_program_that_never_ends(tmp_path)
    words = [sys.executable, script, tmp_path]
    options = {"cwd": ROOT, "start_new_session": True, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, **options) as process:
        assert wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2, 90)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode != 0
    assert wait_until(lambda: not session_of(process.pid), 30)


@needs.real
@needs.gpus(1)
def test_the_memory_is_back_after_runs_and_after_a_killed_rank():
    def takes_a_gigabyte(comm, dies):
        held = torch.ones(2**30, dtype=torch.uint8, device=comm.device)
        if dies and comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()
        return held.nbytes

    before = free_bytes()
    settings = {"world_size": 2, "devices": "cuda:0,cuda:0", "timeout_s": 60}
    run(takes_a_gigabyte, False, **settings)
    with pytest.raises(WorkerError):
        run(takes_a_gigabyte, True, **settings)
    assert wait_until(lambda: free_bytes() > before - SLACK_BYTES, 30)


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=needs.gpus(n)) for n in (1, 2)])
def test_torchrun(ranks, tmp_path):
    """With twice as many ranks as GPUs here, and with a GPU for each."""
    world_size = 2 * ranks if ranks == 1 else ranks
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    words += ["-m", "labkit", "train", "--strategy", "ring_all_reduce", "--device", "cuda"]
    words += ["--train-size", "177", "--batch-size", "35", "--json", str(tmp_path / "out.json")]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((tmp_path / "out.json").read_text())
    assert len(record["bytes_sent"]) == world_size
    assert min(record["bytes_sent"]) > 0
