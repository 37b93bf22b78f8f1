"""``nvidia-smi`` is read from recorded answers, and may do anything without harm."""

import json
import os
import time

import pytest
import recorded_gpus as recorded

from labkit.runtime import nvidia_smi
from labkit.runtime.gpu_links import Unanswered, read_topology
from labkit.runtime.nvidia_smi import Card, read_machine


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Put an ``nvidia-smi`` that runs this script, or gives these answers, on the PATH."""

    def pretend(does):
        nvidia_smi._asked.cache_clear()
        write = recorded.program if isinstance(does, str) else recorded.write_program
        return write(tmp_path, does)

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(nvidia_smi, "DRIVER_FILES", (tmp_path / "version",))
    yield pretend
    pretend("exit 1")


def test_a_server_with_eight_gpus():
    machine = read_machine(recorded.DGX["-q -x"])
    assert (machine.driver, machine.cuda, len(machine.cards)) == ("580.65.06", "13.0", 8)
    assert machine.cards[7] == Card(
        7, recorded.A100, "GPU-77", 80 * 2**30, 4 * 2**20, 0, "Default", None, True
    )
    links = read_topology(recorded.DGX["topo -m"])
    assert set(links.pairs().values()) == {"NV12"}
    assert len(links.pairs()) == 28
    near = {
        card: code
        for (gpu, card), code in links.links.items()
        if gpu == 4 and card not in range(8)
    }
    assert near == {"mlx5_0": "SYS", "mlx5_1": "SYS", "mlx5_2": "PXB", "mlx5_3": "PIX"}
    assert links.cores[0] == "48-63,176-191"
    assert links.nodes == {0: "3", 1: "3", 2: "1", 3: "1", 4: "7", 5: "7", 6: "5", 7: "5"}


def test_programs_that_only_draw_do_not_count():
    cards = read_machine(recorded.PCIE["-q -x"]).cards
    assert [card.programs for card in cards] == [2, 0]
    assert [card.keeps_driver for card in cards] == [False, False]


def test_slices_modes_and_what_is_not_told():
    (card,) = read_machine(recorded.MIG["-q -x"]).cards
    assert (card.mig_slices, card.used_bytes) == (2, None)
    modes = [card.compute_mode for card in read_machine(recorded.EXCLUSIVE["-q -x"]).cards]
    assert modes == ["Exclusive_Process", "Exclusive_Process", "Prohibited"]
    old = read_machine(recorded.OLD["-q -x"])
    assert (old.cuda, old.cards[0].mig_slices) == ("", None)


def test_warnings_around_a_report_and_a_damaged_card_do_not_hide_it(smi):
    report = recorded.PCIE["-q -x"] + "WARNING: infoROM is corrupted at gpu 0000:01:00.0\n"
    smi({"-q -x": (14, "WARNING: first\n" + report)})
    assert len(nvidia_smi.machine().cards) == 2


@pytest.mark.parametrize(
    "text",
    [
        *["", "no such thing", "<nvidia_smi_log>", recorded.DGX["-q -x"][:900], "\0\xff<gpu/>"],
        "<nvidia_smi_log><gpu></nvidia_smi_log>",
    ],
)
def test_rubbish_is_no_report(text):
    with pytest.raises(Unanswered, match="nvidia-smi -q -x gives"):
        read_machine(text)


def test_a_report_without_its_usual_parts_is_one_of_cards_unknown():
    (card,) = read_machine("<nvidia_smi_log><gpu/></nvidia_smi_log>").cards
    assert card == Card(0, "a GPU without a name")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "echo 'NVIDIA-SMI has failed.'; exit 9",
            "fails with exit code 9: NVIDIA-SMI has failed.",
        ),
        ("echo 'Insufficient Permissions' >&2; exit 4", "code 4: Insufficient Permissions"),
        ("exit 255", "fails with exit code 255: it says nothing"),
        ("kill -SEGV $$", "fails with exit code -11"),
        ("printf '\\377\\376 <b>'", "gives no whole report"),
        ("exit 0", "gives no whole report"),
    ],
)
def test_a_failing_program_is_told_in_one_line(script, said, smi):
    smi(script)
    with pytest.raises(Unanswered) as caught:
        nvidia_smi.machine()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_program_that_hangs_is_left_alone(smi, monkeypatch):
    smi("trap '' TERM INT\nwhile :; do sleep 60; done")
    monkeypatch.setattr(nvidia_smi, "PATIENCE_S", 0.2)
    started_s = time.monotonic()
    with pytest.raises(Unanswered, match="no answer within 200 ms"):
        nvidia_smi.machine()
    assert time.monotonic() - started_s < 20


def test_a_program_that_is_absent_or_cannot_start(smi, tmp_path, monkeypatch):
    monkeypatch.setattr(nvidia_smi, "_ALSO_IN", str(tmp_path / "absent"))
    smi("exit 0").write_bytes(b"\x7fELFnot a program")
    with pytest.raises(Unanswered, match="cannot be started"):
        nvidia_smi.machine()
    monkeypatch.setenv("PATH", str(tmp_path / "absent"))
    nvidia_smi._asked.cache_clear()
    with pytest.raises(Unanswered, match="nvidia-smi is not installed"):
        nvidia_smi.machine()


def test_an_older_program_does_not_know_compute_capabilities(smi):
    smi(recorded.OLD)
    assert nvidia_smi.capabilities() == {}
    smi(recorded.PCIE)
    assert nvidia_smi.capabilities() == {0: (12, 0), 1: (12, 0)}


def test_the_kernel_tells_the_driver_where_the_program_does_not(smi, tmp_path):
    assert nvidia_smi.kernel_driver() == ""
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.144.03  Release Build\n"
    )
    assert nvidia_smi.kernel_driver() == "550.144.03"
    smi("exit 9")
    assert nvidia_smi.facts()["driver"] == "550.144.03"
    assert "exit code 9" in nvidia_smi.facts()["problem"]


@pytest.mark.parametrize("name", recorded.MACHINES)
def test_facts_of_every_machine_can_be_recorded(name, smi):
    smi(recorded.MACHINES[name])
    facts = json.loads(json.dumps(nvidia_smi.facts()))
    assert ("problem" in facts) == (name == "no driver")
    assert facts.get("links", {}).get("0 1") == {"DGX": "NV12", "four V100": "NV1"}.get(
        name, {"two over PCIe": "PHB", "exclusive": "PIX"}.get(name)
    )
