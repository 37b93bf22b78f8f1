"""The turns of labkit's own techniques, in ranks of ``labkit.run``."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from labkit import strategies
from labkit.comm.comm import Comm
from labkit.devices import versions
from labkit.errors import DeadlineError, WorkerError
from labkit.runtime.launch import run
from workbook.measure.elsewhere.counting import Counting
from workbook.measure.elsewhere.digits import Place, initial_model, module_of
from workbook.measure.elsewhere.turn import Turn, TurnError, reason_in


def turn(
    place: Place,
    steps: int,
    limit_s: float,
    *,
    strategy: str,
    world_size: int,
    transport: str = "auto",
) -> Turn:
    """Train with one of labkit's techniques, on the CPU.

    Raises:
        TurnError: it failed, or took longer than ``limit_s``.
    """
    reports = _run(partial(_train, place, strategy), world_size, transport, limit_s)
    # A rank knows the sum over its own samples.
    totals = [sum(each) for each in zip(*(report["losses"] for report in reports))]
    found = Turn.of([report | {"losses": totals} for report in reports], steps)
    return replace(found, versions={"torch": versions()["torch"]})


def _run(
    action: Callable[[Comm], Any], world_size: int, transport: str, limit_s: float
) -> list[Any]:
    settings: dict[str, Any] = {"device": "cpu", "timeout_s": limit_s, "transport": transport}
    try:
        return run(action, world_size=world_size, **settings).values
    except DeadlineError:
        raise TurnError(f"not done after {limit_s:g} s, and so ended") from None
    except (WorkerError, OSError) as error:
        raise TurnError(reason_in(str(error))) from None


# In the ranks


def _train(place: Place, strategy: str, comm: Comm) -> dict[str, Any]:
    """Train on this rank's share of every batch; returns its report, without versions."""
    # As on a device of its own.
    torch.set_num_threads(1)
    module = module_of(place.folder)
    experiment = module.Experiment.load(place.experiment)
    model = initial_model()
    weights = {name: torch.from_numpy(value) for name, value in experiment.weights.items()}
    model.load_state_dict(weights)
    technique = strategies.get(strategy)()
    rates = {"lr": experiment.lr, "momentum": experiment.momentum}
    technique.setup(comm, model, partial(torch.optim.SGD, **rates))
    index, count = technique.share()
    measured, losses = Counting(lambda: comm, module.Measured()), []
    for step in range(experiment.steps):
        inputs, targets = map(torch.from_numpy, experiment.share(index, count or 1, step))
        batch_size = experiment.labels.shape[1]
        if not count:  # a server works on no samples
            inputs, targets = inputs[:0], targets[:0]
        with measured:
            loss = technique.step(inputs, targets, batch_size)
        losses.append(loss.item() / batch_size)
    name = f"worker {index}" if count else "server"
    return {
        "worker": index if count else -1,
        "losses": losses,
        "step_s": measured.step_s,
        "sent_bytes": {name: measured.sent_bytes},
        "counted_bytes": {name: measured.counted_bytes},
        "versions": {},
    }
