"""What holds the set-up together: pins and ranges, the two commands, the packages' floors."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from labkit import run, strategies

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
WORKFLOW = ROOT / ".github" / "workflows" / "tests.yml"
LOCKED = ("requirements.txt", "tools/uv.txt", "tools/cluster.txt")
LOCKED += ("tools/horovod.txt", "tools/tensorflow.txt", "tools/site.txt", "tools/clients.txt")

# The floors of each package, from the ground up. A room imports from floors below, never from
# above or beside, and labkit never imports workbook. A new room gets its place here. Each
# ``__init__`` hands names on, by name alone.
FLOORS = {
    "labkit": [
        {"extras", "units"},
        {"schedules"},
        {"engine"},
        {"collectives", "workload"},
        {"backend", "costs", "strategies"},
        {"builtin", "horovod"},
        {"training"},
        {"__init__", "__main__"},
    ],
    "workbook": [
        {"agents", "gpt_step", "plots"},
        {"notebook"},
        {"exercises", "widgets"},
        {"check", "kernels", "measure"},
        {"lab"},
        {"__init__", "commands"},
    ],
}
# The same inside the largest room.
INSIDE_ENGINE = [
    {"errors", "gpus", "started"},
    {"devices", "files"},
    {"tracing"},
    {"comm"},
    {"runtime"},
]
ROOMS = [[f"{package}.{room}" for room in row] for package in FLOORS for row in FLOORS[package]]
FLOOR_OF = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}
FLOOR_IN_ENGINE = {part: floor for floor, parts in enumerate(INSIDE_ENGINE) for part in parts}

REGISTRY_HOSTS = ["pypi." + "org", "pythonhosted." + "org", "anaconda." + "org"]
REGISTRY_HOSTS += ["download.pytorch." + "org/whl", "conda." + "anaconda"]
HOME_PATH = re.compile(r"(?<![\w.~$}])/(?:home|Users|root)/[A-Za-z.]")


def locked(name: str) -> list[tuple[Requirement, list[str]]]:
    """The requirements of a locked file, each with the options that follow it."""
    lines = (ROOT / name).read_text().replace("\\\n", " ").splitlines()
    entries = [line.split(" --") for line in lines if line.strip() and not line.startswith("#")]
    return [(Requirement(pin), [option.strip() for option in rest]) for pin, *rest in entries]


@functools.cache
def repository_files() -> list[Path]:
    """What is, or is about to be, under version control."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git clone: which files belong to the repository is not known")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


