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
class CodePosition:
    """Where a syntax node is in the code: its function or module, its class, and whether a loop or
    a condition is around it.
    """

    scope: Scope
    owner: str = ""  # class of which the scope is a method
    in_loop: bool = False
    is_certain: bool = True  # under no condition


@dataclass(frozen=True, slots=True)
class CallPath:
    """A way in which a run reaches a function or module: the calls that lead there, with their
    arguments.
    """

    scope: Scope
    order: Order = ()
    in_loop: bool = False
    is_certain: bool = True  # each run gets there, as far as the code says
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    caller: CallPath | None = None


Argument = tuple[ast.expr, CallPath | None]  # value, and the frame in which its names stand
Value = tuple[ast.expr, CallPath, bool]  # with whether every run gives it


class CallReader:
    """All calls and assignments in the syntax trees of some modules, the script first."""

    def __init__(self, trees: Sequence[ast.Module]) -> None:
        """Collect them. Only what the first tree's module itself calls is certain to run."""
        self.calls: list[tuple[ast.Call, CodePosition]] = []
        self.values: dict[
            int, dict[str, list[tuple[ast.expr, bool]]]
        ] = {}  # id of a scope -> name -> value, certain
        self.returns: dict[int, list[ast.expr]] = {}
        self.imports: dict[str, str] = {}
        self._functions: dict[str, list[tuple[Function, CodePosition]]] = {}
        self._enclosing: dict[int, Scope] = {}
        self._sites: dict[int, list[tuple[ast.Call, CodePosition, bool]]] = {}
        self._frames: dict[int, tuple[CallPath, ...]] = {}
        self._script = trees[0]
        for tree in trees:
            self._visit_node(tree, CodePosition(tree))
        for call, place in self.calls:
            for function in self.find_functions(call, place):
                self._sites.setdefault(id(function), []).append((call, place, True))
            references = [argument.id for argument in call.args if isinstance(argument, ast.Name)]
            for name in references:  # typer.run(main)
                for function, owner in self._functions.get(name, ()):
                    if not owner.owner:
                        self._sites.setdefault(id(function), []).append((call, place, False))

    def _visit_node(self, node: ast.AST, position: CodePosition) -> None:
        """Record the calls, assignments and functions in a node at this position, and in all nodes
        below it.
        """
        inner = dict.fromkeys(ast.iter_child_nodes(node), position)
        uncertain = replace(position, is_certain=False)
        match node:
            case ast.FunctionDef(name=name, body=body) | ast.AsyncFunctionDef(name=name, body=body):
                self._functions.setdefault(name, []).append((node, position))
                self._enclosing[id(node)] = position.scope
                inner |= dict.fromkeys(body, CodePosition(node, position.owner))
            case ast.ClassDef(name=name, body=body):
                inner |= dict.fromkeys(body, replace(position, owner=name))
            case ast.For(body=body) | ast.AsyncFor(body=body) | ast.While(body=body):
                inner |= dict.fromkeys(body, replace(position, in_loop=True))
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
                self.calls.append((node, position))
            case ast.Return(value=ast.expr() as value):
                self.returns.setdefault(id(position.scope), []).append(value)
            case ast.Import(names=names):
                self.imports |= {alias.asname or alias.name: alias.name for alias in names}
            case ast.ImportFrom(module=module, names=names):
                prefix = f"{module}." if module else ""
                self.imports |= {alias.asname or alias.name: prefix + alias.name for alias in names}
        for name, value in _iterate_assigned_names_and_values(node):
            self.values.setdefault(id(position.scope), {}).setdefault(name, []).append(
                (value, position.is_certain)
            )
        for child, where in inner.items():
            self._visit_node(child, where)

    def find_dotted_name(self, node: ast.expr) -> str:
        """Return the full name of a called expression: `os.replace` for `replace` after `from os
        import replace`.
        """
        first, dot, rest = ast.unparse(node).partition(".")
        return f"{self.imports.get(first, first)}{dot}{rest}"

    def find_functions(self, call: ast.Call, call_position: CodePosition) -> list[Function]:
        """Return the functions of these modules that a call may run; a call of a class runs its
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
                call_position.owner
                if receiver in ("self", "cls", "super()")
                else self._find_class_name(call.func.value, call_position)
            )
            name = call.func.attr if owner or receiver in self.imports else ""
        candidates = self._functions.get(name, [])
        methods = [function for function, where in candidates if where.owner == owner]
        inherited = [function for function, where in candidates if where.owner] if owner else []
        return methods or inherited

    def _find_class_name(self, receiver: ast.expr, position: CodePosition) -> str:
        """Return the name of an object's class, from an expression such as `Trainer(args)` or a
        name with such a value; else "".
        """
        values = [receiver]
        for scope in (position.scope, self._script):
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

    def list_call_paths(self, scope: Scope, depth: int = DEPTH_MAX) -> tuple[CallPath, ...]:
        """Return the ways in which a run reaches a function or module.

        A function that nothing calls has one way, which is not certain.
        """
        if isinstance(scope, ast.Module):
            return (CallPath(scope, is_certain=scope is self._script),)
        if id(scope) in self._frames:
            return self._frames[id(scope)]
        sites = self._sites.get(id(scope), []) if depth else []
        self._frames[id(scope)] = ()  # a function that calls itself adds no way
        frames = list[CallPath]()
        for call, place, has_arguments in sites:
            is_only = len(self.find_functions(call, place)) == 1 or not has_arguments
            for caller in self.list_call_paths(place.scope, depth - 1):
                frames.append(
                    CallPath(
                        scope,
                        (*caller.order, (call.lineno, call.col_offset)),
                        caller.in_loop or place.in_loop,
                        caller.is_certain and place.is_certain and is_only,
                        self.bind_arguments(scope, call if has_arguments else None, caller),
                        caller,
                    )
                )
        unknown = CallPath(
            scope,
            ((scope.lineno, 0),),
            is_certain=False,
            arguments=self.bind_arguments(scope, None, None),
        )
        self._frames[id(scope)] = tuple(frames[:FRAMES_MAX]) or (unknown,)
        return self._frames[id(scope)]

    def bind_arguments(
        self, function: Function, call: ast.Call | None, caller_path: CallPath | None
    ) -> dict[str, Argument]:
        """Return {parameter: (its argument in this call or its default, path on which that is read
        or None)}.

        Without a call there are only defaults, whose path is None.
        """
        pairs = list(iterate_parameters_and_defaults(function.args))
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
            bound[name] = (value, caller_path)
        return bound | {
            keyword.arg: (keyword.value, caller_path) for keyword in call.keywords if keyword.arg
        }

    def find_value(self, name: ast.expr, call_path: CallPath) -> Value | None:
        """Return (expression, path on which it is read, whether every run gives it) for the value
        of a name or an attribute.

        In the name's own function, the last assignment before it counts. None where the code does
        not tell the value.
        """
        text = ast.unparse(name)
        for scope, way in self._iterate_enclosing_scopes_and_paths(call_path):
            values = self.values.get(id(scope), {}).get(text, [])
            if scope is call_path.scope:
                values = [pair for pair in values if pair[0].lineno < name.lineno]
            if values:
                value, is_certain = values[-1]
                return value, way, is_certain or len(values) == 1
            if text in way.arguments:
                value, caller = way.arguments[text]
                return value, caller or CallPath(self._find_module(scope)), True
        return self._find_attribute_value(text) if isinstance(name, ast.Attribute) else None

    def _iterate_enclosing_scopes_and_paths(
        self, call_path: CallPath
    ) -> Iterator[tuple[Scope, CallPath]]:
        """Yield (function or module, path to it) for the path's own scope and those around that,
        from inside out.
        """
        scope = call_path.scope
        callers = list[CallPath]()
        yield scope, call_path
        while call_path.caller is not None:
            call_path = call_path.caller
            callers.append(call_path)
        while id(scope) in self._enclosing:
            scope = self._enclosing[id(scope)]
            yield (
                scope,
                next((caller for caller in callers if caller.scope is scope), CallPath(scope)),
            )

    def _find_attribute_value(self, attribute: str) -> Value | None:
        """Return the value of an attribute such as `self.folder`, as `find_value` does.

        None unless the code sets the attribute exactly once.
        """
        places = list[tuple[ast.expr, Function]]()
        for functions in self._functions.values():
            for function, _ in functions:
                values = self.values.get(id(function), {}).get(attribute, [])
                places += [(value, function) for value, _ in values]
        if len(places) != 1:
            return None
        value, function = places[0]
        return value, next(iter(self.list_call_paths(function)), CallPath(function)), True

    def _find_module(self, scope: Scope) -> Scope:
        """Return the module in which a function is defined; a module itself."""
        while id(scope) in self._enclosing:
            scope = self._enclosing[id(scope)]
        return scope


def iterate_parameters_and_defaults(
    arguments: ast.arguments,
) -> Iterator[tuple[ast.arg, ast.expr | None]]:
    """Yield (parameter, its default expression or None) of a function's parameters, in order."""
    positional = [*arguments.posonlyargs, *arguments.args]
    blank: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    yield from zip(positional, [*blank, *arguments.defaults], strict=True)
    yield from zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)


def _holds_in_every_run(condition: ast.expr) -> bool:
    """Return whether a condition is true in every run, on the rank that saves, such as `if rank ==
    0`.
    """
    parts = (
        condition.values
        if isinstance(condition, ast.BoolOp) and isinstance(condition.op, ast.And)
        else [condition]
    )
    return all(OF_EVERY_RUN.search(ast.unparse(part)) for part in parts)


def _iterate_assigned_names_and_values(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, value's expression) of each name that a syntax node sets.

    Several names that are set from one call all get that call. A loop's variable has no value of
    its own: it gets `*` and the expression over which the loop runs.
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
