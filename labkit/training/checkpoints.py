"""The checkpoints of a run as its loop sees them: when one is due, what it holds, how to go on.

A checkpoint holds, as nested dicts of tensors::

    model                       parameters and buffers, as in the model's state dict
    optimizer   state           of each parameter, by its name
                updates         where the schedule of the learning rate is
    scaler                      of the loss, with fp16
    ranks       R   random      states of rank R's random number generators
                    buffers     batch statistics of this moment
                    own         what else its technique carries from step to step
                    rates       the numbers in its optimizer's groups
                    progress    sums of the epoch under way

Its facts are the settings, where the run is, and the epochs so far. Everything but ``ranks`` is the
same for any number of ranks, so a run can go on with another one where ``ranks`` allows it: see
``labkit.training.resume``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labkit.config import RunConfig
from labkit.devices import versions
from labkit.strategies.base import Batch, Strategy
from labkit.strategies.kept import Kept, copy_into
from labkit.training.checkpoint.reading import read_tensors, stored_in
from labkit.training.checkpoint.whole import read_facts
from labkit.training.checkpoint.writing import CheckpointWriter
from labkit.training.evaluation import is_best
from labkit.training.progress import Progress
from labkit.training.random_states import equal_states, random_states, set_random_states
from labkit.training.resume import arrangement

Tensors = dict[str, Any]


class Checkpoints:
    """The checkpoints of a run, on one rank; without a ``checkpoint_dir`` there are none.

    Args:
        config: the settings.
        strategy: set up.
        writer: of the checkpoints; None if there are none.
        steps: of an epoch.
        facts: of the run, which every checkpoint has.
    """

    def __init__(
        self,
        config: RunConfig,
        strategy: Strategy,
        writer: CheckpointWriter | None,
        steps: int,
        facts: Mapping[str, Any],
    ):
        self.config, self.strategy, self.steps = config, strategy, steps
        self.writer, self.facts = writer, dict(facts)
        self.devices = [strategy.comm.device, *strategy.devices]
        # Random states to continue with, and whether any number was drawn in a step.
        self._states: Mapping[str, Tensor] | None = None
        self._draws = False

    def after_step(self, progress: Progress) -> None:
        """Save if a checkpoint is due; after the last step of an epoch, ``after_epoch`` does."""
        if self.writer is None:
            return
        if progress.step == self.steps:
            self._note_draws()
        elif self._is_due(progress):
            progress.stop_clock(self.strategy)
            self._note_draws()
            self.save(progress)
            progress.resume_clock(self.strategy)

    def after_epoch(self, progress: Progress) -> None:
        """Save if a checkpoint is due, the run has ended, or the epoch was the best so far."""
        if self.writer is None:
            return
        best, every = is_best(progress.rows), self.config.checkpoint_every
        is_last = progress.epoch == self.config.epochs
        if best or is_last or every is None or self._is_due(progress):
            self.save(progress, best)

    def save(self, progress: Progress, best: bool = False) -> None:
        """Save a checkpoint; returns when the tensors are copied."""
        assert self.writer is not None
        with self.strategy.comm.span("checkpoint"):
            step = progress.epoch * self.steps + progress.step
            place = {"epoch": progress.epoch, "step": progress.step, "epochs": progress.rows}
            self.writer.save(step, self._tensors(progress), self.facts | place, best)

    def shares(
        self, progress: Progress, make: Callable[[int], Iterator[Batch]]
    ) -> Iterator[Batch]:
        """The batches of the epoch that are left, and the random numbers that belong to them.

        Args:
            progress: how far the run is.
            make: n -> this rank's shares from the n-th batch of the epoch on. A DataLoader draws
                a random number when it is made, from which its workers' follow.
        """
        if self.writer is None:
            return make(progress.step)
        states, self._states = self._states, None
        if states is not None and progress.step:
            torch.set_rng_state(states["torch_at_epoch"])
        elif states is not None:
            set_random_states(states, self.devices)
        self._at_epoch = torch.get_rng_state()
        # A DataLoader's workers have random numbers of their own: they have to read all again.
        first = 0 if self.config.num_workers else progress.step
        batches = make(first)
        for _ in range(first, progress.step):
            next(batches)
        if states is not None and progress.step:
            set_random_states(states, self.devices)
        self._before = random_states(self.devices)
        return batches

    def load(self, path: Path, rehearse: Callable[[], object]) -> Progress:
        """Continue from a checkpoint.

        Args:
            path: of the checkpoint, which ``resume`` has found to fit this run.
            rehearse: see ``Strategy.rehearse``.
        """
        facts, comm = read_facts(path), self.strategy.comm
        rehearse()
        kept, there = self.strategy.kept(), {one.path for one in stored_in(path)}
        kept.load_state(_read(path, there, ("model",), kept.state))
        state = _read(path, there, ("optimizer", "state"), kept.state_of())
        kept.load_optimizer_state(state)
        self._load_rates(path, there)
        as_before = facts["arrangement"] == arrangement(self.config)
        ranks = read_tensors(path, [f"ranks.{comm.rank}"] if as_before else ["ranks"])["ranks"]
        if as_before:
            mine = ranks[str(comm.rank)]
            self._states = mine["random"]
            copy_into(kept.buffers, mine.get("buffers", {}))
            _load_groups(self.strategy.optimizer, mine.get("rates"))
            parts = [mine["progress"]]
        else:
            mine = {}
            copy_into(kept.buffers, merged_buffers(ranks))
            parts = [rank["progress"] for rank in ranks.values()] if comm.rank == 0 else []
        self.strategy.continued(mine.get("own", {}))
        return self._progress(facts, parts, as_before)

    def close(self) -> None:
        """Wait until the last checkpoint is whole."""
        if self.writer is not None:
            self.writer.close()

    def _is_due(self, progress: Progress) -> bool:
        every = self.config.checkpoint_every
        return bool(every) and (progress.epoch * self.steps + progress.step) % every == 0

    def _note_draws(self) -> None:
        self._draws |= not equal_states(self._before, random_states(self.devices))

    def _tensors(self, progress: Progress) -> Tensors:
        strategy = self.strategy
        kept, optimizer = strategy.kept(), strategy.optimizer
        found: Tensors = {"model": kept.given, "optimizer": {"state": kept.optimizer_state()}}
        if optimizer is not None and (scheduler := scheduler_of(optimizer)) is not None:
            found["optimizer"]["updates"] = torch.tensor(scheduler.last_epoch)
        if strategy.scaler is not None:
            scale = strategy.scaler.state_dict()
            found["scaler"] = {k: torch.tensor(v, dtype=torch.float64) for k, v in scale.items()}
        found["ranks"] = {str(strategy.comm.rank): self._of_this_rank(kept, progress)}
        return found

    def _of_this_rank(self, kept: Kept, progress: Progress) -> Tensors:
        states = random_states(self.devices) | {"torch_at_epoch": self._at_epoch}
        sums = {
            "loss_sum": progress.loss_sum,
            "seconds": torch.tensor(progress.seconds, dtype=torch.float64),
            "draws": torch.tensor(self._draws),
        }
        if progress.sent is not None:
            sums["sent"] = torch.tensor(progress.sent)
        found = {"random": states, "buffers": kept.buffers, "own": kept.own, "progress": sums}
        if (rates := _groups(self.strategy.optimizer)) is not None:
            found["rates"] = rates
        return found

    def _load_rates(self, path: Path, there: set[tuple[str, ...]]) -> None:
        optimizer, scaler = self.strategy.optimizer, self.strategy.scaler
        if optimizer is not None and ("optimizer", "updates") in there:
            updates = read_tensors(path, ["optimizer.updates"])["optimizer"]["updates"]
            continue_schedule(optimizer, int(updates))
        if scaler is not None and any(name[0] == "scaler" for name in there):
            state = read_tensors(path, ["scaler"])["scaler"]
            scaler.load_state_dict({key: value.item() for key, value in state.items()})

    def _progress(
        self, facts: Mapping[str, Any], parts: Sequence[Tensors], as_before: bool
    ) -> Progress:
        """How far the run was; ``parts`` are the sums that this rank continues."""
        progress = Progress(torch.zeros(1, dtype=torch.float64, device=self.devices[0]))
        progress.epoch, progress.step = facts["epoch"], facts["step"]
        progress.rows = facts["epochs"]
        for part in parts:
            progress.loss_sum += part["loss_sum"].to(self.devices[0])
            progress.seconds = max(progress.seconds, part["seconds"].item())
            self._draws |= bool(part["draws"])
        if as_before:
            sent = parts[0].get("sent")
            progress.sent = None if sent is None else tuple(sent.tolist())
        return progress
