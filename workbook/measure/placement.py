"""``labkit bench placement``: the costs of the cuts of VGG16, measured and predicted.

It measures the hops of every named placement (``placement.VGG16_SPLITS``), and the step of every
single cut into two stages, with and without a pipeline, in turns: the planner's cut against all
others. The smallest of many medians is partly luck, so compare cuts by the spread of their ratio.

Without a pipeline, the predicted steps of all cuts of VGG16 are within 0.1 % of each other, since
a hop is short compared with a step: the planner's choice among them then says little.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from labkit.comm.comm import Comm
from labkit.costs.link import Link
from labkit.placement import VGG16_SPLITS
from labkit.placement.planner import Profile, predict_split
from labkit.strategies.model_parallel import ModelParallel, Pipeline
from labkit.training.measured import measure_link, measure_profile, measure_split
from workbook.measure.benches import MICRO_BATCHES, SHAPE, step_of
from workbook.measure.record import Result
from workbook.measure.turns import Where, on_ranks, repeat_turns, timed

MODEL = "vgg16"
BATCH_SIZES = (8, 32)
CUTS_BATCH = 16


def bench_placement(repeats: int, where: Where) -> Iterator[Result]:
    """Measure the hops and cuts of VGG16, with one process per stage.

    On GPUs the hops are timed by CUDA events; placements with more stages than GPUs are measured
    with stages that share one.
    """
    link = measure_link(**where)
    yield measure_placements(link, repeats, where)
    profile = measure_profile(MODEL, batch_size=CUTS_BATCH, input_shape=SHAPE, **where)
    for micro_batches in (1, MICRO_BATCHES):
        yield measure_cuts(profile, link, micro_batches, repeats, where)


def measure_placements(link: Link, repeats: int, where: Where) -> Result:
    """Measure the hops of every placement."""
    seconds, num_bytes, model_s = (dict[str, dict[str, Any]]() for _ in range(3))
    for batch_size in BATCH_SIZES:
        batch: Any = {"batch_size": batch_size, "input_shape": SHAPE, **where}
        profile = measure_profile(MODEL, **batch, repeats=1)
        for name, points in VGG16_SPLITS.items():
            predicted = predict_split(profile, points, link)
            measured = measure_split(MODEL, points, **batch, steps=repeats)
            ways = {"activation": measured.forward_hop_s, "gradient": measured.backward_hop_s}
            for way, hops_s in ways.items():
                facts = zip(points, hops_s, predicted.hop_bytes, predicted.hop_s)
                for cut, *fact in facts:
                    hop = f"cut {cut}, {way}, batch of {batch_size}"
                    for cells, cell in zip((seconds, num_bytes, model_s), fact):
                        cells.setdefault(name, {})[hop] = cell
    return Result(
        "Communication of VGG16's placements, per step",
        {"what": "placements"},
        seconds,
        case="placement",
        columns={"num_bytes": num_bytes, "model_s": model_s},
    )


def measure_cuts(
    profile: Profile, link: Link, micro_batches: int, repeats: int, where: Where
) -> Result:
    """Measure the steps of all splits into two stages of a model on images of 3x32x32.

    ``micro_batches`` is M; 1 is the split without a pipeline.
    """
    cuts = {f"cut {cut}": cut for cut in range(1, len(profile.layers))}
    predicted_s = {
        name: predict_split(profile, (cut,), link, micro_batches=micro_batches).step_s
        for name, cut in cuts.items()
    }

    def measure(comm: Comm) -> tuple[dict[str, list[float]], None]:
        def turn(cut: int) -> float:
            # Freed after its turn: if all cuts kept their stage, they would take a model each.
            pipelined = micro_batches > 1
            strategy = Pipeline((cut,), micro_batches) if pipelined else ModelParallel((cut,))
            step = step_of(strategy, comm, profile.model, profile.batch_size)
            step()
            return timed(comm, step)

        return repeat_turns({n: partial(turn, cut) for n, cut in cuts.items()}, repeats), None

    seconds, _ = on_ranks(measure, world_size=2, where=where)
    planned = min(predicted_s, key=predicted_s.__getitem__)
    how = f"{micro_batches} micro-batches" if micro_batches > 1 else "not pipelined"
    facts = {"what": "cuts", "model": profile.model, "batch_size": profile.batch_size}
    return Result(
        f"Every cut of {profile.model}, batch of {profile.batch_size}, {how}",
        facts | {"micro_batches": micro_batches},
        {"": seconds},
        (planned,),
        columns={"model_s": {"": predicted_s}},
        notes=(f"The planner's cut: {planned}.",),
    )
