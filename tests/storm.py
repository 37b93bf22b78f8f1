"""A storm of signals: runs that are hit by a signal at a random moment after their start.

A strike sends SIGKILL, SIGTERM, SIGABRT or SIGSTOP to a rank, to the forkserver or to the program
that runs them, or SIGINT to the caller (the stop button). Its moment is counted from an event (the
ranks are there, the program has said that it runs), so that a slow start is not struck before it
began. Whatever is hit, the run must end in time, with the right values or with an error that names
the cause, and leave nothing behind: no process, no file, no semaphore.

``make storm`` makes several hundred runs, tests/runtime/test_storm.py a few. The same seed repeats
the same strikes.
"""

import argparse
import contextlib
import itertools
import multiprocessing.util
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path

import torch
from ranks import (
    is_alive,
    leftovers,
    running_ranks,
    server_pid,
    session_of,
    travel_by_value,
    wait_until,
)

from labkit import WorkerError, run
from labkit.runtime.preload import FOR_TRAINING

travel_by_value(__name__)

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGABRT, signal.SIGSTOP)
# A run with a stopped rank ends at its deadline; all other runs end much earlier.
TIMEOUT_S = 2.0
# A forkserver that was hit before a run is started again, and imports torch.
PATIENCE_S, IMPORT_S = 10.0, 60.0


def returns_at_once(comm):
    return comm.rank


def meets_often(comm):
    total = torch.ones(1000)
    for _ in range(30):
        torch.distributed.all_reduce(total)
        total /= comm.world_size
        comm.barrier()
    return comm.rank if total.sum().item() == 1000 else "wrong"


def computes_alone(comm):
    until_s = time.monotonic() + 0.15
    while time.monotonic() < until_s:
        pass
    return comm.rank


def returns_much(comm):
    return comm.rank, torch.zeros(2_000_000)


def fails_everywhere(comm):
    raise ValueError(f"the fault of rank {comm.rank}")


# (target, signal) of the strikes, in turn.
KINDS = [("caller", signal.SIGINT)] * 2
KINDS += itertools.product(["rank"] * 3, SIGNALS)
KINDS += itertools.product(["forkserver"], SIGNALS[:3])
FUNCTIONS = (returns_at_once, meets_often, computes_alone, returns_much)


def strike_run(target: str, number: signal.Signals, draw: random.Random) -> str:
    """Make one run, and send it the signal when it has ranks, and a while later.

    Returns:
        ``whole`` if the run ended with its values, ``named`` if its error named its fault or the
        strike, ``stopped`` if the caller was interrupted.

    Raises:
        AssertionError: the run took too long, named another cause, or left something behind.
    """
    after_s = draw.uniform(0, draw.choice([0.06, 0.12, 0.3]))
    function, world_size = draw.choice((*FUNCTIONS, fails_everywhere)), draw.randint(1, 4)
    told = f"{number.name} to the {target} after {after_s:.3f} s of {function.__name__}"
    before, ended, hit, started_s = leftovers(), threading.Event(), [], time.monotonic()

    def strike():
        while not (ranks := multiprocessing.active_children()) and not ended.is_set():
            time.sleep(0.001)
        if ended.wait(after_s):
            return
        struck = draw.choice(ranks)
        pids = {"caller": os.getpid(), "forkserver": server_pid(), "rank": struck.pid}
        with contextlib.suppress(ProcessLookupError):
            hit.append(struck.name.rpartition("-")[2])
            os.kill(pids[target], number)
            # Aborting takes a while: the next run must not find a server that is about to end.
            if number not in (signal.SIGSTOP, signal.SIGINT):
                wait_until(lambda: not is_alive(pids[target]), 10)

    def is_named_by(error):
        if function is fails_everywhere and "raised ValueError: the fault of rank" in error:
            return True
        if target == "forkserver":
            return hit and (not error or re.search("exit code 255|EOF|Errno", error))
        if number == signal.SIGSTOP:
            return hit and "still going at its deadline" in error
        return hit and f"rank {hit[0]} was killed by {number.name}" in error

    striker = threading.Thread(target=strike)
    try:
        try:
            striker.start()
            values = run(function, world_size=world_size, timeout_s=TIMEOUT_S).values
            ranks = [value[0] if isinstance(value, tuple) else value for value in values]
            assert ranks == list(range(world_size)), f"{told}: wrong values {ranks}"
            outcome = "whole"
        except (WorkerError, EOFError, ConnectionError) as error:
            if not is_named_by(str(error)):
                raise AssertionError(f"{told} is not named by: {error}") from None
            outcome = "named"
        finally:
            # An interrupt that is on its way arrives here at the latest.
            ended.set()
            striker.join()
    except KeyboardInterrupt:
        assert target == "caller", told
        striker.join()
        outcome = "stopped"
    took_s = time.monotonic() - started_s
    limit_s = TIMEOUT_S + PATIENCE_S + IMPORT_S * (target == "forkserver")
    assert took_s < limit_s, f"{told}: the run took {took_s:.1f} s"
    assert wait_until(lambda: not running_ranks(), 2), f"{told} left ranks {running_ranks()}"
    assert leftovers() <= before, f"{told} left {leftovers() - before}"
    return outcome


