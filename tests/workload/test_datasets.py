"""Data that are what they say, and errors that help."""

import hashlib
import shutil
import urllib.request
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch

from labkit.workload.datasets import DATASETS, fake_data, load_dataset, open_dataset

DIGITS_FOLDER = Path(__file__).parents[2] / "data" / "digits"


@pytest.fixture
def digits_copy(tmp_path):
    folder = tmp_path / "digits"
    shutil.copytree(DIGITS_FOLDER, folder)
    return folder


@pytest.fixture
def mnist_root(tmp_path):
    """A folder as torchvision keeps it, with digits' files in the place of MNIST's."""
    for class_name in ("MNIST", "FashionMNIST"):
        shutil.copytree(DIGITS_FOLDER, tmp_path / class_name / "raw")
    return tmp_path


@pytest.fixture
def no_network(monkeypatch):
    """Make each attempt to open an address fail as it does offline; return the attempts."""
    attempts = []

    def refuse(request, *args, **kwargs):
        attempts.append(request)
        raise URLError("Temporary failure in name resolution")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    return attempts


def test_digits_are_what_the_readme_says():
    data = load_dataset("digits")
    assert data.name == "digits"
    assert data.num_classes == 10
    assert data.input_shape == (1, 8, 8)
    assert data.train_inputs.shape == (1437, 1, 8, 8)
    assert data.test_inputs.shape == (360, 1, 8, 8)
    assert data.train_inputs.dtype == torch.float32
    assert data.train_targets.dtype == data.test_targets.dtype == torch.int64
    assert data.test_targets.bincount().tolist() == [36] * 10
    assert data.train_targets.bincount().tolist() == [
        *(142, 146, 141, 147, 145, 146, 145, 143, 138, 144)
    ]
    assert abs(data.train_inputs.mean().item()) < 1e-3
    assert abs(data.train_inputs.std().item() - 1) < 1e-3
    assert len(data.train_inputs.unique()) == 17


def test_no_held_out_digit_is_trained_on():
    data = load_dataset("digits")
    train = {tuple(image.flatten().tolist()) for image in data.train_inputs}
    test = {tuple(image.flatten().tolist()) for image in data.test_inputs}
    assert not train & test


def test_float64_digits_and_the_first_samples():
    small = load_dataset("digits", train_size=100, dtype=torch.float64)
    whole = load_dataset("digits")
    assert small.train_inputs.dtype == small.test_inputs.dtype == torch.float64
    torch.testing.assert_close(small.train_inputs.float(), whole.train_inputs[:100])
    assert torch.equal(small.train_targets, whole.train_targets[:100])
    assert len(small.test_targets) == 360
    assert small.train_targets.bincount(minlength=10).min() >= 5


def test_augmented_digits_are_the_digits_and_then_copies_that_all_differ():
    digits, most = load_dataset("digits"), load_dataset("digits_augmented")
    assert most.train_inputs.shape == (50_000, 1, 8, 8)
    assert torch.equal(most.train_inputs[:1437], digits.train_inputs)
    assert torch.equal(most.train_targets, digits.train_targets.repeat(35)[:50_000])
    assert torch.equal(most.test_inputs, digits.test_inputs)
    found = {image.numpy().tobytes() for image in most.train_inputs}
    assert len(found) == 50_000
    assert not found & {image.numpy().tobytes() for image in digits.test_inputs}
    # The same for any size, and on any machine.
    some = open_dataset("digits_augmented", train_size=3000)
    assert torch.equal(some.standard(some.train_images, torch.float32), most.train_inputs[:3000])
    assert (some.train_images.max(), some.train_images.dtype) == (16, torch.uint8)
    with pytest.raises(ValueError, match=r"50001.*50000 training"):
        load_dataset("digits_augmented", train_size=50_001)


def test_torchvision_reads_the_same_files(mnist_root):
    data = load_dataset("mnist", root=mnist_root)
    digits = load_dataset("digits")
    assert data.input_shape == (1, 8, 8)
    assert torch.equal(data.train_targets, digits.train_targets)
    # The same pixels, each standardised with its own statistics and scale.
    pixels = (data.test_inputs * 0.3081 + 0.1307) * 255
    torch.testing.assert_close(pixels, (digits.test_inputs * 0.3761 + 0.3054) * 16)


def test_readme_lists_size_and_sha256_of_each_file():
    readme = (DIGITS_FOLDER.parent / "README.md").read_text(encoding="utf-8")
    files = list(DIGITS_FOLDER.glob("*-ubyte"))
    assert len(files) == 4
    for path in files:
        content = path.read_bytes()
        [row] = [line for line in readme.splitlines() if line.startswith(f"| `{path.name}`")]
        assert f"| {len(content)} | `{hashlib.sha256(content).hexdigest()}`" in row


@pytest.mark.parametrize("kept_bytes", [0, 3, 5000])
def test_a_truncated_file_is_named_with_its_sizes(digits_copy, kept_bytes):
    path = digits_copy / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(ValueError, match="git checkout") as caught:
        load_dataset("digits", root=digits_copy)
    for words in (str(path), f"{kept_bytes} bytes"):
        assert words in str(caught.value)


def test_a_missing_file_is_named(digits_copy):
    path = digits_copy / "t10k-images-idx3-ubyte"
    path.unlink()
    with pytest.raises(FileNotFoundError, match="git checkout -- data/digits") as caught:
        load_dataset("digits", root=digits_copy)
    assert str(path) in str(caught.value)


