"""The experiment as a file, and a folder with it and the scripts that learners read.

The digits are the shipped ones, the weights those of the course's ``small_cnn``: both follow from
the seed, so that runs can be compared with a record.
"""

import importlib.util
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from labkit.files import write_atomically
from labkit.units import check_integer
from labkit.workload.datasets import load_dataset
from labkit.workload.models import build_model
from labkit.workload.sampling import batch_slices, epoch_order
from workbook.measure.elsewhere.environments import REPOSITORY

SCRIPTS = REPOSITORY / "notebooks" / "scripts" / "elsewhere"
BATCH_SIZE, LR, MOMENTUM = 64, 0.05, 0.9
# The one line in which the script on labkit's ring differs from Horovod's.
THEIR_IMPORT, OUR_IMPORT = "import horovod.torch as hvd", "import labkit.horovod as hvd"
HOROVOD_SCRIPT, OUR_SCRIPT = "horovod_digits.py", "labkit_horovod_digits.py"


@dataclass(frozen=True)
class Place:
    """A private folder with the experiment and the scripts."""

    folder: Path

    @property
    def experiment(self) -> Path:
        return self.folder / "experiment.npz"

    def script(self, name: str) -> Path:
        return self.folder / name


def prepare(folder: Path, steps: int, seed: int = 0, scripts: Path = SCRIPTS) -> Place:
    """Put the experiment and copies of all scripts into a folder.

    Raises:
        ValueError: no steps; the scripts are not here.
    """
    if not (scripts / "experiment.py").is_file():
        raise ValueError(f"no experiment.py in {scripts}: run this in a clone of the course")
    place = Place(folder)
    for path in scripts.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        write_atomically(place.script(path.name), text)
        if path.name == HOROVOD_SCRIPT:
            write_atomically(place.script(OUR_SCRIPT), with_our_import(text))
    write_atomically(place.experiment, experiment_file(steps, seed))
    return place


def with_our_import(text: str) -> str:
    """Horovod's script with its one import changed.

    Raises:
        ValueError: it does not have exactly one line with that import.
    """
    lines = text.splitlines(keepends=True)
    places = [number for number, line in enumerate(lines) if line.strip() == THEIR_IMPORT]
    if len(places) != 1:
        raise ValueError(f"{len(places)} lines of the script are {THEIR_IMPORT!r}, not one")
    lines[places[0]] = lines[places[0]].replace(THEIR_IMPORT, OUR_IMPORT)
    return "".join(lines)


def initial_model(seed: int = 0) -> nn.Sequential:
    """The course's small_cnn for digits, float32."""
    return build_model("small_cnn", num_classes=10, input_shape=(1, 8, 8), seed=seed)


def experiment_file(steps: int, seed: int = 0) -> bytes:
    """The experiment as an ``.npz`` file of ``steps`` whole batches, a function of the seed.

    An epoch's last batch, which is smaller, is left out; so more steps begin with the same ones.

    Raises:
        ValueError: no steps.
    """
    check_integer("steps", steps, most=10_000)
    data = load_dataset("digits")
    samples, batches, epoch = len(data.train_targets), [], 0
    while len(batches) < steps:
        order = epoch_order(samples, epoch=epoch, seed=seed)
        batches += [b for b in batch_slices(order, BATCH_SIZE) if len(b) == BATCH_SIZE]
        epoch += 1
    chosen = torch.stack(batches[:steps])
    state = initial_model(seed).state_dict()
    file = io.BytesIO()
    np.savez(
        file,
        images=data.train_inputs[chosen].numpy(),
        labels=data.train_targets[chosen].numpy(),
        lr=LR,
        momentum=MOMENTUM,
        **{f"weight/{name}": value.numpy() for name, value in state.items()},
    )
    return file.getvalue()


def module_of(scripts: Path) -> Any:
    """A new copy of the module ``experiment`` that is in this folder."""
    spec = importlib.util.spec_from_file_location("experiment", scripts / "experiment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
