"""Make the environment of another framework: ``make horovod``, ``make tensorflow``.

The packages come from tools/horovod.txt or tools/tensorflow.txt, each file checked by its hash;
Horovod is then compiled, and at the end what was made is tried. A call that is interrupted, by
whatever, leaves a folder that nobody takes for ready, and the next call begins with the step that
was not finished. ``workbook/measure/elsewhere/environments.py`` tells whether one is ready.
"""

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch_build
from framework_recipes import RECIPES, SWITCHES
from run_program import CannotMakeError, Ran, answer, free_memory_gb, run

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "workbook" / "measure" / "elsewhere"))
# By its file: a call with nothing to do is over before labkit would be imported.
from environments import environment_of, pins_of, stamp, why_not  # noqa: E402

UV = ROOT / ".venv" / "bin" / "uv"
CHECK_S = 600


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("framework", choices=RECIPES)
    parser.add_argument("--python", default="", help="the Python to make it with")
    parser.add_argument("--torch", default="default", help="the build of PyTorch in .venv")
    given = parser.parse_args()
    framework = given.framework
    if not why_not(framework, ROOT):
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with _alone(framework):
            if why_not(framework, ROOT):  # else another call has made it meanwhile
                Making(framework, given.torch).run(given.python)
        return 0
    except KeyboardInterrupt:
        _say(framework, f"stopped. make {framework} goes on with the step that was not finished.")
        return 130
    except OSError as error:
        _say(
            framework, f"{error.filename or ROOT}: {error.strerror}. Then make {framework} again."
        )
    except CannotMakeError as error:
        _say(framework, f"{error}.")
    return 1


