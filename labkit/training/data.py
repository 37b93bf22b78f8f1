"""The samples of a run: one of labkit's data sets, or the learner's own."""

from dataclasses import replace

import torch
from torch.utils.data import Subset

from labkit.config import RunConfig, parse_augment
from labkit.training.own import Own, made
from labkit.units import format_count
from labkit.workload.datasets import load_dataset, open_dataset
from labkit.workload.images import Transform
from labkit.workload.samples import Samples, TensorSamples, parts_of


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
    if config.dataset == "fake":
        data = load_dataset("fake", train_size=size, dtype=dtype)
        test = TensorSamples(data.test_inputs, data.test_targets, None, _or_none(transform))
        return TensorSamples(
            data.train_inputs, data.train_targets, data.num_classes, _or_none(transform)
        ), test
    stored = open_dataset(config.dataset, train_size=size, download=download)
    transform = replace(transform, standard=stored.standard)
    classes = stored.num_classes
    train = TensorSamples(stored.train_images, stored.train_targets, classes, transform)
    return train, TensorSamples(stored.test_images, stored.test_targets, classes, transform)


def _transform(config: RunConfig) -> Transform:
    changes = parse_augment(config.augment)
    return Transform(
        dtype=getattr(torch, config.dtype),
        crop="crop" in changes,
        flip="flip" in changes,
        resize=config.resize,
        seed=config.seed,
    )


def _or_none(transform: Transform) -> Transform | None:
    """None for a transform that does nothing."""
    return None if transform == Transform(transform.dtype, seed=transform.seed) else transform


def _own_samples(config: RunConfig, own: Own) -> tuple[Samples, Samples | None]:
    dtype, transform = getattr(torch, config.dtype), _or_none(_transform(config))
    train, test = parts_of(made(own.dataset, "dataset", config.seed), dtype, config.seed)
    if config.train_size is not None:
        train = _first(train, config)
    test = test and replace(test, transform=transform)
    return replace(train, transform=transform), test


def _first(train: Samples, config: RunConfig) -> Samples:
    if config.train_size > len(train):
        raise ValueError(
            f"train_size {config.train_size}: {config.dataset} has "
            f"{format_count(len(train), 'training sample')}"
        )
    if isinstance(train, TensorSamples):
        kept = slice(config.train_size)
        return TensorSamples(train.inputs[kept], train.targets[kept])
    return replace(train, dataset=Subset(train.dataset, range(config.train_size)))
