"""Reads the calls of a script from its syntax trees: caller, place, and what each argument stands for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.specs.replace import replace

DEPTH_MAX = 12  # calls within each other, and names that stand for each other
FRAMES_MAX = 64  # of a function
# Conditions that hold on the rank that saves, in every run: `if rank == 0`, `if
# accelerator.is_main_process`.
OF_EVERY_RUN = re.compile(
    r"(?<!lora_)rank\b.*(== 0|in [\[(])|^not [\w.]*(?<!lora_)rank\b"
    r"|rank_?0|is_main|is_master|(main|master)_process|_zero\b|__name__",
    re.IGNORECASE,
)
Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = ast.Module | Function
Order = tuple[tuple[int, int], ...]  # (line, column) of each call on the way, the outermost first


@dataclass(frozen=True, slots=True)
class Place:
    """Where a syntax node is in the code: its function or module, its class, and whether it is in a
    loop or under a condition.
    """

    scope: Scope
    owner: str = ""  # class of which the scope is a method
    in_loop: bool = False
    is_certain: bool = True  # under no condition


@dataclass(frozen=True, slots=True)
class Frame:
    """A way to reach a function or module: the calls that lead there, with their arguments."""

    scope: Scope
    order: Order = ()
    in_loop: bool = False
    is_certain: bool = True  # each run gets there, as far as the code says
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    caller: Frame | None = None


Argument = tuple[ast.expr, Frame | None]  # value, and the frame in which its names stand
Value = tuple[ast.expr, Frame, bool]  # with whether every run gives it


class CallReader:
    """The calls and assignments of some modules, the script first."""

    def __init__(self, trees: Sequence[ast.Module]) -> None:
        """Read the syntax trees. Only what the first tree's module calls is certain to run."""
        self.calls: list[tuple[ast.Call, Place]] = []
        self.values: dict[
            int, dict[str, list[tuple[ast.expr, bool]]]
        ] = {}  # id of a scope -> name -> value, certain
        self.returns: dict[int, list[ast.expr]] = {}
        self.imports: dict[str, str] = {}
        self._functions: dict[str, list[tuple[Function, Place]]] = {}
        self._enclosing: dict[int, Scope] = {}
        self._sites: dict[int, list[tuple[ast.Call, Place, bool]]] = {}
        self._frames: dict[int, tuple[Frame, ...]] = {}
        self._script = trees[0]
        for tree in trees:
            self._visit_node(tree, Place(tree))
        for call, place in self.calls:
            for function in self.find_functions(call, place):
                self._sites.setdefault(id(function), []).append((call, place, True))
            references = [argument.id for argument in call.args if isinstance(argument, ast.Name)]
            for name in references:  # typer.run(main)
                for function, owner in self._functions.get(name, ()):
                    if not owner.owner:
                        self._sites.setdefault(id(function), []).append((call, place, False))

    def _visit_node(self, node: ast.AST, place: Place) -> None:
        inner = dict.fromkeys(ast.iter_child_nodes(node), place)
        uncertain = replace(place, is_certain=False)
        match node:
            case ast.FunctionDef(name=name, body=body) | ast.AsyncFunctionDef(name=name, body=body):
                self._functions.setdefault(name, []).append((node, place))
                self._enclosing[id(node)] = place.scope
                inner |= dict.fromkeys(body, Place(node, place.owner))
            case ast.ClassDef(name=name, body=body):
                inner |= dict.fromkeys(body, replace(place, owner=name))
            case ast.For(body=body) | ast.AsyncFor(body=body) | ast.While(body=body):
                inner |= dict.fromkeys(body, replace(place, in_loop=True))
            case (
                ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp() | ast.Lambda()
            ):
                inner = dict.fromkeys(inner, replace(uncertain, in_loop=True))
            case ast.If(test=test, body=body, orelse=orelse):
                inner |= dict.fromkeys(orelse, uncertain)
                if not _holds_in_every_run(test):
                    inner |= dict.fromkeys(body, uncertain)
            case ast.IfExp() | ast.BoolOp() | ast.match_case() | ast.ExceptHandler():
                inner = dict.fromkeys(inner, uncertain)
            case ast.Call():
                self.calls.append((node, place))
            case ast.Return(value=ast.expr() as value):
                self.returns.setdefault(id(place.scope), []).append(value)
            case ast.Import(names=names):
                self.imports |= {alias.asname or alias.name: alias.name for alias in names}
            case ast.ImportFrom(module=module, names=names):
                prefix = f"{module}." if module else ""
                self.imports |= {alias.asname or alias.name: prefix + alias.name for alias in names}
        for name, value in _iterate_assignments(node):
            self.values.setdefault(id(place.scope), {}).setdefault(name, []).append(
                (value, place.is_certain)
            )
        for child, where in inner.items():
            self._visit_node(child, where)

    def dotted_name(self, node: ast.expr) -> str:
        """Return the full name of a called expression: `os.replace` for `replace` after `from os
        import replace`.
        """
        first, dot, rest = ast.unparse(node).partition(".")
        return f"{self.imports.get(first, first)}{dot}{rest}"

    def find_functions(self, call: ast.Call, code_place: Place) -> list[Function]:
        """Return the functions of the code that a call may run; a call of a class runs its
        constructor.
        """
        name = ""
        owner = ""
        if isinstance(call.func, ast.Name):
            name = call.func.id
            if any(where.owner == name for _, where in self._functions.get("__init__", ())):
                name, owner = "__init__", name
        elif isinstance(call.func, ast.Attribute):
            receiver = ast.unparse(call.func.value)
            owner = (
                code_place.owner
                if receiver in ("self", "cls", "super()")
                else self._find_class(call.func.value, code_place)
            )
            name = call.func.attr if owner or receiver in self.imports else ""
        candidates = self._functions.get(name, [])
        methods = [function for function, where in candidates if where.owner == owner]
        inherited = [function for function, where in candidates if where.owner] if owner else []
        return methods or inherited

    def _find_class(self, receiver: ast.expr, code_place: Place) -> str:
        """Return the class name of an object: of the expression `Trainer(args)`, or of a name with
        such a value; else "".
        """
        values = [receiver]
        for scope in (code_place.scope, self._script):
            values += [
                value for value, _ in self.values.get(id(scope), {}).get(ast.unparse(receiver), ())
            ]
        owners = {
            where.owner
            for functions in self._functions.values()
            for _, where in functions
            if where.owner
        }
        calls = [ast.unparse(value.func) for value in values if isinstance(value, ast.Call)]
        return next((name for name in calls if name in owners), "")

    def list_frames(self, scope: Scope, depth: int = DEPTH_MAX) -> tuple[Frame, ...]:
        """Return the ways to reach a function or module. A function that nothing calls has one way,
        which is not certain.
        """
        if isinstance(scope, ast.Module):
            return (Frame(scope, is_certain=scope is self._script),)
        if id(scope) in self._frames:
            return self._frames[id(scope)]
        sites = self._sites.get(id(scope), []) if depth else []
        self._frames[id(scope)] = ()  # a function that calls itself adds no way
        frames = list[Frame]()
        for call, place, has_arguments in sites:
            is_only = len(self.find_functions(call, place)) == 1 or not has_arguments
            for caller in self.list_frames(place.scope, depth - 1):
                frames.append(
                    Frame(
                        scope,
                        (*caller.order, (call.lineno, call.col_offset)),
                        caller.in_loop or place.in_loop,
                        caller.is_certain and place.is_certain and is_only,
                        self.bind_arguments(scope, call if has_arguments else None, caller),
                        caller,
                    )
                )
        unknown = Frame(
            scope,
            ((scope.lineno, 0),),
            is_certain=False,
            arguments=self.bind_arguments(scope, None, None),
        )
        self._frames[id(scope)] = tuple(frames[:FRAMES_MAX]) or (unknown,)
        return self._frames[id(scope)]

    def bind_arguments(
        self, function: Function, call: ast.Call | None, caller: Frame | None
    ) -> dict[str, Argument]:
        """Return {parameter: its argument in this call, or its default}. Each value comes with the
        caller's frame, or None.
        """
        pairs = list(iterate_parameters(function.args))
        bound: dict[str, Argument] = {
            argument.arg: (default, None) for argument, default in pairs if default is not None
        }
        if call is None:
            return bound
        names = [argument.arg for argument, _ in pairs if argument not in function.args.kwonlyargs]
        names = names[1:] if names[:1] in (["self"], ["cls"]) else names
        for name, value in zip(names, call.args, strict=False):
            if isinstance(value, ast.Starred):
                break
            bound[name] = (value, caller)
        return bound | {
            keyword.arg: (keyword.value, caller) for keyword in call.keywords if keyword.arg
        }

    def find_value(self, name: ast.expr, frame: Frame) -> Value | None:
        """Return (expression, frame in which it is read, whether every run gives it) for a name or
        an attribute.

        In the name's own function, the last assignment before it counts. None where the code does
        not say the value.
        """
        text = ast.unparse(name)
        for scope, way in self._enclosing_scopes(frame):
            values = self.values.get(id(scope), {}).get(text, [])
            if scope is frame.scope:
                values = [pair for pair in values if pair[0].lineno < name.lineno]
            if values:
                value, is_certain = values[-1]
                return value, way, is_certain or len(values) == 1
            if text in way.arguments:
                value, caller = way.arguments[text]
                return value, caller or Frame(self._find_module(scope)), True
        return self._find_attribute_value(text) if isinstance(name, ast.Attribute) else None

    def _enclosing_scopes(self, frame: Frame) -> Iterator[tuple[Scope, Frame]]:
        """Yield (function or module, its frame) for the frame's own scope and those around it, from
        inside out.
        """
        scope = frame.scope
        callers = list[Frame]()
        yield scope, frame
        while frame.caller is not None:
            frame = frame.caller
            callers.append(frame)
        while id(scope) in self._enclosing:
            scope = self._enclosing[id(scope)]
            yield scope, next((caller for caller in callers if caller.scope is scope), Frame(scope))

    def _find_attribute_value(self, attribute: str) -> Value | None:
        """Return the value of an attribute such as `self.folder`, as `find_value` does, if the code
        sets it exactly once.
        """
        places = list[tuple[ast.expr, Function]]()
        for functions in self._functions.values():
            for function, _ in functions:
                values = self.values.get(id(function), {}).get(attribute, [])
                places += [(value, function) for value, _ in values]
        if len(places) != 1:
            return None
        value, function = places[0]
        return value, next(iter(self.list_frames(function)), Frame(function)), True

    def _find_module(self, scope: Scope) -> Scope:
        while id(scope) in self._enclosing:
            scope = self._enclosing[id(scope)]
        return scope


