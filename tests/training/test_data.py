"""The data of a run: the same samples for any number of ranks, and what is not trained stays."""

import contextlib
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from ranks import travel_by_value
from torch import nn
from torch.utils.data import Dataset

from labkit import RunConfig, run
from labkit.training.evaluation import evaluated
from labkit.training.loop import fit
from labkit.training.own import NOTHING, Own
from labkit.training.resolve import make_strategy, samples_for, work_of
from labkit.training.state import largest_difference
from labkit.training.train_run import train_run, train_with
from labkit.workload.freezing import is_frozen
from labkit.workload.samples import TensorSamples

travel_by_value(__name__)

TECHNIQUES = [
    ("data_parallel", False, {}),
    ("ddp", False, {}),
    ("ddp", True, {}),
    ("ddp", False, {"sync_batch_norm": True}),
    ("ring_all_reduce", False, {"accumulate": 2}),
    ("parameter_server", False, {}),
    ("model_parallel", False, {}),
    ("model_parallel", True, {}),
    ("pipeline", False, {"micro_batches": 3}),
    ("pipeline", True, {"micro_batches": 3}),
]
# 90 = 4 x 21 + 6: batches that do not divide, and a last one that is smaller.
SMALL = {"batch_size": 21, "train_size": 90, "dtype": "float64", "epochs": 2}
SMALL |= {"augment": "crop,flip", "resize": 12}


def backbone():
    """Frozen up to its BatchNorm, whose averages are not those of the data."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )
    model[1].running_mean[:] = torch.tensor([0.5, -0.2, 0.1, 0.3])
    model[1].running_var[:] = torch.tensor([2.0, 0.5, 1.5, 3.0])
    return model


OWN = Own(model=backbone)


def in_turn(comm, jobs):
    return {key: fit(comm, *job, False, OWN) for key, job in jobs.items()}


@pytest.fixture(scope="module")
def trained():
    """The ranks' reports by technique and world size: one run for each number of ranks."""
    jobs = defaultdict(dict)
    for world_size in (1, 2, 3):
        for index, (name, builtin, options) in enumerate([("single", False, {}), *TECHNIQUES]):
            if name == "single" and world_size > 1:
                continue
            freeze = {"freeze": "0,1"}
            config = RunConfig(name, world_size, builtin=builtin, **SMALL, **freeze, **options)
            job = config, make_strategy(config, own=OWN)
            jobs[1 if name == "data_parallel" else world_size][index, world_size] = job
    found = {}
    for ranks, some in jobs.items():
        values = run(in_turn, some, world_size=ranks, timeout_s=300).values
        found |= {key: [reports[key] for reports in values] for key in some}
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("index", range(1, len(TECHNIQUES) + 1))
def test_augmented_resized_and_frozen_it_ends_where_one_device_ends(trained, index, world_size):
    (single,), reports = trained[0, 1], trained[index, world_size]
    assert largest_difference(reports[0].state, single.state) < 1e-10
    assert len({report.checksum for report in reports}) == 1
    for mine, reference in zip(reports[0].epochs, single.epochs, strict=True):
        assert mine["loss"] == pytest.approx(reference["loss"], abs=1e-12)
        assert mine["test_accuracy"] == reference["test_accuracy"]


def test_what_is_frozen_stays_to_the_bit_and_the_rest_is_trained(trained):
    from labkit.training.own import made

    start = made(backbone, "model", 0).double().state_dict()
    [report] = trained[0, 1]
    changed = {key for key, value in start.items() if not torch.equal(value, report.state[key])}
    assert changed == {"3.weight", "3.bias", "6.weight", "6.bias"}


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
        states[world_size] = train_run(config, own=own).state
    assert largest_difference(states[3], states[1]) < 1e-10


def batches_of(samples, epoch, numbers, **options):
    return list(samples.batches(numbers, epoch=epoch, **options))


def test_each_epoch_is_augmented_anew_and_held_out_images_are_not():
    settings = {"train_size": 64, "epochs": 2, "lr": 1e-30, "model": "mlp"}
    plain = train_with("single", **settings).epochs
    moved = train_with("single", augment="crop", **settings).epochs
    # Of a model that does not change.
    assert plain[0]["loss"] == pytest.approx(plain[1]["loss"], rel=1e-5)
    assert len({round(row["loss"], 4) for row in (*moved, plain[0])}) == 3
    assert moved[0]["test_accuracy"] == plain[0]["test_accuracy"] == moved[1]["test_accuracy"]


