"""Storms: runs that are hit by a signal at a random moment.

``make storm`` sends SIGKILL, SIGTERM, SIGABRT or SIGSTOP to a rank or to the forkserver, or SIGINT
to the caller (the stop button), a while after the ranks are there. Whatever is hit, the run must
end in time, with the right values or with an error that names the cause, and leave nothing behind.

``make storm-resume`` kills a rank of runs of each technique, with a checkpoint every few steps.
They are started again until they end, as a run ends that nobody has killed, to the bit.

The tests make a few of both. The same seed repeats the same strikes.
"""

import argparse
import contextlib
import itertools
import multiprocessing.util
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import torch
from ranks import is_alive, leftovers, running_ranks, server_pid, travel_by_value, wait_until
from torch import nn
from torch.nn import functional

from labkit import WorkerError, run, train_with
from labkit.training.checkpoint_files import newest

travel_by_value(__name__)

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGABRT, signal.SIGSTOP)
# A run with a stopped rank ends at its deadline; all other runs end much earlier.
TIMEOUT_S = 2.0
# A forkserver that was hit before a run is started again, and imports torch.
PATIENCE_S, IMPORT_S = 30.0, 60.0


@contextlib.contextmanager
def struck(target, number, after_s, draw):
    """Send a signal ``after_s`` after this block's run has ranks; yields the ranks that were hit.

    An interrupt of the caller arrives at the end of the block at the latest.
    """
    ended, hit = threading.Event(), []

    def strike():
        while not (ranks := multiprocessing.active_children()) and not ended.is_set():
            time.sleep(0.001)
        if ended.wait(after_s):
            return
        one = draw.choice(ranks)
        pid = {"caller": os.getpid(), "forkserver": server_pid(), "rank": one.pid}[target]
        with contextlib.suppress(ProcessLookupError):
            hit.append(int(one.name.rpartition("-")[2]))
            os.kill(pid, number)
            # Aborting takes a while: the next run must not find a server that is about to end.
            if number not in (signal.SIGSTOP, signal.SIGINT):
                wait_until(lambda: not is_alive(pid), 60)

    striker = threading.Thread(target=strike)
    striker.start()
    try:
        yield hit
    finally:
        ended.set()
        striker.join()


# Runs that end whole, or with the cause named


def returns_at_once(comm):
    return comm.rank


def meets_often(comm):
    total = torch.ones(1000)
    for _ in range(30):
        torch.distributed.all_reduce(total)
        total /= comm.world_size
        comm.barrier()
    return comm.rank if total.sum().item() == 1000 else "wrong"


def returns_much(comm):
    return comm.rank, torch.zeros(2_000_000)


def fails_everywhere(comm):
    raise ValueError(f"the fault of rank {comm.rank}")


FUNCTIONS = (returns_at_once, meets_often, returns_much, fails_everywhere)
# (target, signal) of the strikes, in turn.
KINDS = [("caller", signal.SIGINT)] * 2
KINDS += itertools.product(["rank"] * 3, SIGNALS)
KINDS += itertools.product(["forkserver"], SIGNALS[:3])


def strike_run(target: str, number: signal.Signals, draw: random.Random) -> str:
    """Make one run that is struck.

    Returns:
        ``whole`` if the run ended with its values, ``named`` if its error named its fault or the
        strike, ``stopped`` if the caller was interrupted.

    Raises:
        AssertionError: the run took too long, named another cause, or left something behind.
    """
    after_s = draw.uniform(0, draw.choice([0.06, 0.12, 0.3]))
    function, world_size = draw.choice(FUNCTIONS), draw.randint(1, 4)
    told = f"{number.name} to the {target} after {after_s:.3f} s of {function.__name__}"
    before, started_s, error = leftovers(), time.monotonic(), None
    try:
        with struck(target, number, after_s, draw) as hit:
            try:
                values = run(function, world_size=world_size, timeout_s=TIMEOUT_S).values
                ranks = [value[0] if isinstance(value, tuple) else value for value in values]
                assert ranks == list(range(world_size)), f"{told}: wrong values {ranks}"
            except (WorkerError, EOFError, ConnectionError) as raised:
                error = str(raised)
        outcome = "whole" if error is None else "named"
    except KeyboardInterrupt:
        assert target == "caller", told
        outcome = "stopped"
    if outcome == "named" and not (function is fails_everywhere and "the fault of rank" in error):
        assert hit, f"{told} was not struck, and says: {error}"
        names = {"rank": f"rank {hit[0]} was killed by {number.name}", "caller": "never"}
        names["forkserver"] = r"forked from has ended|exit code 255|Errno"
        says = "still going at its deadline" if number == signal.SIGSTOP else names[target]
        assert re.search(says, error), f"{told} is not named by: {error}"
    took_s = time.monotonic() - started_s
    limit_s = TIMEOUT_S + PATIENCE_S + IMPORT_S * (target == "forkserver")
    assert took_s < limit_s, f"{told}: the run took {took_s:.1f} s"
    assert wait_until(lambda: not running_ranks(), 60), f"{told} left ranks {running_ranks()}"
    assert leftovers() <= before, f"{told} left {leftovers() - before}"
    return outcome


