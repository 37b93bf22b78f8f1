"""Two hosts for the tests that need root: why there are none here; a Ray cluster on both."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tools"))
from namespaces import ADDRESSES, SCRATCH, TwoHosts  # noqa: E402

# Ray gives up if its own processes take longer than 15 s to start, as they do on a busy machine:
# the scheduler shall prefer this session, and in it this program.
_FIRST = ["sh", "-c", 'echo -15 >/proc/self/autogroup; exec nice -n -15 "$@"', "sh"]


def why_not() -> str:
    """What two hosts lack on this machine, in words; empty if they can be made."""
    try:
        with TwoHosts() as hosts:
            hosts.set_rate(1e9)
    except ValueError as error:
        return str(error)
    return ""


class RayCluster:
    """A cluster of Ray with a node on each host; it ends with the hosts.

    Attributes:
        address: of its head, on the first host.
    """

    address = f"{ADDRESSES[0]}:6379"

    def __init__(self, hosts: TwoHosts):
        head = ["--head", "--port", "6379", "--include-dashboard", "false"]
        for host, role in enumerate((head, ["--address", self.address])):
            words = [*_FIRST, Path(sys.executable).with_name("ray"), "start", *role]
            words += ["--node-ip-address", ADDRESSES[host], "--num-cpus", "2"]
            words += ["--temp-dir", f"{SCRATCH}/ray", "--object-store-memory", "100000000"]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            settings = {"RAY_AUTH_MODE": "disabled", "RAY_prestart_worker_first_driver": "0"}
            words = [*map(str, words), "--disable-usage-stats"]
            starting = hosts.popen(host, words, settings, **pipes)
            said, _ = starting.communicate(timeout=240)
            assert starting.returncode == 0, said
