"""Names of files that a script saves, as shell patterns such as `ckpt_*.pt`, read from its syntax tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

SAVES = {  # last name of a call that saves -> index of the argument that is its path
    "torch.save": 1,
    "save_file": 1,  # safetensors
    "save_pretrained": 0,
    "save_state": 0,
    "save_checkpoint": 0,
}
PATH_KEYWORDS = ("f", "path", "filename", "output_dir", "save_directory", "save_dir")
SAME_PATH = ("Path", "str", "PurePath", "fspath", "abspath", "expanduser", "as_posix", "resolve")  # calls on a path
TEMPORARY = (".tmp", ".part", ".partial", ".temp")  # of a file that is renamed when it is whole
# In the name of a checkpoint, or of what varies in it. Any other fixed name is taken for a result.
CHECKPOINT = re.compile(r"ckpt|checkpoint|check_point|step|epoch|iter|snapshot|last|latest|resume|state", re.IGNORECASE)
PROJECTS_SAVE = "save_checkpoint"  # takes what its project likes, in any order
WEIGHTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
DEPTH_MAX = 8  # names that stand for each other
ANY = "*"
Values = Mapping[str, Sequence[ast.expr]]


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A file that a script saves."""

    pattern: str  # as typed in the script, with * for what is not literal: */ckpt_*.pt
    where: str  # file and line
    is_checkpoint: bool
    varying: str = ""  # code of what is not literal in it: args.out step

    def below(self, *, has_folder_knob: bool) -> str | None:
        """Return the pattern relative to the output folder; None where the file is elsewhere.

        With a knob for the folder, the first part of the path must be that folder, not a literal.
        """
        first, _, rest = self.pattern.partition("/")
        relative = rest if has_folder_knob and first == ANY else "" if has_folder_knob else self.pattern
        is_elsewhere = relative.startswith(("/", "*/", "~")) or ".." in relative.split("/")
        has_name = re.search(r"\w", PurePosixPath(relative).stem) is not None
        return relative if relative and has_name and not is_elsewhere else None


def saved_files(tree: ast.Module, file: str) -> Iterator[SavedFile]:
    """Yield the files that the code of `file` saves, where their names are literals or f-strings."""
    values = _values(tree)
    for call in ast.walk(tree):
        path = _path_argument(call, values) if isinstance(call, ast.Call) else None
        if path is None:
            continue
        pattern, varying = _pattern(path, values)
        pattern = re.sub(r"\*+", ANY, pattern).removeprefix("./").rstrip("/")
        pattern = next((pattern.removesuffix(end) for end in TEMPORARY if pattern.endswith(end)), pattern)
        name = PurePosixPath(pattern).name
        if name.strip("*."):
            is_checkpoint = CHECKPOINT.search(name) is not None or (ANY in name and CHECKPOINT.search(varying))
            if is_checkpoint or ANY not in name:
                yield SavedFile(pattern, f"{file}:{path.lineno}", bool(is_checkpoint), varying)


def _path_argument(call: ast.Call, values: Values) -> ast.expr | None:
    """Return the argument that is the path; of a function of the project's own, the first that names such a file."""
    name = ast.unparse(call.func)
    index = SAVES.get(name, SAVES.get(name.rpartition(".")[2]))
    if index is None:
        return None
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)] if name.endswith(PROJECTS_SAVE) else []
    named = next((argument for argument in arguments if _pattern(argument, values)[0].endswith(WEIGHTS)), None)
    keywords = (keyword.value for keyword in call.keywords if keyword.arg in PATH_KEYWORDS)
    return named or (call.args[index] if len(call.args) > index else next(keywords, None))


def _values(tree: ast.Module) -> Values:
    """Return the values of each name in the code: of its assignments, and of the calls with that parameter."""
    values = dict[str, list[ast.expr]]()
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    values.setdefault(target.id, []).append(node.value)
        function = functions.get(ast.unparse(node.func)) if isinstance(node, ast.Call) else None
        if function is not None and isinstance(node, ast.Call):
            for name, value in _arguments(function, node):
                values.setdefault(name, []).append(value)
    return values


def _value_of(name: ast.Name, values: Values) -> ast.expr | None:
    """Return the value that a name has: its only one, or that of the assignment before; None where it is not known."""
    several = values.get(name.id, ())
    before = [value for value in several if value.lineno < name.lineno]
    return several[0] if len(several) == 1 else max(before, key=lambda value: value.lineno, default=None)


def _arguments(function: ast.FunctionDef, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Yield each parameter of a function with what a call gives it, or its default."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    defaults = function.args.defaults
    values = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    values |= dict(zip(names, call.args, strict=False))
    yield from (values | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}).items()


def _pattern(node: ast.expr, values: Values, depth: int = DEPTH_MAX) -> tuple[str, str]:
    """Return a path as a shell pattern, and the code of what varies in it."""

    def joined(parts: Sequence[ast.expr], between: str) -> tuple[str, str]:
        pairs = [_pattern(part, values, depth - 1) for part in parts]
        return between.join(pattern for pattern, _ in pairs), " ".join(code for _, code in pairs)

    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value, ""
    value = _value_of(node, values) if isinstance(node, ast.Name) and depth else None
    if isinstance(node, ast.Name) and value is not None:
        pattern, code = _pattern(value, values, depth - 1)
        return pattern, f"{node.id} {code}" if ANY in pattern else code
    if isinstance(node, ast.JoinedStr):
        return joined(node.values, "")
    if isinstance(node, ast.FormattedValue) and depth:
        return _pattern(node.value, values, depth - 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Add) and depth:
        return joined([node.left, node.right], "/" if isinstance(node.op, ast.Div) else "")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        pattern, code = _pattern(node.left, values, depth - 1) if depth else (ANY, "")
        return re.sub(r"%[-+ 0-9.]*[a-zA-Z]", ANY, pattern), f"{code} {ast.unparse(node.right)}"
    if isinstance(node, ast.Call) and depth:
        name = ast.unparse(node.func)
        last = name.rpartition(".")[2]
        if last == "join" and "path" in name:
            return joined(node.args, "/")
        if last == "joinpath" and isinstance(node.func, ast.Attribute):
            return joined([node.func.value, *node.args], "/")
        if last == "format" and isinstance(node.func, ast.Attribute):
            pattern, code = _pattern(node.func.value, values, depth - 1)
            return re.sub(r"\{[^}]*\}", ANY, pattern), f"{code} {ast.unparse(node)}"
        if last in SAME_PATH and node.args:
            return joined(node.args, "/")
        if last in SAME_PATH and isinstance(node.func, ast.Attribute):
            return _pattern(node.func.value, values, depth - 1)
    return ANY, ast.unparse(node)
