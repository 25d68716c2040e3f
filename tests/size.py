"""The size and the density of our code, counted in nodes of its syntax tree: `python -m tests.size` prints the sizes.

Lines are no measure: a budget of lines made them dense. Only the standard library is needed, as before an installation.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Decided on 2026-11-29: 545,000 when the round ends. `orc launch` brought 11,600 at once: what is
# above goes, and this number falls with it. 640 came later: a running job of 0.1.0 outlives the
# upgrade, `orc fit hf:` has seconds, a plan says what no machine with several GPUs has run, and a
# comparison of scripts claims no precision that nobody stated, and `orc init` takes no batch size of
# one rank or of all where nothing says which. 650 more: ends on a full disk, resumed ends without
# a step, programs that interrupt themselves, and ranks without an error. Nights and a matrix of
# ends found them. 521 more: the restored optimizer counts the steps before an attempt.
PACKAGE_NODES_MAX = 551_642
DECISIONS_MAX = 10  # ruff's default of C901, which counts no expressions
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
STATEMENTS_THAT_DECIDE = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.match_case,
)
DECISIONS = (*STATEMENTS_THAT_DECIDE, ast.IfExp, ast.BoolOp)


@dataclass(slots=True)
class Counts:
    """What a folder's modules hold; each field says in one sentence what it counts."""

    # Nodes of the syntax tree, as `ast.walk` yields them.
    nodes: int = 0
    # Statements; a function or class is one, as is each that stands in it.
    statements: int = 0
    # Expressions `A if CONDITION else B`.
    conditional_expressions: int = 0
    # Comprehensions of lists, sets and mappings, and generator expressions.
    comprehensions: int = 0
    # Comprehensions that have two loops, or another comprehension anywhere inside.
    nested_comprehensions: int = 0
    # Functions with more than ten decisions: an `if`, a loop, an `except`, a `case`, a conditional
    # expression, an `and` or `or`, or a comprehension's filter. Each function has its own decisions.
    complex_functions: int = 0


def count(sources: Iterable[str]) -> Counts:
    """Return the counts of these modules together; one tree is in memory at a time."""
    counts = Counts()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            counts.nodes += 1
            counts.statements += isinstance(node, ast.stmt)
            counts.conditional_expressions += isinstance(node, ast.IfExp)
            if isinstance(node, COMPREHENSIONS):
                counts.comprehensions += 1
                counts.nested_comprehensions += is_nested(node)
            if isinstance(node, FUNCTIONS):
                counts.complex_functions += decisions(node) > DECISIONS_MAX
    return counts


def is_nested(comprehension: ast.AST) -> bool:
    """Return whether a comprehension has two loops, be one of them that of a comprehension inside."""
    return sum(isinstance(node, ast.comprehension) for node in ast.walk(comprehension)) > 1


def decisions(function: ast.AST) -> int:
    """Return how many decisions a function takes, without those of functions inside it."""
    number = 0
    pending = [*ast.iter_child_nodes(function)]
    while pending:
        node = pending.pop()
        if isinstance(node, FUNCTIONS):
            continue
        number += isinstance(node, DECISIONS)
        if isinstance(node, ast.comprehension):
            number += len(node.ifs)
        pending += ast.iter_child_nodes(node)
    return number


def modules(folder: str) -> Iterator[str]:
    """Yield the text of each module of a folder of the repository."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield path.read_text()


if __name__ == "__main__":
    package, tests = (count(modules(folder)).nodes for folder in ("orchestrator", "tests"))
    print(f"package {package:,} nodes of at most {PACKAGE_NODES_MAX:,}, tests {tests:,} nodes")
