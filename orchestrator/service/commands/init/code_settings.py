"""Finds settings in a script's code: constants, environment variables, and divisions by the number of ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Literal

from orchestrator.service.commands.init.call_frames import iterate_parameters_and_defaults
from orchestrator.service.commands.init.meanings import (
    EVALUATION,
    Setting,
    find_quantity_and_count,
    make_snake_case_word,
)
from orchestrator.service.commands.init.named_files import evaluate_number

Divisor = Literal[
    "global", "node", "tokens", "step"
]  # what is divided: a number of all ranks, of a node, tokens, or of all micro-batches of a rank's step
READ = (
    "micro_batch_size",
    "gradient_accumulation_steps",
)  # other settings of code stay as they are, unread
RANKS = re.compile(
    r"world_size|worldsize|n_?gpus|num_gpus|num_processes|device_count|nprocs|dp_size|num_devices|ngpus"
)
PER_NODE = re.compile(r"per_node|device_count")
LENGTHS = re.compile(r"\bT\b|seq_?len|sequence_length|block_size|context_length|max_length")
ENVIRONMENT = ("os.environ.get", "os.getenv", "environ.get", "getenv", "os.environ", "environ")
CODE_RANK, DEFAULT_RANK = 4, 5  # of a constant, and of a parameter's default


def iterate_code_settings(tree: ast.Module, file_name: str) -> Iterator[Setting]:
    """Yield the settings in a script's code: constants named like a batch size or accumulation, and
    variables that set one.

    The variables are environment variables that the code reads.
    """
    evaluates = {
        id(node)
        for statement in ast.walk(tree)
        for node in _iterate_nodes_for_evaluation(statement)
    }
    for node in ast.walk(tree):
        for name, value, line, rank in (
            _iterate_names_values_lines_and_precedences(node) if id(node) not in evaluates else ()
        ):
            yield from _make_setting(name, value, f"{file_name}:{line}", rank)


def _iterate_names_values_lines_and_precedences(
    node: ast.AST,
) -> Iterator[tuple[str, ast.expr | None, int, int]]:
    """Yield (name, value, line, precedence) of assignments, keyword arguments, dict keys, and
    parameters' defaults.
    """
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield _get_target_name(target), value, node.lineno, CODE_RANK
        case ast.AnnAssign(target=target, value=value):
            yield _get_target_name(target), value, node.lineno, CODE_RANK
        case ast.keyword(arg=str(name), value=value):
            yield name, value, value.lineno, CODE_RANK
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, value, value.lineno, CODE_RANK
        case ast.FunctionDef(args=args):
            for argument, default in iterate_parameters_and_defaults(args):
                if default is not None:
                    yield argument.arg, default, default.lineno, DEFAULT_RANK


def iterate_names_and_counts_of_divided_values(tree: ast.Module) -> Iterator[tuple[str, Divisor]]:
    """Yield (setting's name, what its value counts) for each setting that the code divides by its
    number of ranks.

    A division by the micro-batch size also counts.
    """
    for node in ast.walk(tree):
        match node:
            case (
                ast.BinOp(left=left, op=ast.FloorDiv() | ast.Div(), right=right)
                | ast.AugAssign(target=left, op=ast.FloorDiv() | ast.Div(), value=right)
            ):
                pass
            case _:
                continue
        word = make_snake_case_word(_get_target_name(left))
        by = ast.unparse(right)
        meaning = find_quantity_and_count(word) if word else None
        if meaning is None or meaning[0] not in READ:
            continue
        divisors = {
            (find_quantity_and_count(name) or ("",))[0]
            for name in map(_get_target_name, ast.walk(right))
            if name
        }
        if LENGTHS.search(by):
            yield word, "tokens"
        elif PER_NODE.search(by):
            yield word, "node"
        elif RANKS.search(by) or READ[0] in divisors:
            yield word, "global"
        elif READ[1] in divisors:
            yield word, "step"


def _make_setting(
    name: str, value: ast.expr | None, location: str, precedence: int
) -> Iterator[Setting]:
    variable = _find_variable_and_default(value)
    meaning = (find_quantity_and_count(name) if name else None) or (
        find_quantity_and_count(variable[0]) if variable is not None else None
    )
    if meaning is None or meaning[0] not in READ:
        return
    if variable is not None:
        yield Setting(meaning[0], variable[0], "env", variable[1], location, 2, meaning[1])
        return
    number = evaluate_number(value)
    if type(number) is int and number > 0:
        yield Setting(meaning[0], name, "constant", str(number), location, precedence, meaning[1])


def _find_variable_and_default(node: ast.AST | None) -> tuple[str, str | None] | None:
    """Return (name, default or None) of the environment variable in code such as
    `int(os.environ.get("BATCH", 128))`.

    None where the code reads no variable.
    """
    for part in ast.walk(node) if node is not None else ():
        match part:
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *rest]):
                if ast.unparse(func) in ENVIRONMENT:
                    default = evaluate_number(rest[0]) if rest else None
                    return name, None if default is None else str(default)
            case ast.Subscript(value=value, slice=ast.Constant(value=str(name))):
                if ast.unparse(value) in ENVIRONMENT[-2:]:
                    return name, None
    return None


def _iterate_nodes_for_evaluation(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the syntax nodes of values that are only for evaluation, such as in `test_loader =
    DataLoader(test)`.
    """
    if isinstance(node, ast.Assign) and any(
        EVALUATION & set(make_snake_case_word(_get_target_name(target)).split("_"))
        for target in node.targets
    ):
        yield from ast.walk(node.value)


def _get_target_name(node: ast.AST) -> str:
    match node:
        case ast.Subscript(slice=ast.Constant(value=value)):
            return str(value)
    return get_last_part_of_name(node)


def get_last_part_of_name(node: ast.AST) -> str:
    """Return the last part of a dotted name in code: `run` of `typer.run`; "" for a node that is no
    name.
    """
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""
