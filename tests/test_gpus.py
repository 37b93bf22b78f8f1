"""Which GPUs count, tried with other processes in place of real GPUs."""

import subprocess

import pytest
import torch

from labkit import gpus
from labkit.gpus import Gpu, Gpus


@pytest.fixture
def tried(monkeypatch):
    """Let the trying process print these lines and end with this code."""

    def pretend(listed, lines, code=0, stderr=""):
        gpus._tried.cache_clear()
        monkeypatch.setattr(torch.cuda, "device_count", lambda: listed)
        done = subprocess.CompletedProcess([], code, "\n".join(lines), stderr)
        monkeypatch.setattr(gpus.subprocess, "run", lambda *args, **kwargs: done)
        return gpus.found()

    yield pretend
    gpus._tried.cache_clear()


def test_without_listed_gpus_nothing_is_tried(tried):
    assert tried(0, ["nonsense"], code=1) == Gpus()


def test_a_gpu_on_which_no_kernel_runs_does_not_count_and_the_reason_is_kept(tried):
    seen = tried(
        2,
        [
            '{"index": 0, "error": "", "name": "A", "memory_bytes": 8, "capability": [9, 0]}',
            '{"index": 1, "error": "AcceleratorError: no kernel image", "name": "Old"}',
        ],
    )
    assert seen.usable == (Gpu(0, "A", 8, (9, 0)),)
    assert seen.why_not == "cuda:1 cannot be used (AcceleratorError: no kernel image)"


def test_a_process_that_dies_while_it_tries_means_no_gpu(tried):
    seen = tried(1, [], code=-6, stderr="first\nRuntimeError: the driver is too old")
    assert seen.usable == ()
    assert "the driver is too old" in seen.why_not


def test_this_process_never_initialises_cuda():
    gpus.found()
    assert not torch.cuda.is_initialized()
