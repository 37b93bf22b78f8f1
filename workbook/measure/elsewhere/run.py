"""The one run: in each round every contender that is here trains once, in turns."""

import contextlib
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from labkit.costs.traffic import parameter_server_cost, ring_all_reduce_cost
from labkit.units import check_choice, check_integer
from workbook.measure.elsewhere import turns
from workbook.measure.elsewhere.environments import version_in, why_not
from workbook.measure.elsewhere.turns import HOROVOD_SCRIPT, OUR_SCRIPT, SCRIPTS, Turn, TurnError
from workbook.measure.processes import as_ctrl_c
from workbook.measure.spread import Spread, rounded

ONE_DEVICE = "one device"
# How far a loss may be from that of one device: PyTorch's kernels everywhere, or TensorFlow's.
_SAME_KERNELS, _OTHER_KERNELS = 1e-5, 1e-4
# Who trains for longer than this hangs: the slowest takes some seconds to start.
_LIMIT_S = 120.0
_MOST_WARM_UP, _ELEMENT_BYTES = 5, 4


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        take_turn: (folder, steps, limit in seconds) -> a turn.
        framework: whose it is.
        messages: how they travel: ``TCP``, ``shared memory``, or none.
        formula: of the bytes that a worker sends: ``all-reduce``, ``server``; empty for none.
        tolerance: the most by which a loss may differ from one device's.
        environment: the environment that it needs, see ``environments``; empty for ours.
    """

    take_turn: Callable[[Path, int, float], Turn]
    framework: str = "labkit"
    messages: str = "none"
    formula: str = ""
    tolerance: float = _SAME_KERNELS
    environment: str = ""

    def versions(self) -> dict[str, str]:
        """Of what a script cannot tell, as its text is the same for Horovod and labkit."""
        if self.environment == "horovod":
            return {"horovod": version_in("horovod", "horovod")}
        return {"labkit": metadata.version("labkit")} if self.framework == "labkit" else {}


def _own(strategy: str, transport: str, ranks: int = 2, formula: str = "all-reduce") -> Contender:
    take = partial(turns.own_turn, strategy=strategy, ranks=ranks, transport=transport)
    messages = "TCP" if transport == "gloo" else "shared memory"
    return Contender(take, messages=messages if ranks > 1 else "none", formula=formula)


def _script(script: str, launch: Callable[[Path], Sequence[str]], *fields: Any) -> Contender:
    return Contender(partial(turns.script_turn, script=script, launch=launch), *fields)


_TENSORFLOW = _OTHER_KERNELS, "tensorflow"
CONTENDERS = {
    ONE_DEVICE: _own("single", "auto", 1, ""),
    "labkit ddp": _own("ddp", "auto"),
    "labkit ring_all_reduce": _own("ring_all_reduce", "auto"),
    "labkit parameter_server": _own("parameter_server", "auto", 3, "server"),
    "labkit ddp over TCP": _own("ddp", "gloo"),
    "labkit ring_all_reduce over TCP": _own("ring_all_reduce", "gloo"),
    "labkit parameter_server over TCP": _own("parameter_server", "gloo", 3, "server"),
    "PyTorch DDP": _script("ddp_digits.py", turns.torchrun, "PyTorch", "TCP", "all-reduce"),
    "labkit.horovod": _script(
        *(OUR_SCRIPT, turns.ring_on_one_host, "labkit", "shared memory", "all-reduce")
    ),
    "labkit.horovod over TCP": _script(
        *(OUR_SCRIPT, turns.ring_on_two_hosts, "labkit", "TCP", "all-reduce")
    ),
    "Horovod": _script(
        *(HOROVOD_SCRIPT, turns.horovodrun, "Horovod", "TCP", "all-reduce"),
        *(_SAME_KERNELS, "horovod"),
    ),
    "MirroredStrategy": _script(
        *("mirrored.py", turns.tensorflow, "TensorFlow", "none", "", *_TENSORFLOW)
    ),
    "MultiWorkerMirroredStrategy": _script(
        *("multi_worker.py", turns.tensorflow, "TensorFlow", "TCP", "all-reduce", *_TENSORFLOW)
    ),
    "ParameterServerStrategy": _script(
        *("parameter_server.py", turns.tensorflow, "TensorFlow", "TCP", "server", *_TENSORFLOW)
    ),
}


def run_elsewhere(
    contenders: Sequence[str] | None = None, steps: int = 12, repeats: int = 1, tell: bool = False
) -> dict[str, Any]:
    """Train the same model with every contender; the record of losses, bytes and seconds.

    Args:
        contenders: only these of ``CONTENDERS``; one device always trains, as the reference.
        steps: batches of 64 digits. The first few warm up: their seconds and bytes do not count.
        repeats: how often each contender trains.
        tell: print who trains, on stderr.

    Raises:
        ValueError: an unknown contender, no steps, no repeats.
    """
    check_integer("steps", steps)
    check_integer("repeats", repeats)
    for name in contenders or ():
        check_choice("contender", name, CONTENDERS)
    wanted = {ONE_DEVICE, *(contenders or CONTENDERS)}
    chosen = {name: contender for name, contender in CONTENDERS.items() if name in wanted}
    return measure(chosen, steps, repeats, tell=tell)


def measure(
    contenders: Mapping[str, Contender],
    steps: int,
    repeats: int,
    *,
    limit_s: float = _LIMIT_S,
    scripts: Path = SCRIPTS,
    tell: bool = False,
) -> dict[str, Any]:
    """Train with these contenders in turns, one device first in the first round.

    A contender that fails is out of the later rounds, and its row says why. However this ends, no
    process and no file of it is left.
    """
    found: dict[str, list[Turn]] = {name: [] for name in contenders}
    absent = {n: why_not(c.environment) for n, c in contenders.items() if c.environment}
    problems = {name: reason for name, reason in absent.items() if reason}
    with contextlib.ExitStack() as stack:
        stack.enter_context(as_ctrl_c())
        private = tempfile.TemporaryDirectory(prefix="lk-", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(private))
        turns.prepare(folder, steps, scripts=scripts)
        for repeat in range(repeats):
            names = [name for name in found if name not in problems]
            first = repeat % max(1, len(names))
            for name in names[first:] + names[:first]:
                if tell:
                    print(f"round {repeat + 1} of {repeats}: {name}", file=sys.stderr, flush=True)
                try:
                    found[name].append(contenders[name].take_turn(folder, steps, limit_s))
                except TurnError as error:
                    problems[name] = str(error)
    # The first steps of a turn are left out: frameworks compile, and buffers are made.
    warm_up = min(_MOST_WARM_UP, steps // 2)
    truth = (found[ONE_DEVICE] or [{"losses": []}])[0]["losses"]
    rows = []
    for name, contender in contenders.items():
        row = {"contender": name, "framework": contender.framework, "messages": contender.messages}
        row |= {"problem": problems.get(name, ""), "absent": bool(absent.get(name))}
        rows.append(
            row | (_numbers(contender, found[name], truth, warm_up) if found[name] else {})
        )
    return {
        "batch_size": turns.BATCH_SIZE,
        "parameters": sum(p.numel() for p in turns.initial_model().parameters()),
        "warm_up": warm_up,
        "contenders": rows,
    }


def _numbers(
    contender: Contender, taken: list[Turn], truth: list[float], warm_up: int
) -> dict[str, Any]:
    """A contender's measurements; bytes are those of a process per step, means over all turns."""
    apart = [abs(a - b) for turn in taken for a, b in zip(turn["losses"], truth)]
    # Not max alone: it overlooks a NaN.
    known = bool(apart) and all(map(math.isfinite, apart))
    seconds = [one for turn in taken for one in turn["step_s"][warm_up:]]
    per_step = {
        kind: {
            process: statistics.fmean(b for turn in taken for b in turn[kind][process][warm_up:])
            for process in taken[0][kind]
        }
        for kind in ("sent_bytes", "counted_bytes")
    }
    return per_step | {
        "losses": taken[0]["losses"],
        "tolerance": contender.tolerance,
        "difference": max(apart) if known else None,
        "agrees": known and max(apart) <= contender.tolerance,
        "formula_bytes": formula_bytes(contender.formula),
        "seconds": rounded(seconds),
        "step_s": asdict(Spread.of(seconds)),
        "versions": contender.versions() | taken[0]["versions"],
    }


def formula_bytes(formula: str, workers: int = 2) -> dict[str, int]:
    """What each role sends per step of the course's model, by the formula of a contender.

    ``all-reduce``: 2 (P - 1) / P S. ``server``: a worker sends its gradient, S, and the server
    the new parameters to each worker, W S.
    """
    elements = sum(p.numel() for p in turns.initial_model().parameters())
    if formula == "all-reduce":
        return {"worker": ring_all_reduce_cost(elements, _ELEMENT_BYTES, workers).num_bytes}
    if formula == "server":
        server, worker = (
            parameter_server_cost(elements, _ELEMENT_BYTES, workers + 1, rank).num_bytes
            for rank in (0, 1)
        )
        return {"worker": worker, "server": server}
    return {}
