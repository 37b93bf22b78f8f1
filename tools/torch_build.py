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
DRIVER = Path("/proc/driver/nvidia/version")
_OF_THE_BUILD = re.compile(r"(nvidia|cuda)-|(pytorch-)?triton\b")


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
    if sys.platform != "linux" or DRIVER.is_file() or shutil.which("nvidia-smi"):
        return [size]
    return [size, "(No NVIDIA driver here: make env TORCH=cpu needs no CUDA, 3 GB less.)"]


if __name__ == "__main__":
    main(*sys.argv[1:])
