"""Command-line flags of a training script, read from its syntax tree. The script is never run."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from orchestrator.service.commands.init.call_frames import iterate_parameters_and_defaults
from orchestrator.service.commands.init.code_settings import (
    Divisor,
    get_last_part_of_name,
    iterate_code_settings,
    iterate_names_and_counts_of_divided_values,
)
from orchestrator.service.commands.init.meanings import Count, Setting
from orchestrator.service.commands.init.named_files import REWRITABLE, evaluate_number
from orchestrator.service.commands.init.saved_files import SavedFile, find_saved_files
from orchestrator.service.commands.init.vocabulary import VOCABULARY
from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.replace import replace

MODULES_MAX = 96  # of the script's folder and its packages that are read with it
TRL = (
    "SFTConfig",
    "DPOConfig",
    "GRPOConfig",
    "RewardConfig",
    "KTOConfig",
    "RLOOConfig",
)  # trl/trainer/*_config.py
TRAINING_ARGUMENTS = ("TrainingArguments", *TRL)
# Calls whose arguments are classes or functions, whose fields or parameters are flags. Nested
# classes have dotted flags
# but under FLAT, where the fields of all classes stand beside each other.
FLAT = ("HfArgumentParser", "TrlParser", "H4ArgumentParser", "add_arguments")
DASHED = ("cli",)  # tyro: --batch-size, and a pair of switches for each bool
PARSERS = (
    *FLAT,
    *DASHED,
    *("CLI", "auto_cli", "Fire", "parse", "entrypoint", "nested_entrypoint", "wrap"),
    *("add_class_arguments", "add_dataclass_arguments", "add_function_arguments"),
)
WRAPS = (
    "wrap",
    "entrypoint",
)  # decorators of a function whose parameter is the class: draccus, pyrallis, chz
TAP = "Tap"  # typed-argument-parser: the fields of each subclass are flags
ABSL = re.compile(r"DEFINE_(integer|float|string|bool|boolean|enum)")
EVERY_RANK = re.compile(
    r"\b(?:total|all|across|overall|global|effective)\b.*\b(?:gpu|device|rank|process|node)", re.I
)
TOKENS = re.compile(r"\b(?:tokens|frames)\b", re.I)
EACH_RANK = re.compile(
    r"\b(?:per|each|every|single|one)[\s-]+(?:gpu|device|rank|process|card)", re.I
)
LIBRARIES = {*sys.stdlib_module_names, *VOCABULARY["libraries"]}
Constants = dict[str, Any]  # values of names in the code


@frozen
class Flag:
    """A command-line flag of a script."""

    name: str  # as written, or the name of a positional argument
    kind: Literal["value", "switch", "boolean", "positional"]  # a boolean takes `true` or `false`
    default: int | float | str | bool | None = None  # None: none, or not readable
    required: bool = False
    choices: tuple[str, ...] = ()
    also_called: tuple[str, ...] = ()
    counts: Count = "plain"  # of a batch size whose help says that it counts all ranks

    @property
    def word(self) -> str:
        """The flag's name in snake case: `batch_size` for --batch-size."""
        return self.name.lstrip("-").replace("-", "_").lower()


@frozen
class Script:
    """The command-line flags of a script, and other facts about it and the modules beside it."""

    flags: tuple[Flag, ...]
    imports: frozenset[str]  # dotted names of imported modules and objects
    calls: frozenset[str]  # last names of called functions
    attributes: frozenset[str]  # names of attributes that are read
    training_arguments: str | None  # class of transformers or TRL whose fields are flags too
    unread: tuple[str, ...]  # other sources of settings, which are not read
    # files of settings whose names stand in code that loads such files
    own_files: tuple[str, ...] = ()
    places: tuple[Setting, ...] = ()  # constants and variables in the code that mean a setting
    divided: Mapping[str, Divisor] = field(
        default_factory=dict
    )  # settings that the code divides by its ranks
    saves: tuple[SavedFile, ...] = ()
    hydra: tuple[Path, str] | None = None  # folder and name of Hydra's primary file
    # settings are words --name=value, as nanoGPT's configurator.py reads them
    only_equals: bool = False

    @property
    def flags_by_name(self) -> dict[str, Flag]:
        """The script's flags by their names."""
        return {flag.name: flag for flag in self.flags}


