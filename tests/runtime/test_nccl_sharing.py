"""Several ranks on one GPU over NCCL: on request only, tried first, told clearly."""

import pytest

from labkit import run
from labkit.devices import Plan, plan
from labkit.runtime import launch, nccl_sharing


@pytest.fixture(autouse=True)
def tried_anew():
    nccl_sharing._tried.cache_clear()
    yield
    nccl_sharing._tried.cache_clear()


class TestPlans:
    def test_gloo_stays_the_default(self):
        assert plan(4, "cuda", gpus=1).backend == "gloo"
        assert plan(4, "cuda", gpus=4).backend == "nccl"

    def test_on_request_ranks_share_a_gpu_and_are_told_so(self):
        chosen = plan(4, "cuda", "nccl", gpus=2)
        assert (chosen.backend, chosen.transport) == ("nccl", "torch")
        assert chosen.devices == ("cuda:0", "cuda:1", "cuda:0", "cuda:1")
        assert "4 ranks share 2 GPUs: they talk over NCCL, which NCCL_MULTI_RANK" in chosen.note
        assert plan(2, "cuda", "nccl", gpus=2).note == ""

    def test_ranks_on_the_cpu_are_refused(self):
        with pytest.raises(ValueError, match=r"'nccl' moves the memory of GPUs only.*run on cpu"):
            plan(2, "cpu", "nccl")
        with pytest.raises(ValueError, match="run on cpu and cuda:0: use 'auto' or 'gloo'"):
            plan(2, "auto", "nccl", gpus=1, devices="cuda:0,cpu")


class TestCheck:
    def test_it_is_tried_only_where_ranks_share_a_gpu_over_nccl(self, monkeypatch):
        tried = []
        monkeypatch.setattr(nccl_sharing, "_try_two", lambda device: tried.append(device) or "")
        for apart in (plan(2, "cuda", gpus=2), plan(2, "cuda", gpus=1), plan(2, "cpu")):
            nccl_sharing.check_sharing(apart)
        assert tried == []
        for _ in range(2):
            nccl_sharing.check_sharing(Plan("nccl", ("cuda:0", "cuda:1", "cuda:1")))
        assert tried == ["cuda:1"]

    def test_a_run_is_refused_with_the_reason_and_what_else_there_is(self, monkeypatch):
        monkeypatch.setattr(nccl_sharing, "_try_two", lambda device: "NCCL 2.19 is too old")
        shared = plan(2, "cuda", "nccl", gpus=1)
        monkeypatch.setattr(launch, "plan", lambda *args, **options: shared)
        with pytest.raises(ValueError, match=r"on this machine: NCCL 2\.19 is") as no:
            run(lambda comm: None, world_size=2, device="cuda", transport="nccl")
        assert "several ranks on cuda:0" in str(no.value)
        assert "'auto' (gloo) or 'shared' (CUDA IPC), or a GPU for each rank" in str(no.value)

    def test_a_run_that_may_lose_ranks_talks_over_gloo(self, monkeypatch):
        asked = []

        def plan_on_gpus(world_size, device, transport, devices):
            asked.append(transport)
            return Plan("nccl" if transport == "auto" else "gloo", ("cpu",) * world_size)

        monkeypatch.setattr(launch, "plan", plan_on_gpus)
        assert run(lambda comm: comm.rank, world_size=2, may_lose=[1]).values == [0, 1]
        assert asked == ["auto", "gloo"]


class TestTheTry:
    """With other code in the place of NCCL's: this machine may have no GPU."""

    def test_two_that_succeed(self, monkeypatch):
        monkeypatch.setattr(nccl_sharing, "_TRY", "print('fine')")
        assert nccl_sharing.why_not() == ""

    def test_the_reason_is_that_of_the_first_to_fail_and_nobody_waits_for_the_other(
        self, monkeypatch
    ):
        code = (
            "import os, sys, time\n"
            "assert os.environ['NCCL_MULTI_RANK_GPU_ENABLE'] == '1'\n"
            "time.sleep(60 * (sys.argv[1] == '0'))\n"
            "raise RuntimeError('Multiple Ranks are using the same GPU/Partition.')\n"
        )
        monkeypatch.setattr(nccl_sharing, "_TRY", code)
        why = nccl_sharing.why_not("cuda:0")
        assert why == "RuntimeError: Multiple Ranks are using the same GPU/Partition"
        monkeypatch.setattr(nccl_sharing, "_TRY", "")
        assert nccl_sharing.why_not("cuda:0") == why  # tried once
        assert nccl_sharing.why_not("cuda:1") == ""

    def test_two_that_hang(self, monkeypatch):
        monkeypatch.setattr(nccl_sharing, "_TRY", "import time\ntime.sleep(60)")
        monkeypatch.setattr(nccl_sharing, "_PATIENCE_S", 0.2)
        assert "had not exchanged a message after 0.2 s" in nccl_sharing.why_not()

    def test_the_code_that_is_tried_can_be_compiled(self):
        compile(nccl_sharing._TRY, "try", "exec")