def strike_runs(runs: int, seed: int) -> Counter:
    """Strike many runs; count them by target, signal and outcome."""
    draw, seen = random.Random(seed), Counter()
    run(returns_at_once, world_size=1)
    for target, number in itertools.islice(itertools.cycle(KINDS), runs):
        if not is_alive(server_pid()):
            run(returns_at_once, world_size=1)
        seen[target, number.name, strike_run(target, number, draw)] += 1
    return seen


# Runs that are killed and go on


class Network(nn.Sequential):
    """Batch statistics and dropout have states of their own."""

    def __init__(self, dropout=0.2):
        layers = [nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU()]
        super().__init__(*layers, nn.Dropout(dropout), nn.Linear(16, 10))


def slow_loss(outputs, targets):
    """A step takes some time, so that most kills hit one."""
    time.sleep(0.02)
    return functional.cross_entropy(outputs, targets)


SETTINGS = {"epochs": 3, "train_size": 110, "batch_size": 20, "lr_schedule": "cosine"}
SETTINGS |= {"model": Network, "loss": slow_loss}
# Replicas in threads would take turns with the same random numbers.
REPLICAS = {"strategy": "data_parallel", "world_size": 2, "model": lambda: Network(dropout=0.0)}
RUNS = {
    "single": {"strategy": "single"},
    "data_parallel": REPLICAS,
    "ddp": {"strategy": "ddp", "world_size": 3},
    "ring_all_reduce": {"strategy": "ring_all_reduce", "world_size": 3, "optimizer": "adamw"},
    "topk": {"strategy": "ring_all_reduce", "world_size": 2, "compress": "topk"},
    "parameter_server": {"strategy": "parameter_server", "world_size": 3},
    "model_parallel": {"strategy": "model_parallel", "world_size": 2, "optimizer": "adam"},
    "model_parallel in one process": {"strategy": "model_parallel", "devices": "cpu"},
    "pipeline": {"strategy": "pipeline", "world_size": 3, "micro_batches": 2},
    "DistributedDataParallel": {"strategy": "ddp", "world_size": 3, "builtin": True},
    "nn.DataParallel": {**REPLICAS, "model": Network, "builtin": True},
    "PyTorch's pipeline": {
        "strategy": "pipeline", "world_size": 2, "builtin": True, "micro_batches": 2,
    },
    "RPC server": {"strategy": "parameter_server", "world_size": 3, "builtin": True},
}  # fmt: skip


def end_of(result):
    """What does not depend on time."""
    rows = [{**row, "seconds": 0} for row in result.epochs]
    state = {name: value.numpy().tobytes() for name, value in result.state.items()}
    return repr([rows, state, result.checksums])


def kill_and_resume(name: str, kills: int, draw: random.Random) -> list[int]:
    """Kill runs of a technique so many times, and compare their ends with that of a whole run.

    Returns:
        After which steps they went on.
    """
    whole, went_on = train_with(**SETTINGS | RUNS[name]), []
    most_s = 1.2 * sum(row["seconds"] for row in whole.epochs)
    while len(went_on) < kills:
        with tempfile.TemporaryDirectory(prefix="kept-") as folder:
            every, result = draw.randint(1, 4), None
            place = {"checkpoint_dir": folder, "resume": True, "checkpoint_every": every}
            while result is None:
                with struck("rank", signal.SIGKILL, draw.uniform(0, most_s), draw) as hit:
                    try:
                        result = train_with(**SETTINGS | RUNS[name] | place)
                    except WorkerError:
                        if not hit:
                            raise
                        stored, _ = newest(Path(folder))
                        step = 0 if stored is None else int(stored.path.name.rpartition("-")[2])
                        went_on.append(step)
            assert end_of(result) == end_of(whole), f"{name} every {every}, from {went_on}"
            assert not newest(Path(folder))[1]
            assert not [entry for entry in os.listdir(folder) if entry.endswith(".part")]
    return went_on


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Storms: runs that are hit by a signal at a random moment."
    )
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--resume", nargs="*", metavar="NAME", help="all of them if none is named")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}, torch {torch.__version__}")
    # The forkserver's folder is removed at the end of this process, after the one made here.
    multiprocessing.util.get_temp_dir()
    # A folder of this process only: other programs make files in the common one meanwhile.
    with tempfile.TemporaryDirectory(prefix="storms-") as folder:
        os.environ["TMPDIR"], tempfile.tempdir = folder, folder
        if chosen.resume is None:
            for one, count in sorted(strike_runs(chosen.runs, chosen.seed).items()):
                print(*one, count)
            return
        for name in chosen.resume or RUNS:
            steps = sorted(kill_and_resume(name, chosen.kills, random.Random(chosen.seed)))
            print(f"{name}: all equal to the bit; went on after steps {steps}", flush=True)


if __name__ == "__main__":
    main()
