"""Paths in a script's code as text. A private character stands for each part that the code does not say."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from orchestrator.service.commands.init.call_frames import (
    DEPTH_MAX,
    CallReader,
    Frame,
    Place,
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
    """Reads paths from code, and remembers what each private character stands for."""

    def __init__(self, calls: CallReader) -> None:
        """Begin without any character."""
        self.calls = calls
        self._characters: dict[tuple[str, object], str] = {}
        self._codes: dict[str, str] = {}
        self._aliases: dict[str, set[str]] = {}  # text -> names of the code for it
        self._unsure: set[str] = set()

    def read(self, node: ast.expr, frame: Frame) -> str:
        """Return a path as text; equal texts are the same path."""
        text = self._read(node, frame, DEPTH_MAX)
        return re.sub(r"(?<!^)//+", "/", text).removeprefix("./").rstrip("/")

    def pattern(self, text: str) -> str:
        """Return the text as a shell pattern."""
        return re.sub(r"\*+", "*", UNKNOWN.sub("*", text))

    def varying(self, text: str) -> str:
        """Return the code of what is unknown in the text, with the names of the code for the whole."""
        names = sorted(self._aliases.get(text, ()))
        for character in "".join(UNKNOWN.findall(text)):
            names += [*sorted(self._aliases.get(character, ())), self._codes[character]]
        return " ".join(names)

    def is_unsure(self, text: str) -> bool:
        """Return whether runs may differ in this path."""
        return text in self._unsure

    def doubt(self, text: str) -> None:
        """Note that runs may differ in this path."""
        self._unsure.add(text)

    def _unknown(self, node: ast.expr, frame: Frame) -> str:
        code = ast.unparse(node)
        is_fresh = (
            isinstance(node, ast.Call) and code.partition("(")[0].rpartition(".")[2] in TEMPORARIES
        )
        key = (code, (frame.order, node.lineno) if is_fresh else None)
        character = self._characters.setdefault(key, chr(min(LAST, FIRST + len(self._characters))))
        self._codes[character] = code
        return character

    def _read(self, node: ast.expr, frame: Frame, depth: int) -> str:
        text: str | None = None
        match node:
            case ast.Constant(value=str(literal)):
                return literal
            case _ if not depth:
                pass
            case ast.JoinedStr(values=values):
                text = self._join(values, "", frame, depth)
            case ast.FormattedValue(value=value):
                text = self._read(value, frame, depth)
            case ast.NamedExpr(value=value):
                text = self._read(value, frame, depth - 1)
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                text = self._join([left, right], "/", frame, depth)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                text = self._join([left, right], "", frame, depth)
            case ast.BinOp(left=left, op=ast.Mod(), right=ast.Tuple(elts=values)):
                text = self._filled(PERCENT, left, values, frame, depth)
            case ast.BinOp(left=left, op=ast.Mod(), right=right):
                text = self._filled(PERCENT, left, [right], frame, depth)
            case ast.Name() | ast.Attribute():
                text = self._named(node, frame, depth - 1)
            case ast.Subscript():
                text = self._item(node, frame, depth - 1)
            case ast.IfExp(body=body):
                text = self._read(body, frame, depth - 1)
                self.doubt(text)
            case ast.Call():
                text = self._called(node, frame, depth - 1)
        return self._unknown(node, frame) if text is None else text

    def _named(self, node: ast.Name | ast.Attribute, frame: Frame, depth: int) -> str | None:
        """Return what a name or an attribute stands for; None for a counter, and where the code does not say it."""
        value = self.calls.value_of(node, frame)
        if value is not None:
            text = self._read(value[0], value[1], depth)
            if not UNKNOWN.sub("", text) and not isinstance(
                value[0], ast.Name | ast.Attribute | ast.Call
            ):
                return None
            self._aliases.setdefault(text, set()).add(ast.unparse(node))
            if not value[2]:
                self.doubt(text)
            return text
        if isinstance(node, ast.Attribute) and node.attr in PARTS:
            text = self._read(node.value, frame, depth)
            return text if self._is_open_file(node, frame) else _part(text, node.attr)
        return None

    def _item(self, node: ast.Subscript, frame: Frame, depth: int) -> str | None:
        """Return a part of a text, as `path[:-4]`, or a value of a dict of the code; None for anything else."""
        match node.slice:
            case ast.Slice(lower=lower, upper=upper, step=None):
                text = self._read(node.value, frame, depth)
                try:
                    ends = [
                        None if end is None else ast.literal_eval(end) for end in (lower, upper)
                    ]
                    return text[slice(*ends)]
                except (ValueError, TypeError):
                    return None
        value = self._value_of(node.value, frame)
        match value:
            case (ast.Dict(keys=keys, values=items), inner, _):
                for key, item in zip(keys, items, strict=True):
                    if key is not None and ast.unparse(key) == ast.unparse(node.slice):
                        return self._read(item, inner, depth)
        return None

    def _value_of(self, node: ast.expr, frame: Frame) -> Value | None:
        is_name = isinstance(node, ast.Name | ast.Attribute)
        return self.calls.value_of(node, frame) if is_name else None

    def _join(self, parts: Sequence[ast.expr], between: str, frame: Frame, depth: int) -> str:
        texts = [self._read(part, frame, depth - 1) for part in parts]
        text = between.join(part.rstrip("/") if between and part != "/" else part for part in texts)
        if any(self.is_unsure(part) for part in texts):
            self.doubt(text)
        return text

    def _filled(
        self, field: str, form: ast.expr, values: Sequence[ast.expr], frame: Frame, depth: int
    ) -> str:
        """Return the text of a form with its fields filled; fields without a value of their own get the last."""
        texts = [self._read(value, frame, depth - 1) for value in values] or [
            self._unknown(form, frame)
        ]
        rest = iter(texts)
        return re.sub(field, lambda _: next(rest, texts[-1]), self._read(form, frame, depth - 1))

    def _is_open_file(self, node: ast.Attribute, frame: Frame) -> bool:
        """Return whether `.name` is that of an open file, so its path."""
        value = self._value_of(node.value, frame)
        call = node.value if value is None else value[0]
        name = ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
        return name in (*OPENS, *TEMPORARIES)

    def _called(self, call: ast.Call, frame: Frame, depth: int) -> str | None:
        """Return the path that a call gives; None where it is not known."""
        name = self.calls.dotted(call.func)
        arguments = call.args
        last = name.rpartition(".")[2]
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        if last in OPENS:
            first = arguments[0] if arguments else None
            is_method = first is None or (
                isinstance(first, ast.Constant) and MODE.fullmatch(str(first.value))
            )
            path = receiver if is_method else first
            return None if path is None else self._read(path, frame, depth)
        if (last == "join" and "path" in name) or (last in SAME_PATH and arguments):
            return self._join(arguments, "/", frame, depth)
        if last in OF_PATH and len(arguments) == 1:
            return _part(self._read(arguments[0], frame, depth), OF_PATH[last])
        functions = [
            function
            for function in self.calls.functions_of(call, Place(frame.scope))
            if len(self._returns(function)) == 1
        ]
        if len(functions) == 1:
            inner = Frame(
                functions[0],
                frame.order,
                arguments=self.calls.bind(functions[0], call, frame),
                caller=frame,
            )
            return self._read(self._returns(functions[0])[0], inner, depth)
        if receiver is None:
            return None
        if last == "joinpath":
            return self._join([receiver, *arguments], "/", frame, depth)
        if last == "format":
            values = [*arguments, *(keyword.value for keyword in call.keywords)]
            return self._filled(r"\{[^}]*\}", receiver, values, frame, depth)
        text = self._read(receiver, frame, depth)
        if last in SAME_PATH:
            return text
        texts = [self._read(argument, frame, depth) for argument in arguments]
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

    def _returns(self, function: ast.AST) -> list[ast.expr]:
        return self.calls.returns.get(id(function), [])


def _part(text: str, name: str) -> str:
    return str(getattr(PurePosixPath(text), name))
