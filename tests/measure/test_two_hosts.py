"""Two hosts on one machine: what is missing is named, nothing is left behind, the model's sums.

What runs on them: tests/measure/test_two_hosts_runs.py.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import is_alive, wait_until
from two_hosts import ROOT, end_session, why_not

from labkit.__main__ import main
from labkit.costs import Link
from workbook.measure import BENCHES
from workbook.measure.two_hosts import (
    TwoHosts,
    all_reduce_table,
    cable_table,
    model,
    real_table,
    slow_downs,
    two_hosts_figure,
    two_hosts_table,
    work,
)
from workbook.measure.two_hosts.hosts import CARD, CommandError
from workbook.measure.two_hosts.raw_rate import raw_bytes_per_s
from workbook.measure.two_hosts.result import UNLIMITED, Cable, TwoHostsResult

RECORD = json.loads((ROOT / "data" / "results" / "two_hosts.json").read_text())
linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
PROGRAMS = ("unshare", "nsenter", "mount", "ip", "tc")


@pytest.fixture(scope="module")
def hosts():
    if missing := why_not():
        pytest.skip(missing)
    with TwoHosts() as made:
        yield made


# What is missing


@linux_only
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_missing_program_is_named(program, monkeypatch, refused):
    monkeypatch.setattr(shutil, "which", lambda name: None if name == program else f"/bin/{name}")
    line = refused("bench", "two-hosts")
    assert f"need the program {program}: install " in line


@linux_only
def test_without_root_it_says_so_and_what_else_shows_the_effect(monkeypatch, refused):
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "need root" in refused("bench", "two-hosts")


def test_elsewhere_it_needs_linux(monkeypatch, refused):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "need Linux" in refused("bench", "two-hosts")


@pytest.mark.parametrize(
    ("program", "words", "complaint", "named"),
    [
        ("ip", "link add", "Error: Unknown device type.", "virtual network cards (veth)"),
        ("tc", "qdisc replace", "Error: Specified qdisc kind is unknown.", "filter (tbf"),
        ("mount", "-t proc", "mount: permission denied.", "namespaces (or this container"),
    ],
)
def test_what_a_kernel_lacks_is_named(
    program, words, complaint, named, tmp_path, monkeypatch, refused, hosts
):
    """A program that fails as on such a kernel, and otherwise is the real one."""
    real = shutil.which(program)
    fake = tmp_path / program
    lines = f'#!/bin/sh\ncase "$*" in "{words}"*) echo "{complaint}" >&2; exit 2;; esac\n'
    fake.write_text(f'{lines}exec {real} "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    line = refused("bench", "two-hosts")
    assert named in line
    assert complaint in line


def test_no_other_bench_makes_hosts():
    """``labkit bench`` runs all benches but one that takes root, and one of other frameworks."""
    only_named = {"two-hosts", "elsewhere"}
    assert only_named < set(BENCHES)
    from workbook.measure import command

    ran = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            command,
            "BENCHES",
            {name: lambda name=name: ran.append(name) or () for name in BENCHES},
        )
        assert main(["bench"]) == 0
    assert ran == [name for name in BENCHES if name not in only_named]


def test_repeats_are_checked_before_anything(refused):
    assert "repeats must be" in refused("bench", "two-hosts", "--repeats", "0")


# The hosts


def outside():
    """The machine's own interfaces, routes and filters."""
    asked = (["ip", "-br", "link"], ["ip", "route"], ["tc", "qdisc"])
    return [subprocess.run(words, capture_output=True, text=True).stdout for words in asked]


def test_each_host_has_its_own_loopback_processes_memory_and_name(hosts):
    before = outside()
    for host, name in enumerate(("host0", "host1")):
        assert hosts.run(host, "hostname").strip() == name
        cards = [line.split()[0] for line in hosts.run(host, "ip", "-br", "link").splitlines()]
        assert [card.partition("@")[0] for card in cards] == ["lo", CARD]
        numbers = [int(n) for n in hosts.run(host, "ls", "/proc").split() if n.isdigit()]
        assert max(numbers) < 1000, "those of its own"
        assert hosts.run(host, "ls", "/dev/shm") == ""
        assert hosts.run(host, "pwd").strip() == os.getcwd()
    hosts.run(0, "touch", "/dev/shm/mine")
    assert hosts.run(1, "ls", "/dev/shm") == ""
    assert not Path("/dev/shm/mine").exists()
    hosts.run(0, "rm", "/dev/shm/mine")
    assert outside() == before


