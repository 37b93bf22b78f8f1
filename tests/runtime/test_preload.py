"""``labkit.warm_up``, and that nothing which the forkserver imports spoils CUDA for its ranks."""

import os
import sys

import pytest
import torch
from ranks import end_server, travel_by_value

from labkit import devices, gpus, run, warm_up
from labkit.gpus import Gpu, Gpus
from labkit.runtime import preload
from labkit.runtime.supervisor import Supervisor

travel_by_value(__name__)

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


def cuda_in_a_rank(comm):
    """Whether the forkserver has asked for GPUs; what has become of CUDA; what is visible."""
    spoilt = torch.cuda._is_in_bad_fork(), torch.cuda.is_initialized()
    visible = torch.cuda._parse_visible_devices(), os.environ.get(NVML_CHECK)
    return "asks_for_gpus" in sys.modules, *spoilt, *visible


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine with two GPUs, on which no rank is started."""

    class Started(Exception):
        pass

    def refuse(self):
        raise Started(self.job.plan)

    found = Gpus((Gpu(0, "A"), Gpu(1, "B")))
    monkeypatch.setattr(gpus, "found", lambda: found)
    monkeypatch.setattr(devices, "_told", set())
    monkeypatch.setattr(preload, "start_server", lambda names: None)
    monkeypatch.setattr(Supervisor, "run", refuse)
    return Started


class TestNotes:
    def test_the_setup_cell_says_that_ranks_share_and_no_later_run_does(self, two_gpus, capsys):
        warm_up(device="auto")
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("4 ranks share 2 GPUs: they talk over gloo")
        for world_size in (3, 4):
            with pytest.raises(two_gpus):
                run(print, world_size=world_size, device="auto")
        assert capsys.readouterr().err == ""

    def test_named_devices_are_checked_and_their_notes_told(self, two_gpus, capsys):
        warm_up(devices="cuda:1,cuda:1", world_size=2)
        assert capsys.readouterr().err.startswith("2 ranks share 1 GPU")
        with pytest.raises(ValueError, match="this machine has 2 CUDA GPUs"):
            warm_up(devices="cuda:2")

    @pytest.mark.parametrize("options", [{}, {"device": "cpu"}, {"world_size": 2}])
    def test_without_a_choice_of_device_nothing_is_said(self, two_gpus, capsys, options):
        warm_up(**options)
        assert capsys.readouterr().err == ""

    def test_enough_gpus_are_not_worth_a_word(self, two_gpus, capsys):
        warm_up(device="auto", world_size=2)
        assert capsys.readouterr().err == ""

    def test_cuda_that_is_not_there_is_refused_in_the_setup_cell(self, two_gpus, monkeypatch):
        monkeypatch.setattr(gpus, "found", Gpus)
        with pytest.raises(ValueError, match="shows no CUDA GPU: use device 'cpu'"):
            warm_up(device="cuda")

    def test_without_a_driver_the_callers_process_does_not_wait_for_torch(
        self, two_gpus, monkeypatch
    ):
        monkeypatch.setattr(preload, "may_exist", lambda: False)
        monkeypatch.delitem(sys.modules, "torch")
        monkeypatch.setattr(preload, "plan", pytest.fail)
        warm_up(device="auto")
        assert "torch" not in sys.modules


@pytest.fixture(scope="class")
def asking_server(light_server, tmp_path_factory):
    """A forkserver that imports a module which asks for GPUs, as many people's modules do."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "asks_for_gpus.py").write_text("import torch\nHAS = torch.cuda.is_available()\n")
    end_server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setattr(preload, "FOR_RANKS", [*preload.FOR_RANKS, "asks_for_gpus"])
        warm_up(training=False)
        yield


@pytest.mark.fresh
class TestCudaInRanks:
    def seen(self, world_size=1):
        return run(cuda_in_a_rank, world_size=world_size, device="cpu").values

    def test_a_module_that_asks_for_gpus_when_it_is_imported_spoils_nothing(self, asking_server):
        assert self.seen(world_size=2) == [(True, False, False, [], None)] * 2

    def test_gpus_that_are_chosen_after_the_start_are_those_of_the_ranks(
        self, asking_server, monkeypatch
    ):
        self.seen()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
        assert self.seen() == [(True, False, False, [3, 1], None)]
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        assert self.seen() == [(True, False, False, list(range(64)), None)]

    def test_a_caller_who_has_chosen_how_to_look_for_gpus_is_heard(
        self, asking_server, monkeypatch
    ):
        monkeypatch.setenv(NVML_CHECK, "0")
        assert self.seen()[0][-1] == "0"