NO_SCRIPT = Script(
    flags=(),
    imports=frozenset(),
    calls=frozenset(),
    attributes=frozenset(),
    training_arguments=None,
    unread=(),
)


def read_script(path: Path, roots: Sequence[Path]) -> Script:
    """Return the flags of a Python script, and other facts about its code. Raises SpecError if it
    cannot be parsed.

    `roots` are package folders. They are searched if neither the script nor a module beside it has
    a flag: a thin starter imports the package that parses the flags.
    """
    script = _read_files(path, ())
    if script.flags or script.places or script.hydra or "LightningCLI" in script.calls:
        return script
    return _read_files(path, roots) if roots else script


def _read_files(path: Path, roots: Sequence[Path]) -> Script:
    files = dict(_iterate_paths_and_trees(path, roots))
    trees = list(files.values())
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions: dict[str, ast.FunctionDef] = {}
    classes: dict[str, ast.ClassDef] = {}
    lists: dict[str, list[ast.expr]] = {}
    aliases: dict[str, str] = {}
    calls: list[ast.Call] = []
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name):
                functions[name] = node
            case ast.ClassDef(name=name):
                classes[name] = node
            case ast.Assign(targets=targets, value=ast.Tuple(elts=parts) | ast.List(elts=parts)):
                lists |= dict.fromkeys(filter(None, map(get_last_part_of_name, targets)), parts)
            case ast.ImportFrom(names=names):
                aliases |= {alias.asname: alias.name for alias in names if alias.asname}
            case ast.Call():
                calls.append(node)
    for name, definition in classes.items():
        for part in definition.body:
            # Fire and jsonargparse take the parameters of a constructor as flags
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                functions[name] = part
    # as `from transformers import TrainingArguments as TA`
    for alias, base in aliases.items():
        if alias != base:
            classes.setdefault(alias, _make_empty_class(alias, base))
    constants = {
        name: value for tree in trees for name, value in _iterate_constant_names_and_values(tree)
    }
    imports = frozenset(
        name for tree in trees for name, _ in _iterate_imported_names_and_levels(tree)
    )
    parser_pairs = [
        pair
        for call in calls
        for pair in _iterate_classes_and_parsers(call, lists, tuple(functions))
        if pair[1] in FLAT[:3] or pair[0] in classes or pair[0] in functions
    ]
    for function in functions.values():
        parser_pairs += [(name, "wrap") for name in _iterate_names_of_wrapped_classes(function)]
    for name, definition in classes.items():
        if TAP in map(get_last_part_of_name, definition.bases):
            parser_pairs.append((name, "add_arguments"))
    candidates = [flag for call in calls for flag in _iterate_argparse_flags(call, constants)]
    for function in functions.values():
        candidates += _iterate_click_flags(function, constants)
    if "typer" in imports:
        run = {get_last_part_of_name(call.args[0]) for call in calls if _is_typer_run(call)}
        for node in nodes:
            if isinstance(node, ast.FunctionDef) and (
                node.name in run or "command" in map(get_last_part_of_name, _list_decorators(node))
            ):
                candidates += _iterate_parameter_flags(node, constants)
    is_flat = "simple_parsing" in imports
    for name, parser in parser_pairs:
        joint = "-" if parser in DASHED else "_"
        candidates += _iterate_class_flags(
            name, classes, constants, is_flat or parser in FLAT, joint
        )
        if name in functions and parser not in FLAT:
            candidates += _iterate_parameter_flags(functions[name], constants, joint)
    flags: dict[str, Flag] = {}
    for flag in candidates:
        flags.setdefault(flag.name, flag)
    beside = [(file.name, tree) for file, tree in files.items() if not roots or file == path]
    return Script(
        flags=tuple(flags.values()),
        imports=imports,
        calls=frozenset(get_last_part_of_name(call.func) for call in calls),
        attributes=frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute)),
        training_arguments=next(
            (
                kind
                for name, _ in parser_pairs
                if (kind := _find_arguments_base_class(name, classes))
            ),
            None,
        ),
        unread=tuple(_iterate_unread_sources(nodes, calls)),
        own_files=tuple(_iterate_settings_file_names(nodes, calls)),
        places=tuple(place for name, tree in beside for place in iterate_code_settings(tree, name)),
        divided={
            word: divisor
            for tree in trees
            for word, divisor in iterate_names_and_counts_of_divided_values(tree)
        },
        saves=tuple(find_saved_files(beside)),
        hydra=next(
            (
                place
                for file, tree in files.items()
                for place in _iterate_hydra_folders_and_names(tree, file)
            ),
            None,
        ),
        only_equals=any(
            "configurator" in ast.unparse(call)
            for call in calls
            if get_last_part_of_name(call.func) == "exec"
        ),
    )