def test_augmentation_depends_on_seed_epoch_and_sample_alone():
    settings = {"dataset": "digits", "augment": "crop,flip", "train_size": 64}
    train, test = samples_for(RunConfig(**settings), NOTHING)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    (whole, _), *_ = batches_of(train, 3, [torch.arange(64)])
    # Shuffled, in parts, and after another epoch.
    batches_of(train, 2, order.split(32))
    parts = batches_of(train, 3, order.split(7))
    assert torch.equal(torch.cat([inputs for inputs, _ in parts]), whole[order])
    for other in (
        batches_of(train, 4, [torch.arange(64)]),
        batches_of(train, None, [torch.arange(64)]),
        batches_of(samples_for(RunConfig(**settings, seed=1), NOTHING)[0], 3, [torch.arange(64)]),
    ):
        assert not torch.equal(other[0][0], whole)
    plain = samples_for(RunConfig(dataset="digits", train_size=64), NOTHING)
    for ours, theirs in zip((train, test), plain):
        numbers = [torch.arange(len(ours))]
        assert torch.equal(batches_of(ours, None, numbers)[0][0], theirs.inputs)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_batch_of_bytes_becomes_the_floats_of_the_whole_set(dtype):
    from labkit.training import resolve as module
    from labkit.workload.datasets import load_dataset

    whole = load_dataset("digits", dtype=getattr(torch, dtype))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MOST_FLOATS", 0)
        train, test = samples_for(RunConfig(dtype=dtype), NOTHING)
    assert train.inputs.dtype == test.inputs.dtype == torch.uint8
    for part, inputs in ((train, whole.train_inputs), (test, whole.test_inputs)):
        for numbers in (torch.tensor([5, 0, 5]), torch.arange(100), torch.arange(0)):
            made, _ = part.read(numbers)
            assert torch.equal(made, inputs[numbers])
            assert made.dtype == inputs.dtype


def test_images_of_any_shape_are_resized_for_a_model_of_that_shape():
    config = RunConfig(model="resnet18", resize=80, freeze="features", train_size=10)
    work = work_of(config, NOTHING)
    inputs, _ = work.train.read(torch.arange(2))
    assert inputs.shape == (2, 1, 80, 80)
    model = work.make_model()
    # The stem for large images.
    assert model[0].kernel_size == (7, 7)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == ["14.weight", "14.bias"]
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 20
    assert all(map(is_frozen, norms))


class Seen:
    """A strategy that notes how many numbers it is given at a time."""

    uses_gpu = False
    comm = SimpleNamespace(device=torch.device("cpu"), span=lambda _: contextlib.nullcontext())

    def __init__(self):
        self.sizes = []

    def predict(self, inputs):
        self.sizes.append(inputs.numel())
        return torch.zeros(len(inputs), 10)


@pytest.mark.parametrize(("resize", "batches"), [(None, 1), (80, 2), (200, 7)])
def test_fewer_large_images_are_evaluated_at_a_time(resize, batches):
    seen = Seen()
    work = work_of(RunConfig(resize=resize), NOTHING)
    assert evaluated(work, seen, 0, 1)[1] == 360
    assert len(seen.sizes) == batches
    assert max(seen.sizes) < 2_200_000


def test_own_images_are_augmented_and_resized_and_points_are_refused():
    images = torch.randint(0, 255, (6, 3, 8, 8), dtype=torch.uint8)
    own = Own(dataset=(images.float(), torch.arange(6) % 2))
    train, _ = samples_for(RunConfig(augment="flip", resize=16), own)
    assert isinstance(train, TensorSamples)
    assert train.read(torch.arange(4), 0)[0].shape == (4, 3, 16, 16)
    points = Own(dataset=(torch.randn(6, 4), torch.arange(6)))
    with pytest.raises(ValueError, match=r"augment and resize are for images.*\[4\]"):
        train_run(RunConfig(augment="flip", model="mlp"), own=points)


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


def test_saved_parameters_are_the_start_of_another_run(tmp_path):
    path = tmp_path / "first.safetensors"
    first = train_with("single", train_size=64)
    first.save_state(path)
    # Frozen but for the last layer, and with a learning rate that changes nothing.
    again = train_with(
        "ddp", world_size=2, train_size=64, weights=str(path), freeze="features", lr=1e-30
    )
    assert again.difference_from(first) < 1e-6
    assert "note" not in again.notes
    with pytest.raises(ValueError, match="does not fit the model mlp"):
        train_with("single", model="mlp", weights=str(path))
    with pytest.raises(ValueError, match="there is no file"):
        train_with("single", weights=str(tmp_path / "absent.pt"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"augment": "rotate"}, "unknown augment 'rotate': choose one of crop, flip, randaugment"),
        ({"augment": "crop,flop"}, "did you mean 'flip'"),
        ({"augment": ""}, "augment must be"),
        ({"resize": 0}, "resize"),
        ({"resize": 10_000}, "resize"),
        ({"freeze": "0,,1"}, "freeze must be names"),
        ({"dataset": "no/such/folder"}, r"there is no folder .*no/such/folder.*train and val"),
        ({"freeze": "feature"}, "no layer 'feature'.*did you mean 'features'"),
        ({"freeze": "0,3,6"}, "no parameter to train"),
        ({"model": "inception_v3"}, r"75x75 pixels or more, got \(1, 8, 8\).*resize"),
    ],
)
def test_mistakes_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        train_with("single", **settings)