@functools.cache
def names_in(path: Path) -> set[str]:
    """The modules and names that a file imports, in functions too, and its strings.

    A module that is named in a string of its own (a preload list) counts as imported.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: write imports in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def imports_of(module: str) -> set[str]:
    """The modules of both packages that a module imports."""
    return names_in(module_files()[module]) & module_files().keys()


@functools.cache
def module_files() -> dict[str, Path]:
    """Dotted name -> file; a room goes by its own name, a package's own file by ``__init__``."""
    files = {}
    for path in (path for package in FLOORS for path in (ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)
        files[name] = path
    return files


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def test_every_dependency_is_pinned_inside_its_range():
    wanted = {f"tools/{name}.txt": pins for name, pins in PYPROJECT["dependency-groups"].items()}
    extras = PROJECT["optional-dependencies"]
    wanted["requirements.txt"] = PROJECT["dependencies"] + extras["course"] + extras["test"]
    for name, texts in wanted.items():
        versions = defaultdict(list)
        for requirement, _ in locked(name):
            versions[canonicalize_name(requirement.name)].append(str(requirement.specifier))
        for requirement in map(Requirement, texts):
            # More than one where they differ by Python version.
            pins = versions[canonicalize_name(requirement.name)]
            assert pins, f"{requirement.name} is in pyproject.toml and not in {name}"
            for pin in pins:
                assert requirement.specifier.contains(pin.removeprefix("==")), requirement


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


def test_conda_users_get_the_same_versions():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, _, through_pip = environment["dependencies"]
    assert PROJECT["requires-python"] in str(Requirement(python).specifier)
    # Among files that have hashes pip takes no folder: labkit has a command of its own.
    assert through_pip == {"pip": ["-r requirements.txt"]}


def test_each_python_that_is_said_to_work_is_in_range_everywhere():
    said = [text.rsplit(" ", 1)[1] for text in PROJECT["classifiers"] if "Python :: 3" in text]
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    readme = (ROOT / "README.md").read_text()
    for version in said:
        assert version in readme
        assert Requirement(environment["dependencies"][0]).specifier.contains(f"{version}.0")
    workflow = yaml.safe_load(WORKFLOW.read_text())
    tested = workflow["jobs"]["cpu"]["strategy"]["matrix"]["python"]
    assert set(tested) <= set(said)


def test_the_oldest_pytorch_that_is_tested_is_that_of_the_range():
    command = ["make", "--dry-run", "test-torch"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    (oldest,) = [one for one in PROJECT["dependencies"] if one.startswith("torch>=")]
    assert f"'{oldest.replace('>=', '==')}'" in said
    assert f"test -x .venv-torch-{oldest.removeprefix('torch>=')}/bin/python" in said


def test_the_workflow_is_one_that_the_service_takes():
    schema = ("--builtin-schema", "vendor.github-workflows")
    command = [sys.executable, "-m", "check_jsonschema", *schema, str(WORKFLOW)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_readme_names_the_two_commands_and_no_unknown_one():
    readme = (ROOT / "README.md").read_text()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shown = re.findall(r"(?:`|^)make ([a-z-]+)", readme, re.MULTILINE)
    assert {"lab", "test"} <= {*shown} <= {*targets}


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
    room = room_of(module)
    assert room in FLOOR_OF, f"{room} is new: give it a place in FLOORS, {__file__}"
    for other in imports_of(module):
        below = FLOOR_OF[room_of(other)] < FLOOR_OF[room]
        assert below or room_of(other) == room, f"{module} imports up: {other}"


@pytest.mark.parametrize("module", [name for name in module_files() if ".engine." in name])
def test_imports_inside_the_engine_point_only_downward(module):
    part = module.split(".")[2]
    for other in imports_of(module):
        if other.startswith("labkit.engine."):
            other_part = other.split(".")[2]
            below = FLOOR_IN_ENGINE[other_part] < FLOOR_IN_ENGINE[part]
            assert below or other_part == part, f"{module} imports up: {other}"


def test_labkit_never_imports_workbook():
    """Nor names it, or a module in it, in a string."""
    for module, path in module_files().items():
        if module.startswith("labkit."):
            named = [name for name in names_in(path) if re.match(r"workbook(\.|$)", name)]
            assert not named, f"{module}: {named}"


def test_nothing_that_counts_reaches_the_formulas_or_the_planner():
    """So that the two can disagree: what is called measured is counted where it moves."""
    rooms = ("engine", "collectives", "backend", "strategies", "builtin")
    counting = {f"labkit.{room}" for room in rooms}
    waiting = [name for name in module_files() if room_of(name) in counting]
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        assert room_of(name) != "labkit.costs", f"{name} is reached"
        reached.add(name)
        waiting += imports_of(name) - reached
    assert len(reached) > 50


def test_a_technique_imports_no_other():
    """PyTorch's counterparts may build on ours, and a mesh is made of others."""
    techniques = {path.rpartition(".")[0] for path in strategies.TECHNIQUES.values()}
    techniques -= {"on_shares"}  # what they share
    for name in techniques - {"mesh"}:
        imported = imports_of(f"labkit.strategies.{name}")
        others = {other.removeprefix("labkit.strategies.") for other in imported} & techniques
        assert not others, f"{name} imports {others}"


def test_nothing_imports_in_a_circle():
    TopologicalSorter({name: imports_of(name) - {name} for name in module_files()}).prepare()


def test_what_ranks_import_brings_nothing_heavy():
    """Nor do the benches, which every rank of a bench imports."""
    heavy = {"torchvision", "matplotlib", "IPython", "ipywidgets", "jupyterlab"}

    def brought(comm):
        import workbook.measure

        assert workbook.measure
        return sorted({name.split(".")[0] for name in sys.modules} & heavy)

    assert run(brought, world_size=1).values == [[]]


MOST_LINES, MOST_METHODS = 60, 20
# PyTorch's interface of a group, and what a training run asks of a technique.
WIDE_INTERFACES = ("labkit.backend.group.LabkitGroup", "labkit.strategies.base.Strategy")


def test_no_function_and_no_class_is_too_long():
    for name, path in module_files().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                assert lines <= MOST_LINES, f"{name}: {node.name} has {lines} lines"
            elif isinstance(node, ast.ClassDef):
                methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
                excused = f"{name}.{node.name}" in WIDE_INTERFACES
                assert len(methods) <= MOST_METHODS or excused, f"{name}: {node.name}"
