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
    """Measure the hops of every placement in ``VGG16_SPLITS``, with one process per stage."""
    link = measure_link(**where)
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
    yield Result(
        "Communication of VGG16's placements, per step",
        {"what": "placements"},
        seconds,
        case="placement",
        columns={"num_bytes": num_bytes, "model_s": model_s},
    )
