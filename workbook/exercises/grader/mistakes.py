"""The mistakes that learners make, as changes of a solution's source: of one place, or all alike.

Each has a phrase, such as "with one step more", which does not show the line that is changed.
"""

import ast
import contextlib
import copy
import warnings
from collections.abc import Collection, Iterator, Mapping
from types import CodeType
from typing import Any, NamedTuple

# Code, what a mistake makes of it, and the phrase. Here a, b, c and f stand for any expression.
# In place of a phrase with a part that has no words there is the one after "or".
_SUM, _MEAN = "with a sum of losses in place of their mean", "with mean losses in place of sums"
_RULES = (
    ("a + b", "a", "that does not add {b} or without one of its terms"),
    ("a + b", "b", "that does not add {a} or without one of its terms"),
    ("a + b", "a - b", "that subtracts where it should add"),
    ("a - b", "a", "that does not subtract {b} or without one of its terms"),
    ("a - b", "a + b", "that adds where it should subtract"),
    ("a * b", "a", "that does not multiply by {b} or without one of its factors"),
    ("a * b", "b", "that does not multiply by {a} or without one of its factors"),
    ("a / b", "a", "that does not divide by {b} or without one of its divisions"),
    ("a / b", "a * b", "that multiplies where it should divide"),
    ("a / b", "a / comm.world_size", "that divides by the number of ranks"),
    ("a // b", "a", "that does not divide by {b} or without one of its divisions"),
    ("a % b", "a", "that does not take a remainder (%)"),
    ("a % b", "(a + 1) % b", "with an index that is one too large"),
    ("a % b", "(a - 1) % b", "with an index that is one too small"),
    ("a ** 2", "a", "that does not square {a}"),
    ("a ** 0.5", "a", "that takes no square root"),
    ("a < b", "a <= b", "with <= in place of <"),
    ("a <= b", "a < b", "with < in place of <="),
    ("a > b", "a >= b", "with >= in place of >"),
    ("a >= b", "a > b", "with > in place of >="),
    ("a and b", "a", "without one of its conditions"),
    ("a and b", "b", "without one of its conditions"),
    ("a or b", "a", "without one of its conditions"),
    ("a or b", "b", "without one of its conditions"),
    ("range(a)", "range(a + 1)", "with one step more"),
    ("range(a)", "range(a - 1)", "with one step fewer"),
    ("range(a)", "range(1, a)", "with one step fewer"),
    ("range(a, b)", "range(a, b - 1)", "with one step fewer"),
    ("range(a, b)", "range(a + 1, b)", "with one step fewer"),
    ("f(a)", "a", "without {f}"),
    ("f(a, b)", "a", "without {f}"),
    ("f(a, b)", "b", "without {f}"),
    ("f(comm, a, b)", "a", "without {f}"),
    ("a if b else c", "a", "that does not ask whether {b} or without one of its cases"),
    ("a if b else c", "c", "that does not ask whether {b} or without one of its cases"),
    ("cross_entropy(a, b)", "cross_entropy(a, b, reduction='sum')", _SUM),
    ("f.cross_entropy(a, b)", "f.cross_entropy(a, b, reduction='sum')", _SUM),
    ("f.cross_entropy(a, b, reduction='sum')", "f.cross_entropy(a, b)", _MEAN),
    ("a[b:]", "a", "that leaves nothing out"),
    ("a.topk(b)", "a.topk(b, largest=False)", "that takes the smallest"),
    ("a.tensor_split(b)", "[*a[: len(a) // b * b].view(b, -1)]", "that leaves out a remainder"),
    ("ring_all_reduce(comm, a)", "ring_all_reduce(comm, a, 'mean')", "with a mean over the ranks"),
    ("ring_all_reduce(comm, a, b)", "ring_all_reduce(comm, a)", "with a sum over the ranks"),
    ("comm.exchange(a, b, c, f)", "c.add_(comm.exchange(a, b, c.clone(), f))", "that only adds"),
    ("comm.recv(a, b)", "a.add_(comm.recv(a.clone(), b))", "that adds what it receives"),
    ("a += b", "a[...] = b", "that overwrites where it should add"),
    ("a += b", "a = a + b", "that does not change {a}"),
    ("a += b", "pass", "that does not change {a}"),
    ("a -= b", "a += b", "that adds where it should subtract"),
    ("right, left = a, b", "left, right = a, b", "with the neighbors exchanged"),
    ("dst, src = a, b", "src, dst = a, b", "with sender and receiver exchanged"),
    ("return a, b", "return b, a", "that returns its results in another order"),
    ("return a", "return [*a[comm.rank :], *a[: comm.rank]]", "that begins with the rank's own"),
)
_LOOPS = {
    "list(a)[1:]": "that leaves out the first turn of a loop",
    "list(a)[:-1]": "that leaves out the last turn of a loop",
    "list(a)[::-1]": "with a loop in the reverse order",
}
# A function, an operation or a rank -> what it may be taken for.
_REDUCTIONS = ("sum", "mean", "median", "max")
_OTHER_NAMES: dict[str, Collection[str]] = dict.fromkeys(_REDUCTIONS, _REDUCTIONS)
_OTHER_NAMES |= {"min": ["max"], "maximum": ["minimum"], "sub_": ["add_"], "add_": ["copy_"]}
_OTHER_NAMES |= {"dst": ["src"], "src": ["dst"], "left": ["right"], "right": ["left"]}


