"""Images in folders: one folder per class, as ``torchvision.datasets.ImageFolder`` has them."""

import os
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor
from torch.utils.data import Dataset

from labkit.units import format_count
from labkit.workload.datasets import DATASETS
from labkit.workload.images import Standard
from labkit.workload.models import import_torchvision

# Of ImageNet's training images, as torchvision's models take them.
IMAGENET = Standard(255, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# The first that is there is held out.
_HELD_OUT = ("val", "test")
# The number of images whose sizes are compared before a run; others are compared when read.
_COMPARED = 50


def is_folder(name: str) -> bool:
    """Whether the name of a data set means a folder, which may not exist."""
    if name in DATASETS:
        return False
    return os.path.isdir(os.path.expanduser(name)) or (os.sep in name and ":" not in name)


class ImageFiles(Dataset):
    """Images of the classes in a folder, as (image [3, H, W] uint8, class).

    Attributes:
        classes: their names, sorted; a class is a number in this list.
        files: (path, class) of each image, sorted.
        resize: height and width; None keeps the size of each image.
        crop: take a random part of each image, and scale it to ``resize``. Its place is drawn from
            torch's global generator.

    Raises:
        ValueError: no classes, a class without images, or other classes than those given.
    """

    def __init__(
        self,
        folder: Path,
        classes: Sequence[str] | None = None,
        resize: int | None = None,
        crop: bool = False,
    ):
        found = _classes_in(folder)
        if not found:
            raise ValueError(
                f"{folder} has no folders of images: give each class a folder of its own in it"
            )
        if classes is not None and found != list(classes):
            raise ValueError(_how_classes_differ(folder, found, classes))
        self.classes, self.resize, self.crop = found, resize, crop
        reader = import_torchvision().datasets.folder
        numbers = {name: number for number, name in enumerate(found)}
        endings = reader.IMG_EXTENSIONS
        self.files = reader.make_dataset(str(folder), numbers, endings, allow_empty=True)
        empty = set(numbers.values()) - {number for _, number in self.files}
        if empty:
            names = ", ".join(found[number] for number in sorted(empty))
            raise ValueError(
                f"no images in {folder} for {names}: remove the folder, or put images there "
                f"({', '.join(endings)})"
            )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from torchvision.transforms import RandomResizedCrop, functional

        path, number = self.files[index]
        try:
            image = import_torchvision().datasets.folder.pil_loader(path)
        # Pillow raises errors of many kinds for damaged files.
        except Exception as error:
            raise ValueError(
                f"{path} cannot be read as an image ({error}): replace it, or remove it"
            ) from None
        if self.resize is not None:
            size = [self.resize, self.resize]
            if self.crop:
                # The parts and proportions of torchvision's reference scripts.
                part = RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3])
                image = functional.resized_crop(image, *part, size)
            else:
                image = functional.resize(image, size)
        return functional.pil_to_tensor(image), number

    def check_sizes(self) -> None:
        """Raise ValueError if images of different sizes are not resized, as far as some tell."""
        from PIL import Image

        found: dict[tuple[int, int], str] = {}
        for path, _ in self.files[:: max(1, len(self.files) // _COMPARED)]:
            try:
                with Image.open(path) as image:
                    found.setdefault(image.size, path)
            except Exception as error:
                raise ValueError(f"{path} cannot be read as an image ({error})") from None
        if len(found) > 1 and self.resize is None:
            one, other = [
                f"{path} has {width}x{height}" for (width, height), path in list(found.items())[:2]
            ]
            raise ValueError(
                f"the images differ in size: {one} pixels, and {other}. Scale all of them to one "
                "size with resize, such as 224"
            )


def open_folder(
    name: str, *, train_size: int | None = None, resize: int | None = None, crop: bool = False
) -> tuple[ImageFiles, ImageFiles | None]:
    """The images to train on, and held-out ones if there are any.

    Args:
        name: a folder with a folder ``train`` and perhaps ``val`` or ``test``, each with a folder
            per class; or with the folders of the classes themselves, all to train on.
        train_size: the number of training images, spread evenly over all of them; None for all.
        resize, crop: see ``ImageFiles``; held-out images are not cropped.

    Raises:
        ValueError: no such folder, or as ``ImageFiles``.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {folder}: give a folder with train and val in it, each with a "
            f"folder of images per class, or one of {', '.join(DATASETS)}"
        )
    train, test = _parts_in(folder)
    images = ImageFiles(train, resize=resize, crop=crop and resize is not None)
    if train_size is not None:
        count = len(images)
        if train_size > count:
            has = format_count(count, "training image")
            raise ValueError(f"train_size {train_size}: {train} has {has}")
        images.files = [images.files[i * count // train_size] for i in range(train_size)]
    images.check_sizes()
    if test is None:
        return images, None
    held_out = ImageFiles(test, images.classes, resize)
    held_out.check_sizes()
    return images, held_out


def _parts_in(folder: Path) -> tuple[Path, Path | None]:
    """The folder to train on, and that of the held-out images."""
    held_out = [folder / name for name in _HELD_OUT if (folder / name).is_dir()]
    train = folder / "train"
    # Trains may be one of the classes.
    if train.is_dir() and (held_out or _classes_in(train)):
        return train, next(iter(held_out), None)
    if held_out and _classes_in(held_out[0]):
        raise ValueError(
            f"{folder} has {held_out[0].name} and no train: put the images to train on into a "
            "folder train beside it"
        )
    return folder, None


def _classes_in(folder: Path) -> list[str]:
    return sorted(
        path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    )


def _how_classes_differ(folder: Path, found: Sequence[str], classes: Sequence[str]) -> str:
    told = []
    if also := sorted(set(found) - set(classes)):
        told.append(f"{', '.join(also[:5])} only there")
    if lacking := sorted(set(classes) - set(found)):
        told.append(f"{', '.join(lacking[:5])} not there")
    return (
        f"{folder} has other classes than the training images ({'; '.join(told)}): give both the "
        "same folders, with the same names"
    )
