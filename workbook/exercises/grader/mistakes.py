"""The mistakes that learners make, as changes of a solution's source: of one place, or all alike.

Each has a phrase, such as "with one step more", which does not show the line that is changed.
"""

import ast
import contextlib
import copy
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from types import CodeType
from typing import Any, NamedTuple

from workbook.exercises.grader.mistake_rules import LOOPS, OTHER_NAMES, RULES, TERMS

# Longer expressions are not put into words.
_SHORT = 30


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
    arguments = [n.arg for n in ast.walk(tree) if isinstance(n, ast.arg) and n.arg != "comm"]
    lines = [line for line in ast.walk(tree) if isinstance(line, ast.Assign)]
    values = {ast.unparse(line.targets[0]): line.value for line in lines}
    others = [*arguments, *(name for name in values if name in known or name in TERMS)]
    seen = {ast.unparse(tree)}
    alike: dict[Any, list[_Change]] = {}
    for parent in list(ast.walk(tree)):
        # What is changed in place is meant.
        is_written = isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Store)
        for node in [] if is_written else list(ast.iter_child_nodes(parent)):
            changes = [*_by_rules(node, known, others), *_by_lines(node, known)]
            changes += _by_names(node, arguments, values, known)
            for change in changes:
                yield from _compiled(tree, [change], seen)
                if change.kind:
                    alike.setdefault((change.kind, type(parent)), []).append(change)
    # What is mistaken in one place may be mistaken in all.
    for joint_changes in [*alike.values(), *_exchanged(tree, arguments)]:
        if joint_changes:
            yield from _compiled(tree, joint_changes, seen)


