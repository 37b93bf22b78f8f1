"""Images in folders: torchvision's ``ImageFolder``, one folder per class."""

import os
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, Subset

from labkit.units import format_count
from labkit.workload.datasets import DATASETS
from labkit.workload.images import Standard
from labkit.workload.models import import_torchvision

# Of ImageNet's training images, as torchvision's models take them.
IMAGENET = Standard(255, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# The first that is there is held out.
_HELD_OUT = ("val", "test")


def is_folder(name: str) -> bool:
    """Whether the name of a data set means a folder, which may not exist."""
    if name in DATASETS:
        return False
    return os.path.isdir(os.path.expanduser(name)) or (os.sep in name and ":" not in name)


def open_folder(
    name: str, *, train_size: int | None = None, resize: int | None = None, crop: bool = False
) -> tuple[Dataset, Dataset | None]:
    """The images to train on, and held-out ones if there are any: ([3, H, W] uint8, class).

    Args:
        name: a folder with a folder ``train`` and perhaps ``val`` or ``test``, each with a folder
            per class; or with the folders of the classes themselves, all to train on.
        train_size: the number of training images, spread evenly over all of them; None for all.
        resize: height and width; None keeps the size of each image.
        crop: with ``resize``, take a random part of each training image, and scale that.

    Raises:
        ValueError: no such folder, no classes, a class without images, or other classes held out.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {folder}: give a folder with train and val in it, each with a "
            f"folder of images per class, or one of {', '.join(DATASETS)}"
        )
    train = folder / "train" if (folder / "train").is_dir() else folder
    images = _images_in(train, resize, crop)
    part: Dataset = images
    if train_size is not None:
        count = len(images)
        if train_size > count:
            has = format_count(count, "training image")
            raise ValueError(f"train_size {train_size}: {train} has {has}")
        part = Subset(images, [i * count // train_size for i in range(train_size)])
    held_out = [path for name in _HELD_OUT if (path := folder / name).is_dir()]
    if not held_out:
        return part, None
    if train == folder:
        raise ValueError(
            f"{folder} has {held_out[0].name} and no train: put the images to train on into a "
            "folder train beside it"
        )
    test = _images_in(held_out[0], resize, crop=False)
    if test.classes != images.classes:
        differing = ", ".join(sorted({*test.classes} ^ {*images.classes})[:5])
        raise ValueError(
            f"{held_out[0]} has other classes than {train} ({differing}): give both the same "
            "folders, with the same names"
        )
    return part, test


def _images_in(folder: Path, resize: int | None, crop: bool) -> Any:
    datasets = import_torchvision().datasets
    from torchvision.transforms import v2

    class Images(datasets.ImageFolder):
        def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
            # Jupyter leaves hidden folders.
            classes, _ = super().find_classes(directory)
            shown = [name for name in classes if not name.startswith(".")]
            return shown, {name: number for number, name in enumerate(shown)}

    def load(path: str) -> Any:
        try:
            return datasets.folder.pil_loader(path)
        # Pillow raises errors of many kinds for damaged files.
        except Exception as error:
            raise ValueError(
                f"{path} cannot be read as an image ({error}): replace it, or remove it"
            ) from None

    steps: list[Any] = [v2.PILToTensor()]
    if resize is not None:
        change = v2.RandomResizedCrop if crop else v2.Resize
        bicubic = v2.InterpolationMode.BICUBIC
        steps.insert(0, change((resize, resize), interpolation=bicubic))
    try:
        return Images(str(folder), transform=v2.Compose(steps), loader=load)
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"{folder} is no folder of images: {error}") from None
