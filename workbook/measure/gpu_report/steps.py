"""The steps of a report, the most valuable first, each with the time that it may take."""

import hashlib
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import labkit
from workbook.measure.record import machine

PACKAGES = [Path(labkit.__file__).resolve().parent, Path(__file__).resolve().parents[2]]
_MODULE = (sys.executable, "-m")


@dataclass(frozen=True)
class Step:
    """One command of a report.

    Attributes:
        name: of its folder.
        title: on the page.
        words: the command; ``{folder}`` stands for its folder, ``{seconds}`` for its time.
        budget_s: the most time it may take.
        why_not: why it cannot run here; empty if it can.
        files: what its results depend on, besides the package.
    """

    name: str
    title: str
    words: tuple[str, ...]
    budget_s: float
    why_not: str = ""
    files: tuple[Path, ...] = ()

    def command(self, folder: Path, seconds: float) -> list[str]:
        """The command, for this folder and this time."""
        values = {"{folder}": str(folder), "{seconds}": f"{seconds:.0f}"}
        return [_filled(word, values) for word in self.words]

    def key(self, machine_key: str) -> str:
        """What its results depend on: if it is the same, the results still hold."""
        words = [word for word in self.words if word != sys.executable]
        return _digest([machine_key, *words, *map(_content, self.files)])


def _filled(word: str, values: dict[str, str]) -> str:
    for mark, value in values.items():
        word = word.replace(mark, value)
    return word


def machine_key() -> str:
    """A digest of the hardware, the versions, and the code of labkit."""
    files = (path for package in PACKAGES for path in sorted(package.rglob("*.py")))
    code = (path.read_text() for path in files)
    return _digest([json.dumps(machine(), sort_keys=True), *code])


def _digest(texts: Iterable[str]) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(hashlib.sha256(text.encode()).digest())
    return found.hexdigest()[:16]


def _content(path: Path) -> str:
    if path.is_dir():
        return "".join(one.read_text() for one in sorted(path.rglob("*.py")))
    return path.read_text()


def all_steps(root: Path | None, gpus: int, quick: bool = False) -> list[Step]:
    """The steps on a machine with ``gpus`` GPUs; ``quick`` makes each as small as it can be.

    Args:
        root: the workbook's folder, which holds tests and notebooks; None if it is not there.
    """
    doctor = Step("doctor", "Doctor", (*_MODULE, "labkit", "doctor"), 120)
    first = _bench("all-reduce", "All-reduce and its bus bandwidth", 210, gpus, quick)
    later = [
        _bench("ddp", "A step of DDP", 150, gpus, quick),
        _bench("pipeline", "A step of a pipeline", 180, gpus, quick),
    ]
    last = [
        _compare(gpus, quick),
        _bench("launch", "The launch of a run", 90, gpus, quick),
        _bench("placement", "Hops and cuts at 32x32 pixels", 240, gpus, quick),
    ]
    return [
        doctor,
        _placements(quick),
        first,
        _tests(root, quick),
        *later,
        *_notebooks(root),
        *last,
    ]


def _placements(quick: bool) -> Step:
    words = (*_MODULE, "workbook.measure.gpu_report.placements", "{folder}", "--seconds")
    words += ("6", "--quick") if quick else ("{seconds}",)
    return Step("placements", "VGG16's placements at their published size", words, 240)


# What a bench is given besides where it writes: as much as fits into its time; then quickly.
_OPTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "all-reduce": (("--repeats", "20"), ("--sizes", "4KiB,64KiB", "--repeats", "2")),
    "ddp": (("--repeats", "20"), ("--models", "small_cnn", "--repeats", "2")),
    "pipeline": (("--models", "vgg16", "--repeats", "10"), ("--models", "mlp", "--repeats", "2")),
    "launch": ((), ("--repeats", "1")),
    "placement": (("--repeats", "4"), ("--repeats", "1")),
}
_DRAWN = ("all-reduce", "placement")


def _bench(name: str, title: str, budget_s: float, gpus: int, quick: bool) -> Step:
    words = (*_MODULE, "labkit", "bench", name, "--device", "cuda")
    if name != "placement":
        words += ("--world-size", _world_sizes(name, gpus, quick))
    words += _OPTIONS[name][quick]
    words += ("--json", "{folder}/result.json")
    if name in _DRAWN:
        words += ("--figure", "{folder}/figure.png")
    return Step(name, title, words, budget_s)


def _world_sizes(name: str, gpus: int, quick: bool) -> str:
    """2 ranks, which are also in the CPU's records, and as many as there are GPUs."""
    most = min(gpus, 8)
    sizes = {2} if quick or name == "pipeline" else {2, 4 if most < 4 else most}
    if not quick and name == "pipeline" and 2 < most <= 4:
        sizes |= {most}
    if name == "ddp":
        sizes = {2, most} if most > 2 and not quick else {2}
    return ",".join(map(str, sorted(sizes)))


def _compare(gpus: int, quick: bool) -> Step:
    words = (*_MODULE, "labkit", "compare", "--device", "cuda", "--json", "{folder}/result.json")
    words += ("--figures", "{folder}", "--repeats", "1")
    most = min(max(2, gpus), 4)
    words += ("--world-size", ",".join(map(str, range(1, most + 1))))
    if quick:
        words += ("--strategies", "ring_all_reduce", "--epochs", "1")
    return Step("compare", "All techniques and PyTorch's, like for like", words, 240)


def _tests(root: Path | None, quick: bool) -> Step:
    tests = root / "tests" / "gpu" if root else Path("tests/gpu")
    why_not = ""
    if root is None or not tests.is_dir():
        why_not = f"{tests} is not here: run this in the workbook's folder"
    words = (*_MODULE, "pytest", str(tests), "-p", "no:cacheprovider", "-p", "no:nbval", "-q")
    # The notebooks have steps of their own.
    words += ("--junitxml={folder}/tests.xml", "-k", "not notebook")
    if quick:
        words += ("--collect-only",)
    files = () if why_not else (tests,)
    return Step("tests", "The tests that need a GPU", words, 420, why_not, files)


def _notebooks(root: Path | None) -> list[Step]:
    paths: list[Any] = sorted((root / "notebooks").glob("*.ipynb")) if root else []
    run = (*_MODULE, "workbook.measure.gpu_report.run_notebook")
    return [
        Step(f"notebook-{path.stem}", path.name, (*run, str(path), "{folder}"), 200, "", (path,))
        for path in paths
    ]
