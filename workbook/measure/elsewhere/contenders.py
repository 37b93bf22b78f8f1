"""All contenders of the one run: what trains, in how many processes, and how far it may differ."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata

from workbook.measure.elsewhere import own, scripts
from workbook.measure.elsewhere.digits import HOROVOD_SCRIPT, OUR_SCRIPT, Place
from workbook.measure.elsewhere.environments import version_in, why_not
from workbook.measure.elsewhere.turn import Turn

# A function of the place, the steps and the limit in seconds.
TakeTurn = Callable[[Place, int, float], Turn]
ONE_DEVICE = "one device"
# How far a loss may be from that of one device: PyTorch's kernels everywhere, or TensorFlow's.
_SAME_KERNELS, _OTHER_KERNELS = 1e-5, 1e-4


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        take_turn: trains once.
        framework: whose it is.
        messages: how they travel: ``TCP``, ``shared memory``, or none.
        formula: of the bytes that a worker sends: ``all-reduce``, ``server``; empty for none.
        tolerance: the most by which a loss may differ from one device's.
        environment: the environment that it needs, see ``environments``; empty for ours.
    """

    take_turn: TakeTurn
    framework: str = "labkit"
    messages: str = "none"
    formula: str = ""
    tolerance: float = _SAME_KERNELS
    environment: str = ""

    def why_not(self) -> str:
        """Why it cannot run here, and what to do; empty if it can."""
        return why_not(self.environment) if self.environment else ""

    def versions(self) -> dict[str, str]:
        """Of what a script cannot tell, as its text is the same for Horovod and labkit."""
        if self.environment == "horovod":
            return {"horovod": version_in("horovod", "horovod")}
        return {"labkit": metadata.version("labkit")} if self.framework == "labkit" else {}


def _own(strategy: str, transport: str, ranks: int = 2, formula: str = "all-reduce") -> Contender:
    take = partial(own.turn, strategy=strategy, world_size=ranks, transport=transport)
    messages = "TCP" if transport == "gloo" else "shared memory"
    return Contender(take, messages=messages, formula=formula)


def _tensorflow(script: str, messages: str, formula: str) -> Contender:
    take = partial(scripts.turn, script=script, launch=scripts.tensorflow)
    return Contender(take, "TensorFlow", messages, formula, _OTHER_KERNELS, "tensorflow")


CONTENDERS = {
    ONE_DEVICE: Contender(partial(own.turn, strategy="single", world_size=1)),
    "labkit ddp": _own("ddp", "auto"),
    "labkit ring_all_reduce": _own("ring_all_reduce", "auto"),
    "labkit parameter_server": _own("parameter_server", "auto", 3, "server"),
    "labkit ddp over TCP": _own("ddp", "gloo"),
    "labkit ring_all_reduce over TCP": _own("ring_all_reduce", "gloo"),
    "labkit parameter_server over TCP": _own("parameter_server", "gloo", 3, "server"),
    "PyTorch DDP": Contender(
        partial(scripts.turn, script="ddp_digits.py", launch=scripts.torchrun),
        *("PyTorch", "TCP", "all-reduce"),
    ),
    "labkit.horovod": Contender(
        partial(scripts.turn, script=OUR_SCRIPT, launch=scripts.ring_on_one_host),
        messages="shared memory",
        formula="all-reduce",
    ),
    "labkit.horovod over TCP": Contender(
        partial(scripts.turn, script=OUR_SCRIPT, launch=scripts.ring_on_two_hosts),
        messages="TCP",
        formula="all-reduce",
    ),
    "Horovod": Contender(
        partial(scripts.turn, script=HOROVOD_SCRIPT, launch=scripts.horovodrun),
        *("Horovod", "TCP", "all-reduce", _SAME_KERNELS, "horovod"),
    ),
    "MirroredStrategy": _tensorflow("mirrored.py", "none", ""),
    "MultiWorkerMirroredStrategy": _tensorflow("multi_worker.py", "TCP", "all-reduce"),
    "ParameterServerStrategy": _tensorflow("parameter_server.py", "TCP", "server"),
}
