"""The ratchets of density, and the bound of the package's size: `tests/size.py` defines what is counted."""

from __future__ import annotations

import pytest

from tests.size import PACKAGE_NODES_MAX, Counts, count, modules

# Of 2026-11-29. An anchor of our size has 3 to 12 conditional expressions in 1,000 lines, we had 40.
# A limit may only fall: lower it with the commit that made the number smaller.
LIMITS = {
    "conditional expressions in 1,000 statements": 43.0,
    "comprehensions in 1,000 statements": 54.7,
    "nested comprehensions": 201,
    "functions with more than ten decisions": 150,
}
SLACK = 0.02  # of a limit: so far below, the limit is lowered


@pytest.fixture(scope="module")
def package() -> Counts:
    return count(modules("orchestrator"))


def densities(counts: Counts) -> dict[str, float]:
    """Return the number of each kind that has a limit."""
    thousands = counts.statements / 1000
    numbers = (
        counts.conditional_expressions / thousands,
        counts.comprehensions / thousands,
        counts.nested_comprehensions,
        counts.complex_functions,
    )
    return dict(zip(LIMITS, numbers, strict=True))


def test_the_package_is_no_larger_than_was_decided(package: Counts) -> None:
    assert package.nodes <= PACKAGE_NODES_MAX, "delete something first: growth is a cost"


@pytest.mark.parametrize("kind", LIMITS)
def test_the_package_becomes_no_denser(package: Counts, kind: str) -> None:
    number, limit = densities(package)[kind], LIMITS[kind]
    assert number <= limit, f"{kind}: write statements, one a line"
    assert number >= limit * (1 - SLACK), f"{kind}: lower the limit in this test to {number:.1f}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 1 if y else 2", {"statements": 1, "conditional_expressions": 1}),
        ("x = [y for y in z if y]", {"statements": 1, "comprehensions": 1}),
        (
            "x = [y for z in w for y in z]",
            {"statements": 1, "comprehensions": 1, "nested_comprehensions": 1},
        ),
        (
            "x = {y: f(z for z in y) for y in w}",
            {"statements": 1, "comprehensions": 2, "nested_comprehensions": 1},
        ),
        ("def f():\n" + "    a and b\n" * 11, {"statements": 12, "complex_functions": 1}),
        ("def f():\n" + "    a and b\n" * 10, {"statements": 11}),
        ("def f():\n" + "    def g():\n        a or b\n" * 11, {"statements": 23}),
        (
            "def f():\n    [y for y in z" + " if y" * 11 + "]",
            {"statements": 2, "comprehensions": 1, "complex_functions": 1},
        ),
    ],
)
def test_each_kind_is_counted_as_its_definition_says(source: str, expected: dict[str, int]) -> None:
    counts = count([source])
    assert counts == Counts(nodes=counts.nodes, **expected)


def test_every_node_of_the_syntax_tree_counts() -> None:
    # the module, the assignment, its name with its context, the sum with its operator, and two constants
    assert count(["x = 1 + 2"]).nodes == 8
