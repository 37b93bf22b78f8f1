"""SECURITY.md says what the code does, and what a run opens to others is what it says.

The rendezvous of ranks in a hostile store: tests/engine/comm/test_rendezvous.py.
"""

import contextlib
import ipaddress
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from multiprocessing import parent_process
from pathlib import Path

import browser
import psutil
import pytest
import torch
import torch.distributed as dist
import warm_python
from inventory import ROOT, dangerous_calls
from ranks import travel_by_value, wait_until

from labkit import run
from labkit.builtin import rpc as remote

travel_by_value(__name__)

SECURITY = (ROOT / "SECURITY.md").read_text()
linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")


def test_what_executes_data_is_what_is_listed():
    """Each row of the table is a file, a function in it, a call."""
    rows = re.findall(r"^\| `([\w/.]+)` \| `([\w()]+)` \| `([\w.]+)` \|", SECURITY, re.M)
    listed, found = set(rows), dangerous_calls()
    assert len(rows) == len(listed)
    assert not found - listed, "say in SECURITY.md whom that trusts"
    assert not listed - found, "gone: take it out of SECURITY.md"


# Listening


def heard_outside(pids) -> list[str]:
    """Where these processes listen for TCP, or take UDP, beyond loopback."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in psutil.Process(pid).net_connections("inet"):
                is_open = one.status == psutil.CONN_LISTEN or (
                    one.type == socket.SOCK_DGRAM and not one.raddr
                )
                address = ipaddress.ip_address(one.laddr.ip.removeprefix("::ffff:"))
                if is_open and not address.is_loopback:
                    found.append(f"{one.laddr} of {pid}")
    return found


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def may_unshare() -> bool:
    """Whether this process may have a network and a host name of its own."""
    if not all(map(shutil.which, ("unshare", "ip", "hostname"))):
        return False
    probe = ["unshare", "--uts", "--net", "true"]
    return not subprocess.call(probe, stderr=subprocess.DEVNULL)


def listens_in_a_run(comm, during):
    """(of the ranks, of their launcher) where they can be heard while ``during`` is open."""
    if during == "rpc":
        remote.join_rpc(comm)
    else:
        dist.barrier(dist.new_group(backend=during))
    pids = torch.zeros(comm.world_size, dtype=torch.int64)
    pids[comm.rank] = os.getpid()
    dist.all_reduce(pids)
    found = heard_outside(pids.tolist()), heard_outside([parent_process().pid])
    comm.barrier()
    if during == "rpc":
        remote.rpc.shutdown()
    return found


@linux_only
class TestListening:
    def test_a_listener_beyond_loopback_would_be_seen(self):
        before = heard_outside([os.getpid()])
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        assert len(heard_outside([os.getpid()])) == len(before) + 1
        del store
        assert heard_outside([os.getpid()]) == before

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("during", "transport"), [("gloo", "shared"), ("labkit", "gloo"), ("rpc", "shared")]
    )
    def test_ranks_and_launcher_are_heard_on_loopback_alone_and_not_after_the_run(
        self, during, transport
    ):
        if during == "rpc" and not dist.rpc.is_available():
            pytest.skip("this PyTorch has no RPC")
        before = {*heard_outside([os.getpid()])}
        result = run(listens_in_a_run, during, world_size=2, transport=transport)
        assert result.values == [([], [])] * 2
        pids = [os.getpid(), *(one.pid for one in descendants())]
        assert wait_until(lambda: before >= {*heard_outside(pids)}, 60)

    @pytest.mark.fresh
    @pytest.mark.skipif(not may_unshare(), reason="needs a network of its own: unshare, as root")
    def test_where_the_hosts_name_is_an_outside_address(self, tmp_path):
        """gloo listens there unless it is told otherwise."""
        said = output_in_a_network(tmp_path, IN_A_NETWORK)
        assert [line for line in said.splitlines() if "found" in line] == ["found []"] * 6


# Ranks of a run; ranks without a launcher; and ranks as of torchrun that have to use gloo.
IN_A_NETWORK = """
    import fcntl, multiprocessing, os, sys
    import torch.distributed as dist
    import test_security
    from labkit import run, warm_up

    def refuses(*_):
        raise OSError("no common memory")

    def plain(number, store, over_gloo):
        if over_gloo:
            os.environ.update(LOCAL_WORLD_SIZE="2", WORLD_SIZE="2")
            fcntl.fcntl = refuses
        store = dist.FileStore(store, 2)
        dist.init_process_group("labkit", store=store, rank=number, world_size=2)
        dist.barrier()
        found = test_security.heard_outside([os.getpid()])
        dist.barrier()
        sys.stdout.write(f"found {found}\\n")
        dist.destroy_process_group()

    if __name__ == "__main__":
        warm_up(training=False)
        for during in ("gloo", "rpc"):
            values = run(test_security.listens_in_a_run, during, world_size=2).values
            print("found", [place for ranks, _ in values for place in ranks], flush=True)
        context = multiprocessing.get_context("forkserver")
        for over_gloo in (False, True):
            store = f"store {over_gloo}"
            ranks = [context.Process(target=plain, args=(i, store, over_gloo)) for i in range(2)]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join()
    """


def output_in_a_network(folder, script):
    """What a program prints in a network of its own, whose host's name is an outside address."""
    (folder / "program.py").write_text(textwrap.dedent(script))
    setting = "ip link set lo up && ip addr add 10.9.8.7/32 dev lo && hostname 10.9.8.7"
    program = f"exec {sys.executable} program.py"
    environment = {k: v for k, v in os.environ.items() if not k.endswith("SOCKET_IFNAME")}
    places = (ROOT, ROOT / "tests", Path(__file__).parent)
    environment["PYTHONPATH"] = os.pathsep.join(map(str, places))
    done = subprocess.run(
        ["unshare", "--uts", "--net", "sh", "-c", f"{setting} && {program}"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.fresh
@linux_only
def test_jupyterlab_is_heard_on_loopback_and_asks_for_its_token(tmp_path):
    (tmp_path / "workbook" / "notebooks").mkdir(parents=True)
    with browser.serve(tmp_path, tmp_path / "workbook") as address:
        base, token = re.fullmatch(r"(.*?)/lab.*token=(\w+)", address).groups()
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{base}/api/contents", timeout=20)
        headers = {"Authorization": f"token {token}"}
        asked = urllib.request.Request(f"{base}/api/kernels", b"{}", headers)
        kernel = json.loads(urllib.request.urlopen(asked, timeout=40).read())["id"]
        (note,) = (tmp_path / "runtime").glob(f"kernel-{kernel}.json")
        assert note.stat().st_mode & 0o077 == 0
        below = descendants()
        assert len(below) > 1
        assert heard_outside(one.pid for one in below) == []
        shown = []
        for one in below:
            # One that has ended meanwhile shows nothing.
            with contextlib.suppress(psutil.NoSuchProcess):
                shown += one.cmdline()
        assert shown
        assert not any(token in word for word in shown)


# Reports under torchrun

TORCHRUN_RANK = """
    import fcntl, pickle, sys
    import torch.distributed as dist
    import labkit

    def refuses(*_):
        raise OSError("no common memory, and no pickles")

    def work(comm, transport):
        return transport, "x" * 10 ** (1 + 5 * comm.rank)

    dist.all_gather_object = pickle.loads = refuses
    for transport in ("auto", "gloo", "auto"):
        values = labkit.run(work, transport, world_size=2, transport=transport).values
        sys.stdout.write(f"{[(name, len(text)) for name, text in values]}\\n")
        if transport == "gloo":
            fcntl.fcntl = refuses
    """


@pytest.mark.fresh
@linux_only
def test_torchruns_ranks_of_one_machine_take_no_pickle_with_or_without_common_memory(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(TORCHRUN_RANK))
    launch = [warm_python.command(), "-m", "torch.distributed.run"]
    launch += ["--nproc-per-node", "2", program]
    done = subprocess.run(
        launch, capture_output=True, text=True, timeout=240, env=os.environ | {"PYTHONPATH": ROOT}
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    values = {str([(name, 10), (name, 10**6)]) for name in ("auto", "gloo")}
    assert set(lines) == values
    assert len(lines) == 6


# RPC


class TestRpcAmongStrangers:
    def test_among_other_people_it_is_refused_unless_they_are_trusted(self, monkeypatch):
        monkeypatch.delenv(remote.TRUST, raising=False)
        monkeypatch.setattr(remote, "other_people", list)
        remote.check_available()
        monkeypatch.setattr(remote, "other_people", lambda: [1001, 1004])
        with pytest.raises(ValueError, match=r"users \(1001, 1004\).*without builtin"):
            remote.check_available()
        monkeypatch.setenv(remote.TRUST, "1")
        remote.check_available()

    @linux_only
    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
    @pytest.mark.parametrize(
        ("uid", "counts"),
        [(4242, True), (65534, True), (10**6, True), (61_500, False), (33, False)],
    )
    def test_people_are_told_from_services(self, uid, counts):
        wait, end = os.pipe()
        other = os.fork()
        if other == 0:
            os.setuid(uid)
            os.close(end)
            os.read(wait, 1)
            os._exit(0)
        found = wait_until(lambda: os.stat(f"/proc/{other}").st_uid == uid, 60)
        people = remote.other_people()
        os.close(wait)
        os.close(end)
        os.waitpid(other, 0)
        assert found
        assert (uid in people) == counts
