"""Paths in a script's code as text. A private character stands for each part that the code does not say."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from orchestrator.service.commands.init.call_frames import (
    DEPTH_MAX,
    CallPath,
    CallReader,
    CodePosition,
    Value,
)

FIRST, LAST = 0xE000, 0xF8FF  # Unicode's private use area
UNKNOWN = re.compile(f"[{chr(FIRST)}-{chr(LAST)}]+")
SAME_PATH = (  # calls on a path
    *(
        "Path",
        "PurePath",
        "str",
        "fspath",
        "abspath",
        "realpath",
        "expanduser",
        "as_posix",
        "resolve",
        "absolute",
    ),
)
OPENS = ("open", "fdopen", "atomic_write", "AtomicFile")  # calls whose file stands for its path
TEMPORARIES = (
    "NamedTemporaryFile",
    "TemporaryDirectory",
    "mkstemp",
    "mkdtemp",
    "mktemp",
    "TemporaryFile",
)
MODE = re.compile(r"[rwabx+t]+")
PARTS = ("name", "stem", "suffix", "parent")  # attributes of a path
PERCENT = r"%[-+ 0-9.]*[a-zA-Z]"  # a field of a form
OF_PATH = {"dirname": "parent", "basename": "name"}  # os.path.dirname(path)


class PathReader:
    """Reads the paths in a script's code as texts. A private character stands for each part that
    the code does not tell.
    """

    def __init__(self, call_reader: CallReader) -> None:
        """Start without a private character for any part."""
        self.calls = call_reader
        self._characters: dict[tuple[str, object], str] = {}
        self._codes: dict[str, str] = {}
        self._aliases: dict[str, set[str]] = {}  # text -> names of the code for it
        self._unsure: set[str] = set()

    def read_path(self, node: ast.expr, call_path: CallPath) -> str:
        """Return a path in the code as text; equal texts are the same path. A private character is
        an unknown part.
        """
        text = self._read_expression(node, call_path, DEPTH_MAX)
        return re.sub(r"(?<!^)//+", "/", text).removeprefix("./").rstrip("/")

    def make_shell_pattern(self, path_text: str) -> str:
        """Return the path text as a shell pattern, with `*` for each unknown part."""
        return re.sub(r"\*+", "*", UNKNOWN.sub("*", path_text))

    def describe_unknown_parts(self, path_text: str) -> str:
        """Return the code of the unknown parts of a path text, and the names that the code gives to
        them and to the whole.
        """
        names = sorted(self._aliases.get(path_text, ()))
        for character in "".join(UNKNOWN.findall(path_text)):
            names += [*sorted(self._aliases.get(character, ())), self._codes[character]]
        return " ".join(names)

    def is_unsure(self, path_text: str) -> bool:
        """Return whether this path may differ between runs."""
        return path_text in self._unsure

    def mark_unsure(self, path_text: str) -> None:
        """Record that this path may differ between runs."""
        self._unsure.add(path_text)

    def _make_unknown_character(self, node: ast.expr, call_path: CallPath) -> str:
        """Return the private character for an expression whose value the code does not tell on this
        call path.
        """
        code = ast.unparse(node)
        is_fresh = (
            isinstance(node, ast.Call) and code.partition("(")[0].rpartition(".")[2] in TEMPORARIES
        )
        key = (code, (call_path.order, node.lineno) if is_fresh else None)
        character = self._characters.setdefault(key, chr(min(LAST, FIRST + len(self._characters))))
        self._codes[character] = code
        return character

    def _read_expression(self, node: ast.expr, call_path: CallPath, depth: int) -> str:
        text: str | None = None
        match node:
            case ast.Constant(value=str(literal)):
                return literal
            case _ if not depth:
                pass
            case ast.JoinedStr(values=values):
                text = self._join_parts(values, "", call_path, depth)
            case ast.FormattedValue(value=value):
                text = self._read_expression(value, call_path, depth)
            case ast.NamedExpr(value=value):
                text = self._read_expression(value, call_path, depth - 1)
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                text = self._join_parts([left, right], "/", call_path, depth)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                text = self._join_parts([left, right], "", call_path, depth)
            case ast.BinOp(left=left, op=ast.Mod(), right=ast.Tuple(elts=values)):
                text = self._fill_format(PERCENT, left, values, call_path, depth)
            case ast.BinOp(left=left, op=ast.Mod(), right=right):
                text = self._fill_format(PERCENT, left, [right], call_path, depth)
            case ast.Name() | ast.Attribute():
                text = self._read_name(node, call_path, depth - 1)
            case ast.Subscript():
                text = self._read_item(node, call_path, depth - 1)
            case ast.IfExp(body=body):
                text = self._read_expression(body, call_path, depth - 1)
                self.mark_unsure(text)
            case ast.Call():
                text = self._read_call(node, call_path, depth - 1)
        return self._make_unknown_character(node, call_path) if text is None else text

    def _read_name(
        self, node: ast.Name | ast.Attribute, call_path: CallPath, depth: int
    ) -> str | None:
        """Return the path text of a name or an attribute; None for a counter, and where the code
        does not tell the value.
        """
        value = self.calls.find_value(node, call_path)
        if value is not None:
            text = self._read_expression(value[0], value[1], depth)
            if not UNKNOWN.sub("", text) and not isinstance(
                value[0], ast.Name | ast.Attribute | ast.Call
            ):
                return None
            self._aliases.setdefault(text, set()).add(ast.unparse(node))
            if not value[2]:
                self.mark_unsure(text)
            return text
        if isinstance(node, ast.Attribute) and node.attr in PARTS:
            text = self._read_expression(node.value, call_path, depth)
            return (
                text
                if self._is_open_file(node, call_path)
                else _get_path_attribute(text, node.attr)
            )
        return None

    def _read_item(self, node: ast.Subscript, call_path: CallPath, depth: int) -> str | None:
        """Return the path text of a slice such as `path[:-4]`, or of an entry of a dict in the
        code; None for anything else.
        """
        match node.slice:
            case ast.Slice(lower=lower, upper=upper, step=None):
                text = self._read_expression(node.value, call_path, depth)
                try:
                    ends = [
                        None if end is None else ast.literal_eval(end) for end in (lower, upper)
                    ]
                    return text[slice(*ends)]
                except (ValueError, TypeError):
                    return None
        value = self._find_value(node.value, call_path)
        match value:
            case (ast.Dict(keys=keys, values=items), inner, _):
                for key, item in zip(keys, items, strict=True):
                    if key is not None and ast.unparse(key) == ast.unparse(node.slice):
                        return self._read_expression(item, inner, depth)
        return None

    def _find_value(self, node: ast.expr, call_path: CallPath) -> Value | None:
        is_name = isinstance(node, ast.Name | ast.Attribute)
        return self.calls.find_value(node, call_path) if is_name else None

    def _join_parts(
        self, parts: Sequence[ast.expr], separator: str, call_path: CallPath, depth: int
    ) -> str:
        texts = [self._read_expression(part, call_path, depth - 1) for part in parts]
        text = separator.join(
            part.rstrip("/") if separator and part != "/" else part for part in texts
        )
        if any(self.is_unsure(part) for part in texts):
            self.mark_unsure(text)
        return text

    def _fill_format(
        self,
        field_pattern: str,
        format_string: ast.expr,
        values: Sequence[ast.expr],
        call_path: CallPath,
        depth: int,
    ) -> str:
        """Return the path text of a format string with its fields filled by these values.

        Fields beyond the values get the last value.
        """
        texts = [self._read_expression(value, call_path, depth - 1) for value in values] or [
            self._make_unknown_character(format_string, call_path)
        ]
        rest = iter(texts)
        return re.sub(
            field_pattern,
            lambda _: next(rest, texts[-1]),
            self._read_expression(format_string, call_path, depth - 1),
        )

    def _is_open_file(self, node: ast.Attribute, call_path: CallPath) -> bool:
        """Return whether this is the attribute `.name` of an open file, which is the file's path."""
        value = self._find_value(node.value, call_path)
        call = node.value if value is None else value[0]
        name = ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
        return name in (*OPENS, *TEMPORARIES)

    def _read_call(self, call: ast.Call, call_path: CallPath, depth: int) -> str | None:
        """Return the path text that a call returns; None where the code does not tell it."""
        name = self.calls.find_dotted_name(call.func)
        arguments = call.args
        last = name.rpartition(".")[2]
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        if last in OPENS:
            first = arguments[0] if arguments else None
            is_method = first is None or (
                isinstance(first, ast.Constant) and MODE.fullmatch(str(first.value))
            )
            path = receiver if is_method else first
            return None if path is None else self._read_expression(path, call_path, depth)
        if (last == "join" and "path" in name) or (last in SAME_PATH and arguments):
            return self._join_parts(arguments, "/", call_path, depth)
        if last in OF_PATH and len(arguments) == 1:
            return _get_path_attribute(
                self._read_expression(arguments[0], call_path, depth), OF_PATH[last]
            )
        functions = [
            function
            for function in self.calls.find_functions(call, CodePosition(call_path.scope))
            if len(self._list_returned_expressions(function)) == 1
        ]
        if len(functions) == 1:
            inner = CallPath(
                functions[0],
                call_path.order,
                arguments=self.calls.bind_arguments(functions[0], call, call_path),
                caller=call_path,
            )
            return self._read_expression(
                self._list_returned_expressions(functions[0])[0], inner, depth
            )
        if receiver is None:
            return None
        if last == "joinpath":
            return self._join_parts([receiver, *arguments], "/", call_path, depth)
        if last == "format":
            values = [*arguments, *(keyword.value for keyword in call.keywords)]
            return self._fill_format(r"\{[^}]*\}", receiver, values, call_path, depth)
        text = self._read_expression(receiver, call_path, depth)
        if last in SAME_PATH:
            return text
        texts = [self._read_expression(argument, call_path, depth) for argument in arguments]
        if last == "replace" and len(texts) == 2:
            return text.replace(texts[0], texts[1])
        if last == "removesuffix" and len(texts) == 1:
            return text.removesuffix(texts[0])
        if last in ("with_suffix", "with_name", "with_stem") and len(texts) == 1:
            try:
                return str(getattr(PurePosixPath(text), last)(texts[0]))
            except ValueError:
                return None
        return None

    def _list_returned_expressions(self, function: ast.AST) -> list[ast.expr]:
        return self.calls.returns.get(id(function), [])


def _get_path_attribute(path_text: str, attribute_name: str) -> str:
    """Return what a `Path` with this text has as this attribute, such as `name`, `stem` or
    `parent`, as text.
    """
    return str(getattr(PurePosixPath(path_text), attribute_name))