def _iterate_paths_and_trees(
    path: Path, roots: Sequence[Path]
) -> Iterator[tuple[Path, ast.Module]]:
    """Yield (path, syntax tree) of the script, and of each module that it imports from its folder
    or from `roots`.
    """
    waiting = [path]
    visited = set[Path]()
    while waiting and len(visited) < MODULES_MAX:
        file = waiting.pop(0)
        if file in visited:
            continue
        visited.add(file)
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (
            OSError,
            UnicodeDecodeError,
            SyntaxError,
            ValueError,
            RecursionError,
            MemoryError,
        ) as error:
            if file != path:
                continue
            if isinstance(error, OSError):
                raise SpecError(f"cannot be read: {error.strerror}", source=str(path)) from None
            hint = "a shell script has no readable flags: name the Python file that it starts"
            raise SpecError(
                f"cannot be read as Python: {error}", source=str(path), hint=hint
            ) from None
        yield file, tree
        for name, level in sorted(_iterate_imported_names_and_levels(tree)):
            if not level and name.partition(".")[0] in LIBRARIES:
                continue
            above = [file.parents[level - 1]] if level and level <= len(file.parents) else []
            for root in above or (path.parent, *roots):
                place = root.joinpath(*filter(None, name.split(".")))
                places = [place.with_suffix(".py"), place / "__init__.py"] if name else []
                waiting += [place for place in places if place.is_file()]


def _iterate_imported_names_and_levels(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield (dotted name, number of leading dots) of each import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = f"{node.module}." if node.module else ""
            yield module.rstrip("."), node.level
            yield from ((f"{module}{alias.name}", node.level) for alias in node.names)


def _iterate_constant_names_and_values(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name), *_], value=value):
                literal = evaluate_number(value)
                if literal is not None:
                    yield name, literal


def _evaluate_literal(node: ast.expr | None, constants: Constants) -> Any:
    """Return the value of a literal or of a named constant; None for anything else."""
    return constants.get(node.id) if isinstance(node, ast.Name) else evaluate_number(node)


def _evaluate_scalar(node: ast.expr | None, constants: Constants) -> Any:
    value = _evaluate_literal(node, constants)
    return value if isinstance(value, bool | int | float | str) else None


def _list_keyword_arguments(call: ast.Call) -> dict[str, ast.expr]:
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def _list_text_arguments(call: ast.Call) -> list[str]:
    return [
        argument.value
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]


def _read_choices(node: ast.expr | None, constants: Constants) -> tuple[str, ...]:
    match node:
        case ast.Call(args=args):  # click.Choice([...])
            node = args[0] if args else None
        case ast.Subscript(value=value, slice=inner) if get_last_part_of_name(value) == "Literal":
            node = inner
    choices = _evaluate_literal(node, constants)
    return tuple(map(str, choices)) if isinstance(choices, list | tuple) else ()


def _list_decorators(function: ast.FunctionDef) -> list[ast.expr]:
    """Return the decorators of a function, each without its arguments."""
    return [node.func if isinstance(node, ast.Call) else node for node in function.decorator_list]


