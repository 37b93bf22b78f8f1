"""What ``make env`` needs to know about builds of PyTorch, before anything is installed.

``pins`` prints requirements.txt for a build other than the package index's: torch and torchvision
keep their version and lose the hashes, which are those of the index's files; what comes with the
index's build alone is left out, since each build names its own. All else keeps its hash.
``advice BUILD`` prints what is about to be set up, and which build would suit this machine better.
"""

import re
import shutil
import sys
from pathlib import Path

PINS = Path(__file__).parents[1] / "requirements.txt"
DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/sys/module/nvidia/version"))
_OF_THE_BUILD = re.compile(r"(nvidia|cuda)-|(pytorch-)?triton\b")
# The oldest driver of each CUDA generation: docs.nvidia.com/deploy/cuda-compatibility. (A test
# compares it with labkit's.)
OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}


def main(task: str, build: str = "default") -> None:
    print("\n".join(pins() if task == "pins" else advice(build)))


def pins() -> list[str]:
    """The entries of requirements.txt as another build needs them, one a line."""
    return of_another_build(entries(PINS))


def entries(file: Path) -> list[str]:
    """The entries of a locked file, one a line."""
    text = file.read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def of_another_build(entries: list[str]) -> list[str]:
    """Without what comes with the index's build of PyTorch, and without PyTorch's hashes."""
    kept = [entry for entry in entries if not _OF_THE_BUILD.match(entry)]
    return [
        entry.partition("--hash")[0].strip() if re.match(r"torch(vision)?==", entry) else entry
        for entry in kept
    ]


def advice(build: str) -> list[str]:
    if build != "default":
        return [f"Setting up .venv with the build '{build}' of PyTorch, from PyTorch's own index."]
    size = "Setting up .venv: downloads about 3 GB the first time, then it is quick."
    pinned = re.search(r"^cuda-toolkit==(\d+)", PINS.read_text(), re.MULTILINE)
    if pinned is None or sys.platform != "linux":
        return [size]
    texts = [file.read_text(errors="replace") for file in DRIVER_FILES if file.is_file()]
    if not texts and not shutil.which("nvidia-smi"):
        return [size, "(No NVIDIA driver here: make env TORCH=cpu needs no CUDA, 3 GB less.)"]
    driver, needed = driver_major(texts), OLDEST_DRIVERS.get(int(pinned[1]), 0)
    if driver is not None and driver < needed:
        needs = f"CUDA {pinned[1]} needs driver {needed} or newer, and this one is {driver}"
        return [size, f"({needs}: make env TORCH=auto takes a build that it can run.)"]
    return [size]


def driver_major(texts: list[str]) -> int | None:
    """The first number of the NVIDIA driver's version, as the kernel tells it."""
    versions = (re.search(r"\b(\d{3,4})\.\d+", text) for text in texts)
    return next((int(version[1]) for version in versions if version), None)


if __name__ == "__main__":
    main(*sys.argv[1:])
