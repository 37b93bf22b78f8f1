"""Two hosts on one machine: network namespaces with a cable between them, slowed to a rate.

A host is a process that waits in its own namespaces: network, processes, mounts and name. It
reaches the other host only through a veth pair (a cable with a network card at each end). The
kernel's token bucket filter (tbf) slows each card down to a rate. Nothing has a name outside: the
namespaces end with the process that holds them, which ends when its standard input does. The
machine's own network is never touched.

Sources: network_namespaces(7), pid_namespaces(7), veth(4), tc-tbf(8).
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.engine.comm.shared_memory import is_running

NAMES = ("host0", "host1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
# The name of the network card in each host.
CARD = "cable"
# What each host's programs may use as a temporary folder: memory that ends with the host.
SCRATCH = "/dev/shm"
_PROGRAMS = ("unshare", "nsenter", "mount", "ip", "tc")
_NAMESPACES = ("--net", "--pid", "--mount", "--uts", "--ipc")
# The first process of a host. It says its number, which its new /proc would hide; lets the kernel
# clear away processes that nobody waits for; and ends with its standard input.
_HOLD = (
    "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    "print(os.readlink('/proc/self'), flush=True); sys.stdin.read()"
)
_SET_UP = """
set -e
mount -t proc proc /proc
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
printf '127.0.0.1 localhost\\n{hosts}\\n' > /dev/shm/.hosts
if [ -e /etc/hosts ]; then mount --bind /dev/shm/.hosts /etc/hosts; fi
echo {name} > /proc/sys/kernel/hostname
ip link set lo up
"""
_TIMEOUT_S = 20.0
# A bucket must hold what the kernel hands over at once (64 KiB), and what the rate lets through
# while the kernel wakes up, or a busy machine does not reach the rate. Not more: it is what a
# message after a pause sends for nothing.
_LEAST_BURST_BYTES, _WAKE_UP_S = 128 * 1024, 2e-3
# A sender stops when so much is waiting, long before the filter would drop anything.
_QUEUE_BYTES = 16 * 1024 * 1024


class TwoHosts:
    """Two hosts with a cable between them, until the end of the ``with`` block or of the program.

    Raises:
        ValueError: not root, not Linux, or a program or a part of the kernel is missing.
    """

    def __init__(self) -> None:
        if not sys.platform.startswith("linux") or os.geteuid() != 0:
            raise ValueError("two hosts on one machine need Linux and root, for their namespaces")
        if missing := [one for one in _PROGRAMS if shutil.which(one) is None]:
            raise ValueError(f"two hosts need {', '.join(missing)} (util-linux, iproute2)")
        self._holders: list[subprocess.Popen[str]] = []
        self.pids: list[int] = []
        try:
            self._start()
        except subprocess.CalledProcessError as error:
            self.close()
            raise ValueError(f"no two hosts on this kernel: {error.stderr or error}") from None
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        hold = [sys.executable, "-I", "-S", "-c", _HOLD]
        pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | {"text": True}
        lines = "\\n".join(f"{address} {name}" for address, name in zip(ADDRESSES, NAMES))
        for host, name in enumerate(NAMES):
            # Ctrl-C is for this program, which then ends the hosts.
            words = ["unshare", *_NAMESPACES, "--fork", "--kill-child=KILL", *hold]
            holder: Any = subprocess.Popen(words, start_new_session=True, **pipes)
            self._holders.append(holder)
            if not (number := holder.stdout.readline()):
                complaint = holder.communicate()[1]
                raise ValueError(f"this kernel, or container, makes no namespaces: {complaint}")
            self.pids.append(int(number))
            self.run(host, "sh", "-c", _SET_UP.format(name=name, hosts=lines))
        # By ``ip`` in this program's /proc, in which both hosts have a number.
        words = ["ip", "link", "add", CARD, "type", "veth"]
        words += ["peer", "name", CARD, "netns", str(self.pids[1])]
        enter = ["nsenter", f"--target={self.pids[0]}", "--net"]
        subprocess.run([*enter, *words], check=True, capture_output=True, text=True)
        for host, address in enumerate(ADDRESSES):
            self.run(host, "ip", "address", "add", f"{address}/24", "dev", CARD)
            self.run(host, "ip", "link", "set", CARD, "up")

    def __enter__(self) -> "TwoHosts":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End both hosts, and with them every process that runs in them."""
        for holder in self._holders:
            holder.kill()
            holder.communicate()
        # The kernel ends the processes of a host before its first process.
        deadline_s = time.monotonic() + _TIMEOUT_S
        while any(map(is_running, self.pids)) and time.monotonic() < deadline_s:
            time.sleep(0.01)

    def popen(
        self, host: int, words: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a program in a host (0 or 1); ``options`` as of ``subprocess.Popen``.

        The program sees this program's files, but the host's network, processes and ``/dev/shm``,
        which is its temporary folder.
        """
        # In other mounts a program starts in the root folder.
        enter = ["nsenter", f"--target={self.pids[host]}", *_NAMESPACES]
        enter += ["env", f"--chdir={os.getcwd()}"]
        # The names of this machine's network interfaces mean nothing there.
        own = {key: text for key, text in os.environ.items() if not key.endswith("_IFNAME")}
        settings = own | {"TMPDIR": SCRATCH} | dict(env or {})
        return subprocess.Popen([*enter, *words], env=settings, start_new_session=True, **options)

    def run(self, host: int, *words: str) -> str:
        """Run a short command in a host, and return what it prints.

        Raises:
            subprocess.CalledProcessError: it failed; ``stderr`` is what it said.
        """
        pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
        process = self.popen(host, words, stderr=subprocess.PIPE, **pipes)
        output, complaint = process.communicate(timeout=_TIMEOUT_S)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, words, output, complaint)
        return output

    def set_rate(self, bits_per_s: float | None) -> None:
        """Let the cable carry so many bits per second in each direction; None for no limit."""
        for host in (0, 1):
            if bits_per_s is None:
                with contextlib.suppress(subprocess.CalledProcessError):  # there was no limit
                    self.run(host, "tc", "qdisc", "del", "dev", CARD, "root")
                continue
            burst = max(_LEAST_BURST_BYTES, int(bits_per_s / 8 * _WAKE_UP_S))
            limits = ["rate", f"{bits_per_s:.0f}bit", "burst", str(burst)]
            words = ["tc", "qdisc", "replace", "dev", CARD, "root", "tbf", *limits]
            self.run(host, *words, "limit", str(_QUEUE_BYTES))
