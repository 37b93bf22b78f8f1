"""A Slurm cluster of two nodes on this machine, and jobs of a user that is not root.

The nodes are the hosts of ``tools/namespaces.py``: everything that runs in them ends with them. As
on many a cluster, a node knows itself by a long name that leads to 127.0.1.1, and the nodes share
a folder, but no temporary one. A Slurm that this machine may have is neither read nor touched.

Sources: slurm.conf(5), gres.conf(5), munged(8).
"""

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agents import SCRIPTS
from ranks import wait_until
from two_hosts import ROOT, TwoHosts, why_not as no_two_hosts

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "munged", "setpriv")
NODES = ("host0", "host1")
# "nobody", whom every machine has.
USER = 65534
_PATIENCE_S = 180
# cred_expire, SchedulerParameters: a job that is queued again starts after seconds, not minutes.
_CONF = """
ClusterName=tests
SlurmctldHost=host0(10.77.0.1)
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
SchedulerParameters=sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
NodeName=host0 NodeAddr=10.77.0.1 CPUs=2 RealMemory=1000 Gres=gpu:1
NodeName=host1 NodeAddr=10.77.0.2 CPUs=2 RealMemory=1000 Gres=gpu:1
PartitionName=main Nodes=host[0-1] Default=YES MaxTime=INFINITE State=UP
"""
_SET_UP = """
set -e
echo {node}.cluster.test > /proc/sys/kernel/hostname
hosts=$(sed 's/.* {node}$/127.0.1.1 {node}.cluster.test {node}/' /dev/shm/.hosts)
echo "$hosts" > /dev/shm/.hosts
"""


def why_not() -> str:
    """Say why this machine can have no cluster; empty if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)}: Debian's slurmctld, slurmd, slurm-client and munge"
    return no_two_hosts()


@dataclass
class Slurm:
    """The running cluster; its nodes share ``folder``."""

    hosts: TwoHosts
    folder: Path

    def run(self, host: int, *words: str) -> str:
        """Run a command as root on a node (0 or 1), and return what it prints."""
        return self.hosts.run(host, "env", f"SLURM_CONF={self.folder}/slurm.conf", *words)

    def users_processes(self) -> int:
        """Count the job user's processes on both nodes."""
        owners = ["sh", "-c", "stat --format=%u /proc/[0-9]* 2> /dev/null || true"]
        return sum(self.run(host, *owners).split().count(str(USER)) for host in (0, 1))


@contextlib.contextmanager
def cluster() -> Iterator[Slurm]:
    """Start a cluster for the ``with`` block."""
    shared = tempfile.TemporaryDirectory(prefix="slurm-", dir=os.environ["TESTS_TMPDIR"])
    with shared as path, TwoHosts() as hosts:
        folder = Path(path)
        folder.chmod(0o755)
        (folder / "slurm.conf").write_text(_CONF.format(folder=folder))
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        (folder / "munge.key-file").write_bytes(os.urandom(64))
        (folder / "munge.key-file").chmod(0o600)
        for name in ("state", "spool.host0", "spool.host1"):
            (folder / name).mkdir()
        for host, node in enumerate(NODES):
            hosts.run(host, "sh", "-c", _SET_UP.format(node=node) + _open_up())
        slurm = Slurm(hosts, folder)
        files = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        slurm.run(0, "munged", *(f"--{name}={folder}/munge.{name}" for name in files))
        slurm.run(0, "slurmctld")
        for host, node in enumerate(NODES):
            slurm.run(host, "slurmd", "-N", node)
        states = ["sinfo", "--noheader", "--format=%T %D"]
        if not wait_until(lambda: slurm.run(0, *states) == "idle 2\n", _PATIENCE_S):
            raise AssertionError((folder / "slurmctld.log").read_text())
        yield slurm


class Job:
    """``slurm.sbatch`` with further ``words``, submitted in a new folder that the nodes share.

    Args:
        options: of sbatch.
        pace_s: how long each step takes at least, until ``hurry``.
    """

    def __init__(self, slurm: Slurm, options: list[str], words: list[str], pace_s: float = 0.0):
        self.slurm = slurm
        self.folder = Path(tempfile.mkdtemp(prefix="job-", dir=slurm.folder))
        for name in ("slurm.sbatch", "many_nodes.sh"):
            shutil.copy(SCRIPTS / name, self.folder)
        os.chown(self.folder, USER, USER)
        # The first node alone has the folder in which the job's temporary folder can be made.
        slurm.run(0, "mkdir", "--parents", "--mode=777", "/dev/shm/of-host0")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        settings = [f"PATH={path}", f"PYTHONPATH={ROOT}:{ROOT}/tests", "OMP_NUM_THREADS=1"]
        settings += [f"TESTS_FOLDER={self.folder}", f"TESTS_PACE_S={pace_s}"]
        settings += [f"HOME={self.folder}", "TMPDIR=/dev/shm/of-host0/job"]
        settings += [f"SLURM_CONF={slurm.folder}/slurm.conf", "LABKIT_TRUST_LOCAL_USERS=1"]
        sbatch = ["sbatch", "--parsable", *options, "slurm.sbatch"]
        # Nothing of the tests' own: its folders are closed to the job's user.
        login = ["env", "--ignore-environment", *settings]
        self.number = self.as_user(*login, *sbatch, *words).strip()
        self.checkpoints = self.folder / "runs" / self.number

    def as_user(self, *words: str) -> str:
        """Run a command as the job user, on the first node and in the job's folder."""
        user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
        return self.slurm.run(0, *user, "env", f"--chdir={self.folder}", *words)

    def told(self) -> str:
        return (self.folder / f"slurm-{self.number}.out").read_text()

    def facts(self) -> dict[str, str]:
        """Return what Slurm knows of the job: JobState, Restarts and more."""
        return dict(
            re.findall(r"(\w+)=(\S+)", self.slurm.run(0, "scontrol", "show", "job", self.number))
        )

    def wait_until(self, condition) -> None:
        if not wait_until(condition, _PATIENCE_S):
            raise AssertionError(f"{self.facts()}\n{self.told()}")

    def wait_for(self, state: str) -> None:
        self.wait_until(lambda: self.facts()["JobState"] == state)


def _open_up() -> str:
    """Commands for a node, after which other users than root can enter labkit and its Python.

    Where these are in root's home, which is closed, the node has nothing else in it.
    """
    tops = {}
    for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix)):
        for parent in reversed(path.parents):
            if not parent.stat().st_mode & 1:
                tops[path] = parent
                break
    lines = [""]
    for path in tops:
        lines.append(f"mkdir -p /dev/shm/.seen{path}; mount --bind {path} /dev/shm/.seen{path}")
    for top in sorted(set(tops.values())):
        lines.append(f"mount -t tmpfs -o mode=755 tmpfs {top}")
    for path in tops:
        lines.append(f"mkdir -p {path}; mount --bind /dev/shm/.seen{path} {path}")
    return "\n".join(lines)
