"""What holds the set-up together: pins and ranges, the two commands, the package's floors."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import yaml
from core import COURSE
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from labkit import WorkerError, run, strategies

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKED = ("requirements.txt", "tools/uv.txt", "tools/cluster.txt")
LOCKED += ("tools/horovod.txt", "tools/tensorflow.txt")

# The package's floors, from the ground up. A room imports from floors below, never from above or
# beside. A new room gets its place here. ``labkit/__init__`` hands names on, by name alone.
FLOORS = [
    {"errors", "units"},
    {"files", "gpus"},
    {"schedules", "tracing"},
    {"config", "costs"},
    {"comm", "devices", "workload"},
    {"collectives", "placement"},
    {"backend", "runtime"},
    {"strategies"},
    {"horovod", "training"},
    {"plots"},
    {"notebook"},
    {"check", "widgets"},
    {"bench", "lab"},
    {"doctor"},
    {"__init__", "__main__"},
]
FLOOR_OF = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}

REGISTRY_HOSTS = ["pypi." + "org", "pythonhosted." + "org", "anaconda." + "org"]
REGISTRY_HOSTS += ["download.pytorch." + "org/whl", "conda." + "anaconda"]
HOME_PATH = re.compile(r"(?<![\w.~$}])/(?:home|Users|root)/[A-Za-z.]")


def locked(name: str) -> list[tuple[Requirement, list[str]]]:
    """The requirements of a locked file, each with the options that follow it."""
    lines = (ROOT / name).read_text().replace("\\\n", " ").splitlines()
    entries = [line.split(" --") for line in lines if line.strip() and not line.startswith("#")]
    return [(Requirement(pin), [option.strip() for option in rest]) for pin, *rest in entries]


def pinned() -> dict[str, list[str]]:
    """Name -> the versions pinned for it (more than one where they differ by Python version)."""
    found: dict[str, list[str]] = {}
    for requirement, _ in locked("requirements.txt"):
        name = canonicalize_name(requirement.name)
        found.setdefault(name, []).append(str(requirement.specifier))
    return found


@functools.cache
def repository_files() -> list[Path]:
    """What is, or is about to be, under version control."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git clone: which files belong to the repository is not known")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def imports_of(path: Path) -> set[str]:
    """The labkit modules that a file imports, in functions too, as ``comm.board`` or ``units``.

    A module that is named in a string of its own (a preload list) counts as imported.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: write imports from labkit in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    modules = set(module_files())
    return {name.removeprefix("labkit.") for name in found if name.startswith("labkit.")} & modules


@functools.cache
def module_files() -> dict[str, Path]:
    """Dotted name below labkit -> file; a package goes by its own name."""
    package = ROOT / "labkit"
    files = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        files[name] = path
    return files


def test_every_dependency_is_pinned_inside_its_range():
    versions = pinned()
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]]
    for requirement in map(Requirement, wanted):
        pins = versions.get(canonicalize_name(requirement.name), [])
        assert pins, f"{requirement.name} is in pyproject.toml and not in requirements.txt"
        for pin in pins:
            assert requirement.specifier.contains(pin.removeprefix("==")), f"{requirement}: {pin}"


def test_types_are_checked_where_an_extra_is_not_installed():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyrefly"]
    code = "".join(path.read_text() for path in (ROOT / "labkit").rglob("*.py"))
    for extra in PROJECT["optional-dependencies"].keys() - {"test"}:
        for name in (Requirement(text).name for text in PROJECT["optional-dependencies"][extra]):
            if re.search(rf"^\s*(import|from) {name}\b", code, re.M):
                assert {name, f"{name}.*"} <= {*config["ignore-missing-imports"]}, extra


@pytest.mark.parametrize("name", LOCKED)
def test_what_is_installed_is_one_exact_version_whose_files_are_known(name):
    for requirement, options in locked(name):
        pin = str(requirement.specifier)
        assert re.fullmatch(r"==[\w.!+]+", pin), f"{requirement} is not one exact version"
        assert requirement.url is None
        assert options, f"{requirement} has no hash"
        for option in options:
            assert re.fullmatch(r"hash=sha256:[0-9a-f]{64}", option), f"{requirement}: {option}"
    assert "://" not in (ROOT / name).read_text(), "an address ties a pin to one place"


def test_make_env_installs_nothing_that_has_no_hash():
    """But for PyTorch of another build, see test_make_env.py."""
    makefile = re.sub(r"\s*\\\n\s*", " ", (ROOT / "Makefile").read_text())
    rule = makefile[makefile.index("$(READY): requirements.txt") :].partition("\n\n")[0]
    installs = [line for line in rule.splitlines() if " install " in line and "$(BIN)" in line]
    through_pip, through_uv, other_build, labkit, kernel = installs
    assert through_pip.endswith("--require-hashes -r tools/uv.txt")
    asked, _, given_up = through_uv.partition(" || ")
    assert re.search(r"uv pip install .*--require-hashes -r requirements.txt$", asked)
    assert given_up == "$(GIVE_UP)"
    assert "--verify-hashes --torch-backend $(BUILD) -r $(VENV)/pins.txt ||" in other_build
    assert labkit.endswith("--no-deps --no-build-isolation -e .")
    assert "ipykernel install" in kernel
    assert [requirement.name for requirement, _ in locked("tools/uv.txt")] == ["uv"]


def test_conda_users_get_the_same_versions():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, through_pip = environment["dependencies"]
    assert Requirement(python).specifier.contains("3.11")
    assert str(Requirement(python).specifier).count(PROJECT["requires-python"]) == 1
    assert pip == "pip"
    # Among files that have hashes pip takes no folder: labkit has a command of its own.
    assert through_pip == {"pip": ["-r requirements.txt"]}
    own = "pip install --no-deps --no-build-isolation -e ."
    for guide in ("environment.yml", "README.md"):
        assert own in (ROOT / guide).read_text(), f"{guide} does not say how labkit is installed"


def test_the_readme_names_the_two_commands_and_no_unknown_one():
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert {"env", "lab", "test", "bench", "html", "notebooks", "clean"} <= targets
    assert re.search(r"^make lab\b", readme, re.MULTILINE)
    assert re.search(r"^make test\b", readme, re.MULTILINE)
    shown = re.findall(r"`make ([a-z-]+)|^make ([a-z-]+)", readme, re.MULTILINE)
    assert {name or other for name, other in shown} <= targets


def test_no_file_names_a_registry_or_somebodys_home():
    for path in repository_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture or packed data
        for host in REGISTRY_HOSTS:
            assert host not in text, f"{path.relative_to(ROOT)} names {host}"
        home = HOME_PATH.search(text)
        assert not home, f"{path.relative_to(ROOT)} holds {home and home[0]!r}"


@pytest.mark.parametrize("module", sorted(module_files()))
def test_imports_point_only_downward(module):
    room = module.split(".")[0]
    assert room in FLOOR_OF, f"labkit/{room} is new: give it a place in FLOORS, {__file__}"
    for other in imports_of(module_files()[module]):
        target = other.split(".")[0]
        assert target == room or FLOOR_OF[target] < FLOOR_OF[room], f"{module} imports up: {other}"


def test_a_name_in_a_preload_list_counts_as_an_import():
    assert "runtime.worker" in imports_of(module_files()["runtime.preload"])
    assert "training.loop" in imports_of(module_files()["__init__"])


def test_nothing_that_counts_reaches_the_formulas_or_the_planner():
    """So that the two can disagree: what is called measured is counted where it moves."""
    counting = {"comm", "collectives", "backend", "runtime", "strategies"}
    waiting = [name for name in module_files() if name.split(".")[0] in counting]
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        assert name.split(".")[0] not in {"costs", "placement"}, f"labkit.{name} is reached"
        reached.add(name)
        waiting += imports_of(module_files()[name]) - reached
    assert len(reached) > 50


def test_the_core_never_imports_the_course():
    for name, path in module_files().items():
        if name.split(".")[0] not in COURSE | {"__init__", "__main__", "lab", "doctor"}:
            rooms = {other.split(".")[0] for other in imports_of(path)}
            assert not rooms & COURSE, f"labkit.{name} imports {rooms & COURSE}"


def test_a_technique_imports_no_other():
    techniques = {
        place.rpartition(".")[0]
        for places in [*strategies.TECHNIQUES.values(), strategies.IN_ONE_PROCESS.values()]
        for place in places
    }
    for name in techniques:
        imported = imports_of(module_files()[f"strategies.{name}"])
        others = {other.removeprefix("strategies.") for other in imported} & techniques
        assert not others, f"{name} imports {others}"


def test_nothing_imports_in_a_circle():
    edges = {name: imports_of(path) - {name} for name, path in module_files().items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name in done:
            return
        for other in sorted(edges[name]):
            visit(other, (*trail, name))
        done.add(name)

    for name in sorted(edges):
        visit(name, ())


def test_what_ranks_import_brings_nothing_heavy():
    """Nor do the benches, which every rank of a bench imports."""
    heavy = {"torchvision", "matplotlib", "IPython", "ipywidgets", "jupyterlab"}

    def brought(comm):
        import workbook.measure

        assert workbook.measure
        return sorted({name.split(".")[0] for name in sys.modules} & heavy)

    assert run(brought, world_size=1).values == [[]]


def warn_as_ours(comm):
    warnings.warn_explicit(
        "old name", FutureWarning, "labkit/comm/comm.py", 1, module="labkit.comm.comm"
    )


MOST_LINES, MOST_METHODS = 60, 20


def test_no_function_and_no_class_is_too_long():
    for name, path in module_files().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                assert lines <= MOST_LINES, f"{name}: {node.name} has {lines} lines"
            elif isinstance(node, ast.ClassDef):
                methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
                excused = "their number" in (ast.get_docstring(node) or "")
                assert len(methods) <= MOST_METHODS or excused, f"{name}: {node.name}"


def test_a_warning_of_our_own_lines_is_an_error_here_and_in_ranks():
    """Such as DDP's of ``broadcast_buffers``, which PyTorch 2.13 has renamed."""
    with pytest.raises(FutureWarning, match="old name"):
        warn_as_ours(None)
    with pytest.raises(WorkerError, match="FutureWarning: old name"):
        run(warn_as_ours, world_size=1)
