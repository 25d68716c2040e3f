"""The command line flags of a training script, read from its syntax tree; the script is never run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from orchestrator.specs.errors import SpecError

MODULES_MAX = 32  # of the script's folder that are read with it
TRL = ("SFTConfig", "DPOConfig", "GRPOConfig", "RewardConfig", "KTOConfig", "RLOOConfig")  # trl/trainer/*_config.py
TRAINING_ARGUMENTS = ("TrainingArguments", *TRL)
_NOT_LITERAL = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One setting of a command line."""

    name: str  # as written, or the name of a positional argument
    kind: Literal["value", "switch", "boolean", "positional"]  # a boolean takes `true` or `false`
    default: int | float | str | bool | None = None  # None: none, or not readable
    required: bool = False
    choices: tuple[str, ...] = ()
    also_called: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """`batch_size` of --batch-size."""
        return self.name.lstrip("-").replace("-", "_").lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What was found in a script and the modules beside it."""

    flags: tuple[Flag, ...]
    imports: frozenset[str]  # dotted names of imported modules and objects
    calls: frozenset[str]  # last names of called functions
    attributes: frozenset[str]  # names of attributes that are read
    training_arguments: str | None  # class of transformers or TRL whose fields are flags too
    unread: tuple[str, ...]  # other sources of settings, which are not read


NO_SCRIPT = Script(
    flags=(), imports=frozenset(), calls=frozenset(), attributes=frozenset(), training_arguments=None, unread=()
)


def read_script(path: Path) -> Script:
    """The flags of a Python script. Raises SpecError if it cannot be parsed."""
    trees = list(_trees(path))
    classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    constants = {name: value for tree in trees for name, value in _constants(tree)}
    nodes = [node for tree in trees for node in ast.walk(tree)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    imports = frozenset(name for tree in trees for name in _imported(tree))
    flags: dict[str, Flag] = {}
    listed = dict(_listed(nodes))
    parsed = [one for call in calls for one in _parsed_classes(call, listed)]
    found = [
        *(flag for call in calls for flag in _added(call, constants)),
        *(flag for name in parsed for flag in _fields(name, classes, constants)),
        *(flag for node in nodes if isinstance(node, ast.FunctionDef) for flag in _decorated(node, constants)),
        *(flag for node in _typer_commands(nodes, imports) for flag in _parameters(node, constants)),
    ]
    for flag in found:
        flags.setdefault(flag.name, flag)
    return Script(
        flags=tuple(flags.values()),
        imports=imports,
        calls=frozenset(_last(call.func) for call in calls),
        attributes=frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute)),
        training_arguments=next((one for name in parsed if (one := _inherited(name, classes))), None),
        unread=tuple(_unread(nodes, calls)),
    )


def _trees(path: Path) -> Iterator[ast.Module]:
    """The syntax trees of the script and of the modules that it imports from its folder, each once."""
    waiting, seen = [path], set[Path]()
    while waiting and len(seen) < MODULES_MAX:
        file = waiting.pop(0)
        if file in seen:
            continue
        seen.add(file)
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
            if file != path:
                continue
            if isinstance(error, OSError):
                raise SpecError(f"cannot be read: {error.strerror}", source=str(path)) from None
            hint = "a shell script has no readable flags: name the Python file that it starts"
            raise SpecError(f"cannot be read as Python: {error}", source=str(path), hint=hint) from None
        yield tree
        for name in sorted(_imported(tree)):
            beside = path.parent.joinpath(*name.split("."))
            waiting += [one for one in (beside.with_suffix(".py"), beside / "__init__.py") if one.is_file()]


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _constants(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = _literal(node.value, {})
            if value is not _NOT_LITERAL:
                yield node.targets[0].id, value


def _literal(node: ast.expr | None, constants: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return constants.get(node.id, _NOT_LITERAL)
    try:
        return _NOT_LITERAL if node is None else ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return _NOT_LITERAL


def _scalar(node: ast.expr | None, constants: dict[str, Any]) -> Any:
    value = _literal(node, constants)
    return value if isinstance(value, bool | int | float | str) else None


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {one.arg: one.value for one in call.keywords if one.arg}


def _names(call: ast.Call) -> list[str]:
    return [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]


def _choices(node: ast.expr | None, constants: dict[str, Any]) -> tuple[str, ...]:
    if isinstance(node, ast.Call):  # click.Choice([...])
        node = node.args[0] if node.args else None
    if isinstance(node, ast.Subscript) and _last(node.value) == "Literal":
        node = node.slice
    found = _literal(node, constants)
    return tuple(map(str, found)) if isinstance(found, list | tuple) else ()


# ---------------------------------------------------------------------------------------------- argparse and its kin


def _added(call: ast.Call, constants: dict[str, Any]) -> Iterator[Flag]:
    if _last(call.func) == "add_config_arguments":  # deepspeed/__init__.py
        yield Flag(name="--deepspeed", kind="switch", default=False)
        yield Flag(name="--deepspeed_config", kind="value")
    names = _names(call)
    if _last(call.func) != "add_argument" or not names:
        return
    said = _keywords(call)
    default = _scalar(said.get("default"), constants)
    if not names[0].startswith("-"):
        needed = _literal(said.get("nargs"), constants) not in ("?", "*")
        yield Flag(name=names[0], kind="positional", default=default, required=needed and default is None)
        return
    action = said.get("action")
    word = _literal(action, constants) if action is not None else None
    switch = word in ("store_true", "store_false") or (action is not None and _last(action) == "BooleanOptionalAction")
    is_bool = "const" in said or "bool" in (_last(said["type"]).lower() if "type" in said else "")
    yield Flag(
        name=_longest(names),
        kind="switch" if switch else "boolean" if is_bool else "value",
        default=False if word == "store_true" else True if word == "store_false" else default,
        required=_literal(said.get("required"), constants) is True,
        choices=_choices(said.get("choices"), constants),
        also_called=tuple(name for name in names if name != _longest(names)),
    )


def _longest(names: Iterable[str]) -> str:
    """The longest name: --batch-size of -b, --batch-size."""
    return max(names, key=len)


# ------------------------------------------------------------------------------------------------- fields of classes


def _listed(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, list[ast.expr]]]:
    """(name, elements) of every list assigned to a name."""
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.List):
            yield from ((_last(target), node.value.elts) for target in node.targets if _last(target))


def _parsed_classes(call: ast.Call, listed: Mapping[str, list[ast.expr]]) -> Iterator[str]:
    if _last(call.func) not in ("HfArgumentParser", "TrlParser") or not (call.args or call.keywords):
        return
    first = call.args[0] if call.args else call.keywords[0].value
    one_by_one = first.elts if isinstance(first, ast.Tuple | ast.List) else listed.get(_last(first), [first])
    yield from map(_last, one_by_one)


def _inherited(name: str, classes: dict[str, ast.ClassDef], depth: int = 8) -> str | None:
    """The class of transformers or TRL that a class is, or inherits from."""
    if name not in classes:
        return name if name.endswith(TRAINING_ARGUMENTS) else None
    bases = (_inherited(_last(base), classes, depth - 1) for base in classes[name].bases) if depth else iter(())
    return next((base for base in bases if base), None)


def _fields(name: str, classes: dict[str, ast.ClassDef], constants: dict[str, Any], depth: int = 8) -> Iterator[Flag]:
    if name not in classes or not depth:
        return
    for node in classes[name].body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        value, is_call = node.value, isinstance(node.value, ast.Call)
        said = _keywords(value) if isinstance(value, ast.Call) else {}
        given = said.get("default") if is_call else value
        kind = ast.unparse(node.annotation)
        yield Flag(
            name=f"--{node.target.id}",
            kind="boolean" if "bool" in kind else "value",
            default=_scalar(given, constants),
            required=given is None and "default_factory" not in said,
            choices=_choices(node.annotation, constants),
        )
    for base in classes[name].bases:
        yield from _fields(_last(base), classes, constants, depth - 1)


# --------------------------------------------------------------------------------------------------- click and typer


def _decorated(function: ast.FunctionDef, constants: dict[str, Any]) -> Iterator[Flag]:
    for call in function.decorator_list:
        if not isinstance(call, ast.Call) or _last(call.func) not in ("option", "argument") or not _names(call):
            continue
        said, names = _keywords(call), _names(call)
        default = _scalar(said.get("default"), constants)
        if _last(call.func) == "argument":
            needed = default is None and _literal(said.get("required"), constants) is not False
            yield Flag(name=names[0], kind="positional", default=default, required=needed)
            continue
        flags = [name for name in names if name.startswith("-")]
        switch = _literal(said.get("is_flag"), constants) is True or any("/" in name for name in flags)
        yield Flag(
            name=_longest(name.partition("/")[0] for name in flags),
            kind="switch" if switch else "boolean" if _last(said.get("type", call.func)) == "bool" else "value",
            default=default if default is not None or not switch else False,
            required=_literal(said.get("required"), constants) is True,
            choices=_choices(said.get("type"), constants),
        )


def _typer_commands(nodes: Iterable[ast.AST], imports: frozenset[str]) -> Iterator[ast.FunctionDef]:
    """Functions that are typer commands."""
    if "typer" not in imports:
        return
    nodes = list(nodes)
    run = {_last(node.args[0]) for node in nodes if isinstance(node, ast.Call) and _is_typer_run(node)}
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            decorators = [_last(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list]
            if node.name in run or "command" in decorators:
                yield node


def _is_typer_run(call: ast.Call) -> bool:
    return ast.unparse(call.func) == "typer.run" and bool(call.args)


def _parameters(function: ast.FunctionDef, constants: dict[str, Any]) -> Iterator[Flag]:
    arguments = [*function.args.posonlyargs, *function.args.args]
    blank: list[ast.expr | None] = [None] * (len(arguments) - len(function.args.defaults))
    pairs = [*zip(arguments, [*blank, *function.args.defaults], strict=True)]
    pairs += zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    for argument, given in pairs:
        kind = ast.unparse(argument.annotation) if argument.annotation is not None else ""
        said = _typer_info(argument.annotation) or _typer_info(given)
        if said is not None and said is given:  # typer.Option(8, "--batch"): the first word is the default
            given = said.args[0] if said.args else _keywords(said).get("default")
        required = given is None or _literal(given, constants) is ...
        default = None if required else _scalar(given, constants)
        option = _last(said.func) == "Option" if said is not None else not required
        names = [name.partition("/")[0] for name in _names(said)] if said is not None else []
        flags = [name for name in names if name.startswith("-")]
        switch = "bool" in kind or isinstance(default, bool)
        if option:
            name = _longest(flags) if flags else "--" + argument.arg.replace("_", "-")
            yield Flag(name=name, kind="switch" if switch else "value", default=default, required=required)
        else:
            yield Flag(name=argument.arg, kind="positional", default=default, required=required)


def _typer_info(node: ast.expr | None) -> ast.Call | None:
    """The call of typer.Option or typer.Argument in an annotation or a default."""
    calls = ast.walk(node) if node is not None else iter(())
    return next((one for one in calls if isinstance(one, ast.Call) and _last(one.func) in ("Option", "Argument")), None)


# --------------------------------------------------------------------------------------------------- what is not read


def _unread(nodes: Iterable[ast.AST], calls: Iterable[ast.Call]) -> Iterator[str]:
    written = {ast.unparse(call.func) for call in calls}
    written |= {
        ast.unparse(one.func if isinstance(one, ast.Call) else one)
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        for one in node.decorator_list
    }
    told = {
        "hydra.main": "Hydra: settings are words like `data.batch_size=8`; use knobs with `override: data.batch_size`",
        "OmegaConf.load": "OmegaConf: if it reads a file, set `config: {file: ...}` and knobs with `key: ...`",
        "fire.Fire": "Fire: every parameter of its argument is a flag; set them as knobs",
        "tyro.cli": "tyro: every field of its argument is a flag; set them as knobs",
        "yaml.safe_load": "a YAML file: if it has the batch size, set `config: {file: ...}` and knobs with `key: ...`",
    }
    yield from (words for name, words in told.items() if name in written)
    if any(name.endswith("add_subparsers") for name in written):
        yield "subcommands: `command` must contain the one that trains"
