"""Calls that execute what they read: unpickling, and Python's own ``eval``.

They are found by their names, as with grep, but not in comments.
"""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# By the module on which they are called; "" stands for Python's built-in functions.
OF_MODULES = {
    "": {"eval", "exec", "compile", "__import__"},
    "pickle": {"load", "loads", "Unpickler"},
    "cloudpickle": {"load", "loads"},
    "marshal": {"load", "loads"},
    "torch": {"load"},
    "np": {"load"},
}
# Whatever they are called on.
ANYWHERE = {
    *{"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"},
    *{"send_object_list", "recv_object_list", "init_rpc", "rpc_sync", "rpc_async"},
}


def dangerous_calls() -> set[tuple[str, str, str]]:
    """(file, function, call) of each such call in the packages, the tools and the notebooks."""
    found = set()
    packages = [*ROOT.glob("labkit/**/*.py"), *ROOT.glob("workbook/**/*.py")]
    for path in sorted([*packages, *ROOT.glob("tools/*.py")]):
        found |= _in_module(path, ast.parse(path.read_text()))
    for path in sorted([*ROOT.glob("data/*.py"), *ROOT.glob("notebooks/*.ipynb")]):
        for tree in _trees(path):
            found |= _in_module(path, tree)
    return found


def _trees(path: Path) -> Iterator[ast.Module]:
    if path.suffix == ".py":
        yield ast.parse(path.read_text())
        return
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            lines = "".join(cell["source"]).splitlines()
            yield ast.parse("\n".join(line for line in lines if line.lstrip()[:1] not in "%!"))


def _in_module(path: Path, tree: ast.Module) -> set[tuple[str, str, str]]:
    place = path.relative_to(ROOT).as_posix()
    return {(place, function, call) for function, call in calls(tree, "")}


def calls(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
    """Names of the dangerous calls below ``node``, each with the function around it.

    A function that is imported by its own name counts at its import.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call) and (call := _dangerous(child.func)):
            yield function or "(module)", call
        if isinstance(child, ast.ImportFrom):
            module = (child.module or "").rpartition(".")[2]
            names = {alias.name for alias in child.names} & OF_MODULES.get(module, set())
            yield from ((function or "(module)", f"{module}.{name}") for name in names)
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        yield from calls(child, child.name if is_function else function)


def _dangerous(called: ast.expr) -> str:
    if isinstance(called, ast.Name):
        return called.id if called.id in OF_MODULES[""] | ANYWHERE else ""
    if not isinstance(called, ast.Attribute):
        return ""
    module = ast.unparse(called.value).rpartition(".")[2]
    if called.attr in ANYWHERE or called.attr in OF_MODULES.get(module, ()):
        return f"{module}.{called.attr}"
    return ""
