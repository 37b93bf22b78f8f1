"""``labkit bench placement``: the costs of the cuts of VGG16, measured and predicted.

It measures one hop between two stages; the hops of every named placement
(``placement.VGG16_SPLITS``); and the step of every single cut into two stages, with and without a
pipeline. All cuts take turns in one run, the sweep. The smallest of many medians is partly luck:
the planner's cut and the fastest of the others meet again, in a play-off of many repeats.

Without a pipeline, the predicted steps of all cuts of VGG16 are within 0.1 % of each other, since
a hop is short compared with a step: the planner's choice among them then says little.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from labkit.collectives import tree_all_reduce
from labkit.comm.comm import Comm
from labkit.comm.torch_transport import TorchTransport
from labkit.costs.link import Link
from labkit.placement import VGG16_SPLITS
from labkit.placement.planner import Profile, predict_split
from labkit.strategies.model_parallel import ModelParallel, Pipeline
from labkit.training.measured import measure_link, measure_profile, measure_split
from labkit.workload.layers import layers_of
from workbook.measure.model_step import SHAPE, ModelStep
from workbook.measure.record import Result
from workbook.measure.turns import (
    Where,
    check_settings,
    on_ranks,
    repeat_turns,
    slowest,
    take_turns,
    timed,
)

MODEL = "vgg16"
BATCH_SIZES = (8, 32)
BACKBONE = 31  # layers of the feature extractor, which the reference project froze
CUTS_BATCH, MICRO_BATCHES = 16, 4
SIZES_BYTES = tuple(2**k for k in (18, 20, 22, 24, 26))
# Rivals of the planner's cut in the play-off; its repeats per repeat of the sweep.
RIVALS, PLAY_OFF_SHARE = 3, 6
_HOP_BUDGET_S, _PLAY_OFF_BUDGET_S = 20.0, 60.0
COPY = "a plain copy"


def bench_placement(
    repeats: int = 6, device: str = "auto", devices: tuple[str, ...] | None = None
) -> Iterator[Result]:
    """Measure the hops and cuts of VGG16, with one process per stage.

    On GPUs the hops are timed by CUDA events; placements with more stages than GPUs are measured
    with stages that share one.

    Args:
        repeats: counted steps of each placement; each single cut gets half as many, and each cut
            in the play-off of the best ones about three times as many.
        device, devices: see ``labkit.run``.

    Raises:
        ValueError: an impossible number of repeats or device, before anything runs.
        WorkerError: a stage failed.
    """
    where = {"device": device, "devices": devices}
    check_settings("a placement", (2,), repeats, where)

    def results() -> Iterator[Result]:
        yield measure_hop(5 * repeats, where)
        link = measure_link(**where)
        yield measure_placements(link, repeats, where)
        profile = measure_profile(MODEL, batch_size=CUTS_BATCH, input_shape=SHAPE, **where)
        for micro_batches in (1, MICRO_BATCHES):
            yield from measure_cuts(profile, link, micro_batches, max(1, repeats // 2), where)

    return results()


def measure_hop(repeats: int, where: Where, sizes: tuple[int, ...] = SIZES_BYTES) -> Result:
    """Time a hop between two stages over each transport, and a copy in one process, by size."""
    seconds = slowest(on_ranks(_hop_every_way, repeats, sizes, world_size=2, where=where))
    first, *_ = next(iter(seconds.values()))
    return Result("One hop between two stages", {"what": "hop"}, seconds, (first,), "size_bytes")


def _hop_every_way(comm: Comm, repeats: int, sizes: tuple[int, ...]) -> dict[int, dict]:
    backend = dist.get_backend()
    plainly = Comm(comm.rank, 2, comm.device, TorchTransport(backend, comm.device))
    ways = {"shared memory": comm} if comm.transport.shares_memory else {}
    found = {}
    for size in sizes:
        tensor, landing = torch.ones(2, size // 4, device=comm.device)

        def hop(way: Comm, tensor: torch.Tensor = tensor) -> None:
            way.send(tensor, 1) if comm.rank == 0 else way.recv(tensor, 0)

        def copy(tensor: torch.Tensor = tensor, landing: torch.Tensor = landing) -> None:
            if comm.rank == 0:
                landing.copy_(tensor)

        actions = {name: partial(hop, way) for name, way in (ways | {backend: plainly}).items()}
        turns = {n: partial(timed, comm, one) for n, one in (actions | {COPY: copy}).items()}
        found[size] = take_turns(comm, turns, repeats, _HOP_BUDGET_S)
    return found


def measure_placements(link: Link, repeats: int, where: Where) -> Result:
    """Measure the hops of every placement, with all layers trained and with a frozen backbone."""
    # Not at the top: every rank of a bench imports this module, and does not need matplotlib.
    from workbook.plots import size_curves

    placements = {name: points for name, points in VGG16_SPLITS.items() if points}
    seconds: dict[str, Any] = {}
    facts, by_size = dict[Any, Any](), dict[Any, Any]()
    for batch_size in BATCH_SIZES:
        batch: Any = {"batch_size": batch_size, "input_shape": SHAPE, **where}
        profile = measure_profile(MODEL, **batch, repeats=1)
        for (name, points), frozen in itertools.product(placements.items(), (0, BACKBONE)):
            predicted = predict_split(profile, points, link, frozen=frozen)
            measured = measure_split(MODEL, points, **batch, frozen=frozen, steps=repeats)
            case = f"{name}, trained: {'head' if frozen else 'all'}"
            ways = ("activation", measured.forward_hop_s), ("gradient", measured.backward_hop_s)
            for way, hops_s in ways:
                for cut, hop_s, *fact in zip(points, hops_s, predicted.hop_bytes, predicted.hop_s):
                    if hop_s:
                        hop = f"cut {cut}, {way}, batch of {batch_size}"
                        seconds.setdefault(case, {})[hop] = hop_s
                        facts[case, hop] = fact
                        by_size.setdefault(fact[0], []).extend(hop_s)
    return Result(
        "Communication of VGG16's placements, per step",
        {"what": "placements"},
        seconds,
        case="placement",
        columns={
            "num_bytes": lambda case, hop, spread: facts[case, hop][0],
            "model_s": lambda case, hop, spread: facts[case, hop][1],
        },
        figures={"hops": lambda: size_curves({"hop": by_size}, {"hop": dict(facts.values())})},
    )


def measure_cuts(
    profile: Profile, link: Link, micro_batches: int, repeats: int, where: Where
) -> Iterator[Result]:
    """Measure the steps of all splits into two stages: the sweep, and the play-off.

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
    predicted_s = {
        cut: predict_split(profile, (cut,), link, micro_batches=micro_batches).step_s
        for cut in range(1, len(profile.layers))
    }
    planned = min(predicted_s, key=predicted_s.__getitem__)
    settings = profile.model, profile.batch_size, micro_batches, planned, repeats
    seconds = slowest(on_ranks(_measure_cuts, *settings, world_size=2, where=where))
    how = f"{micro_batches} micro-batches" if micro_batches > 1 else "not pipelined"
    title = f"Every cut of {profile.model}, batch of {profile.batch_size}, {how}"
    facts = {"model": profile.model, "batch_size": profile.batch_size}
    facts |= {"micro_batches": micro_batches}

    def figure() -> Any:
        from workbook.plots.split_costs import split_scatter

        points = [
            {"split_points": [cut], "predicted_s": predicted_s[cut], "measured_s": measured}
            for cut, measured in seconds["sweep"].items()
        ]
        return split_scatter(points, title=f"{title}: a sweep of {repeats}")

    for what in ("sweep", "play-off"):
        yield Result(
            f"{title}: {what}",
            facts | {"what": what},
            {"": {f"cut {cut}": one for cut, one in seconds[what].items()}},
            (f"cut {planned}",),
            columns={"model_s": lambda case, name, spread: predicted_s[int(name.split()[1])]},
            notes=(f"The planner's cut is {planned}.",),
            figures={f"cuts_{micro_batches}_micro_batches": figure} if what == "sweep" else {},
        )


def _measure_cuts(
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
    # The seconds of the slowest rank decide, so that all ranks name the same rivals.
    seconds = torch.tensor(list(sweep.values()), dtype=torch.float64, device=comm.device)
    medians = dict(
        zip(sweep, map(statistics.median, tree_all_reduce(comm, seconds, "max").tolist()))
    )
    rivals = sorted(set(cuts) - {planned}, key=medians.__getitem__)[:RIVALS]
    steps = {cut: warmed_up(cut) for cut in (planned, *rivals)}
    turns = {cut: partial(timed, comm, step) for cut, step in steps.items()}
    play_off = take_turns(comm, turns, PLAY_OFF_SHARE * repeats, _PLAY_OFF_BUDGET_S)
    return {"sweep": sweep, "play-off": play_off}
