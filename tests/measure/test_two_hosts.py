"""Two hosts on one machine: what they share, what the cable carries, what is left behind."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import is_alive, wait_until
from two_hosts import ROOT, TwoHosts, why_not


@pytest.fixture(scope="module")
def hosts():
    if missing := why_not():
        pytest.skip(missing)
    with TwoHosts() as made:
        yield made


def outside():
    """The machine's own interfaces, routes and filters."""
    asked = (["ip", "-br", "link"], ["ip", "route"], ["tc", "qdisc"])
    return [subprocess.run(words, capture_output=True, text=True).stdout for words in asked]


def test_each_host_has_its_own_network_processes_memory_and_name(hosts):
    before = outside()
    for host, name in enumerate(("host0", "host1")):
        assert hosts.run(host, "hostname").strip() == name
        cards = [line.split()[0] for line in hosts.run(host, "ip", "-br", "link").splitlines()]
        assert [card.partition("@")[0] for card in cards] == ["lo", "cable"]
        numbers = [int(n) for n in hosts.run(host, "ls", "/proc").split() if n.isdigit()]
        assert max(numbers) < 1000, "those of its own"
        assert hosts.run(host, "pwd").strip() == os.getcwd()
    hosts.run(0, "touch", "/dev/shm/mine")
    assert hosts.run(1, "ls", "/dev/shm") == ""
    assert not Path("/dev/shm/mine").exists()
    assert outside() == before


def test_the_cable_carries_at_most_its_rate_and_nothing_when_it_is_cut(hosts):
    hosts.set_rate(50e6)
    assert "rate 50Mbit" in hosts.run(0, "tc", "qdisc", "show", "dev", "cable")
    hosts.set_rate(None)
    assert "tbf" not in hosts.run(0, "tc", "qdisc", "show", "dev", "cable")
    code = "import socket; socket.create_connection(('host1', 9), timeout=0.5)"
    for change, answer in (("up", "refused"), ("down", "timed out|unreachable")):
        hosts.run(1, "ip", "link", "set", "cable", change)
        with pytest.raises(subprocess.CalledProcessError) as found:
            hosts.run(0, sys.executable, "-IS", "-c", code)
        assert re.search(answer, found.value.stderr), found.value.stderr
    hosts.run(1, "ip", "link", "set", "cable", "up")


def test_nothing_is_left_when_the_program_is_killed():
    if missing := why_not():
        pytest.skip(missing)
    code = "import time\nfrom namespaces import TwoHosts\nhosts = TwoHosts()\n"
    code += "hosts.popen(0, ['sleep', '600'])\nprint(*hosts.pids, flush=True)\ntime.sleep(600)"
    pipes = {"stdout": subprocess.PIPE, "text": True, "cwd": ROOT / "tools"}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        pids = list(map(int, process.stdout.readline().split()))
        process.kill()
    assert len(pids) == 2
    assert all(wait_until(lambda pid=pid: not is_alive(pid), 20) for pid in pids)


@pytest.mark.slow
def test_a_short_measurement_takes_place(tmp_path):
    if missing := why_not():
        pytest.skip(missing)
    words = [sys.executable, "tools/two_hosts.py", "--repeats", "1", "--out", f"{tmp_path}/r"]
    subprocess.run(words, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    record = json.loads((tmp_path / "r.json").read_text())
    assert {row["rate"] for row in record["steps"]} == {"unlimited", "10 Gb/s", "1 Gb/s"}
    computed = {row["workers"]: row["samples"] for row in record["real_steps"]}
    assert computed == {1: 16, 2: 16, 4: 32}
    assert record["links"][-1]["raw_bytes_per_s"] < 1.1 * 1e9 / 8
