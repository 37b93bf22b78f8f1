"""The memory explorer: what a rank holds under sharding, on paper, and then in a run."""

from functools import cache
from typing import Any

import ipywidgets
import torch

from labkit.costs.memory import sharded_memory
from labkit.strategies.sharded import divide
from labkit.training.train_run import train_with
from labkit.workload.models import build_model
from workbook import plots
from workbook.widgets.explorer import Explorer

# Model -> data set, classes, and the shape of a sample.
MODELS: dict[str, tuple[str, int, tuple[int, ...]]] = {
    "gpt": ("text", 80, (64,)),
    "resnet18": ("digits", 10, (1, 8, 8)),
    "small_cnn": ("digits", 10, (1, 8, 8)),
    "mlp": ("digits", 10, (1, 8, 8)),
}
PRECISIONS = ("float32", "float64")
MOMENTS = {
    "between_steps": "between two steps",
    "most": "most, in backward",
    "setup": "most, in set-up",
}


@cache
def predicted_memory(model: str, ranks: int, precision: str, stage: int) -> dict[str, Any]:
    """The ledgers of rank 0 by moment, with Adam."""
    _, num_classes, shape = MODELS[model]
    built = build_model(model, num_classes=num_classes, input_shape=shape, seed=0)
    _, flats, uses = divide(built, stage)
    sizes = []
    for parameters in flats:
        sizes.append(sum(parameter.numel() for parameter in parameters))
    layout = {"uses": uses, "trained": range(len(sizes))}
    element_bytes = getattr(torch, precision).itemsize
    adam = {"element_bytes": element_bytes, "states": 2, "counter_bytes": 4}
    ledgers = sharded_memory(sizes, stage, ranks, **layout, **adam)
    return {words: ledgers[moment] for moment, words in MOMENTS.items()}


def held_memory(model: str, ranks: int, precision: str, stage: int) -> dict[str, Any]:
    """The same as a run counts it: two steps of Adam."""
    work: dict[str, Any] = {"model": model, "dataset": MODELS[model][0], "optimizer": "adam"}
    work |= {"dtype": precision, "train_size": 4 * ranks, "batch_size": 2 * ranks}
    result = train_with("sharded", world_size=ranks, device="cpu", stage=stage, **work)
    ledgers = {}
    for moment, words in MOMENTS.items():
        ledgers[words] = {}
        for kind, held_by_rank in result.notes["memory"][moment].items():
            if kind != "activations":
                ledgers[words][kind] = held_by_rank[0]
    return ledgers


def memory_explorer(model: str = "gpt", ranks: int = 4, stage: int = 3) -> Explorer:
    """Choose a model, ranks, precision and stage: the ledger by the formula, and of a run.

    The controls are ``model``, ``ranks``, ``precision`` and ``stage``; ``plots.memory_ledger``
    draws both.
    """

    def draw(*chosen: Any) -> plots.CaptionedFigure:
        title = "{}, {} ranks, {}, stage {}: rank 0".format(*chosen)
        return plots.memory_ledger(predicted_memory(*chosen), title=title)

    def measured(*chosen: Any) -> plots.CaptionedFigure:
        title = "{}, {} ranks, {}, stage {}: formula, and held".format(*chosen)
        return plots.memory_ledger(predicted_memory(*chosen), held_memory(*chosen), title=title)

    explorer = Explorer(
        draw,
        model=ipywidgets.Dropdown(options=[*MODELS], value=model, description="model"),
        ranks=ipywidgets.IntSlider(ranks, 1, 8, description="ranks"),
        precision=ipywidgets.Dropdown(options=PRECISIONS, description="precision"),
        stage=ipywidgets.IntSlider(stage, 1, 3, description="stage"),
    )
    explorer.add_run_button("training ...", measured)
    return explorer
