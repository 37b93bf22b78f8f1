"""``make horovod``, ``make tensorflow``: what stops them, what is left then, and how they go on.

The real program and the real Makefile run in a folder of their own, with programs that only take
notes: nothing is downloaded, and nothing is compiled.
"""

import errno
import fcntl
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ranks import is_alive, wait_until

from workbook.measure.elsewhere import environments
from workbook.measure.elsewhere.environments import FRAMEWORKS, python_of, stamp, why_not

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import other_framework  # noqa: E402
import run_program  # noqa: E402
import torch_build  # noqa: E402

# It notes what it is asked, and does what the file "does" says: one line, used once.
UV = """#!/bin/sh
here=$(cd "$(dirname "$0")/../.." && pwd)
echo "$*" >> "$here/asked"
case "$1 $2" in
  "python find") [ -e "$here/no_python" ] && exit 1; echo "$here/python"; exit;;
  "venv "*) for folder; do :; done; torch="$folder/lib/python3.11/site-packages/torch"
    mkdir -p "$folder/bin" "$torch"; ln "$here/version.py" "$torch"
    cp "$here/python" "$here/horovodrun" "$folder/bin"; exit;;
esac
env | grep -E "^(HOROVOD_|MAKEFLAGS|UV_CACHE_DIR|CUDA_)" > "$here/switches"
for word in $(cat "$here/does" 2>/dev/null); do case "$word" in
  hang) rm "$here/does"; sleep 600 & echo $! > "$here/below"
    echo $$ > "$here/hangs"; wait;;
  fail) cat "$here/words" >&2; exit 1;;
esac; done
"""
# What is asked of a Python, and the program that tries TensorFlow.
PYTHON = """#!/bin/sh
here=$(cd "$(dirname "$0")" && pwd)
case "$here" in */bin) here=$(dirname "$(dirname "$here")");; esac
case "$*" in
  *version_info*) echo "${VERSION:-3 11}";;
  *sysconfig*) echo "$here/include/python3.11";;
  *tensorflow*) echo "devices 2";;
esac
"""
HOROVODRUN = """#!/bin/sh
here=$(cd "$(dirname "$0")/../.." && pwd)
case "$(cat "$here/tried" 2>/dev/null)" in
  hang) rm "$here/tried"; sleep 600 & echo $! > "$here/below"
    echo $$ > "$here/hangs"; wait;;
  broken) echo "ImportError: undefined symbol"; exit 1;;
  no_gloo) echo "[X] PyTorch"; echo "[ ] Gloo"; exit;;
esac
echo "[X] PyTorch [X] Gloo"; echo "[0]<stdout>:sum 3.0"; echo "[1]<stdout>:sum 3.0"
"""


