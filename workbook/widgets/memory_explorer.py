"""The memory explorer: what a rank holds under sharding, on paper, and then in a run."""

import html
from functools import cache
from typing import Any

import ipywidgets
import torch

from labkit.costs.memory import sharded_memory
from labkit.strategies.sharded import divide
from labkit.training.train_run import train_with
from labkit.workload.models import build_model
from workbook import plots
from workbook.widgets.explorer import Explorer, Job, as_page

# Model -> data set, classes, and the shape of a sample.
MODELS: dict[str, tuple[str, int, tuple[int, ...]]] = {
    "gpt": ("text", 80, (64,)),
    "resnet18": ("digits", 10, (1, 8, 8)),
    "small_cnn": ("digits", 10, (1, 8, 8)),
    "mlp": ("digits", 10, (1, 8, 8)),
}
PRECISIONS = ("float32", "float64")
# What "most" is shown as.
MOMENTS = {"between_steps": "between two steps", "most": "most, in backward"}


@cache
def _flats(model: str, stage: int) -> tuple[list[int], list[list[int]]]:
    """The elements of each flat, and the flats of each unit."""
    _, num_classes, shape = MODELS[model]
    built = build_model(model, num_classes=num_classes, input_shape=shape, seed=0)
    _, flats, uses = divide(built, stage)
    return [sum(parameter.numel() for parameter in flat) for flat in flats], uses


def predicted_memory(model: str, ranks: int, precision: str, stage: int) -> dict[str, Any]:
    """The ledgers of rank 0 by moment, with Adam."""
    sizes, uses = _flats(model, stage)
    item = getattr(torch, precision).itemsize
    options = {"uses": uses, "element_bytes": item, "states": 2, "counter_bytes": 4}
    found = sharded_memory(sizes, stage, ranks, **options)
    return {MOMENTS[moment]: ledger for moment, ledger in found.items()}


def held_memory(model: str, ranks: int, precision: str, stage: int) -> dict[str, Any]:
    """The same as a run counts it: two steps of Adam."""
    run = train_with(
        "sharded",
        stage=stage,
        world_size=ranks,
        model=model,
        dataset=MODELS[model][0],
        dtype=precision,
        optimizer="adam",
        device="cpu",
        epochs=1,
        train_size=4 * ranks,
        batch_size=2 * ranks,
    )
    memory = run.notes["memory"]
    return {
        MOMENTS[moment]: {
            kind: by_rank[0] for kind, by_rank in kinds.items() if kind != "activations"
        }
        for moment, kinds in memory.items()
    }


def memory_explorer(model: str = "gpt", ranks: int = 4, stage: int = 3) -> Explorer:
    """Choose a model, ranks, precision and stage: the ledger by the formula, and of a run.

    The controls are ``model``, ``ranks``, ``precision`` and ``stage``; ``plots.memory_ledger``
    draws both.
    """
    run, ran = ipywidgets.Button(description="Run"), ipywidgets.HTML()

    def draw(*chosen: Any) -> plots.CaptionedFigure:
        title = "{}, {} ranks, {}, stage {}: rank 0".format(*chosen)
        return plots.memory_ledger(predicted_memory(*chosen), title=title)

    def measured(*chosen: Any) -> str:
        title = "{}, {} ranks, {}, stage {}: formula, and held".format(*chosen)
        return as_page(
            plots.memory_ledger(predicted_memory(*chosen), held_memory(*chosen), title=title)
        )

    def say(doing: str, said: str) -> None:
        run.disabled = bool(doing)
        ran.value = said if said.startswith("<") else html.escape(doing or said)

    made = Explorer(
        draw,
        model=ipywidgets.Dropdown(options=[*MODELS], value=model, description="model"),
        ranks=ipywidgets.IntSlider(ranks, 1, 8, description="ranks"),
        precision=ipywidgets.Dropdown(options=PRECISIONS, description="precision"),
        stage=ipywidgets.IntSlider(stage, 1, 3, description="stage"),
    )
    made.job = job = Job(say)
    run.on_click(lambda _: job.start("training ...", lambda: measured(*made.chosen())))
    made.children = [*made.children, run, ran]
    return made
