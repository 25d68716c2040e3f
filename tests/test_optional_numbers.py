"""No `x or y` on a number that may be None: 0 is a number. Read from the syntax tree of every module. `x or 0` is 0.

A name counts as an optional number where an annotation says so: of a field of any class, a parameter, a variable or
what a function returns. A field that some class has as anything but a number is left to the reader, as its class is not
known here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NUMBERS = {"int", "float"}


def is_optional_number(annotation: ast.expr | None) -> bool:
    """Return whether an annotation is a number or None, such as `float | None`."""
    parts = set(ast.unparse(annotation).split(" | ")) if annotation is not None else set()
    return "None" in parts and len(parts) > 1 and parts <= NUMBERS | {"None"}


def fields(trees: Iterable[ast.AST]) -> set[str]:
    """Return fields, and functions as `name()`, that are an optional number or, elsewhere, a number."""
    optional, other = set[str](), set[str]()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            pairs = [
                (part.target, part.annotation)
                for part in node.body
                if isinstance(part, ast.AnnAssign)
            ]
            names = [
                (target.id, annotation)
                for target, annotation in pairs
                if isinstance(target, ast.Name)
            ]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [(f"{node.name}()", node.returns)] if node.returns is not None else []
        else:
            continue
        for name, annotation in names:
            is_number = ast.unparse(annotation) in NUMBERS
            (optional if is_optional_number(annotation) else set() if is_number else other).add(
                name
            )
    return optional - other


def findings(path: str, source: str, optional: set[str]) -> list[str]:
    """Return a line for each `or` after an optional number."""
    breaches = set[str]()
    tree = ast.parse(source)
    for scope in (tree, *_outermost(tree)):
        names = set() if scope is tree else {*_variables(scope, optional)}
        for node in ast.walk(scope):
            if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
                pairs = zip(node.values, node.values[1:], strict=False)
                numbers = [
                    left
                    for left, right in pairs
                    if _is_optional(left, names, optional) and not _is_zero(right)
                ]
                breaches |= {
                    f"{path}:{node.lineno} {ast.unparse(number)} or ...: 0 counts"
                    for number in numbers
                }
    return sorted(breaches)


def _outermost(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield functions that are within no other function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        else:
            yield from _outermost(node)


def _is_zero(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value == 0


def _variables(scope: ast.AST, optional: set[str]) -> Iterator[str]:
    """Names of the parameters and variables of a function that are optional numbers."""
    for node in ast.walk(scope):
        if isinstance(node, ast.arg) and is_optional_number(node.annotation):
            yield node.arg
        elif (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and is_optional_number(node.annotation)
        ):
            yield node.target.id
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = [*zip(target.elts, value.elts, strict=False)]
            for part, source in pairs:
                if isinstance(part, ast.Name) and _is_optional(source, set(), optional):
                    yield part.id
        elif isinstance(node, ast.NamedExpr) and _is_optional(node.value, set(), optional):
            yield node.target.id


def _is_optional(value: ast.expr, names: set[str], optional: set[str]) -> bool:
    match value:
        case ast.Name(id=name):
            return name in names
        case ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
            return name in optional
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return f"{name}()" in optional
        case ast.NamedExpr(value=inner):
            return _is_optional(inner, names, optional)
    return False


def test_no_module_takes_zero_for_nothing() -> None:
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for path in (ROOT / "orchestrator").rglob("*.py")
    }
    optional = fields(map(ast.parse, sources.values()))
    breaches = [
        line
        for path, source in sorted(sources.items())
        for line in findings(path, source, optional)
    ]
    assert breaches == []


PLANTED = {
    "a field": "class A:\n    end_s: float | None\ndef f(a): return a.end_s or 1.0",
    "a key": "class A(TypedDict):\n    end_s: float | None\ndef f(a): return a['end_s'] or 1.0",
    "a parameter": "def f(end_s: int | None): return end_s or 1",
    "a variable": "def f():\n    end_s: None | float = 0.0\n    return end_s or 1.0",
    "an answer": "def f() -> float | None: ...\ndef g(): return f() or 1.0",
    "a copy": "class A:\n    end_s: float | None\ndef f(a):\n    end_s = a.end_s\n    return end_s or 1.0",
    "one of three": "def f(a: int | None, b: int | None): return a or b or 1",
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_breaches_are_found(name: str) -> None:
    assert findings("new.py", PLANTED[name], fields([ast.parse(PLANTED[name])]))


@pytest.mark.parametrize(
    "source",
    [
        "def f(name: str | None): return name or 'x'",
        "def f(a: int | None): return 1 if a is None else a",
        "def f(a: int): return a or 1",
        "def f(a: int | None): return a or 0",
        "class A:\n    x: int | None\nclass B:\n    x: str | None\ndef f(b): return b.x or ''",
    ],
)
def test_what_is_no_optional_number_is_silent(source: str) -> None:
    assert findings("new.py", source, fields([ast.parse(source)])) == []
