"""A storm of kills: runs that are killed at random moments, and go on to the same end, to the bit.

For each technique, runs with a checkpoint every few steps are hit by SIGKILL: one of their ranks,
or the program that has launched them. They are started again with ``resume``, and some of them are
hit again, until one ends. Its parameters and its epochs must be those of a run that nobody has
killed.

``make storm-resume`` makes 20 kills per technique, tests/training/test_resume.py a few. The same
seed repeats the same targets; what a rank is doing when it is hit differs.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import torch
from ranks import is_alive, running_ranks, session_of, travel_by_value, wait_until
from torch import nn
from torch.nn import functional

from labkit import WorkerError, train_with
from labkit.training.checkpoint import newest

travel_by_value(__name__)

# A step takes some time, so that most kills hit one.
STEP_S = 0.02
SETTINGS = {"epochs": 3, "train_size": 110, "batch_size": 20, "lr_schedule": "cosine"}


class Network(nn.Sequential):
    """Batch statistics and dropout have states of their own."""

    def __init__(self, dropout=0.2):
        layers = [nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU()]
        super().__init__(*layers, nn.Dropout(dropout), nn.Linear(16, 10))


def without_dropout():
    return Network(dropout=0.0)


class SlowLoss:
    """Cross entropy that takes a while, and says in the file ``begun`` that a run has begun."""

    def __init__(self, begun):
        self.begun = begun

    def __call__(self, outputs, targets):
        if multiprocessing.parent_process() is not None:
            Path(self.begun).touch()
            time.sleep(STEP_S)
        return functional.cross_entropy(outputs, targets)


# name -> settings; the number of ranks, where it is not that of world_size.
RUNS = {
    "single": {"strategy": "single"},
    # Threads would take turns with the same random numbers.
    "data_parallel": {"strategy": "data_parallel", "world_size": 2, "model": without_dropout},
    "ddp": {"strategy": "ddp", "world_size": 3},
    "ring_all_reduce": {"strategy": "ring_all_reduce", "world_size": 3, "optimizer": "adamw"},
    "topk": {"strategy": "ring_all_reduce", "world_size": 2, "compress": "topk"},
    "parameter_server": {"strategy": "parameter_server", "world_size": 3},
    "model_parallel": {"strategy": "model_parallel", "world_size": 2, "optimizer": "adam"},
    "model_parallel in one process": {"strategy": "model_parallel", "devices": "cpu"},
    "pipeline": {"strategy": "pipeline", "world_size": 3, "micro_batches": 2},
    "DistributedDataParallel": {"strategy": "ddp", "world_size": 3, "builtin": True},
    "nn.DataParallel": {"strategy": "data_parallel", "world_size": 2, "builtin": True},
    "PyTorch's pipeline": {
        "strategy": "pipeline", "world_size": 2, "builtin": True, "micro_batches": 2,
    },
    "RPC server": {"strategy": "parameter_server", "world_size": 3, "builtin": True},
}  # fmt: skip


def settings_of(name, folder=None, every=2):
    """The arguments of ``train_with``; with a folder, of a run that goes on from what is there."""
    place = {} if folder is None else {"checkpoint_dir": str(folder / "kept"), "resume": True}
    place |= {} if folder is None else {"checkpoint_every": every}
    begun = tempfile.gettempdir() if folder is None else str(folder)
    return SETTINGS | {"model": Network, "loss": SlowLoss(f"{begun}/begun")} | RUNS[name] | place


def end_of(result):
    """What does not depend on time."""
    rows = [{**row, "seconds": 0} for row in result.epochs]
    state = {name: value.numpy().tobytes() for name, value in result.state.items()}
    return repr([rows, state, result.checksums])


def kill_rank(name, folder, every, draw, most_s):
    """Run on, and kill a rank at a random moment; the result if the run has ended before that."""
    after_s, ends, struck = draw.uniform(0, most_s), threading.Event(), []

    def strike():
        wait_until(lambda: (folder / "begun").exists() or ends.is_set(), 120)
        if not ends.wait(after_s) and (ranks := running_ranks()):
            with contextlib.suppress(ProcessLookupError):
                struck.append(draw.choice(ranks))
                os.kill(struck[0], signal.SIGKILL)

    (folder / "begun").unlink(missing_ok=True)
    timer = threading.Thread(target=strike)
    timer.start()
    try:
        return train_with(**settings_of(name, folder, every))
    except WorkerError:
        if not struck:
            raise
        return None
    finally:
        ends.set()
        timer.join()


PROGRAM = """
    import sys
    from pathlib import Path
    sys.path.insert(0, {here!r})
    import resume_storm
    from labkit import train_with

    if __name__ == "__main__":
        train_with(**resume_storm.settings_of({name!r}, Path({folder!r}), {every}))
