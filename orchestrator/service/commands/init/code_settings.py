"""Finds settings in a script's code: constants, environment variables, and divisions by the number of ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Literal

from orchestrator.service.commands.init.call_frames import parameters_of
from orchestrator.service.commands.init.meanings import EVALUATION, Setting, meaning_of, word_of
from orchestrator.service.commands.init.named_files import number_of

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


def settings_in(tree: ast.Module, file: str) -> Iterator[Setting]:
    """Yield constants named like a batch size or accumulation, and environment variables that set one."""
    evaluates = {id(node) for statement in ast.walk(tree) for node in _evaluation(statement)}
    for node in ast.walk(tree):
        for name, value, line, rank in _bindings(node) if id(node) not in evaluates else ():
            yield from _setting(name, value, f"{file}:{line}", rank)


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr | None, int, int]]:
    """Yield (name, value, line, rank) of assignments, keywords, keys of dicts, and defaults of parameters."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield _name(target), value, node.lineno, CODE_RANK
        case ast.AnnAssign(target=target, value=value):
            yield _name(target), value, node.lineno, CODE_RANK
        case ast.keyword(arg=str(name), value=value):
            yield name, value, value.lineno, CODE_RANK
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, value, value.lineno, CODE_RANK
        case ast.FunctionDef(args=args):
            for argument, default in parameters_of(args):
                if default is not None:
                    yield argument.arg, default, default.lineno, DEFAULT_RANK


def divided_by_ranks(tree: ast.Module) -> Iterator[tuple[str, Divisor]]:
    """Yield (name, what it counts) of each value that the code divides by the number of ranks or its micro-batch."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.BinOp(left=left, op=ast.FloorDiv() | ast.Div(), right=right)
                | ast.AugAssign(target=left, op=ast.FloorDiv() | ast.Div(), value=right)
            ):
                pass
            case _:
                continue
        word = word_of(_name(left))
        by = ast.unparse(right)
        meaning = meaning_of(word) if word else None
        if meaning is None or meaning[0] not in READ:
            continue
        divisors = {(meaning_of(name) or ("",))[0] for name in map(_name, ast.walk(right)) if name}
        if LENGTHS.search(by):
            yield word, "tokens"
        elif PER_NODE.search(by):
            yield word, "node"
        elif RANKS.search(by) or READ[0] in divisors:
            yield word, "global"
        elif READ[1] in divisors:
            yield word, "step"


def _setting(name: str, value: ast.expr | None, where: str, rank: int) -> Iterator[Setting]:
    variable = _variable(value)
    meaning = (meaning_of(name) if name else None) or (
        meaning_of(variable[0]) if variable is not None else None
    )
    if meaning is None or meaning[0] not in READ:
        return
    if variable is not None:
        yield Setting(meaning[0], variable[0], "env", variable[1], where, 2, meaning[1])
        return
    number = number_of(value)
    if type(number) is int and number > 0:
        yield Setting(meaning[0], name, "constant", str(number), where, rank, meaning[1])


def _variable(node: ast.AST | None) -> tuple[str, str | None] | None:
    """Return (name, default) of the variable in `int(os.environ.get("BATCH", 128))`; None without one."""
    for part in ast.walk(node) if node is not None else ():
        match part:
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *rest]):
                if ast.unparse(func) in ENVIRONMENT:
                    default = number_of(rest[0]) if rest else None
                    return name, None if default is None else str(default)
            case ast.Subscript(value=value, slice=ast.Constant(value=str(name))):
                if ast.unparse(value) in ENVIRONMENT[-2:]:
                    return name, None
    return None


def _evaluation(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes assigned to a name of evaluation: `test_loader = DataLoader(test, batch_size=1000)`."""
    if isinstance(node, ast.Assign) and any(
        EVALUATION & set(word_of(_name(target)).split("_")) for target in node.targets
    ):
        yield from ast.walk(node.value)


def _name(node: ast.AST) -> str:
    match node:
        case ast.Subscript(slice=ast.Constant(value=value)):
            return str(value)
    return last_name(node)


def last_name(node: ast.AST) -> str:
    """Return the last part of a name in code: `run` of `typer.run`; "" for what is no name."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""
