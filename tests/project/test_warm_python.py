"""A fork of the warm Python is, to whoever started it, the Python that was asked for."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys

import pytest
import warm_python
from ranks import wait_until

pytestmark = [
    pytest.mark.fresh,
    pytest.mark.skipif(warm_python.command() == sys.executable, reason="not on Linux, or GPUs"),
]
SAYS = """
import json, os, sys
names = __name__, sys.argv, sys.path[0], os.getcwd(), os.environ.get("SAYS"), sys.stdin.read()
print(json.dumps([*names, "torch" in sys.modules, "labkit" in sys.modules]))
"""


def run(*words, **settings):
    pipes = {"capture_output": True, "text": True, "timeout": 60}
    return subprocess.run([warm_python.command(), *words], **pipes | settings)


def test_code_a_script_and_a_module_are_the_main_module_of_a_new_process(tmp_path):
    script = tmp_path / "says.py"
    script.write_text(SAYS)
    settings = {"cwd": tmp_path, "input": "in", "env": os.environ | {"SAYS": "so"}}
    common = str(tmp_path), "so", "in"
    found = [
        json.loads(run(*words, "a", "b", **settings).stdout)
        for words in (["-c", SAYS], ["-u", str(script)], ["-m", "says"])
    ]
    assert found[0] == ["__main__", ["-c", "a", "b"], "", *common, True, False]
    for one in found[1:]:
        assert one == ["__main__", [str(script), "a", "b"], *common[:1], *common, True, False]


@pytest.mark.parametrize("words", [["-c", SAYS], ["-I", "-c", SAYS]], ids=["variable", "flag"])
def test_what_a_fork_cannot_become_is_a_real_python(words):
    environment = os.environ | ({"OMP_WAIT_POLICY": "active"} if len(words) == 2 else {})
    said = json.loads(run(*words, input="", env=environment).stdout)
    assert said[6] is False


def test_it_ends_as_a_python_ends():
    done = run("-c", "import atexit; atexit.register(print, 'bye'); 1 / 0")
    due = 'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n'
    assert (done.returncode, done.stdout) == (1, "bye\n")
    assert done.stderr == due + "ZeroDivisionError: division by zero\n"
    assert run("-c", "raise SystemExit(7)").returncode == 7
    done = run("-c", "raise SystemExit('why')")
    assert (done.returncode, done.stderr) == (1, "why\n")
    assert run("-c", "import os; os.kill(os.getpid(), 9)").returncode == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_reaches_it_and_its_death_is_that_of_the_fork(number):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    words = [warm_python.command(), "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(words, **pipes) as process:
        pid = int(process.stdout.readline())
        assert pid != process.pid
        process.send_signal(number)
        assert process.wait(30) == -number
        assert wait_until(lambda: not os.path.exists(f"/proc/{pid}"), 10)


def test_the_server_goes_on_when_who_asks_is_killed_meanwhile():
    for half in (b"", b"12", struct.pack("q", 99), struct.pack("q", 99) + b"{"):
        with asking() as connection:
            connection.sendall(half)
    with asking() as connection:
        warm_python.ask(connection, ("-c", "import time; time.sleep(60)", []))
    assert json.loads(run("-c", SAYS, input="").stdout)[6] is True, "the server has ended"


def asking():
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.path.join(os.environ[warm_python.VARIABLE], "socket"))
    return connection