class _Change(NamedTuple):
    phrase: str
    level: int  # 0: the phrase tells which place it is; 1: it does not; 2: another number
    old: ast.AST  # the node that is changed
    new: ast.AST  # the one in its place
    kind: Any = None  # changes of one kind may be one mistake


def with_one_mistake(source: str, known: Collection[str]) -> Iterator[tuple[str, int, CodeType]]:
    """Yield the phrase, its level, and the code, for each change of the source.

    ``known``: the words that a phrase may use for what is in the source.
    """
    tree = ast.parse(source)
    arguments = [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]
    alike: dict[Any, list[_Change]] = {}
    for parent in list(ast.walk(tree)):
        for node in list(ast.iter_child_nodes(parent)):
            changes = [*_by_rules(node, known), *_by_names(node, arguments), *_by_lines(node)]
            for change in changes:
                yield from _compiled(tree, [change])
                if change.kind:
                    alike.setdefault((change.kind, type(parent)), []).append(change)
    # What is mistaken in one place may be mistaken in all.
    for changes in alike.values():
        if len(changes) > 1:
            yield from _compiled(tree, changes)


def _compiled(tree: ast.Module, changes: list[_Change]) -> Iterator[tuple[str, int, CodeType]]:
    """The code of the tree with the changes; nothing if it is no Python."""
    changed: Any = _Replacement({id(change.old): change.new for change in changes}).visit(tree)
    with contextlib.suppress(SyntaxError, TypeError, ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may be unusual Python
        code = compile(ast.fix_missing_locations(changed), "<mistake>", "exec")
        yield changes[0].phrase, changes[0].level, code
    _Replacement({id(change.new): change.old for change in changes}).visit(tree)


class _Replacement(ast.NodeTransformer):
    """Puts other nodes in the places of some, which are given by id or by name."""

    def __init__(self, others: Mapping[Any, Any]):
        self._others = others

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Name) and node.id in self._others:
            other = copy.copy(self._others[node.id])
            other.ctx = node.ctx
            return other
        return self._others.get(id(node)) or self.generic_visit(node)


def _parsed(code: str) -> Any:
    """The node of a statement, or of an expression."""
    statement = ast.parse(code).body[0]
    return statement.value if isinstance(statement, ast.Expr) else statement


_PATTERNS = [_parsed(code) for code, _, _ in _RULES]


def _matches(pattern: Any, node: Any, parts: dict[str, Any]) -> bool:
    """Tell if a node has the form of a pattern; ``parts`` gets what a, b, c and f stand for."""
    if isinstance(pattern, ast.Name) and pattern.id in ("a", "b", "c", "f"):
        parts[pattern.id] = node
        return isinstance(node, ast.expr)
    if pattern == "f" and isinstance(node, str):  # the name of a method
        parts["f"] = ast.Name(node)
        return True
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, list):
        return len(pattern) == len(node) and all(map(_matches, pattern, node, [parts] * len(node)))
    if isinstance(pattern, ast.AST):
        fields = [field for field in pattern._fields if field != "ctx"]
        ours = [getattr(pattern, field, None) for field in fields]
        theirs = [getattr(node, field, None) for field in fields]
        return _matches(ours, theirs, parts)
    return pattern == node


def _by_rules(node: ast.AST, known: Collection[str]) -> Iterator[_Change]:
    for pattern, (_, mistaken, phrase) in zip(_PATTERNS, _RULES):
        parts: dict[str, Any] = {}
        if not _matches(pattern, node, parts):
            continue
        code = {name: ast.unparse(part) for name, part in parts.items()}
        words = {name: _words_of(part, known) for name, part in parts.items()}
        words["f"] = _name_of(parts.get("f"))
        exact, _, text = phrase.partition(" or ")
        if all(word or f"{{{name}}}" not in exact for name, word in words.items()):
            text = exact.format(**words)
        if text:
            level = int(" one of its " in text or text.endswith(" 1"))
            new = _Replacement(parts).visit(_parsed(mistaken))
            yield _Change(text, level, node, new, (mistaken, exact.format(**code)))