class Clone:
    """A folder with the Makefile, the pins, the tools, and programs that only take notes."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in ("tools", "include/python3.11", ".venv/bin", "workbook/measure/elsewhere"):
            (folder / name).mkdir(parents=True)
        for path in (ROOT / "tools").glob("*"):
            if path.suffix in (".py", ".txt"):
                shutil.copy(path, folder / "tools" / path.name)
        shutil.copy(environments.__file__, folder / "workbook/measure/elsewhere")
        (folder / "include/python3.11/Python.h").touch()
        (folder / "version.py").write_text("cuda = '11.7'\nhip = None\n")
        for name, text in {".venv/bin/uv": UV, "python": PYTHON, "horovodrun": HOROVODRUN}.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def asked(self) -> list[str]:
        """What uv was asked since the last time: ``find``, ``venv``, ``packages``, ``compile``."""
        notes = self.folder / "asked"
        lines = notes.read_text().splitlines() if notes.exists() else []
        notes.unlink(missing_ok=True)
        return [
            "find" if line.startswith("python find")
            else "venv" if line.startswith("venv")
            else "compile" if "--no-build-isolation" in line
            else "packages"
            for line in lines
        ]  # fmt: skip

    def start(self, framework: str, *words: str) -> subprocess.Popen:
        program = self.folder / "tools" / "other_framework.py"
        return subprocess.Popen(
            [sys.executable, program, framework, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def why_not(self, framework: str = "horovod") -> str:
        return why_not(framework, self.folder)

    def environment(self, framework: str = "horovod") -> Path:
        return self.folder / f".venv-{framework}"

    def says(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path / "clone")


@pytest.fixture
def make(clone, monkeypatch, capfd):
    """Run the program in this process: (exit code, what it said)."""
    monkeypatch.setattr(other_framework, "ROOT", clone.folder)
    monkeypatch.setattr(other_framework, "UV", clone.folder / ".venv" / "bin" / "uv")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    def run(framework="horovod", *words):
        monkeypatch.setattr(sys, "argv", ["other_framework.py", framework, *words])
        code = other_framework.main()
        said = "".join(capfd.readouterr())
        return code, said

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def ended(program: subprocess.Popen) -> bool:
    return program.poll() is not None


def refusal(said: str) -> str:
    """The one line that says why, and what to do."""
    (line,) = [one for one in said.splitlines() if one.endswith(".")]
    return line


def test_made_once_and_then_found(clone, make):
    assert clone.why_not() == "horovod needs an environment of its own: make horovod"
    code, said = make()
    assert code == 0, said
    assert clone.asked() == ["find", "venv", "packages", "compile"]
    assert "is ready" in said
    assert clone.why_not() == ""
    assert python_of("horovod", clone.folder) == clone.environment() / "bin" / "python"
    assert make() == (0, "")
    assert clone.asked() == []
    assert make("tensorflow")[0] == 0
    assert clone.asked() == ["find", "venv", "packages"]


def test_horovod_is_compiled_for_gloo_alone_whatever_the_shell_has_set(clone, make, monkeypatch):
    for name in ("HOROVOD_WITH_MPI", "HOROVOD_GPU_OPERATIONS", "CUDA_HOME", "MAKEFLAGS"):
        monkeypatch.setenv(name, "of the shell")
    monkeypatch.setattr(other_framework, "free_memory_gb", lambda: 3.1)
    make()
    lines = (clone.folder / "switches").read_text().splitlines()
    found = dict(line.split("=", 1) for line in lines)
    cache = found.pop("UV_CACHE_DIR")
    assert cache.startswith(str(clone.environment() / ".compile-"))
    assert not Path(cache).exists()
    assert found.pop("MAKEFLAGS") in ("-j1", "-j2"), "each compiler needs 1.5 GB"
    wanted = {n: v for n, v in other_framework.SWITCHES.items() if n.startswith("HOROVOD_")}
    assert found == wanted


def test_its_pytorch_knows_no_cuda_and_the_file_in_uv_s_cache_stays(clone, make):
    make()
    (version,) = clone.environment().glob("lib/*/site-packages/torch/version.py")
    assert version.read_text() == "cuda = None\nhip = None\n"
    assert (clone.folder / "version.py").read_text() == "cuda = '11.7'\nhip = None\n"
    annotated = clone.folder / "annotated.py"
    annotated.write_text("cuda: Optional[str] = '12.1'\ncuda_more = 1\n")
    other_framework.compute_on_cpu(annotated)
    assert annotated.read_text().splitlines() == ["cuda = None", "cuda_more = 1"]


# ---- interrupted

STEPS = {
    "packages": ("does", ["find", "venv", "packages", "compile"]),
    "compile": ("does", ["compile"]),
    "try": ("tried", []),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_in_a_step_it_leaves_nothing_and_goes_on_there(step, number, clone, make):
    file, due = STEPS[step]
    if step == "compile":
        clone.says("does", "fail")
        clone.says("words", "error: Failed to build `horovod==0.28.1`")
        # The packages are there, and the first try to compile has failed.
        made = other_framework.Making("horovod", "default")
        made._install = lambda *words, **environment: None
        made._install_packages(clone.folder / "python")
    clone.says(file, "hang")
    clone.asked()
    running = clone.start("horovod")
    hangs = clone.folder / "hangs"
    assert wait_until(lambda: (hangs.exists() and hangs.read_text().strip()) or ended(running), 60)
    child = int(hangs.read_text())
    running.send_signal(number)
    running.wait(60)
    assert wait_until(lambda: not is_alive(child), 60)
    below = int((clone.folder / "below").read_text())
    if number == signal.SIGKILL:
        os.kill(below, signal.SIGKILL)  # a compiler ends with its file, and cannot do harm
    said, _ = running.communicate(timeout=60)
    assert wait_until(lambda: not is_alive(below), 60)
    assert running.returncode == (-number if number == signal.SIGKILL else 130), said
    if number != signal.SIGKILL:
        assert "make horovod: stopped. make horovod goes on with" in said
    assert clone.why_not() == ".venv-horovod is not complete: make horovod"
    clone.asked()
    code, said = make()
    assert code == 0, said
    assert clone.asked() == due
    assert clone.why_not() == ""
    assert not list(clone.environment().glob(".compile-*"))
    assert not list(clone.environment().rglob("*.part"))


def test_a_call_beside_another_waits_and_finds_it_done(clone, make):
    with (clone.folder / "tools" / "horovod.txt").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = clone.start("horovod")
        assert "another call is making it" in second.stdout.readline()
        other_framework.Making("horovod", "default").run("")  # what the first one does
        clone.asked()
    said, _ = second.communicate(timeout=60)
    assert (second.returncode, said) == (0, "")
    assert clone.asked() == []


# ---- made anew


def test_a_moved_copy_and_changed_pins_are_made_anew(clone, make):
    make()
    moved = clone.folder.rename(clone.folder.with_name("moved"))
    assert "made in another folder" in why_not("horovod", moved)
    moved.rename(clone.folder)
    assert clone.why_not() == ""
    with (clone.folder / "tools" / "horovod.txt").open("a") as file:
        file.write("# changed\n")
    assert (
        clone.why_not() == ".venv-horovod has other versions than tools/horovod.txt: make horovod"
    )
    clone.asked()
    assert make()[0] == 0
    assert clone.asked() == ["find", "venv", "packages", "compile"]
    assert clone.why_not() == ""


def test_an_environment_that_has_lost_its_python_is_made_anew(clone, make):
    make("tensorflow")
    (clone.environment("tensorflow") / "bin" / "python").unlink()
    assert "has lost its Python: make tensorflow" in clone.why_not("tensorflow")
    assert make("tensorflow")[0] == 0
    assert clone.why_not("tensorflow") == ""


def test_a_link_to_the_environment_of_another_clone_is_never_emptied(clone, make, tmp_path):
    make()
    other = Clone(tmp_path / "other")
    other.environment().symlink_to(clone.environment())
    assert why_not("horovod", other.folder) == ""
    (other.folder / "tools" / "horovod.txt").write_text("horovod==0.28.1\n")
    assert why_not("horovod", other.folder)
    other_framework.ROOT = other.folder  # monkeypatch of ``make`` sets it back
    other_framework.Making("horovod", "default").run("")
    assert not other.environment().is_symlink()
    assert clone.why_not() == ""


# ---- refused


BUILD = "error: Failed to build `horovod==0.28.1`\n"
UNREACHED = "error: Failed to fetch: http://127.0.0.1:9/simple/six/\n  cause: error sending\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            f"{UNREACHED}  cause: Connection refused (os error 111)\n",
            "six cannot be had (Connection refused (os error 111)): is the package index in reach",
        ),
        (
            "error: No solution found\n  cause: Because there is no version of torch==2.0.1 and "
            "you require torch==2.0.1, we can conclude that your requirements are unsatisfiable.",
            "torch==2.0.1 cannot be had (Because there is no version of torch==2.0.1",
        ),
        (
            "error: Failed to download `torch==2.0.1`\n  cause: Hash mismatch for "
            "`torch==2.0.1`\n\n    Computed:\n      sha256:4721\n",
            "torch==2.0.1 at the index is not the file whose hash is pinned: do not use it",
        ),
        (
            "error: failed to write\n  cause: No space left on device (os error 28)\n",
            "the disk is full: make room",
        ),
        (
            f"{BUILD}\n[stderr]\n/x/operations.cc:5: error: no type\n",
            "horovod==0.28.1 cannot be compiled here (/x/operations.cc:5: error: no type)",
        ),
        (
            f"{BUILD}c++: fatal error: Killed signal terminated program cc1plus\n",
            "a compiler was killed: 1.5 GB of free memory are needed",
        ),
        ("", "a package cannot be had (it printed nothing)"),
    ],
)
def test_what_uv_cannot_do_is_said_in_one_line(words, said, clone, make):
    clone.says("words", words)
    clone.says("does", "fail")
    code, output = make()
    assert code == 1
    assert said in refusal(output)
    assert refusal(output).startswith("make horovod: ")
    assert refusal(output).endswith("; then make horovod again.")
    assert clone.why_not() == ".venv-horovod is not complete: make horovod"
    (clone.folder / "does").unlink()
    assert make()[0] == 0
    assert clone.why_not() == ""


def test_another_python_is_refused_with_the_one_that_is_needed(clone, make, monkeypatch):
    monkeypatch.setenv("VERSION", "3 12")
    asked = str(clone.folder / "python")
    code, said = make("horovod", "--python", asked)
    assert code == 1
    assert "Horovod needs Python 3.11 (torch 2.0.1, the newest that it compiles with" in said
    assert f"{asked} is Python 3.12: make horovod PYTHON=python3.11." in said
    assert not clone.environment().exists()
    assert make("tensorflow", "--python", asked)[0] == 0
    monkeypatch.setenv("VERSION", "3 9")
    (clone.environment("tensorflow") / ".ready").unlink()
    (clone.environment("tensorflow") / ".steps").unlink()
    code, said = make("tensorflow", "--python", asked)
    assert "TensorFlow needs Python 3.11 to 3.13" in refusal(said)
    code, said = make("horovod", "--python", "python3.0")
    assert "there is no python3.0 here" in refusal(said)


def test_without_a_fitting_python_it_says_how_to_get_one(clone, make):
    (clone.folder / "no_python").touch()
    code, said = make()
    assert code == 1
    assert "there is none here: sudo apt install python3.11-dev, or: .venv/bin/uv" in refusal(said)


def test_what_compiling_needs_is_looked_at_before_anything_is_downloaded(clone, make, monkeypatch):
    which = shutil.which
    (clone.folder / "include/python3.11/Python.h").unlink()
    assert "sudo apt install python3.11-dev" in refusal(make()[1])
    (clone.folder / "include/python3.11/Python.h").touch()
    monkeypatch.setattr(other_framework.shutil, "which", lambda name: None)
    assert "no C++ compiler here: sudo apt install g++" in refusal(make()[1])
    monkeypatch.setattr(other_framework.shutil, "which", which)
    monkeypatch.setattr(other_framework, "free_memory_gb", lambda: 0.7)
    assert "1.5 GB of memory, and 0.7 GB are free" in refusal(make()[1])
    assert clone.asked() == ["find"] * 3
    assert not clone.environment().exists()
    assert make("tensorflow")[0] == 0, "nothing is compiled for it"


def test_a_full_disk_is_told_before_and_while_it_fills(clone, make, monkeypatch):
    usage = shutil.disk_usage(clone.folder)
    little = usage._replace(free=10**9)
    monkeypatch.setattr(other_framework.shutil, "disk_usage", lambda path: little)
    assert "5 GB are needed in" in refusal(make()[1])
    plenty = usage._replace(free=10**12)
    monkeypatch.setattr(other_framework.shutil, "disk_usage", lambda path: plenty)

    def full(self, name, lines):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder / name))

    with monkeypatch.context() as patched:
        patched.setattr(other_framework.Making, "_write", full)
        code, said = make()
    assert code == 1
    assert "pins.txt: No space left on device" in refusal(said)
    assert clone.why_not() == ".venv-horovod is not complete: make horovod"
    assert make()[0] == 0


@pytest.mark.parametrize("fault", ["broken", "no_gloo"])
def test_what_does_not_work_is_not_called_ready_and_made_anew(fault, clone, make):
    clone.says("tried", fault)
    code, said = make()
    assert code == 1
    assert "horovodrun does not work in what was made" in refusal(said)
    assert clone.why_not() == ".venv-horovod is not complete: make horovod"
    (clone.folder / "tried").unlink()
    clone.asked()
    assert make()[0] == 0
    assert clone.asked() == ["find", "venv", "packages", "compile"]


def test_a_try_that_never_ends_is_ended(clone, make, monkeypatch):
    clone.says("tried", "hang")
    with monkeypatch.context() as patched:
        # Long enough on a busy machine for two shells to start.
        patched.setattr(other_framework, "CHECK_S", 3)
        code, said = make()
    assert code == 1
    assert "horovodrun has not ended after 3 s" in refusal(said)
    for name in ("hangs", "below"):
        process = int((clone.folder / name).read_text())
        assert wait_until(lambda process=process: not is_alive(process), 60)
    clone.asked()
    assert make()[0] == 0
    assert clone.asked() == [], "only tried again"


# ---- what is installed


def test_another_build_of_pytorch_is_taken_without_cuda(clone, make):
    make("horovod", "--torch", "cu128")
    asked = (clone.folder / "asked").read_text().splitlines()
    assert sum("--torch-backend cpu --verify-hashes" in line for line in asked) == 2
    made = other_framework.Making("horovod", "cu128")
    pins = made._pins(compiled=False)
    assert not [pin for pin in pins if pin.startswith("nvidia-")]
    assert "torch==2.0.1" in pins
    assert all("--hash" in pin for pin in pins if pin != "torch==2.0.1")


def test_by_default_each_file_has_a_hash(clone, make):
    make()
    asked = (clone.folder / "asked").read_text().splitlines()
    assert sum("--require-hashes" in line for line in asked) == 2
    pins = torch_build.entries(ROOT / "tools" / "horovod.txt")
    assert all("--hash=sha256:" in pin for pin in pins)
    compiled = (clone.environment() / "pins.txt").read_text().splitlines()
    assert [pin.split()[0] for pin in compiled] == ["horovod==0.28.1"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_pins_are_those_of_pyproject(framework):
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    entries = torch_build.entries(ROOT / "tools" / f"{framework}.txt")
    pins = {name: Requirement(f"{name}{rest}") for name, rest in
            (re.match(r"([\w.-]+)(==[\w.+]+)", entry).groups() for entry in entries)}  # fmt: skip
    for wanted in map(Requirement, groups[framework]):
        (version,) = pins[wanted.name].specifier
        assert wanted.specifier.contains(version.version), wanted
    if framework == "horovod":
        assert not {"triton", "lit", "nvidia-cusolver-cu11"} & pins.keys(), "1/6 of the download"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_is_there_is_what_the_pins_say(framework):
    if missing := why_not(framework):
        pytest.skip(missing)
    folder = python_of(framework).parents[1]
    (packages,) = folder.glob("lib/python*/site-packages")
    found = {
        canonicalize_name(one.metadata["Name"]): one.version
        for one in importlib.metadata.distributions(path=[str(packages)])
    }
    entries = torch_build.entries(ROOT / "tools" / f"{framework}.txt")
    pins = [re.match(r"([\w.-]+)==([\w.+]+)", entry).groups() for entry in entries]
    assert {name for name in found if (name, found[name]) not in pins} == set()
    if framework == "horovod":
        assert "cuda = None" in (packages / "torch" / "version.py").read_text()


# ---- the commands


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_the_makefile_hands_on_the_python_and_the_build_that_was_chosen(clone):
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, clone.folder / name)
    for name in ("labkit", "workbook", "tests"):
        (clone.folder / name).mkdir(exist_ok=True)
    ready = clone.folder / ".venv" / ".ready"
    notes = '#!/bin/sh\necho "$*" >> asked_of_python\n'
    (clone.folder / ".venv/bin/python").write_text(notes)
    (clone.folder / ".venv/bin/python").chmod(0o755)
    given = {k: v for k, v in os.environ.items() if k not in ("TORCH", "MAKEFLAGS", "PYTHON")}

    def asked(build, *words):
        ready.write_text(f"{clone.folder}\n{build}\n")
        command = ["make", *words]
        done = subprocess.run(command, cwd=clone.folder, env=given, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        notes = clone.folder / "asked_of_python"
        text = notes.read_text()
        notes.unlink()
        return text.splitlines()

    program = "tools/other_framework.py"
    assert asked("default", "horovod") == [f"{program} horovod --torch default"]
    assert asked("cpu", "tensorflow", "PYTHON=python3.12") == [
        f"{program} tensorflow --python python3.12 --torch cpu"
    ]
    (clone.environment() / "bin").mkdir(parents=True)
    subprocess.run(["make", "distclean"], cwd=clone.folder, env=given, check=True, timeout=60)
    assert not list(clone.folder.glob(".venv*"))


@pytest.mark.parametrize("works", [True, False])
def test_ci_goes_on_where_an_environment_cannot_be_made(works, tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    make = f"""#!/bin/sh
echo "$*" >> {tmp_path}/made
case "$1" in test) exit 7;; *) exit {int(not works)};; esac
"""
    for name, text in {"make": make, "apt-get": "#!/bin/sh\n", "chromium": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    search = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", tmp_path / ".ci" / "run"],
        env={**os.environ, "PATH": search},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 7, "that of make test"
    made = (tmp_path / "made").read_text().splitlines()
    assert made == ["cluster", "tensorflow", "horovod", "test"]
    told = [line for line in done.stdout.splitlines() if "its tests will be skipped" in line]
    assert len(told) == (0 if works else 2)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="'jax' is not one of horovod, tensorflow"):
        why_not("jax")
    assert "in a clone" in why_not("horovod", Path("/nowhere"))
    assert run_program.free_memory_gb() > 0
    assert stamp("horovod") != stamp("tensorflow")