def _say(framework: str, text: str) -> None:
    print(f"make {framework}: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _alone(framework: str) -> Iterator[None]:
    """Wait while another call makes the same environment; the lock ends with its process."""
    with pins_of(framework, ROOT).open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(framework, "another call is making it: waiting for that one")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Making:
    """One call: the steps that are left to do."""

    def __init__(self, framework: str, torch: str) -> None:
        self.framework, self.recipe = framework, RECIPES[framework]
        self.again = f"then make {framework} again"
        self.folder = environment_of(framework, ROOT)
        self.log = self.folder / "make.log"
        # Every other build than the index's is in PyTorch's own index, which then is in reach.
        self.of_torch = [] if torch == "default" else ["--torch-backend", "cpu"]

    def run(self, asked: str) -> None:
        """Do what is left to do, and write the stamp.

        Raises:
            CannotMakeError: with the reason and the next step.
        """
        began = time.monotonic()
        if self.folder.is_symlink():  # what it leads to belongs to another clone
            self.folder.unlink()
        (self.folder / ".ready").unlink(missing_ok=True)
        python = self._bin("python") if self._done() else self._find_python(asked)
        self._check_disk()
        if self.recipe.compiled and self._done() != "compiled":
            self._check_compiler(python)
        if not self._done():
            self._install_packages(python)
        if self.recipe.compiled and self._done() != "compiled":
            self._compile()
        self._try()
        self._write(".ready", stamp(self.framework, ROOT))
        seconds = time.monotonic() - began
        print(f"make {self.framework}: {self.folder.name} is ready ({seconds:.0f} s)", flush=True)

    def _done(self) -> str:
        """The last step that was finished in this folder with these pins; empty if none was."""
        with contextlib.suppress(OSError):
            *made, step = (self.folder / ".steps").read_text().splitlines() or [""]
            if made == stamp(self.framework, ROOT) and self._bin("python").exists():
                return step
        return ""

    def _write(self, name: str, lines: Sequence[str]) -> None:
        """Whole or not at all."""
        beside = self.folder / f"{name}.part"
        beside.write_text("\n".join(lines) + "\n")
        beside.replace(self.folder / name)

    def _finished(self, step: str) -> None:
        self._write(".steps", [*stamp(self.framework, ROOT), step])

    def _bin(self, program: str) -> Path:
        return self.folder / "bin" / program

    # What this machine has to have

    def _find_python(self, asked: str) -> Path:
        make = f"make {self.framework} PYTHON=python{self.recipe.python}"
        oldest, newest = self.recipe.pythons
        if asked:
            if not (found := shutil.which(asked)):
                raise CannotMakeError(f"there is no {asked} here; {self.recipe.needs}")
            version = answer([found, "-I", "-c", "import sys; print(*sys.version_info[:2])"])
            major, minor = map(int, version.split())
            if not oldest <= (major, minor) <= newest:
                raise CannotMakeError(
                    f"{self.recipe.needs}, and {asked} is Python {major}.{minor}: {make}"
                )
            return Path(found)
        wanted = f">={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"
        words = [UV, "python", "find", "--no-project", "--system", "--no-python-downloads"]
        try:
            return Path(answer([*words, wanted]))
        except CannotMakeError:
            get = f"sudo apt install python{self.recipe.python}-dev"
            get += f", or: .venv/bin/uv python install {self.recipe.python}"
            raise CannotMakeError(
                f"{self.recipe.needs}, and there is none here: {get}; {self.again}"
            ) from None

    def _check_disk(self) -> None:
        needed = self.recipe.disk_gb / (4 if self._done() else 1)
        free = shutil.disk_usage(ROOT).free / 1e9
        if free < needed:
            raise CannotMakeError(
                f"{needed:.3g} GB are needed in {ROOT}, and {free:.1f} GB are free: make room, "
                f"{self.again}"
            )

    def _check_compiler(self, python: Path) -> None:
        if not any(map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))):
            raise CannotMakeError(f"no C++ compiler here: sudo apt install g++, {self.again}")
        where = "import sysconfig; print(sysconfig.get_path('include'))"
        headers = Path(answer([python, "-I", "-c", where]))
        if not (headers / "Python.h").is_file():
            raise CannotMakeError(
                f"Python's headers are not here ({headers}/Python.h): "
                f"sudo apt install {headers.name}-dev, {self.again}"
            )
        if (free := free_memory_gb()) < self.recipe.memory_gb:
            raise CannotMakeError(
                f"the compiler needs {self.recipe.memory_gb:.2g} GB of memory, and {free:.1f} GB "
                f"are free: end other programs, {self.again}"
            )

    # The steps

    def _install_packages(self, python: Path) -> None:
        """A new environment, with all packages but the one that is compiled."""
        for name in (".ready", ".steps"):  # first: what follows may stop halfway
            (self.folder / name).unlink(missing_ok=True)
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self._tell(f"making {self.folder.name} with {python}, up to {self.recipe.disk_gb:g} GB")
        answer([UV, "venv", "--quiet", "--no-project", "--python", python, self.folder])
        self._install(self._pins(compiled=False), "--compile-bytecode")
        for version in self.folder.glob("lib/python*/site-packages/torch/version.py"):
            compute_on_cpu(version)
        self._finished("packages")

    def _compile(self) -> None:
        """Compile in a folder of this call alone, without uv's cache.

        The cache may hold the same package compiled with other switches. And what the compilers
        of a killed call still write is in nobody's way.
        """
        fit = int(free_memory_gb() / self.recipe.memory_gb)
        jobs = max(1, min(len(os.sched_getaffinity(0)), fit))
        self._tell(f"compiling {self.recipe.title}, some 4 minutes on two quiet cores")
        for left in self.folder.glob(".compile-*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            prefix=".compile-", dir=self.folder, ignore_cleanup_errors=True
        ) as cache:
            made = {**SWITCHES, "MAKEFLAGS": f"-j{jobs}", "UV_CACHE_DIR": cache}
            again = ["--no-build-isolation", "--reinstall-package", self.recipe.compiled]
            self._install(self._pins(compiled=True), *again, **made)
        self._finished("compiled")

    def _try(self) -> None:
        self._tell(f"trying {self.recipe.title}")
        for words, texts in self.recipe.checks:
            ran = self._run(self._bin(words[0]), *words[1:], timeout_s=CHECK_S)
            missing = [text for text in texts if text not in ran.text]
            if ran.code is None:
                raise CannotMakeError(f"{words[0]} has not ended after {CHECK_S} s; {self.again}")
            if ran.code or missing:
                # Nothing of it is to be trusted: the next call starts anew.
                (self.folder / ".steps").unlink()
                raise CannotMakeError(
                    f"{words[0]} does not work in what was made: {ran.reason} "
                    f"(all of it: {self.log}); make {self.framework} begins anew"
                )

    def _pins(self, compiled: bool) -> list[str]:
        pins = torch_build.entries(pins_of(self.framework, ROOT))
        if self.of_torch:
            pins = torch_build.of_another_build(pins)
        name = f"{self.recipe.compiled}=="
        return [pin for pin in pins if pin.startswith(name) == compiled]

    def _install(self, pins: list[str], *options: str, **environment: str) -> None:
        self._write("pins.txt", pins)
        hashes = [*self.of_torch, "--verify-hashes"] if self.of_torch else ["--require-hashes"]
        words = [UV, "pip", "install", "--python", self._bin("python"), "--no-deps", *hashes]
        ran = self._run(*words, *options, "-r", self.folder / "pins.txt", **environment)
        if ran.code:
            why = ran.why_not_installed(self.recipe.memory_gb)
            raise CannotMakeError(f"{why} (uv's words: {self.log}); {self.again}")

    def _tell(self, text: str) -> None:
        print(f"make {self.framework}: {text}", flush=True)

    def _run(self, *words: str | Path, timeout_s: float | None = None, **environment: str) -> Ran:
        return run(words, self.log, self.folder, timeout_s, **environment)


def compute_on_cpu(version: Path) -> None:
    """Have this PyTorch say that it knows no CUDA, for as long as the environment is there.

    Otherwise Horovod compiles for CUDA where it finds a toolkit. The file is replaced, never
    written to: it may be one file with that of uv's cache and of other environments.

    Args:
        version: ``torch/version.py``.
    """
    beside = version.with_name("version.part")
    beside.write_text(re.sub(r"(?m)^cuda\b.*", "cuda = None", version.read_text()))
    beside.replace(version)


if __name__ == "__main__":
    sys.exit(main())
