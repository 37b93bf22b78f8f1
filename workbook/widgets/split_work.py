"""What an explorer of splits does when a button is pressed, and what it says of it."""

import statistics
from collections.abc import Callable
from typing import Any

from labkit.placement.planner import SplitModel
from labkit.training.split_run import MeasuredSplit
from labkit.units import format_bytes, format_seconds
from workbook.plots.split_costs import cuts_words, split_caption
from workbook.widgets.split_choice import HERE, MAX_STAGES, Choice, SplitModels


class SplitWork:
    """The predictions of a model's splits, and the measurements that were taken.

    Args:
        models: the predictions.
        measure: ``training.split_run.measure_split`` for this model.
        kept: where the state is kept for the next run of the cell.
    """

    def __init__(
        self, models: SplitModels, measure: Callable[..., MeasuredSplit], kept: dict[str, Any]
    ):
        self.models, self._measure, self.kept = models, measure, kept
        self._runs: dict[Choice, MeasuredSplit] = kept.setdefault("runs", {})

    def measured(self, choice: Choice) -> MeasuredSplit | None:
        """What was measured of this split; on which link it was predicted does not matter."""
        return self._runs.get(choice._replace(link=HERE))

    def run(self, choice: Choice) -> tuple[MeasuredSplit, str]:
        """Measure the split; returns what was measured, and what to say."""
        measured = self._measure(
            choice.points,
            batch_size=choice.batch_size,
            micro_batches=choice.micro_batches,
            schedule=choice.schedule,
        )
        self._runs[choice._replace(link=HERE)] = measured
        step = format_seconds(statistics.median(measured.step_s))
        said = f"measured, {cuts_words(choice.points)}: {step} per step"
        if choice.link != HERE:
            said += f", on {HERE}, not over {choice.link}"
        return measured, said

    def best(
        self, choice: Choice, objective: str, cap_bytes: float | None
    ) -> tuple[SplitModel, str]:
        """The best split, and why it is better than the chosen one."""
        best = self.models.best(choice, objective, cap_bytes)
        return best, _why(self.models.predicted(choice), best, cap_bytes)

    def in_words(self, choice: Choice) -> str:
        """The controls and the numbers, for pages without a kernel."""
        layers = self.models.measured.layers
        links, most = ", ".join(self.models.links), min(MAX_STAGES, len(layers))
        caption = split_caption(self.models.predicted(choice), self.measured(choice))
        return (
            f"stages 2 to {most}, a cut before any of {len(layers)} layers, link ({links}), "
            f"batch, micro-batches, schedule; Best split, Run. {self.models.title(choice)}, "
            f"{cuts_words(choice.points)}. {caption}"
        )


def _why(before: SplitModel, best: SplitModel, cap_bytes: float | None) -> str:
    """``best by the model: cut before layer 31. The step shrinks from 3 s to 2 s: ...``."""
    said = f"best by the model: {cuts_words(best.split_points)}"
    if best.split_points == before.split_points:
        return f"{said}, where the cuts are already"
    parts = [_change(name, *pair) for name, pair in _compared(before, best).items()]
    largest = max(before.memory_bytes)
    if cap_bytes is not None and largest > cap_bytes:
        now = format_bytes(max(best.memory_bytes))
        parts.append(f"the largest memory {format_bytes(largest)} -> {now}, within the cap")
    return f"{said}. {'; '.join(parts).capitalize()}."


def _compared(before: SplitModel, best: SplitModel) -> dict[str, tuple[float, float]]:
    return {
        "the step": (before.step_s, best.step_s),
        "the largest stage": (_largest_s(before), _largest_s(best)),
        "the sum of the hops": (_hops_s(before), _hops_s(best)),
    }


def _change(name: str, before_s: float, after_s: float) -> str:
    before, after = format_seconds(before_s), format_seconds(after_s)
    if before == after:
        return f"{name} stays at {before}"
    return f"{name} {'shrinks' if after_s < before_s else 'grows'} from {before} to {after}"


def _largest_s(split: SplitModel) -> float:
    return max(f + b for f, b in zip(split.forward_s, split.backward_s))


def _hops_s(split: SplitModel) -> float:
    return sum(split.hop_s) + sum(split.backward_hop_s)