# ---------------------------------------------------------------------------------------------- argparse and its kin


def _iterate_argparse_flags(call: ast.Call, constants: Constants) -> Iterator[Flag]:
    if get_last_part_of_name(call.func) == "add_config_arguments":  # deepspeed/__init__.py
        yield Flag(name="--deepspeed", kind="switch", default=False)
        yield Flag(name="--deepspeed_config", kind="value")
    names = _list_text_arguments(call)
    if absl := ABSL.fullmatch(get_last_part_of_name(call.func)):
        default = _evaluate_scalar(call.args[1], constants) if len(call.args) > 1 else None
        kind: Literal["value", "boolean"] = "boolean" if absl[1].startswith("bool") else "value"
        if names:
            yield Flag(name=f"--{names[0]}", kind=kind, default=default)
    if get_last_part_of_name(call.func) != "add_argument" or not names:
        return
    keywords = _list_keyword_arguments(call)
    default = _evaluate_scalar(keywords.get("default"), constants)
    if not names[0].startswith("-"):
        needed = _evaluate_literal(keywords.get("nargs"), constants) not in ("?", "*")
        yield Flag(
            name=names[0], kind="positional", default=default, required=needed and default is None
        )
        return
    action = keywords.get("action", call.func)
    word = _evaluate_literal(action, constants)
    flag = Flag(
        name=_longest_name(names),
        kind="value",
        default=default,
        required=_evaluate_literal(keywords.get("required"), constants) is True,
        choices=_read_choices(keywords.get("choices"), constants),
        also_called=tuple(name for name in names if name != _longest_name(names)),
        counts=_find_counted_samples(str(_evaluate_literal(keywords.get("help"), constants))),
    )
    if word in ("store_true", "store_false"):
        yield replace(flag, kind="switch", default=word == "store_false")
    elif get_last_part_of_name(action) == "BooleanOptionalAction":
        yield replace(flag, kind="switch")
    elif (
        "const" in keywords
        or "bool" in get_last_part_of_name(keywords.get("type", call.func)).lower()
    ):
        yield replace(flag, kind="boolean")
    else:
        yield flag


def _find_counted_samples(help_text: str) -> Count:
    """Return which samples a batch size counts (of a rank, of all), by its flag's help text; the
    first such phrase decides.
    """
    if TOKENS.search(help_text):
        return "tokens"
    total = EVERY_RANK.search(help_text)
    share = EACH_RANK.search(help_text)
    is_total = total is not None and (share is None or total.start() < share.start())
    return "global" if is_total else "plain"


def _longest_name(names: Iterable[str]) -> str:
    """Return the longest of a flag's names: --batch-size of -b, --batch-size."""
    return max(names, key=len)


# ------------------------------------------------------------------------------------------------- fields of classes