PROGRAM = """
    import sys
    sys.path.insert(0, {here!r})
    import storm
    from labkit import run

    if __name__ == "__main__":
        print("begins", flush=True)
        while True:
            for function in storm.FUNCTIONS:
                run(function, world_size=2)
                print("ran", flush=True)
"""


def strike_program(number: signal.Signals, draw: random.Random, send=os.kill) -> None:
    """Hit a program that makes many runs: everything that it has started must end with it.

    With ``os.killpg`` as ``send`` its whole process group is hit, as by a terminal that closes.
    """
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        script, inside = Path(folder) / "program.py", Path(folder) / "t"
        script.write_text(textwrap.dedent(PROGRAM).format(here=str(Path(__file__).parent)))
        inside.mkdir()
        program = subprocess.Popen(
            [sys.executable, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env=os.environ | {"TMPDIR": str(inside)},
            # Under nohup it would ignore a terminal that closes, as it should.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
        try:
            # While its forkserver imports torch, or while it runs.
            said = draw.choice(["begins\n", "ran\n"])
            while program.stdout.readline() != said:
                assert program.poll() is None
            time.sleep(draw.uniform(0, 1))
            send(program.pid, number)
            if number == signal.SIGSTOP:
                # One that was stopped for a moment continues as before.
                time.sleep(0.5)
                os.kill(program.pid, signal.SIGCONT)
                for _ in range(8):
                    assert program.stdout.readline() == "ran\n"
                os.kill(program.pid, signal.SIGKILL)
            program.wait(10)
            # A forkserver that is still importing notices it only after its imports.
            gone = wait_until(lambda: not any(map(is_alive, session_of(program.pid))), 40)
            assert gone, f"{number.name} to the program left {session_of(program.pid)}"
        finally:
            for pid in session_of(program.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            program.wait()
        # PyTorch's cache of compiled code is meant to stay.
        left = [name for name in os.listdir(inside) if not name.startswith("torchinductor_")]
        assert not left, f"{number.name} to the program left {left}"


def weather(runs: int, seed: int) -> Counter:
    """Strike many runs; count them by target, signal and outcome."""
    draw = random.Random(seed)
    seen: Counter = Counter()
    run(returns_at_once, world_size=1)
    for target, number in itertools.islice(itertools.cycle(KINDS), runs):
        if not is_alive(server_pid()):
            run(returns_at_once, world_size=1)
        seen[target, number.name, strike_run(target, number, draw)] += 1
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--programs", type=int, default=16)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    chosen = parser.parse_args()
    # No function here trains: without these imports, a new forkserver starts in half the time.
    FOR_TRAINING.clear()
    print(f"seed {chosen.seed}")
    # The forkserver's folder is removed at the end of this process, after the one made here.
    multiprocessing.util.get_temp_dir()
    # A folder of this process only: other programs make files in the common one meanwhile.
    with tempfile.TemporaryDirectory(prefix="storms-") as folder:
        os.environ["TMPDIR"], tempfile.tempdir = folder, folder
        for (target, name, outcome), count in sorted(weather(chosen.runs, chosen.seed).items()):
            print(f"  {target:10} {name:8} {outcome:8} {count:4}")
        for number, _ in zip(itertools.cycle(SIGNALS), range(chosen.programs)):
            strike_program(number, random.Random(chosen.seed))


if __name__ == "__main__":
    main()
