"""From settings to a strategy: what cannot run is refused here, before any process starts."""

import os
from collections.abc import Sequence
from typing import Any

from labkit import strategies
from labkit.config import OPTIONS, RunConfig, parse_split_points, parse_straggler
from labkit.devices import check_named, check_world_size, plan
from labkit.placement.even_split import even_split
from labkit.runtime.preload import under_torchrun
from labkit.schedules.split_points import check_split_points
from labkit.strategies.base import Strategy
from labkit.training.own import NOTHING, Own
from labkit.training.work import check_names, work_of
from labkit.units import format_count
from labkit.workload.chain import layers_of
from labkit.workload.samples import first_samples


def make_strategy(config: RunConfig, *, own: Own = NOTHING, download: bool = False) -> Strategy:
    """The strategy that ``config`` names, with its options; it is not set up yet.

    Args:
        config: the settings.
        own: the learner's own model and data set, which may determine where to cut.
        download: fetch the data set if it is absent.

    Raises:
        ValueError: unknown names, or a technique that does not fit the world size or the model.
        FileNotFoundError: the data set is absent, and the technique needs to know its shape.
    """
    technique = strategies.get(
        config.strategy, builtin=config.builtin, in_one_process=config.devices is not None
    )
    check_names(config, own)
    check_world_size(config.world_size, warn=False)
    options = _options(config, technique)
    if technique.in_one_process:
        options["devices"] = _devices(config)
    devices = options.get("devices") or _planned_devices(config)
    _check_backend(config, devices)
    _check_tf32(config, devices)
    if "split_points" in technique.options():
        options["split_points"] = _split_points(config, own, download)
    strategy = technique(**options)
    strategy.check_ranks(config.world_size)
    return strategy


def _planned_devices(config: RunConfig) -> tuple[str, ...]:
    """The devices of the ranks of this machine; none if they run on other hosts.

    Raises:
        ValueError: devices that the machine does not have, or too few of them.
    """
    if config.hosts is not None:
        return ()
    ranks = config.world_size
    if under_torchrun():
        ranks = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    return plan(ranks, config.device, config.transport, devices=config.devices).devices


def _check_backend(config: RunConfig, devices: Sequence[str]) -> None:
    needs = {"nccl": "cuda", "labkit": "cpu"}.get(config.backend, "")
    for device in devices:
        if not device.startswith(needs):
            raise ValueError(
                f"backend {config.backend!r} moves tensors on {needs}, and the ranks are on "
                f"{device}: choose device {needs!r}, or backend 'gloo'"
            )


def _check_tf32(config: RunConfig, devices: Sequence[str]) -> None:
    if config.tf32 and devices and not any(name.startswith("cuda") for name in devices):
        raise ValueError(
            f"tf32 is a mode of NVIDIA's GPUs, and this run is on {devices[0]}: leave it out, or "
            "run on a GPU"
        )


def _options(config: RunConfig, technique: type[Strategy]) -> dict[str, Any]:
    """The options that were given for this technique, as its constructor takes them.

    Raises:
        ValueError: an option that this technique does not take; the message lists its options.
    """
    taken = [name for name in OPTIONS if name in technique.options()]
    given = config.options()
    if not technique.in_one_process:
        # They are the devices of the ranks, and nothing that the technique has to know.
        given.pop("devices", None)
    for name in given:
        if name not in taken:
            whose = f"strategy {config.strategy}" + " with builtin" * config.builtin
            its_own = f"its options are {', '.join(taken)}" if taken else "it has no options"
            why = technique.instead.get(name, its_own)
            raise ValueError(f"{whose} takes no option {name}: {why}")
    if config.straggler is not None:
        given["straggler"] = parse_straggler(config.straggler, config.world_size)
    return given


def _devices(config: RunConfig) -> tuple[str, ...]:
    """The devices of a technique that runs in one process, one per replica or stage.

    Raises:
        ValueError: a device that this machine does not have, or that contradicts
            ``config.device``; or torchrun has started several ranks.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and under_torchrun():
        raise ValueError(
            f"{config.strategy} is one process with {format_count(config.world_size, 'device')}, "
            f"but torchrun started {os.environ['WORLD_SIZE']} ranks: start it without torchrun"
        )
    if config.devices is None:
        chosen = plan(config.world_size, config.device)
        return chosen.devices
    return check_named(config.devices, config.device)


def _split_points(config: RunConfig, own: Own, download: bool) -> tuple[int, ...]:
    """The given split points, or an even split by FLOPs of this model's layers on this data set.

    Raises:
        ValueError: the split points do not cut these layers into ``world_size`` stages.
    """
    work = work_of(config, own, download=download)
    model, (inputs, _) = work.make_model(), first_samples(work.train, 1)
    num_layers = len(layers_of(model))
    if config.split_points is not None:
        points = parse_split_points(config.split_points)
        return check_split_points(points, num_layers, config.world_size)
    if config.world_size > num_layers:
        raise ValueError(
            f"model {config.model} has {format_count(num_layers, 'layer')}, at least one for each "
            f"stage: use world_size {num_layers} or less, got {config.world_size}"
        )
    return even_split(model, tuple(inputs.shape[1:]), config.world_size, inputs.dtype)
