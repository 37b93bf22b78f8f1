"""``labkit bench placement``: the hops of VGG16's placements, measured and predicted.

On GPUs the hops are timed by CUDA events; placements with more stages than GPUs are measured with
stages that share one.
"""

from collections.abc import Iterator
from typing import Any

from labkit.placement import VGG16_SPLITS
from labkit.placement.planner import predict_split
from labkit.training.measured import measure_link, measure_profile, measure_split
from workbook.measure.benches import SHAPE
from workbook.measure.record import Result
from workbook.measure.turns import Where

MODEL = "vgg16"
BATCH_SIZES = (8, 32)


def bench_placement(repeats: int, where: Where) -> Iterator[Result]:
    """Measure the hops of every placement in ``VGG16_SPLITS``, with one process per stage.

    A result per placement and batch.
    """
    link = measure_link(**where)
    for batch_size in BATCH_SIZES:
        batch: Any = {"batch_size": batch_size, "input_shape": SHAPE, **where}
        profile = measure_profile(MODEL, **batch, repeats=1)
        for name, points in VGG16_SPLITS.items():
            if not points:
                continue
            predicted = predict_split(profile, points, link)
            measured = measure_split(MODEL, points, **batch, steps=repeats)
            seconds = dict[str, list[float]]()
            num_bytes = dict[str, float]()
            model_s = dict[str, float]()
            for direction, hops_s in (
                ("activation", measured.forward_hop_s),
                ("gradient", measured.backward_hop_s),
            ):
                for number, point in enumerate(points):
                    hop = f"cut {point}, {direction}"
                    seconds[hop] = hops_s[number]
                    num_bytes[hop] = predicted.hop_bytes[number]
                    model_s[hop] = predicted.hop_s[number]
            yield Result(
                f"Communication of VGG16, {name}, a batch of {batch_size}, per step",
                {"batch_size": batch_size},
                {name: seconds},
                case="placement",
                columns={"num_bytes": {name: num_bytes}, "model_s": {name: model_s}},
            )
