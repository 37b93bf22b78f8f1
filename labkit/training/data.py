"""The samples of a run: one of labkit's data sets, or the learner's own."""

import os
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Subset

from labkit.config import RunConfig, parse_augment
from labkit.training.own import Own, made
from labkit.units import format_count
from labkit.workload.datasets import StoredData, load_dataset, open_dataset
from labkit.workload.folders import IMAGENET, is_folder, open_folder
from labkit.workload.images import Transform
from labkit.workload.models import check_pixels
from labkit.workload.samples import DatasetSamples, Samples, TensorSamples, first_samples, parts_of

# Of a data set that is put into floating point as a whole: up to 16 MB. To do it for each batch
# takes 12 us per batch of digits.
_MOST_FLOATS = 4 * 2**20


def samples_for(
    config: RunConfig, own: Own, download: bool = False
) -> tuple[Samples, Samples | None]:
    """Samples to train on, and held-out ones if there are any.

    Args:
        config: the settings.
        own: the learner's own parts.
        download: fetch one of labkit's data sets if it is absent.

    Raises:
        ValueError: unknown names, or own data of the wrong kind.
        FileNotFoundError: the data set is absent.
    """
    if own.dataset is not None:
        return _own_samples(config, own)
    dtype = getattr(torch, config.dtype)
    size, transform = config.train_size, _transform(config)
    if is_folder(config.dataset):
        return _folder_samples(config, transform)
    if config.dataset == "fake":
        data = load_dataset("fake", train_size=size, dtype=dtype)
    else:
        stored = open_dataset(config.dataset, train_size=size, download=download)
        if transform.changes or stored.train_images.numel() > _MOST_FLOATS:
            return _stored_samples(stored, replace(transform, standard=stored.standard))
        data = stored.in_floats(dtype)
    made = transform if transform.changes else None
    train = TensorSamples(data.train_inputs, data.train_targets, data.num_classes, made)
    return train, TensorSamples(data.test_inputs, data.test_targets, data.num_classes, made)


def check_samples(config: RunConfig, own: Own, download: bool) -> None:
    """Refuse data that labkit's model cannot take, or that cannot be read, before a run starts.

    Raises:
        ValueError, FileNotFoundError: as ``samples_for``, or images that are too small.
    """
    if own.dataset is not None:
        return
    train, _ = samples_for(config, own, download)
    inputs, _ = first_samples(train, 1)
    if own.model is None:
        check_pixels(config.model, tuple(inputs.shape[1:]))


def with_full_paths(config: RunConfig) -> RunConfig:
    """The same settings for ranks, which may have been started in another folder."""
    paths = {"weights": config.weights} if config.weights is not None else {}
    if is_folder(config.dataset):
        paths["dataset"] = config.dataset
    full: dict[str, Any] = {
        name: os.path.abspath(os.path.expanduser(path)) for name, path in paths.items()
    }
    if config.checkpoint_dir is not None:
        full["checkpoint_dir"] = os.path.abspath(config.checkpoint_dir)
    return replace(config, **full)


def _stored_samples(data: StoredData, transform: Transform) -> tuple[Samples, Samples]:
    train = TensorSamples(data.train_images, data.train_targets, data.num_classes, transform)
    test = TensorSamples(data.test_images, data.test_targets, data.num_classes, transform)
    return train, test


def _folder_samples(config: RunConfig, transform: Transform) -> tuple[Samples, Samples | None]:
    images, held_out = open_folder(
        config.dataset, train_size=config.train_size, resize=config.resize, crop=transform.crop
    )
    # Images are resized one by one, and then a random part takes the place of a shift.
    crop = transform.crop and config.resize is None
    transform = replace(transform, standard=IMAGENET, crop=crop, resize=None)
    train = DatasetSamples(images, transform.dtype, transform, config.seed)
    return train, None if held_out is None else replace(train, dataset=held_out)


def _transform(config: RunConfig) -> Transform:
    changes = parse_augment(config.augment)
    return Transform(
        dtype=getattr(torch, config.dtype),
        crop="crop" in changes,
        flip="flip" in changes,
        resize=config.resize,
        seed=config.seed,
    )


def _own_samples(config: RunConfig, own: Own) -> tuple[Samples, Samples | None]:
    transform = _transform(config)
    dataset = made(own.dataset, "dataset", config.seed)
    train, test = parts_of(dataset, transform.dtype, config.seed)
    if config.train_size is not None:
        train = _first(train, config.train_size, config.dataset)
    if transform.changes:
        train, test = (
            replace(train, transform=transform),
            test and replace(test, transform=transform),
        )
    return train, test


def _first(train: Samples, size: int, name: str) -> Samples:
    if size > len(train):
        has = format_count(len(train), "training sample")
        raise ValueError(f"train_size {size}: {name} has {has}")
    if isinstance(train, TensorSamples):
        return replace(train, inputs=train.inputs[:size], targets=train.targets[:size])
    return replace(train, dataset=Subset(train.dataset, range(size)))