"""


def kill_launcher(name, folder, every, draw, most_s):
    """Run on in another program, and kill it at a random moment."""
    script = folder / "program.py"
    words = {"here": str(Path(__file__).parent), "name": name, "folder": str(folder)}
    script.write_text(textwrap.dedent(PROGRAM).format(**words, every=every))
    (folder / "begun").unlink(missing_ok=True)
    program = subprocess.Popen(
        [sys.executable, str(script)], stderr=subprocess.DEVNULL, start_new_session=True
    )
    wait_until(lambda: (folder / "begun").exists() or program.poll() is not None, 120)
    time.sleep(draw.uniform(0, most_s))
    program.kill()
    program.wait()
    # The next run begins at once, as a script would start it, while ranks may still be ending.
    return session_of(program.pid)


def killed_and_resumed(name, due, most_s, draw, launcher):
    """Kill a run once or more, let it go on to its end, and compare that with ``due``.

    Returns:
        At which steps it went on: one for each kill, none if it ended too early.
    """
    every, went_on, left, result = draw.randint(1, 4), [], [], None
    with tempfile.TemporaryDirectory(prefix="kept-") as place:
        folder = Path(place)
        kills = 1 if launcher else 1 + (draw.random() < 0.3)
        while result is None and len(went_on) < kills:
            if launcher:
                left = kill_launcher(name, folder, every, draw, most_s)
            else:
                result = kill_rank(name, folder, every, draw, most_s)
            if result is None:
                stored, _ = newest(folder / "kept")
                went_on.append(0 if stored is None else int(stored.path.name.rpartition("-")[2]))
        if result is None:
            result = train_with(**settings_of(name, folder, every))
        assert end_of(result) == due, f"{name} every {every}, from {went_on}: another end"
        assert not newest(folder / "kept")[1]
        gone = wait_until(lambda: not any(map(is_alive, left)), 20)
        assert gone, f"{name}: the launcher left {left}"
        hidden = [entry for entry in os.listdir(folder / "kept") if entry.endswith(".part")]
        assert not hidden, f"{name} left {hidden}"
    return went_on


def main():
    """Kill runs of each technique ``kills`` times, the launcher of the first; print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(RUNS))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    chosen = parser.parse_args()
    draw = random.Random(chosen.seed)
    print(f"seed {chosen.seed}, torch {torch.__version__}")
    multiprocessing.util.get_temp_dir()
    for name in chosen.names:
        whole = [train_with(**settings_of(name)) for _ in range(2)]
        due, repeated = map(end_of, whole)
        assert due == repeated, f"{name} does not repeat itself"
        most_s = 1.2 * sum(row["seconds"] for row in whole[1].epochs)
        went_on = killed_and_resumed(name, due, most_s, draw, launcher=True)
        while len(went_on) < chosen.kills:
            went_on += killed_and_resumed(name, due, most_s, draw, launcher=False)
        steps = ", ".join(map(str, sorted(went_on)))
        print(f"{name}: all equal to the bit; went on after steps {steps}", flush=True)


if __name__ == "__main__":
    main()
