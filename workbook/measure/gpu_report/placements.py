"""The placements of VGG16 at their published size: images of 299x299, 32 and 64 samples.

The experiment that the course corrects moved activations between four GPUs, with one process that
runs all stages, and compared the placements by the time of their hops. Its events were on the
stream of one GPU while other GPUs' streams copied; nothing warmed up; with a frozen backbone no
gradient crossed a cut; and its placements were not trained with the same model and batch. Here all
placements train the same model on the same batch, frozen and unfrozen; every hop is timed by
events on the stream that copies, after a step that warms up; the loss of each placement is
compared with that of one device; and a step's time is there, too.

``python -m workbook.measure.gpu_report.placements FOLDER --seconds 240`` writes FOLDER/result.json
and the figures.
"""

import argparse
import copy
import gc
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.comm import Comm
from labkit.errors import WorkerError
from labkit.files import write_atomically
from labkit.gpus import num_gpus, synchronize
from labkit.placement.vgg16_splits import VGG16_SPLITS
from labkit.strategies.base import Strategy
from labkit.strategies.model_parallel_one_process import ModelParallelOneProcess
from labkit.strategies.single import Single
from labkit.training.split_run import measure_split
from labkit.units import format_count
from labkit.workload.models import build_model, published_vgg16
from workbook.measure.device_copies import measure_copies
from workbook.measure.record import dumped, machine
from workbook.measure.spread import Spread, rounded
from workbook.measure.turns import Where, on_ranks

BACKBONE = 31  # layers of the feature extractor, which the experiment froze
CLASSES = 10
ONE_DEVICE = "1 device"
_WARM_UP = 2
# Seconds after which no further step of a placement begins.
_STEPS_S = 8.0
# Of the time for everything, the part for stages that have a process each.
_STAGES_SHARE = 0.3


@dataclass(frozen=True)
class Size:
    """What is trained, and how long.

    Attributes:
        pixels: images are 3 x pixels x pixels.
        batch_sizes: samples of a step.
        steps: of each placement, after those that warm up.
        copy_bytes: of a plain copy.
        published: VGG16 with its classifier of 120 million parameters, or labkit's vgg16.
    """

    pixels: int = 299
    batch_sizes: tuple[int, ...] = (32, 64)
    steps: int = 10
    copy_bytes: int = 64 * 2**20
    published: bool = True

    @property
    def shape(self) -> tuple[int, int, int]:
        return 3, self.pixels, self.pixels


# For a test on the CPU: the same layers and cuts, little to compute.
QUICK = Size(pixels=32, batch_sizes=(2,), steps=2, copy_bytes=2**16, published=False)


@dataclass(frozen=True)
class Setting:
    """A placement that is measured; ``frozen`` is the number of first layers without training."""

    placement: str
    batch_size: int
    frozen: int

    @property
    def split_points(self) -> tuple[int, ...]:
        return VGG16_SPLITS[self.placement]


def settings_of(size: Size) -> list[Setting]:
    """What is measured, the most important first: the experiment's own placements lead."""
    names = list(VGG16_SPLITS)
    own, others = names[:4], names[4:]
    order = [
        (batch_size, names, frozen)
        for batch_size in size.batch_sizes
        for names, frozen in itertools.product((own, others), (0, BACKBONE))
    ]
    return [Setting(name, batch, frozen) for batch, names, frozen in order for name in names]


def devices_for(gpus: tuple[str, ...]) -> tuple[str, ...]:
    """The devices of the stages; with one GPU the host's processor is the second device."""
    return gpus if len(gpus) > 1 else (*gpus, "cpu")