def test_the_cable_carries_at_most_its_rate_and_nothing_when_it_is_cut(hosts):
    hosts.set_rate(50e6)
    assert 8 * raw_bytes_per_s(hosts) < 55e6
    hosts.set_rate(None)
    assert "tbf" not in hosts.run(0, "tc", "qdisc", "show", "dev", CARD)
    reach = [sys.executable, "-IS", "-c", "import socket; socket.create_server(('host1', 0))"]
    hosts.run(1, *reach)
    ping = "import socket; socket.create_connection(('10.77.0.1', 9), timeout=0.5)"
    with pytest.raises(CommandError, match="Connection refused"):
        hosts.run(1, sys.executable, "-IS", "-c", ping)
    hosts.cut()
    try:
        with pytest.raises(CommandError, match=r"unreachable|timed out"):
            hosts.run(1, sys.executable, "-IS", "-c", ping)
    finally:
        hosts.mend()
    with pytest.raises(CommandError, match="Connection refused"):
        hosts.run(1, sys.executable, "-IS", "-c", ping)


# One import of torch for all; each child has its own hosts.
PROGRAM = """
import os, sys, time
from workbook.measure.two_hosts.hosts import TwoHosts
for _ in range(3):
    if os.fork() == 0:
        try:
            with TwoHosts() as hosts:
                script = "setsid sleep 1000 & setsid sleep 1000"
                sleepers = [hosts.popen(host, ["sh", "-c", script]) for host in (0, 1)]
                print(os.getpid(), *hosts.pids, *(one.pid for one in sleepers), flush=True)
                time.sleep(1000)
        finally:
            os._exit(0)
for _ in range(3):
    os.wait()
"""


def below(pid):
    """The living processes whose namespaces are those of ``pid``, by its network."""
    place, found = os.readlink(f"/proc/{pid}/ns/net"), set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{entry}/ns/net") == place:
                found.add(int(entry))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_nothing_is_left_whatever_ends_the_program(hosts):
    before, folder = outside(), set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
            program, *pids = map(int, process.stdout.readline().split())
            assert wait_until(lambda pids=pids: all(len(below(p)) >= 3 for p in pids[:2]), 10)
            inside = set().union(*map(below, pids[:2])) | set(pids)
            os.kill(program, number)
            assert wait_until(lambda inside=inside: not any(map(is_alive, inside)), 10)
        process.wait(10)
    finally:
        end_session(process)
    assert outside() == before
    assert set(os.listdir("/dev/shm")) == folder


def test_hosts_that_have_ended_say_so(hosts):
    with TwoHosts() as others:
        pids = others.pids
    assert not any(map(is_alive, pids))
    with pytest.raises(ValueError, match="these two hosts have ended"):
        others.run(0, "true")


# The model

INSIDE, BETWEEN = Link(1e-4, 1e-9, 2e-10), Link(1e-3, 8e-9, 2e-10)
LOCAL = {"compute": 0.2, "update": 0.01, "compress": 0.0}


def test_a_ring_over_two_hosts_takes_what_the_cable_takes():
    size = work.GRADIENT_BYTES
    expected = 6 * (1e-3 + size / 4 * 8e-9) + 3 / 4 * size * 2e-10
    assert model.all_reduce_s(work.FLAT, 4, INSIDE, BETWEEN) == pytest.approx(expected)
    assert model.step_s(work.FLAT, LOCAL, INSIDE, BETWEEN) == pytest.approx(0.21 + expected)
    dealt = 6 * (1e-3 + 2 * size / 4 * 8e-9) + 3 / 4 * size * 2e-10
    assert model.all_reduce_s(work.DEALT_OUT, 4, INSIDE, BETWEEN) == pytest.approx(dealt)
    assert model.dealt_out_order(4) == [0, 2, 1, 3]
    assert model.dealt_out_order(6, 3) == [0, 2, 4, 1, 3, 5]


def test_one_worker_sends_nothing_and_two_on_one_host_nothing_over_the_cable():
    dead = Link(1e6, 1e6)
    assert model.step_s(work.ALONE, LOCAL, dead, dead) == pytest.approx(0.21)
    expected = 0.21 + 2 * INSIDE.message_seconds(work.GRADIENT_BYTES / 2)
    expected += work.GRADIENT_BYTES / 2 * INSIDE.gamma_s_per_byte
    assert model.step_s(work.ONE_HOST, LOCAL, INSIDE, dead) == pytest.approx(expected)