def test_fake_data_are_seeded_and_of_any_size():
    data = load_dataset("fake")
    assert data.train_inputs.shape == (2048, 3, 32, 32)
    assert data.test_inputs.shape == (256, 3, 32, 32)
    assert data.num_classes == 10
    assert data.train_targets.unique().tolist() == list(range(10))
    assert abs(data.train_inputs.std().item() - 1) < 0.02
    small = fake_data(train_size=5, test_size=3, input_shape=(1, 4, 4), num_classes=2, seed=1)
    again = fake_data(train_size=5, test_size=3, input_shape=(1, 4, 4), num_classes=2, seed=1)
    assert small.input_shape == (1, 4, 4)
    assert torch.equal(small.train_inputs, again.train_inputs)
    assert len(load_dataset("fake", train_size=3000).train_targets) == 3000
    single, double = (
        fake_data(train_size=4, test_size=2, dtype=dtype)
        for dtype in (torch.float32, torch.float64)
    )
    assert double.test_inputs.dtype == torch.float64
    assert torch.equal(double.test_inputs.float(), single.test_inputs)


def test_a_downloaded_set_is_found_through_the_environment(mnist_root, monkeypatch):
    monkeypatch.setenv("LABKIT_DATA", str(mnist_root))
    data = load_dataset("fashion_mnist", train_size=10)
    assert data.train_inputs.shape == (10, 1, 8, 8)
    assert len(data.test_targets) == 360


class TinyCifar:
    """As torchvision's CIFAR10: data [N, 32, 32, 3] uint8, targets a list, files in a folder."""

    def __init__(self, root, train=True, download=False):

        folder = Path(root, "cifar-10-batches-py")
        if download:
            folder.mkdir()
        elif not folder.is_dir():
            raise RuntimeError("Dataset not found or corrupted.")
        count = 6 if train else 2
        self.data = np.zeros((count, 32, 32, 3), dtype=np.uint8)
        self.data[:, 5, 7, 1] = 255
        self.targets = list(range(count))


def test_a_set_is_read_once_and_shared(tmp_path, monkeypatch):
    reads = []

    class Counted(TinyCifar):
        def __init__(self, *args, **options):
            reads.append(1)
            super().__init__(*args, **options)

    monkeypatch.setattr("torchvision.datasets.CIFAR10", Counted)
    (tmp_path / "cifar-10-batches-py").mkdir()
    found = [open_dataset("cifar10", root=tmp_path, train_size=size) for size in (None, 4)]
    assert len(reads) == 2
    assert torch.equal(found[0].train_images[:4], found[1].train_images)
    assert found[0].train_images.shape == (6, 3, 32, 32)
    path = tmp_path / "cifar-10-batches-py" / ".cifar10.safetensors"
    maps = Path("/proc/self/maps").read_text()
    assert str(path) in maps
    path.write_bytes(path.read_bytes()[:100])
    open_dataset("cifar10", root=tmp_path)
    (tmp_path / "cifar-10-batches-py" / "test_batch").touch()
    open_dataset("cifar10", root=tmp_path)
    assert len(reads) == 6


def test_download_puts_the_set_in_place_once(tmp_path, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.CIFAR10", TinyCifar)
    data = load_dataset("cifar10", root=tmp_path / "new", download=True)
    assert data.train_inputs.shape == (6, 3, 32, 32)
    assert data.test_targets.tolist() == [0, 1]
    green = data.train_inputs[0, 1]
    assert green.argmax().item() == 5 * 32 + 7
    assert green.max().item() == pytest.approx((1 - 0.4822) / 0.2435)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["cifar-10-batches-py"]
    assert len(load_dataset("cifar10", root=tmp_path / "new", download=True).test_targets) == 2


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "fashion_mnist"])
def test_an_absent_set_is_explained_and_nothing_is_fetched(name, tmp_path, no_network):
    with pytest.raises(FileNotFoundError) as caught:
        load_dataset(name, root=tmp_path)
    for words in (str(tmp_path), "--download", f'load_dataset("{name}", download=True)'):
        assert words in str(caught.value)
    assert no_network == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["cifar10", "mnist"])
def test_a_failed_download_is_one_clear_error_and_leaves_nothing(name, tmp_path, no_network):
    with pytest.raises(ConnectionError, match="Temporary failure in name resolution") as caught:
        load_dataset(name, root=tmp_path, download=True)
    assert no_network
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept_bytes", [0, 2, 100, 5000])
def test_a_damaged_download_is_explained(mnist_root, kept_bytes):
    path = mnist_root / "MNIST" / "raw" / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(ValueError, match=r"MNIST is incomplete or damaged.*delete that folder"):
        load_dataset("mnist", root=mnist_root)


def test_an_empty_folder_of_cifar_is_explained(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(ValueError, match="cifar-10-batches-py is incomplete or damaged"):
        load_dataset("cifar10", root=tmp_path)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("imagenet", {}, "'imagenet'.*" + ".*".join(DATASETS)),
        ("digits", {"train_size": 0}, "train_size.*0"),
        ("digits", {"train_size": 1438}, "1438.*1437"),
        ("fake", {"train_size": -1}, "train_size.*-1"),
    ],
)
def test_mistakes_are_named(name, arguments, words):
    with pytest.raises(ValueError, match=words):
        load_dataset(name, **arguments)