def iterate_parameters(arguments: ast.arguments) -> Iterator[tuple[ast.arg, ast.expr | None]]:
    """Yield (parameter, its default) of a function; None where the parameter has no default."""
    positional = [*arguments.posonlyargs, *arguments.args]
    blank: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    yield from zip(positional, [*blank, *arguments.defaults], strict=True)
    yield from zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)


def _holds_in_every_run(condition: ast.expr) -> bool:
    parts = (
        condition.values
        if isinstance(condition, ast.BoolOp) and isinstance(condition.op, ast.And)
        else [condition]
    )
    return all(OF_EVERY_RUN.search(ast.unparse(part)) for part in parts)


def _iterate_assignments(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, value) of each name that a node sets. Several names that are set from one call
    all get that call.

    A loop's variable has no value of its own: it gets `*` and the expression over which the loop
    runs.
    """
    match node:
        case ast.Assign(targets=targets, value=value):
            pass
        case (
            ast.AnnAssign(target=target, value=ast.expr() as value)
            | ast.NamedExpr(target=target, value=value)
            | ast.withitem(context_expr=value, optional_vars=ast.expr() as target)
        ):
            targets = [target]
        case (
            ast.For(target=target, iter=runs)
            | ast.AsyncFor(target=target, iter=runs)
            | ast.comprehension(target=target, iter=runs)
        ):
            targets = [target]
            value = ast.copy_location(ast.Starred(runs, ast.Load()), runs)
        case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=added):
            before = ast.copy_location(ast.Name(name, ast.Load()), node)
            targets = [target]
            value = ast.copy_location(ast.BinOp(before, op, added), node)
        case _:
            return
    for target in targets:
        match target, value:
            case ((ast.Name() | ast.Attribute()), _):
                yield ast.unparse(target), value
            case ast.Tuple(elts=names), (ast.Call() | ast.Starred()):
                yield from ((ast.unparse(name), value) for name in names)
            case ast.Tuple(elts=names), ast.Tuple(elts=parts) if len(names) == len(parts):
                yield from zip(map(ast.unparse, names), parts, strict=True)
