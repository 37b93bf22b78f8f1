"""Kernels as forks of a warm process: they are what Jupyter asks for, and leave nothing behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from jupyter_client import KernelManager
from ranks import is_alive, session_of, wait_until

from workbook.kernels.provisioner import ForkedKernel, WarmProvisioner
from workbook.kernels.warm import why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a fork with torch: Linux"),
]
WARM, ORDINARY = "labkit-warm", "local-provisioner"
# What a kernel can see of how it was started.
SEEN = """
import gc, json, multiprocessing, os, signal, sys, warnings
print(json.dumps({
    "words": [sys.argv, sys.orig_argv[1:]],
    "environment": {name: os.environ[name] for name in sorted(os.environ)},
    "folder": os.getcwd(),
    "paths": sys.path,
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "signals": [str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP)],
    "blocked": list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "streams": [[s.encoding, s.errors] for s in (sys.__stdin__, sys.__stdout__, sys.__stderr__)],
    "files": [os.fstat(number).st_rdev for number in (1, 2)],
    "garbage": gc.isenabled(),
    "process": [__name__, multiprocessing.current_process().name],
}))
"""
RUN = """
import labkit, os
def numbers(comm):
    return os.getppid()
values = labkit.run(numbers, world_size=2, device="cpu").values
print(os.getpid(), os.getppid(), *values)
"""


@contextlib.contextmanager
def kernel(provisioner=WARM, **options):
    """A kernel with a method ``run``, which returns what a cell prints."""
    manager = KernelManager(kernel_name="python3")
    manager.kernel_spec.metadata["kernel_provisioner"] = {"provisioner_name": provisioner}
    with open(os.devnull, "w") as nothing:
        manager.start_kernel(stdout=nothing, stderr=subprocess.DEVNULL, **options)
        try:
            connect(manager)
            yield manager
        finally:
            manager.client_of_test.stop_channels()
            manager.shutdown_kernel(now=True)


def connect(manager):
    client = manager.client_of_test = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)


def output(manager, code):
    """What a cell prints, or the name of its error."""
    heard = []
    manager.client_of_test.execute_interactive(
        code, timeout=60, output_hook=lambda message: heard.append(message["content"])
    )
    return "".join(part.get("text", part.get("ename", "")) for part in heard)


def pid_of(manager):
    return manager.provisioner.pid


def is_forked(manager):
    return isinstance(manager.provisioner.process, ForkedKernel)


def test_a_fork_sees_what_a_new_kernel_sees(tmp_path):
    seen = []
    environment = os.environ | {"LABKIT_LIVE": "0"}
    for provisioner in (WARM, ORDINARY):
        with kernel(provisioner, cwd=str(tmp_path), env=environment) as started:
            assert is_forked(started) == (provisioner != ORDINARY)
            seen.append(json.loads(output(started, SEEN).replace(started.connection_file, "FILE")))
    assert seen[0] == seen[1]


def test_ranks_are_forked_from_a_fork_of_the_kernel_and_draw_without_a_screen():
    with kernel() as started:
        output(started, "import sys; before = {*sys.modules}")
        pid, parent, *servers = map(int, output(started, RUN).split())
        assert {psutil.Process(server).ppid() for server in servers} == {pid}
        imported = output(
            started,
            "print({name.partition('.')[0] for name in sys.modules}"
            " - {name.partition('.')[0] for name in before})",
        )
        assert imported.strip() in ("set()", "{'__mp_main__'}")
        words = "labkit.run(lambda comm: ' '.join(sys.orig_argv), world_size=1)"
        assert " -c from multiprocessing" in output(started, f"print({words}.values)")
        backend = "labkit.run(lambda comm: __import__('matplotlib').get_backend(), world_size=1)"
        assert output(started, f"print({backend}.values)").strip() == "['agg']"
        draw = "import numpy as np, torch; print(np.random.random(), torch.rand(1).item())"
        with kernel() as other:
            assert psutil.Process(pid_of(other)).ppid() == parent
            drawn = [*output(started, draw).split(), *output(other, draw).split()]
            assert len({*drawn}) == 4


def test_where_a_variable_was_read_at_import_a_new_process_reads_it():
    with kernel(env=os.environ | {"OMP_NUM_THREADS": "7"}) as started:
        assert not is_forked(started)
        assert output(started, "import os; print(os.environ['OMP_NUM_THREADS'])") == "7\n"


def test_a_changed_file_is_imported_again(tmp_path, monkeypatch):
    path = tmp_path / "imported_for_a_test.py"
    path.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    __import__(path.stem)
    changed_ns = time.time_ns() + 10**12
    os.utime(path, ns=(0, changed_ns))
    assert str(path) in why_not(changed_ns - 1)
    assert str(path) not in str(why_not(changed_ns))


def test_a_process_with_threads_does_not_fork():
    with ThreadPoolExecutor() as pool:
        pool.submit(int)
        assert "threads" in why_not(time.time_ns() + 10**13)


def test_interrupt_and_restart():
    with kernel() as started:
        first = pid_of(started)
        client = started.client_of_test
        request = client.execute("import time\nprint('sleeps')\ntime.sleep(60)")
        while client.get_iopub_msg(timeout=30)["header"]["msg_type"] != "stream":
            pass
        started.interrupt_kernel()
        reply = client.get_shell_msg(timeout=30)
        while reply["parent_header"].get("msg_id") != request:
            reply = client.get_shell_msg(timeout=30)
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        client.stop_channels()
        started.restart_kernel(now=True)
        connect(started)
        assert is_forked(started)
        assert pid_of(started) != first
        assert wait_until(lambda: not session_of(first), 10)


def test_after_the_warm_process_is_killed_kernels_go_on_and_start():
    with kernel() as before:
        killed = WarmProvisioner.warm.process.pid
        os.kill(killed, signal.SIGKILL)
        assert wait_until(WarmProvisioner.warm.process.poll, 10)
        assert len(output(before, RUN).split()) == 4
        assert before.is_alive()
        with kernel() as after:
            assert is_forked(after)
            assert WarmProvisioner.warm.process.pid != killed
            assert len(output(after, RUN).split()) == 4


def test_of_a_killed_kernel_nothing_is_left():
    folder = Path(tempfile.gettempdir())
    before = {*folder.iterdir()}, {*Path("/dev/shm").iterdir()}
    with kernel() as started:
        client = started.client_of_test
        client.execute(
            "import labkit, time\nlabkit.run(lambda comm: time.sleep(60), world_size=2)"
        )
        assert wait_until(lambda: len(session_of(pid_of(started))) >= 5, 30)
        os.kill(pid_of(started), signal.SIGKILL)
        assert wait_until(lambda: not started.is_alive(), 10)
        assert wait_until(lambda: not session_of(pid_of(started)), 10)
    after = {*folder.iterdir()}, {*Path("/dev/shm").iterdir()}
    assert [now - then for now, then in zip(after, before)] == [set(), set()]


def test_with_jupyters_process_all_others_end_even_if_it_is_killed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time\n"
        "from jupyter_client import KernelManager\n"
        "from workbook.kernels.provisioner import WarmProvisioner\n"
        f"WarmProvisioner.executable = {WarmProvisioner.executable!r}\n"
        "manager = KernelManager(kernel_name='python3')\n"
        "manager.start_kernel(stdout=-3, stderr=-3)\n"
        "print(WarmProvisioner.warm.process.pid, manager.provisioner.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True)
    with owner:
        warm, forked = map(int, owner.stdout.readline().split())
        assert wait_until(lambda: len(session_of(forked)) >= 3, 30)
        owner.kill()
    assert wait_until(lambda: not is_alive(warm) and not session_of(forked), 10)