def test_compression_and_hierarchy_send_less_over_the_cable():
    free = Link(0.0, 0.0)
    between = Link(0.0, 8e-9)

    def sent_s(name):
        return model.step_s(name, LOCAL, free, between) - 0.21

    flat_s = 1.5 * work.GRADIENT_BYTES * 8e-9
    assert sent_s(work.FLAT) == pytest.approx(flat_s)
    assert sent_s(work.HIERARCHICAL) == pytest.approx(flat_s / 1.5)
    assert sent_s("ring, fp16") == pytest.approx(flat_s / 2)
    assert sent_s("hierarchical, fp16") == pytest.approx(flat_s / 3)
    # 1 % of the values, and their indices, from three ranks.
    assert sent_s("ring, topk") == pytest.approx(
        3 * 2 * work.GRADIENT_BYTES / 100 * 8e-9, rel=1e-4
    )
    assert flat_s / 1.5 < sent_s("DDP") < flat_s, "some of it behind backward"


def test_the_published_figures_are_speed_ups():
    assert work.published_speed_ups(work.ALONE) == [1.0]
    assert [round(one, 2) for one in work.published_speed_ups(work.ONE_HOST)] == [1.84, 1.71]
    assert [round(one, 2) for one in work.published_speed_ups(work.FLAT)] == [1.01]
    assert work.published_speed_ups(work.HIERARCHICAL) == []


# The tables


def result():
    """Of round numbers: one worker a second per step, two on one host and four 2/3 and 2 s."""
    cable = Cable(None, 1e9, BETWEEN, INSIDE, INSIDE)
    by_name = {work.ALONE: [1.0, 1.0], work.ONE_HOST: [2 / 3, 2 / 3], work.FLAT: [2.0, 1.0]}
    slower = by_name | {work.FLAT: [4.0, 3.0]}
    ways = {(2, work.FLAT): [3.0, 4.0], (2, work.HIERARCHICAL): [2.0, 2.0]}
    return TwoHostsResult(
        {UNLIMITED: cable, "1 Gb/s": cable},
        {UNLIMITED: by_name, "1 Gb/s": slower},
        dict.fromkeys(by_name, LOCAL),
        {UNLIMITED: by_name},
        {"1 Gb/s": ways},
    )


def test_speed_ups_count_samples_and_are_paired():
    record = result().record()
    rows = {(row["rate"], row["contender"]): row for row in record["steps"]}
    # 256 samples in 2 s and in 1 s against 128 in 1 s.
    assert rows[UNLIMITED, work.FLAT]["speed_up"]["median"] == pytest.approx(1.5)
    assert rows[UNLIMITED, work.FLAT]["efficiency"] == pytest.approx(1.5 / 4)
    assert rows[UNLIMITED, work.ONE_HOST]["speed_up"]["median"] == pytest.approx(1.5)
    assert rows["1 Gb/s", work.FLAT]["slow_down"]["median"] == pytest.approx(2.5)
    row, alone = rows[UNLIMITED, work.FLAT], rows[UNLIMITED, work.ALONE]
    assert row["model_speed_up"] == pytest.approx(2 * alone["model_s"] / row["model_s"])
    assert slow_downs(record) == {work.FLAT: (pytest.approx(2.5), pytest.approx(1.0))}
    (ring, hierarchical) = record["all_reduces"]
    assert ring["times_ring"]["median"] == 1
    assert hierarchical["times_ring"]["median"] == pytest.approx(1.75)


def test_the_tables_hold_measured_model_and_published():
    record = json.loads(json.dumps(result().record()))
    text = str(two_hosts_table(record, ["1 Gb/s"]))
    assert "1 Gb/s, 4 on 2 hosts: ring" in text
    assert "1.71 to 1.84" in text
    assert UNLIMITED not in text
    assert "<table>" in two_hosts_table(record)._repr_html_()
    assert "2 x 2, hierarchical" in str(all_reduce_table(record))
    assert "8 Gb/s" in str(cable_table(record))
    assert "66" not in str(real_table(record)).splitlines()[1]
    assert "One all-reduce of 44.9 MB" in str(result())


# What is recorded


def test_the_record_is_whole():
    rates = [row["rate"] for row in RECORD["links"]]
    assert rates == [UNLIMITED, "10 Gb/s", "1 Gb/s"]
    found = {(row["rate"], row["contender"]) for row in RECORD["steps"]}
    assert found == {(rate, name) for rate in rates for name in work.CONTENDERS}
    assert {"command", "config", "hardware", "versions"} <= RECORD.keys()
    assert two_hosts_figure(RECORD).alt


@pytest.mark.parametrize("name", [work.FLAT, work.DEALT_OUT, work.HIERARCHICAL])
def test_what_a_cable_of_1_gbit_costs_is_what_the_model_says(name):
    """Within 30 %: the step, and how far four workers fall behind four times one worker."""
    (row,) = [r for r in RECORD["steps"] if (r["rate"], r["contender"]) == ("1 Gb/s", name)]
    assert row["step_s"]["median"] == pytest.approx(row["model_s"], rel=0.3)
    assert row["speed_up"]["median"] == pytest.approx(row["model_speed_up"], rel=0.3)
