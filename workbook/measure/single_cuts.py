"""Every single cut of a model into two stages, measured: does the planner know the best one?

All cuts are measured in one run. In the sweep, they take turns, a few steps each. The smallest of
many medians is partly luck. Therefore the planner's cut and the fastest of the others are measured
again, in a play-off of many repeats, and compared by their ratios within a repeat.

Without a pipeline, the predicted steps of all cuts of VGG16 are within 0.1 % of each other, since
a hop is short compared with a step: the planner's choice among them then says little.
"""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from labkit.collectives import tree_all_reduce
from labkit.comm.comm import Comm
from labkit.costs.link import Link
from labkit.placement.planner import Profile, predict_split
from labkit.strategies.model_parallel import ModelParallel
from labkit.strategies.pipeline import Pipeline
from labkit.units import format_count, format_seconds
from labkit.workload.chain import layers_of
from workbook.measure.model_step import ModelStep
from workbook.measure.record import Figures, Result
from workbook.measure.spread import Spread, ratios, rounded, table
from workbook.measure.turns import (
    ON_CPU,
    Where,
    on_ranks,
    repeat_turns,
    slowest,
    take_turns,
    timed,
)

RIVALS = 3
# Repeats of the play-off per repeat of the sweep.
PLAY_OFF_SHARE = 6
_BUDGET_S = 60.0


@dataclass(frozen=True)
class Cuts(Result):
    """Every single cut into two stages, predicted and measured.

    Attributes:
        model, batch_size: what was trained.
        micro_batches: 1 is the split without a pipeline.
        points: the sweep, as rows for ``plots.split_scatter``.
        play_off: ``{cut: [seconds of each repeat]}`` of the play-off, the planner's cut first.
    """

    model: str
    batch_size: int
    micro_batches: int
    points: list[dict]
    play_off: dict[int, list[float]]

    @property
    def title(self) -> str:
        how = f"{self.micro_batches} micro-batches" if self.micro_batches > 1 else "not pipelined"
        steps = format_count(len(self.points[0]["measured_s"]), "step")
        return f"Every cut of {self.model}, batch of {self.batch_size}, {how}: a sweep of {steps}"

    def duels(self) -> dict[int, Spread]:
        """By rival, planner's step / rival's, repeat by repeat: above 1, the rival is faster."""
        (_, planned_s), *rivals = self.play_off.items()
        return {cut: Spread.of(ratios(planned_s, seconds)) for cut, seconds in rivals}

    def verdict(self) -> str:
        """Compare the planner's cut with the fastest rival, in a sentence."""
        planned, *rivals = self.play_off
        duels, repeats = self.duels(), len(self.play_off[planned])
        best = max(duels, key=lambda cut: duels[cut].median)
        return (
            f"play-off, {format_count(repeats, 'repeat')}: the planner's cut {planned} takes "
            f"{duels[best].text('{:.3f}'.format)} times the step of cut {best}, "
            f"the best rival of {', '.join(map(str, rivals))}"
        )

    def __str__(self) -> str:
        rows = [
            [
                str(point["split_points"][0]),
                format_seconds(point["predicted_s"]),
                Spread.of(point["measured_s"]).text(format_seconds),
            ]
            for point in self.points
        ]
        predicted = [point["predicted_s"] for point in self.points]
        reach = f"model: the slowest cut / the fastest {max(predicted) / min(predicted):.3f}"
        columns = table(["cut", "model", "measured"], rows)
        return f"{self.title}\n\n{columns}\n\n{reach}\n{self.verdict()}\n"

    @property
    def name(self) -> str:
        return f"cuts_{self.micro_batches}_micro_batches"

    def record(self) -> dict[str, Any]:
        points = [row | {"measured_s": rounded(row["measured_s"])} for row in self.points]
        duels = self.duels()
        play_off = [
            {
                "cut": cut,
                "seconds": rounded(seconds),
                "planned_to_this": asdict(duels[cut]) if cut in duels else None,
            }
            for cut, seconds in self.play_off.items()
        ]
        return {self.name: {"points": points, "play_off": play_off, "verdict": self.verdict()}}

    def figures(self) -> Figures:
        from workbook.plots.split_costs import split_scatter

        return {self.name: split_scatter(self.points, title=self.title)}


def measure_cuts(
    profile: Profile, link: Link, micro_batches: int, repeats: int, where: Where = ON_CPU
) -> Cuts:
    """Measure the steps of all splits into two stages.

    Args:
        profile: of a model with three layers or more, on images of 3x32x32.
        link: between the stages.
        micro_batches: M; 1 is the split without a pipeline.
        repeats: turns of each cut in the sweep; ``PLAY_OFF_SHARE`` times as many in the
            play-off, as far as they fit into a minute.
        where: the stages' devices.

    Raises:
        WorkerError: a stage failed.
    """
    predicted = {
        cut: predict_split(profile, (cut,), link, micro_batches=micro_batches).step_s
        for cut in range(1, len(profile.layers))
    }
    planned = min(predicted, key=predicted.__getitem__)
    settings = profile.model, profile.batch_size, micro_batches
    seconds = slowest(on_ranks(_measure, *settings, planned, repeats, world_size=2, where=where))
    points = [
        {"split_points": [cut], "predicted_s": predicted[cut], "measured_s": measured}
        for cut, measured in seconds["sweep"].items()
    ]
    return Cuts(*settings, points, seconds["play_off"])


def _measure(
    comm: Comm, model: str, batch_size: int, micro_batches: int, planned: int, repeats: int
) -> dict[str, dict[int, list[float]]]:
    """Measure on this rank: by cut, the seconds of the sweep and of the play-off."""
    model_step = ModelStep(model, batch_size)

    def warmed_up(cut: int) -> Callable[[], object]:
        pipelined = micro_batches > 1
        strategy = Pipeline((cut,), micro_batches) if pipelined else ModelParallel((cut,))
        step = model_step.of(strategy, comm)
        step()
        return step

    def turn(cut: int) -> float:
        # The stage is freed after its turn: kept for all cuts, stages would take a model per cut.
        return timed(comm, warmed_up(cut))

    cuts = range(1, len(layers_of(model_step.model)))
    sweep = repeat_turns({cut: partial(turn, cut) for cut in cuts}, repeats)
    steps = {cut: warmed_up(cut) for cut in (planned, *fastest_others(comm, sweep, planned))}
    turns = {cut: partial(timed, comm, step) for cut, step in steps.items()}
    play_off = take_turns(comm, turns, PLAY_OFF_SHARE * repeats, _BUDGET_S)
    return {"sweep": sweep, "play_off": play_off}


def fastest_others(comm: Comm, sweep: dict[int, list[float]], planned: int) -> list[int]:
    """The fastest cuts other than the planner's, fastest first, the same on every rank.

    ``sweep`` holds this rank's seconds, by cut; the seconds of the slowest rank decide.
    """
    seconds = torch.tensor(list(sweep.values()), dtype=torch.float64, device=comm.device)
    tree_all_reduce(comm, seconds, "max")
    medians = dict(zip(sweep, map(statistics.median, seconds.tolist())))
    del medians[planned]
    return sorted(medians, key=medians.__getitem__)[:RIVALS]