def measure(comm: Comm, size: Size, devices: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Measure the copies and all settings, in one process, while ``seconds`` have not passed.

    Returns:
        ``copies``, ``rows``, and ``not_measured`` with a reason for each.
    """
    stop_s = time.perf_counter() + seconds
    gpus = [device for device in devices if device != "cpu"]
    found: dict[str, Any] = {"copies": measure_copies(gpus, size.copy_bytes)}
    found |= {"rows": [], "not_measured": []}
    model = _build(size)
    first_loss: dict[tuple[int, int], float] = {}
    for setting in settings_of(size):
        stages, why_not = len(setting.split_points) + 1, ""
        if stages > len(devices):
            why_not = f"needs {stages} devices, and there are {len(devices)}: {', '.join(devices)}"
        elif time.perf_counter() > stop_s:
            why_not = "the time was up"
        row: dict[str, Any] = {}
        if not why_not:
            row, why_not = _measured(comm, setting, devices[:stages], model, size)
        if why_not:
            found["not_measured"].append(asdict(setting) | {"reason": why_not})
            continue
        key = setting.batch_size, setting.frozen
        alone = first_loss.setdefault(key, row["losses"][0])
        row["loss_difference"] = abs(row["losses"][0] - alone) / abs(alone)
        found["rows"].append(row)
    return found


def _build(size: Size) -> nn.Sequential:
    if not size.published:
        return build_model("vgg16", num_classes=CLASSES, input_shape=size.shape, seed=0)
    model = published_vgg16(CLASSES).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.zeros_(parameter)
        else:
            nn.init.kaiming_normal_(parameter, nonlinearity="relu", generator=generator)
    return model


def _measured(
    comm: Comm, setting: Setting, devices: tuple[str, ...], model: nn.Sequential, size: Size
) -> tuple[dict[str, Any], str]:
    """The row of a setting; or why there is none, when a device's memory is too small."""
    try:
        return _row(comm, setting, devices, copy.deepcopy(model), size), ""
    except torch.OutOfMemoryError as error:
        return {}, f"out of memory: {str(error).splitlines()[0]}"
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _row(
    comm: Comm, setting: Setting, devices: tuple[str, ...], model: nn.Sequential, size: Size
) -> dict[str, Any]:
    for layer in list(model)[: setting.frozen]:
        layer.requires_grad_(False)
    strategy: Strategy = Single()
    if setting.split_points:
        strategy = ModelParallelOneProcess(setting.split_points, devices)
    strategy.setup(comm, model, partial(torch.optim.SGD, lr=1e-4, momentum=0.9))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn((setting.batch_size, *size.shape), generator=generator)
    targets = torch.randint(CLASSES, (setting.batch_size,), generator=generator)
    samples = inputs.to(devices[0]), targets.to(devices[-1])
    gpus = [torch.device(device) for device in devices if device != "cpu"]
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    steps = list(_steps(strategy, samples, [torch.device(d) for d in devices], size.steps))
    seconds, losses = zip(*steps)
    return {
        "placement": setting.placement,
        "split_points": list(setting.split_points),
        "devices": list(devices),
        "batch_size": setting.batch_size,
        "trained": "head" if setting.frozen else "all",
        "seconds": rounded(seconds[_WARM_UP:]),
        "step_s": asdict(Spread.of(seconds[_WARM_UP:])),
        "losses": losses,
        "hops": strategy.notes().get("hops", []),
        "peak_bytes": {str(gpu): torch.cuda.max_memory_allocated(gpu) for gpu in gpus},
    }


def _steps(
    strategy: Strategy,
    samples: tuple[Tensor, Tensor],
    devices: list[torch.device],
    count: int,
) -> Iterator[tuple[float, float]]:
    """Seconds and mean loss of each step, from all devices idle to all devices idle."""
    stop_s = time.perf_counter() + _STEPS_S
    for number in range(_WARM_UP + count):
        if number > _WARM_UP and time.perf_counter() > stop_s:
            return
        for device in devices:
            synchronize(device)
        started_s = time.perf_counter()
        loss = strategy.step(*samples, len(samples[1]))
        for device in devices:
            synchronize(device)
        yield time.perf_counter() - started_s, loss.item() / len(samples[1])


def measure_stages(size: Size, gpus: int, seconds: float) -> Iterator[dict[str, Any]]:
    """The same cuts with a process for each stage: a row for each placement that fits.

    Labkit's vgg16 takes the place of the published one: its features are the same, and its
    classifier is small enough to be sent to every process. Ranks share the GPU if there is one.
    """
    stop_s, batch_size = time.perf_counter() + seconds, size.batch_sizes[0]
    for name, points in VGG16_SPLITS.items():
        if not points or len(points) + 1 > max(2, gpus) or time.perf_counter() > stop_s:
            continue
        batch = {"batch_size": batch_size, "input_shape": size.shape, "steps": min(5, size.steps)}
        row = {"placement": name, "split_points": list(points), "batch_size": batch_size}
        row["share_a_gpu"] = len(points) + 1 > gpus
        try:
            found = measure_split("vgg16", points, device="cuda", **batch)
        except WorkerError as error:
            yield row | {"error": str(error).strip().splitlines()[0]}
            continue
        yield row | {
            "hop_bytes": found.hop_bytes,
            "forward_hop_s": [rounded(times) for times in found.forward_hop_s],
            "backward_hop_s": [rounded(times) for times in found.backward_hop_s],
            "step_s": asdict(Spread.of(found.step_s)),
        }


def figures(record: dict[str, Any], folder: Path) -> None:
    """Draw the hops of the rows in which all layers are trained, if there are any."""
    from workbook.plots.communication_time import communication_time

    directions = {"forward": "activation", "backward": "gradient"}
    hops = [
        {
            "placement": row["placement"],
            "cut": row["split_points"][hop["cut"]],
            "direction": directions[hop["direction"]],
            "batch_size": row["batch_size"],
            "num_bytes": hop["num_bytes"],
            "seconds": hop["median_s"],
        }
        for row in record["rows"]
        if row["trained"] == "all"
        for hop in row["hops"]
    ]
    if hops:
        size = f"{record['config']['pixels']}x{record['config']['pixels']}"
        title = f"VGG16's hops, images of {size}, one process"
        drawn = communication_time(hops, title=title)
        drawn.save(folder / "hops.png")
        write_atomically(folder / "hops.txt", f"{drawn.alt}\n{drawn.caption}\n")


def main(argv: list[str] | None = None) -> int:
    """Measure everything; write the record and the figure. Returns the exit status."""
    parser = argparse.ArgumentParser(description="VGG16's placements at their published size")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--quick", action="store_true", help="small images, for a test")
    given = parser.parse_args(argv)
    size = QUICK if given.quick else Size()
    gpus = tuple(f"cuda:{index}" for index in range(num_gpus()))
    if not gpus:
        parser.error("this machine has no GPU that can be used")
    devices = devices_for(gpus)
    alone_s = given.seconds * (1 - _STAGES_SHARE)
    settings = {"world_size": 1, "where": Where("cuda")}
    (found,) = on_ranks(measure, size, devices, alone_s, **settings)
    how = {"config": asdict(size) | {"devices": devices}, "classes": CLASSES}
    stages = list(measure_stages(size, len(gpus), given.seconds - alone_s))
    record = how | found | {"stages": stages} | machine()
    write_atomically(given.folder / "result.json", dumped(record))
    figures(record, given.folder)
    rows = format_count(len(record["rows"]), "placement")
    print(f"{rows} measured, {len(record['not_measured'])} not")
    return 0


if __name__ == "__main__":
    sys.exit(main())