def _compiled(
    tree: ast.Module, changes: list[_Change], seen: set[str]
) -> Iterator[tuple[str, int, CodeType]]:
    """The code of the tree with the changes; nothing if it is no Python, or has been seen."""
    changed: Any = _Replacement({id(change.old): change.new for change in changes}).visit(tree)
    with contextlib.suppress(SyntaxError, TypeError, ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may be unusual Python
        code = compile(ast.fix_missing_locations(changed), "<mistake>", "exec")
        text = ast.unparse(changed)
        if text not in seen:
            seen.add(text)
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


_PATTERNS = [_parsed(code) for code, _, _ in RULES]


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
        pattern_fields = [getattr(pattern, field, None) for field in fields]
        node_fields = [getattr(node, field, None) for field in fields]
        return _matches(pattern_fields, node_fields, parts)
    return pattern == node


def _by_rules(node: ast.AST, known: Collection[str], others: list[str]) -> Iterator[_Change]:
    for pattern, (_, mistaken, phrase) in zip(_PATTERNS, RULES):
        parts: dict[str, Any] = {}
        if not _matches(pattern, node, parts):
            continue
        phrases = phrase.split(" or ")
        for other in others if "{x}" in phrase else [""]:
            parts["x"] = ast.Name(other, ast.Load())
            code = {name: ast.unparse(part) for name, part in parts.items()}
            words = {name: _words_of(part, known) for name, part in parts.items()}
            words |= {"f": _name_of(parts.get("f")), "x": TERMS.get(other, other)}
            # The first phrase of whose parts each has words.
            unknown = [f"{{{name}}}" for name, word in words.items() if not word]
            said = [text for text in phrases if not any(part in text for part in unknown)]
            if said:
                level = int(" one of its " in said[0] or said[0].endswith(" 1"))
                new = _Replacement(parts).visit(_parsed(mistaken))
                kind = mistaken, phrases[0].format(**code)
                yield _Change(said[0].format(**words), level, node, new, kind)


def _words_of(part: ast.AST, known: Collection[str]) -> str:
    """An expression in words that the learner knows; "" if there are none."""
    text = ast.unparse(part)
    if text in TERMS or _name_of(part) == "recv":
        return TERMS.get(text, "what comes in")
    names = {*re.findall(r"[^\W\d]\w*", text)} - {"len", "not"}
    is_known = text in known or text in ("comm.world_size", "comm.rank")
    is_short = not isinstance(part, ast.Call | ast.Name) and len(text) < _SHORT
    if is_known or (is_short and names <= {*known}):
        return text
    _, _, counted = text.partition("num_")
    if isinstance(part, ast.Call) and _name_of(part) == "len":
        counted = ast.unparse(part.args[0])
    return f"the number of {counted}" if counted in known else ""


def _name_of(function: Any) -> str:
    """The name of a function or method, or of the one that is called."""
    function = getattr(function, "func", function)
    return getattr(function, "attr", getattr(function, "id", "")).strip("_")


def _by_names(
    node: Any, arguments: list[str], values: Mapping[str, ast.expr], known: Collection[str]
) -> Iterator[_Change]:
    """Another name, or another argument of the exercise."""
    for field in ("id", "attr", "value"):
        name = getattr(node, field, None)
        others: list = [*OTHER_NAMES.get(name, ())] if isinstance(name, str) else []
        if type(name) is int:
            others = [name - 1, name + 1, 2 * name, name // 2, 4, 8]
        for other in others:
            new = copy.copy(node)
            setattr(new, field, other)
            if other != name:
                phrase = f"with {other} in place of {name}"
                yield _Change(phrase, 2 * (type(name) is int), node, new, (field, name, other))
    for part in node.values if isinstance(node, ast.BoolOp) else ():
        rest = [value for value in node.values if value is not part]
        new = ast.BoolOp(node.op, [*rest, *rest[:1]])
        text = _words_of(part, known)
        phrase = f"that does not ask whether {text}" if text else "without one of its conditions"
        yield _Change(phrase, int(not text), node, new)
    if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
        for other in (0, 1, -1) if type(node.value.value) is int else ():
            new = ast.keyword(node.arg, ast.Constant(other))
            phrase = f"with {node.arg}={other} in place of {ast.unparse(node)}"
            yield _Change(phrase, 0, node, new)
    value = values.get(getattr(node, "id", ""))
    if value and isinstance(node.ctx, ast.Load) and (meant := _words_of(value, known)):
        for name in {part.id for part in ast.walk(value) if isinstance(part, ast.Name)}:
            if name in arguments:
                new = ast.Name(name, ast.Load())
                yield _Change(f"with {name} in place of {meant}", 0, node, new)
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


def _exchanged(tree: ast.Module, arguments: list[str]) -> Iterator[list[_Change]]:
    """Changes of several places that are one mistake, and those that may take long."""
    nodes = [*ast.walk(tree)]
    for line in nodes:
        if isinstance(line, ast.Assign | ast.Return):
            yield [
                _Change("that takes no differences", 0, part, part.left)
                for part in ast.walk(line)
                if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub)
            ]
        if isinstance(line, ast.For) and isinstance(line.target, ast.Name):
            turned = []
            phrase = f"that adds {line.target.id} where it should subtract it, or the other way"
            for part in ast.walk(line):
                if isinstance(part, ast.BinOp) and ast.unparse(part.right) == line.target.id:
                    op = ast.Add() if isinstance(part.op, ast.Sub) else ast.Sub()
                    turned.append(_Change(phrase, 0, part, ast.BinOp(part.left, op, part.right)))
            yield turned
    # A list in place of a number may make a long one.
    lists = set()
    for node in nodes:
        if isinstance(node, ast.Subscript):
            lists.add(ast.unparse(node.value))
        elif isinstance(node, (ast.For, ast.comprehension)):
            lists.add(ast.unparse(node.iter))
    for name in arguments:
        for other in {*arguments, "0"} - {name} - (set() if name in lists else lists):
            phrase = f"with {other} in place of {name}"
            places = [node for node in nodes if getattr(node, "id", "") == name]
            changes = [_Change(phrase, 0, node, _parsed(other)) for node in places]
            yield from [[change] for change in changes]
            yield changes


def _by_lines(node: Any, known: Collection[str]) -> Iterator[_Change]:
    """Turns of loops and lines that are missing, or in another order."""
    turns = getattr(node, "iter", None)
    if turns and _name_of(turns) != "range":
        # In a list that is made in one line, an entry may be missing for another reason.
        for code, phrase in [*LOOPS.items()][0 if isinstance(node, ast.For) else -1 :]:
            yield _Change(phrase, 0, turns, _Replacement({"a": turns}).visit(_parsed(code)))
    if isinstance(node, ast.For):
        for by, word in ((1, "large"), (-1, "small")):
            shifted = copy.deepcopy(node)
            for part in ast.walk(shifted):
                if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod):
                    part.left = ast.BinOp(part.left, ast.Add(), ast.Constant(by))
            yield _Change(f"with indices that are one too {word}", 0, node, shifted)
    if isinstance(node, ast.While):
        yield _Change("with if in place of while", 0, node, ast.If(node.test, node.body, []))
    if isinstance(node, ast.If) and node.orelse:
        for branch, other in (("body", "orelse"), ("orelse", "body")):
            *_, line = getattr(node, branch)
            both = copy.copy(node)
            setattr(both, other, [*getattr(node, other), line])
            name = _deed(line, known)
            phrase = f"with {name or 'one of its lines'} in both cases, not in one"
            yield _Change(phrase, int(not name), node, both)
    body = getattr(node, "body", None)
    lines: list[ast.stmt] = body if isinstance(body, list) else []
    for index, line in enumerate(lines):
        name = _deed(line, known)
        sides = (line.targets[0], line.value) if isinstance(line, ast.Assign) else ()
        for number, (_, entry) in enumerate(zip(*(getattr(side, "elts", ()) for side in sides))):
            shorter: Any = copy.deepcopy(line)
            del shorter.targets[0].elts[number], shorter.value.elts[number]
            words = _words_of(entry, known)
            phrase = f"that sets nothing to {words}" if words else "without one of its assignments"
            yield _Change(phrase, int(not words), line, shorter)
        if not isinstance(line, (ast.FunctionDef, ast.Return, ast.AugAssign)):
            yield _Change(f"without {name or 'one of its lines'}", int(not name), line, ast.Pass())
        if index > 0:
            before = _deed(lines[index - 1], known)
            swapped = copy.copy(node)
            swapped.body = [*lines[: index - 1], line, lines[index - 1], *lines[index + 1 :]]
            phrase = "with two of its lines in the other order"
            if name and before:
                phrase = f"with {name} before {before}"
            yield _Change(phrase, int(not name or not before), node, swapped)


def _deed(line: ast.stmt, known: Collection[str]) -> str:
    """The deed of a line in words; "" if that cannot be said."""
    if isinstance(line, ast.AugAssign):
        return "an update"
    if isinstance(line, ast.Delete):
        return "del"
    if isinstance(line, ast.Assign) and (words := _words_of(line.targets[0], known)):
        return f"setting {words}"
    if isinstance(line, ast.If) and (words := _words_of(line.test, known)):
        return f"asking whether {words}"
    if isinstance(line, ast.For | ast.If) and len(line.body) == 1:
        return _deed(line.body[0], known)
    return _name_of(line.value) if isinstance(line, ast.Expr) else ""
