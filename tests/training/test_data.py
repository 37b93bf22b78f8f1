"""The data of a run: the same samples for any number of ranks, and what is not trained stays."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from labkit import RunConfig
from labkit.training.resolve import Own
from labkit.training.result import largest_difference
from labkit.training.train_run import train_run, train_with


class Noisy(Dataset):
    """Points to which each of the three generators adds noise, and no rank may see other noise."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        import random

        noise = torch.rand(1).item() + random.random() + np.random.rand()
        return torch.full((4,), index / 10 + noise), index % 2


def noisy_points():
    return nn.Linear(4, 2)


def test_the_random_numbers_of_a_learner_s_data_depend_on_no_rank():
    own = Own(model=noisy_points, dataset=Noisy)
    states = {}
    for world_size in (1, 3):
        name = "ddp" if world_size > 1 else "single"
        config = RunConfig(name, world_size, dtype="float64", epochs=2, batch_size=8)
        states[world_size] = train_run(config, own_parts=own).state
    assert largest_difference(states[3], states[1]) < 1e-10


@pytest.fixture
def pictures(tmp_path):
    """Folders of images of three classes and many sizes."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 9), ("val", 3)):
        for number, name in enumerate(("cat", "dog", "eel")):
            folder = tmp_path / "pictures" / part / name
            folder.mkdir(parents=True)
            for index in range(count):
                height, width = generator.integers(10, 30, 2)
                pixels = generator.integers(0, 99, (height, width, 3), dtype=np.uint8)
                pixels[..., number] += 120
                Image.fromarray(pixels).save(folder / f"{index}.png")
    return tmp_path / "pictures"


def test_folders_of_images_train_as_on_one_device(pictures, monkeypatch):
    monkeypatch.chdir(pictures.parent)
    settings = {"dataset": "pictures", "resize": 16, "augment": "crop,flip", "lr": 0.01}
    settings |= {"batch_size": 10, "dtype": "float64"}
    single = train_with("single", **settings)
    ranks = train_with("ring_all_reduce", world_size=3, **settings)
    assert ranks.difference_from(single) < 1e-10
    assert single.config.dataset == "pictures"
    assert single.test_accuracy > 0.3
