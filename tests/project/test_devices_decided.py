"""Every run in the notebooks, the README and the benches has its device decided.

A run without a device goes to GPUs where there are any, and meets tensors that its cell made on
the CPU. So each call says where: ``device`` or ``devices``, by itself, in a dictionary that it is
given (``**settings``), or in the ``partial`` that it calls.
"""

import ast
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BENCHES = sorted((ROOT / "workbook" / "measure").rglob("*.py"))
RUNS = {"run", "train_with", "measure_link", "measure_split", "measure_profile"}
WORDS = {"device", "devices", "where"}
FIRST_OF_A_PAGE = 'DEVICE = "(auto|cpu)"  # '


def undecided(tree, runs=RUNS):
    """The lines of calls that start a run and do not say where.

    A name means what was assigned to it last before its line, in the whole file or page.
    """
    bound = assignments(tree)
    return sorted(
        {
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and starts_a_run(node.func, node.lineno, bound, runs)
            and not says_where(node, node.lineno, bound)
        }
    )


def assignments(tree):
    """By name: (line, value, whether it adds to what was there) of all that is assigned to it."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                value = node.value
                if isinstance(target, ast.Subscript):
                    value = ast.Dict(keys=[target.slice], values=[value])
                    target = target.value
                if isinstance(target, ast.Name):
                    more = isinstance(node, ast.AugAssign) or value is not node.value
                    bound.setdefault(target.id, []).append((node.lineno, value, more))
        elif isinstance(node, (ast.FunctionDef, ast.Lambda)):
            arguments = node.args
            for argument in (*arguments.args, *arguments.kwonlyargs, arguments.kwarg):
                if argument:
                    # Whoever calls the function decides.
                    bound.setdefault(argument.arg, []).append((node.lineno, None, False))
    return bound


def values_of(name, line, bound):
    """What the name means on a line: the last assignment, and what was added since."""
    before = [entry for entry in bound.get(name, []) if entry[0] < line]
    starts = [i for i, (_, _, more) in enumerate(before) if not more]
    return [value for _, value, _ in before[starts[-1] if starts else 0 :]]


def starts_a_run(function, line, bound, runs):
    if isinstance(function, ast.Attribute):
        owner = ast.unparse(function.value)
        return function.attr in runs and owner in ("labkit", "measured")
    if not isinstance(function, ast.Name):
        return False
    values = values_of(function.id, line, bound)
    if not values:
        return function.id in runs
    value = values[-1]
    is_partial = isinstance(value, ast.Call) and ast.unparse(value.func) == "partial"
    return is_partial and starts_a_run(value.args[0], value.lineno, bound, runs)


def says_where(call, line, bound):
    """Whether the call, or the partial that it calls, has a device."""
    for keyword in call.keywords:
        if keyword.arg in WORDS or (keyword.arg is None and has_one(keyword.value, line, bound)):
            return True
    if isinstance(call.func, ast.Name):
        for value in values_of(call.func.id, line, bound):
            if isinstance(value, ast.Call) and ast.unparse(value.func) == "partial":
                inner = ast.Call(value.args[0], value.args[1:], value.keywords)
                return says_where(inner, value.lineno, bound)
    return False


def has_one(value, line, bound):
    """Whether a dictionary that is given to a call has a device."""
    if value is None:
        return True
    if isinstance(value, ast.Name):
        found = values_of(value.id, line, bound)
        return any(has_one(one, line, bound) for one in found)
    if isinstance(value, ast.Dict):
        return any(
            has_one(inner, line, bound) if key is None else ast.literal_eval(key) in WORDS
            for key, inner in zip(value.keys, value.values)
        )
    if isinstance(value, ast.BinOp):
        return has_one(value.left, line, bound) or has_one(value.right, line, bound)
    # The benches' Where says it.
    return isinstance(value, ast.Call) and ast.unparse(value.func).endswith(".settings")


def tree_of_page(path):
    cells = nbformat.read(path, as_version=4).cells
    lines = "\n".join(cell.source for cell in cells if cell.cell_type == "code").splitlines()
    return ast.parse("\n".join("" if line.lstrip()[:1] in "%!" else line for line in lines))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_run_of_a_page_says_where(path):
    tree = tree_of_page(path)
    calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    lost = undecided(tree)
    assert not lost, [call for call in calls if call.partition("(")[0].split(".")[-1] in RUNS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_one_choice_at_the_top_decides_for_the_page(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert re.search(f"^{FIRST_OF_A_PAGE}", cells[0].source, re.MULTILINE)
    assert "labkit.warm_up(device=DEVICE" in cells[0].source
    # On a GPU server it may say that ranks share a GPU.
    assert "nbval-ignore-output" in cells[0].metadata.tags
    literal = [
        (index, word)
        for index, cell in enumerate(cells[1:], start=1)
        for word in re.findall(r'device="(?:auto|cuda\b[^"]*)"', cell.source)
    ]
    assert not literal, "DEVICE decides"


def test_every_run_of_the_readme_says_where():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert any("run(" in block for block in blocks)
    assert not [block for block in blocks if undecided(ast.parse(block))]


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.stem)
def test_every_run_of_a_bench_says_where(path):
    lost = undecided(ast.parse(path.read_text()))
    lines = path.read_text().splitlines()
    assert not lost, [lines[number - 1].strip() for number in lost]


def lost_in(*lines):
    return undecided(ast.parse("\n".join(lines)))


def test_a_run_that_does_not_say_where_is_found():
    assert lost_in("labkit.run(f, world_size=2)") == [1]
    assert lost_in("x = 1", "labkit.train_with('single', **{'epochs': 2})") == [2]
    assert lost_in("run = partial(labkit.run, timeout_s=3)", "run(f)") == [2]
    assert lost_in("s = {'epochs': 2}", "t = [labkit.train_with('single', **s) for _ in x]") == [2]
    assert lost_in("s = {'device': 'cpu'}", "s = {}", "measure_link(**s)") == [3]
    assert lost_in("def f():", "    return measure_split(model, (3,), steps=2)") == [2]
    assert lost_in("p = partial(labkit.run, g)", "q = partial(p, 3)", "q(world_size=2)") == [3]


def test_a_run_that_says_where_is_not():
    assert not lost_in("labkit.run(f, device=DEVICE)", "labkit.run(f, devices='cuda:1')")
    assert not lost_in("run = partial(labkit.run, device='cpu')", "run(f)", "p = partial(run, g)")
    assert not lost_in("run = partial(labkit.run, device=D)", "p = partial(run, g)", "p(3)")
    assert not lost_in("s = {'epochs': 1}", "s['device'] = D", "labkit.train_with('ddp', **s)")
    assert not lost_in("s = {'a': 1}", "s |= {'devices': D}", "labkit.train_with('ddp', **s)")
    assert not lost_in("s = {'device': D}", "t = {**s, 'a': 1}", "measure_split(m, **t)")
    assert not lost_in("def f(where):", "    return measure_link(**where.settings())")
    assert not lost_in("def f(**options):", "    return labkit.train_with('ddp', **options)")
    assert not lost_in("subprocess.run(command)", "def run(): pass", "x.run()")