def _words_of(part: ast.AST, known: Collection[str]) -> str:
    """An expression in words that the learner knows; "" if there are none."""
    text = ast.unparse(part)
    names = {node.id for node in ast.walk(part) if isinstance(node, ast.Name)}
    is_known = text in known or text in ("comm.world_size", "comm.rank")
    if is_known or (isinstance(part, ast.Constant | ast.Compare) and names <= {*known}):
        return text
    _, _, counted = text.partition("num_")
    if isinstance(part, ast.Call) and _name_of(part) == "len":
        counted = ast.unparse(part.args[0])
    return f"the number of {counted}" if counted in known else ""


def _name_of(function: Any) -> str:
    """The name of a function or method, or of the one that is called."""
    function = getattr(function, "func", function)
    return getattr(function, "attr", getattr(function, "id", "")).strip("_")


def _by_names(node: Any, arguments: list[str]) -> Iterator[_Change]:
    """Another name, or another argument of the exercise."""
    for field in ("id", "attr", "value"):
        name = getattr(node, field, None)
        others: list = [*_OTHER_NAMES.get(name, ())] if isinstance(name, str) else []
        if field == "id" and name in arguments:
            unit = name.rpartition("_")[2]
            others += [other for other in arguments if other.endswith(f"_{unit}")]
        if type(name) is int:
            others = [name - 1, name + 1, 2 * name, name // 2]
        for other in others:
            new = copy.copy(node)
            setattr(new, field, other)
            if other != name:
                phrase = f"with {other} in place of {name}"
                yield _Change(phrase, 2 * (type(name) is int), node, new, (field, name, other))
    for argument in arguments:
        given = ast.Name(argument, ast.Load())
        if isinstance(node, ast.Call) and _name_of(node) in ("send", "exchange"):
            phrase = f"that sends {argument}"
            yield _Change(phrase, 0, node.args[0], given, phrase)
        if isinstance(node, ast.Return) and node.value:
            yield _Change(f"that returns {argument}", 0, node.value, given)
    words = []
    inner = node
    while isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
        words.insert(0, _name_of(inner))
        inner = inner.func.value
        phrase = f"without {' and '.join(words)}"
        yield _Change(phrase, 0, node, inner, phrase)
    pair = getattr(getattr(node, "target", None), "elts", [])
    if len(pair) == 2 and _name_of(node.iter) == "enumerate":
        number, entry = map(ast.unparse, pair)
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and part.id == number and isinstance(part.ctx, ast.Load):
                given = ast.Name(entry, ast.Load())
                yield _Change("with an entry in place of its number", 0, part, given)


def _by_lines(node: Any) -> Iterator[_Change]:
    """Turns of loops and lines that are missing, or in another order."""
    turns = getattr(node, "iter", None)
    if turns and _name_of(turns) != "range":
        # In a list that is made in one line, an entry may be missing for another reason.
        for code, phrase in [*_LOOPS.items()][0 if isinstance(node, ast.For) else -1 :]:
            yield _Change(phrase, 0, turns, _Replacement({"a": turns}).visit(_parsed(code)))
    if isinstance(node, ast.For):
        for by, word in ((1, "large"), (-1, "small")):
            shifted = copy.deepcopy(node)
            for part in ast.walk(shifted):
                if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod):
                    part.left = ast.BinOp(part.left, ast.Add(), ast.Constant(by))
            yield _Change(f"with indices that are one too {word}", 0, node, shifted)
    if isinstance(node, ast.If) and node.orelse:
        for branch, other in (("body", "orelse"), ("orelse", "body")):
            *_, line = getattr(node, branch)
            both = copy.copy(node)
            setattr(both, other, [*getattr(node, other), line])
            name = _deed(line)
            phrase = f"with {name or 'one of its lines'} in both cases, not in one"
            yield _Change(phrase, int(not name), node, both)
    body = getattr(node, "body", None)
    lines: list[ast.stmt] = body if isinstance(body, list) else []
    for index, line in enumerate(lines):
        name = _deed(line)
        if not isinstance(line, (ast.FunctionDef, ast.Return, ast.AugAssign)):
            yield _Change(f"without {name or 'one of its lines'}", int(not name), line, ast.Pass())
        if index > 0:
            before = _deed(lines[index - 1])
            swapped = copy.copy(node)
            swapped.body = [*lines[: index - 1], line, lines[index - 1], *lines[index + 1 :]]
            phrase = "with two of its lines in the other order"
            if name and before:
                phrase = f"with {name} before {before}"
            yield _Change(phrase, int(not name or not before), node, swapped)


def _deed(line: ast.stmt) -> str:
    """What a line does, in words; "" if that cannot be said."""
    if isinstance(line, ast.AugAssign):
        return "an update"
    return _name_of(line.value) if isinstance(line, ast.Expr) else ""
