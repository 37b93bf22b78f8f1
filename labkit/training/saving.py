"""What a run gives to its checkpoints, and takes from one: on each rank, by names and kinds.

    model/NAME            parameters and buffers, by their names in the model's state dict
    optimizer/NAME/KEY    what the optimizer keeps of a parameter
    buffers/NAME          batch statistics of this rank at this moment
    own/NAME              what else its technique carries from step to step
    random/NAME           the states of torch's generators; Python's and NumPy's are numbers

The model and the optimizer's state are the same for any number of ranks, so a run can go on with
another one where the rest allows it, see ``labkit.training.resume``.
"""

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.config import RunConfig
from labkit.strategies.base import Strategy
from labkit.strategies.state import State, named
from labkit.training.checkpoint import Facts, Stored, Writer
from labkit.training.evaluation import is_best
from labkit.training.optimizer import continue_schedule, scheduler_of
from labkit.training.progress import Progress
from labkit.training.resume import arrangement

# Torch's generators as tensors, Python's and NumPy's as what JSON can hold.
States = tuple[dict[str, Tensor], list[Any]]


class Checkpoints:
    """The checkpoints of a run, on one rank; without a ``checkpoint_dir`` there are none.

    Args:
        config: the settings.
        strategy: set up.
        facts: of the run, at its beginning.
    """

    def __init__(self, config: RunConfig, strategy: Strategy, facts: Facts | None):
        self.config, self.strategy, self.facts = config, strategy, facts
        self.writer: Writer | None = None
        self._draws = False
        if config.checkpoint_dir is not None:
            comm = strategy.comm
            self.writer = Writer(config.checkpoint_dir, comm.rank, comm.world_size)
            # Rank 0 has removed what an earlier run may have left.
            comm.barrier()
            self._random = self._random_states()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self.writer is not None:
            self.writer.close(failed=kind is not None)

    def is_due(self, progress: Progress) -> bool:
        """Whether to save after this step, or this epoch."""
        every, facts = self.config.checkpoint_every, self.facts
        if facts is None:
            return False
        if every and (progress.epoch * facts.steps + progress.step) % every == 0:
            return True
        ends_epoch = progress.step == 0
        is_last = progress.epoch == self.config.epochs
        return ends_epoch and (not every or is_last or is_best(progress.rows))

    def save(self, progress: Progress) -> None:
        """Save a checkpoint; returns when the tensors are copied."""
        assert self.writer is not None
        assert self.facts is not None
        strategy = self.strategy
        with strategy.comm.span("checkpoint"):
            # A collective call.
            state, now = strategy.state(), self._random_states()
            self._draws |= _differ(now, self._random)
            numbers = progress.numbers() | {"random": now[1], "draws": self._draws}
            if scheduler := strategy.optimizer and scheduler_of(strategy.optimizer):
                numbers["updates"] = scheduler.last_epoch
            if scaler := getattr(strategy, "scaler", None):
                numbers["scaler"] = scaler.state_dict()
            place = {"epoch": progress.epoch, "step": progress.step, "rows": list(progress.rows)}
            facts = dataclasses.replace(self.facts, **place)
            best = progress.step == 0 and is_best(progress.rows)
            self.writer.save(facts, state | named("random", now[0]), numbers, best)

    def load(self, path: Path | None, rehearse: Callable[[], object]) -> Progress:
        """How far the run is; continued from a checkpoint if there is one.

        Args:
            path: of the checkpoint, which ``resume`` has found to fit this run; None to begin.
            rehearse: does ``Strategy.rehearse``.
        """
        progress = Progress.none(self.strategy.comm.device)
        if path is None:
            return progress
        stored, strategy = Stored(path), self.strategy
        facts, rank = stored.facts, strategy.comm.rank
        progress.epoch, progress.step, progress.rows = facts.epoch, facts.step, facts.rows
        progress.finite.fill_(facts.step)
        rehearse()
        # What it has counted was none of the run's samples.
        strategy.counted()
        is_same = arrangement(facts.config) == arrangement(self.config.as_dict())
        state: State = {}
        for kind in ("model", "optimizer", "buffers"):
            state |= named(kind, stored.of_all(kind))
        for kind in ("buffers", "own") if is_same else ():
            state |= named(kind, stored.of_rank(rank, kind))
        updates = [numbers["updates"] for numbers in stored.numbers if "updates" in numbers]
        if strategy.optimizer is not None and updates:
            continue_schedule(strategy.optimizer, updates[0])
        strategy.load_state(state)
        scalers = [numbers["scaler"] for numbers in stored.numbers if numbers.get("scaler")]
        if scalers and getattr(strategy, "scaler", None) is not None:
            strategy.scaler.load_state_dict(scalers[0])
        if is_same:
            self._load_mine(stored, progress)
        else:
            # Their sums go to rank 0.
            for numbers in stored.numbers if rank == 0 else ():
                progress.add(numbers)
        return progress

    def _load_mine(self, stored: Stored, progress: Progress) -> None:
        """Take the sums and the random states that this rank had."""
        rank = self.strategy.comm.rank
        numbers = stored.numbers[rank]
        progress.add(numbers)
        progress.sent = numbers["sent"] and tuple(numbers["sent"])
        self._draws = numbers["draws"]
        self._random = stored.of_rank(rank, "random"), numbers["random"]
        tensors, (python, numpys) = self._random
        torch.set_rng_state(tensors["torch"])
        random.setstate((python[0], tuple(python[1]), python[2]))
        np.random.set_state((numpys[0], np.array(numpys[1], np.uint32), *numpys[2:]))
        for device, state in zip(self._gpus(), list(tensors.values())[1:]):
            torch.cuda.set_rng_state(state, device)

    def _random_states(self) -> States:
        tensors = {"torch": torch.get_rng_state()}
        for place, device in enumerate(self._gpus()):
            tensors[f"torch_{place}"] = torch.cuda.get_rng_state(device)
        version, words, gauss = random.getstate()
        numpys: Any = np.random.get_state()
        name, keys, *rest = numpys
        return tensors, [[version, [*words], gauss], [name, keys.tolist(), *rest]]

    def _gpus(self) -> list[torch.device]:
        devices = dict.fromkeys([self.strategy.comm.device, *self.strategy.devices])
        return [device for device in devices if device.type == "cuda"]


def _differ(
    states: tuple[dict[str, Tensor], list], others: tuple[dict[str, Tensor], list]
) -> bool:
    """Whether a random number was drawn between the two."""
    same = all(torch.equal(state, others[0][name]) for name, state in states[0].items())
    return not same or states[1] != others[1]