def _iterate_classes_and_parsers(
    call: ast.Call, assigned_lists: Mapping[str, list[ast.expr]], functions: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """Yield (class or function, parser) for each one whose fields or parameters this call turns
    into flags.
    """
    parser = get_last_part_of_name(call.func)
    if parser not in PARSERS:
        return
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    if not arguments and parser in ("Fire", "CLI", "auto_cli"):
        yield from ((name, parser) for name in functions)
    for argument in arguments[:1] if parser in FLAT[:3] else arguments:
        several = (
            argument.elts
            if isinstance(argument, ast.Tuple | ast.List)
            else assigned_lists.get(get_last_part_of_name(argument), [argument])
        )
        yield from ((get_last_part_of_name(expression), parser) for expression in several)


def _iterate_names_of_wrapped_classes(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the names of the classes of a function's parameters, if a decorator of the function
    turns their fields into flags.
    """
    if not {*WRAPS}.isdisjoint(map(get_last_part_of_name, _list_decorators(function))):
        for argument in function.args.args:
            if argument.annotation is not None:
                yield get_last_part_of_name(argument.annotation)


def _iterate_hydra_folders_and_names(tree: ast.Module, file: Path) -> Iterator[tuple[Path, str]]:
    """Yield (folder, name) of the primary file of each `@hydra.main` in the tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("hydra.main", "hydra_main"):
            keywords = _list_keyword_arguments(node)
            name = _evaluate_literal(keywords.get("config_name"), {})
            folder = _evaluate_literal(keywords.get("config_path"), {})
            yield (
                file.parent / (folder if isinstance(folder, str) else "."),
                name if isinstance(name, str) else "config",
            )


def _find_arguments_base_class(
    class_name: str, classes: dict[str, ast.ClassDef], depth_max: int = 8
) -> str | None:
    """Return the TrainingArguments class of transformers or TRL that this class is or inherits
    from; None without one.
    """
    if class_name not in classes:
        return class_name.lstrip(".") if class_name.endswith(TRAINING_ARGUMENTS) else None
    for base in _iterate_base_names(classes[class_name], classes) if depth_max else ():
        if kind := _find_arguments_base_class(base, classes, depth_max - 1):
            return kind
    return None


def _make_empty_class(name: str, base: str) -> ast.ClassDef:
    """Return an empty class definition that inherits from `base`."""
    tree = ast.parse(f"class {name}({base}): pass")
    assert isinstance(tree.body[0], ast.ClassDef)
    return tree.body[0]


def _iterate_base_names(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    """Yield the names of a class's bases. A base of a library gets a dot before its name, so that it
    equals no class of the script.
    """
    for base in node.bases:
        name = get_last_part_of_name(base)
        yield (
            f".{name}"
            if isinstance(base, ast.Attribute) or (name == node.name and name in classes)
            else name
        )


def _iterate_class_flags(
    class_name: str,
    classes: dict[str, ast.ClassDef],
    constants: Constants,
    is_flat: bool,
    separator: str,
    prefix: str = "--",
    depth_max: int = 8,
) -> Iterator[Flag]:
    if class_name not in classes or not depth_max:
        return
    for node in classes[class_name].body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        value = node.value
        is_call = isinstance(node.value, ast.Call)
        keywords = _list_keyword_arguments(value) if isinstance(value, ast.Call) else {}
        default = keywords.get("default") if is_call else value
        kind = ast.unparse(node.annotation)
        if get_last_part_of_name(node.annotation) in classes:
            nested = prefix if is_flat else f"{prefix}{node.target.id}."
            yield from _iterate_class_flags(
                get_last_part_of_name(node.annotation),
                classes,
                constants,
                is_flat,
                separator,
                nested,
                depth_max - 1,
            )
            continue
        yield Flag(
            name=f"{prefix}{node.target.id.replace('_', separator)}",
            kind="boolean" if "bool" in kind else "value",
            default=_evaluate_scalar(default, constants),
            required=default is None and "default_factory" not in keywords,
            choices=_read_choices(node.annotation, constants),
        )
    for base in _iterate_base_names(classes[class_name], classes):
        yield from _iterate_class_flags(
            base, classes, constants, is_flat, separator, prefix, depth_max - 1
        )


# --------------------------------------------------------------------------------------------------- click and typer


def _iterate_click_flags(function: ast.FunctionDef, constants: Constants) -> Iterator[Flag]:
    for call in function.decorator_list:
        if (
            not isinstance(call, ast.Call)
            or get_last_part_of_name(call.func) not in ("option", "argument")
            or not _list_text_arguments(call)
        ):
            continue
        keywords = _list_keyword_arguments(call)
        names = _list_text_arguments(call)
        default = _evaluate_scalar(keywords.get("default"), constants)
        if get_last_part_of_name(call.func) == "argument":
            needed = (
                default is None
                and _evaluate_literal(keywords.get("required"), constants) is not False
            )
            yield Flag(name=names[0], kind="positional", default=default, required=needed)
            continue
        flags = [name for name in names if name.startswith("-")]
        switch = _evaluate_literal(keywords.get("is_flag"), constants) is True or any(
            "/" in name for name in flags
        )
        yield Flag(
            name=_longest_name(name.partition("/")[0] for name in flags),
            kind="switch"
            if switch
            else "boolean"
            if get_last_part_of_name(keywords.get("type", call.func)) == "bool"
            else "value",
            default=default if default is not None or not switch else False,
            required=_evaluate_literal(keywords.get("required"), constants) is True,
            choices=_read_choices(keywords.get("type"), constants),
            also_called=tuple(
                name for name in flags if name != _longest_name(flags) and "/" not in name
            ),
        )


def _is_typer_run(call: ast.Call) -> bool:
    return ast.unparse(call.func) == "typer.run" and bool(call.args)


def _iterate_parameter_flags(
    function: ast.FunctionDef, constants: Constants, separator: str = "-"
) -> Iterator[Flag]:
    """Yield the command-line flag of each of a function's parameters.

    In a flag's name `separator` replaces each `_` of the parameter's name.
    """
    for argument, value in iterate_parameters_and_defaults(function.args):
        if argument.arg in ("self", "cls"):
            continue
        kind = ast.unparse(argument.annotation) if argument.annotation is not None else ""
        info = _find_typer_call(argument.annotation) or _find_typer_call(value)
        if (
            info is not None and info is value
        ):  # typer.Option(8, "--batch"): the first word is the default
            value = info.args[0] if info.args else _list_keyword_arguments(info).get("default")
        required = value is None or _evaluate_literal(value, constants) is ...
        default = None if required else _evaluate_scalar(value, constants)
        option = get_last_part_of_name(info.func) == "Option" if info is not None else not required
        names = (
            [name.partition("/")[0] for name in _list_text_arguments(info)]
            if info is not None
            else []
        )
        flags = [name for name in names if name.startswith("-")]
        switch = "bool" in kind or isinstance(default, bool)
        if option:
            name = _longest_name(flags) if flags else "--" + argument.arg.replace("_", separator)
            bool_kind: Literal["switch", "boolean"] = "switch" if separator == "-" else "boolean"
            yield Flag(
                name=name, kind=bool_kind if switch else "value", default=default, required=required
            )
        else:
            yield Flag(name=argument.arg, kind="positional", default=default, required=required)


def _find_typer_call(node: ast.expr | None) -> ast.Call | None:
    """Return the call of typer.Option or typer.Argument in an annotation or default; None without
    one.
    """
    calls = ast.walk(node) if node is not None else iter(())
    return next(
        (
            call
            for call in calls
            if isinstance(call, ast.Call)
            and get_last_part_of_name(call.func) in ("Option", "Argument")
        ),
        None,
    )


# --------------------------------------------------------------------------------------------------- what is not read


LOADERS = ("yaml.safe_load", "yaml.load", "json.load", "OmegaConf.load")


def _iterate_settings_file_names(
    nodes: Sequence[ast.AST], calls: Sequence[ast.Call]
) -> Iterator[str]:
    """Yield the names of settings files that are literals in the code, if the code calls a loader
    of such files.
    """
    if not any(ast.unparse(call.func) in LOADERS for call in calls):
        return
    texts = (node.value for node in nodes if isinstance(node, ast.Constant))
    for text in texts:
        if isinstance(text, str) and text.endswith(REWRITABLE) and "{" not in text:
            yield text


def _iterate_unread_sources(nodes: Sequence[ast.AST], calls: Sequence[ast.Call]) -> Iterator[str]:
    names = {ast.unparse(call.func) for call in calls}
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            names |= {ast.unparse(decorator) for decorator in _list_decorators(node)}
    hints = {
        "OmegaConf.load": "OmegaConf: if it reads a file, set `config: {file: ...}` and knobs with `key: ...`",
        "yaml.safe_load": "a YAML file: if it has the batch size, set `config: {file: ...}` and knobs with `key: ...`",
    }
    if not any(_iterate_settings_file_names(nodes, calls)):
        yield from (hint for name, hint in hints.items() if name in names)
    if any(name.endswith("add_subparsers") for name in names):
        yield "subcommands: `command` must contain the one that trains"
