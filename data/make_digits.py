"""Make labkit/workload/data/digits from scikit-learn's copy of the UCI handwritten digits.

The four files this writes are in the repository: run it only to check how they came about
(`pip install scikit-learn`, which labkit itself does not need; then `python data/make_digits.py`).
"""

import hashlib
import struct
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import labkit
from labkit.engine.files import write_atomically

TEST_PER_CLASS = 36


def held_out(targets: np.ndarray) -> np.ndarray:
    """Mark the test samples: in each class, 36 evenly spaced ones in the original order.

    Of a class with n samples, those at the positions (k * n) // 36 for k = 0 .. 35. No random
    numbers, so the part is the same for everyone; evenly spaced, because the samples lie
    writer by writer and each of the 13 writers should be in both parts.
    """
    is_test = np.zeros(len(targets), dtype=bool)
    for digit in np.unique(targets):
        members = np.flatnonzero(targets == digit)
        is_test[members[np.arange(TEST_PER_CLASS) * len(members) // TEST_PER_CLASS]] = True
    return is_test


def write_idx(path: Path, array: np.ndarray) -> None:
    """Write uint8 `array` as IDX: two zeros, type 8, the rank, big-endian sizes, the bytes."""
    assert array.dtype == np.uint8
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    content = header + array.tobytes()
    write_atomically(path, content)
    print(f"{path.name}  {len(content)}  {hashlib.sha256(content).hexdigest()}")


def main() -> None:
    """Write train-* (1,437 samples) and t10k-* (360), the names MNIST's files have."""
    digits = load_digits()
    images, targets = digits.images.astype(np.uint8), digits.target.astype(np.uint8)
    is_test = held_out(targets)
    folder = Path(labkit.__file__).parent / "workload" / "data" / "digits"
    folder.mkdir(exist_ok=True)
    for part, chosen in (("train", ~is_test), ("t10k", is_test)):
        write_idx(folder / f"{part}-images-idx3-ubyte", images[chosen])
        write_idx(folder / f"{part}-labels-idx1-ubyte", targets[chosen])


if __name__ == "__main__":
    main()
