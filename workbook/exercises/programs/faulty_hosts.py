"""Training on hosts that fail: it goes on from its newest checkpoint, if torchrun starts it again.

Usage: ``torchrun ... --max-restarts N faulty_hosts.py FOLDER SETTINGS``. SETTINGS are the numbers
of ``Settings``, as JSON. In FOLDER are the checkpoint, what each rank has done (``events-RANK``),
and what ``workbook.measure.failures`` writes of faults: ``fault``, the moment of the last one, and
``cut-HOST``, until when that host sends nothing. All moments are of the clock of this machine.
"""

import itertools
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labkit.engine.files import write_atomically
from labkit.engine.runtime import rounds

SAMPLES = 32
# How fast the parameters follow the gradient.
RATE = 0.1
_START_S = 30.0


@dataclass(frozen=True)
class Settings:
    """Durations of a run; computing and writing are sleeps, as long on any machine.

    Attributes:
        every: steps between checkpoints.
        step_s, checkpoint_s: seconds of computing in a step, and of a checkpoint.
        recovery_s: seconds after a fault in which no step is made.
        patience_s: a rank that waits longer for the others ends.
        duration_s: of the whole training.
    """

    every: int = 10
    step_s: float = 0.05
    checkpoint_s: float = 0.1
    recovery_s: float = 2.75
    patience_s: float = 0.5
    duration_s: float = 11.3


def train(rank: int, folder: Path, settings: Settings, note: Any) -> None:
    """Fit a line to points, another batch per step; begin where the newest checkpoint is."""
    newest = folder / "newest.json"
    first, line = load(newest)
    begun_s = begin_together(folder)
    for step in itertools.count(first + 1):
        start_s = time.monotonic()
        time.sleep(settings.step_s)  # as if it computed
        sleep_until(read_moment(folder / f"cut-{os.environ['GROUP_RANK']}"))
        loss, gradient = loss_and_gradient(line, step, rank)
        is_over = torch.tensor([float(time.monotonic() > begun_s + settings.duration_s)])
        total = torch.cat([loss.view(1), gradient, is_over])
        work = dist.all_reduce(total, async_op=True)
        try:
            work.wait(timedelta(seconds=settings.patience_s))
        except RuntimeError as error:
            print(f"rank {rank} got no answer: {str(error).splitlines()[0]}", flush=True)
            os._exit(1)
        total /= dist.get_world_size()
        line -= RATE * total[1:3]
        note("step", start_s, step=step, loss=total[0].item())
        if total[3] > 0:
            return
        if step % settings.every == 0:
            start_s = time.monotonic()
            time.sleep(settings.checkpoint_s)  # as if it were large
            if rank == 0:
                save(newest, step, line)
            note("checkpoint", start_s)


def begin_together(folder: Path) -> float:
    """Return when the first of all attempts began; the same on all ranks."""
    begun = torch.tensor([time.monotonic()], dtype=torch.float64)
    dist.broadcast(begun, src=0)
    path = folder / "begun"
    if dist.get_rank() == 0 and not path.exists():
        write_atomically(path, repr(begun.item()).encode())
    dist.barrier()
    return read_moment(path)


def load(newest: Path) -> tuple[int, torch.Tensor]:
    """Return the step of the newest checkpoint and its parameters [2]; 0 and zeros without one."""
    if not newest.exists():
        return 0, torch.zeros(2)
    checkpoint = json.loads(newest.read_text())
    return checkpoint["step"], torch.tensor(checkpoint["line"])


def save(newest: Path, step: int, line: torch.Tensor) -> None:
    """Write a checkpoint aside, then rename it: a reader finds the old one or the new one."""
    write_atomically(newest, json.dumps({"step": step, "line": line.tolist()}).encode())


def loss_and_gradient(line: torch.Tensor, step: int, rank: int) -> tuple[torch.Tensor, ...]:
    """Loss and gradient of the batch that belongs to this step and rank, always the same."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(SAMPLES, generator=draw)
    y = 2 * x + 1 + 0.1 * torch.randn(SAMPLES, generator=draw)
    error = line[0] * x + line[1] - y
    return (error**2).mean(), 2 * torch.stack([(error * x).mean(), error.mean()])


def read_moment(path: Path) -> float:
    """Return the moment that a file holds; 0 without the file."""
    return float(path.read_text()) if path.exists() else 0.0


def sleep_until(moment_s: float) -> None:
    """Sleep until a moment of ``time.monotonic``; not at all if it has passed."""
    time.sleep(max(0.0, moment_s - time.monotonic()))


def main() -> None:
    """Join the others, train, and note what this process does."""
    # In a fork of an agent it would be the agent's.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    folder = Path(sys.argv[1])
    settings = Settings(**json.loads(sys.argv[2]))
    rank = int(os.environ["RANK"])

    def note(kind: str, start_s: float, **facts: Any) -> None:
        event = {"kind": kind, "start_s": start_s, "end_s": time.monotonic(), **facts}
        with open(folder / f"events-{rank}", "a") as events:
            events.write(json.dumps(event) + "\n")

    note("process", time.monotonic(), pid=os.getpid())
    # Agents count restarts each for itself, so PyTorch's own keys may differ between hosts.
    store = dist.PrefixStore("group", rounds.join(_START_S).store)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=_START_S),
    )
    start_s = time.monotonic()
    sleep_until(read_moment(folder / "fault") + settings.recovery_s)
    note("recover", start_s)
    train(rank, folder, settings, note)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
