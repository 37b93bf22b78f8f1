"""``labkit bench checkpoint``: for how long a checkpoint stops the training.

The state of one model that our DDP trains is saved in turns: as a checkpoint of all ranks, and as
a plain file of safetensors by rank 0 alone.
"""

import itertools
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from labkit.comm.comm import Comm
from labkit.strategies.ddp import DDP
from labkit.training import checkpoint
from labkit.training.checkpoint import Facts
from labkit.units import format_bytes
from workbook.measure.record import Result
from workbook.measure.steps import step_of
from workbook.measure.turns import Where, on_ranks, slowest, take_turns, timed

SAVE, PLAIN = "checkpoint", "safetensors alone"


def bench_checkpoint(world_size: int, model: str, repeats: int, where: Where) -> Iterator[Result]:
    """Time checkpoints and plain files."""
    with tempfile.TemporaryDirectory(prefix="labkit-checkpoints-") as folder:
        by_rank = on_ranks(measure, model, repeats, folder, world_size=world_size, where=where)
    num_bytes = by_rank[0]["num_bytes"]
    yield Result(
        f"Checkpoints of {model} ({format_bytes(num_bytes)}), {world_size} ranks, in turns",
        {"model": model, "world_size": world_size, "num_bytes": num_bytes},
        {"": slowest([rank["seconds"] for rank in by_rank])},
        (PLAIN,),
    )


def measure(comm: Comm, model: str, repeats: int, folder: str) -> dict[str, Any]:
    """Measure on this rank: seconds by contender, and the bytes of the checkpoint's tensors."""
    strategy, numbers = DDP(), itertools.count(1)
    step_of(strategy, comm, model, batch_size=32 * comm.world_size)()
    state = {name: t for name, t in strategy.state().items() if not name.startswith("own/")}
    state = state if comm.rank == 0 else {"random": torch.get_rng_state()}
    # It refuses tensors that share memory.
    alone = {name: tensor.clone().cpu() for name, tensor in state.items()}

    def save() -> None:
        path = checkpoint.step_path(folder, step := next(numbers))
        checkpoint.save(comm, path, Facts(0, step, [], {}), state)

    def plain() -> None:
        if comm.rank == 0:
            # As with checkpoints, an old one goes.
            path = Path(folder, "plain.safetensors")
            path.unlink(missing_ok=True)
            save_file(alone, path)

    turns = {SAVE: partial(timed, comm, save), PLAIN: partial(timed, comm, plain)}
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    return {"seconds": take_turns(turns, repeats), "num_bytes": num_bytes}
