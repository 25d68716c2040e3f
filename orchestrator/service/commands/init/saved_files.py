"""Names of files that a script leaves, as shell patterns such as `ckpt_*.pt`, read from its syntax tree.

Read is what each run does, as far as the code says: a path of literals and variables, given to a call that saves, and
renamed by a call in sight. Everything else is guessed, and never becomes a condition of success.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePosixPath

from orchestrator.service.commands.init.call_frames import CallPath, CallReader, CodePosition
from orchestrator.service.commands.init.path_text import PathReader
from orchestrator.specs.replace import replace

SAVES = {  # last name of a call that saves -> index of the argument that is its path
    "torch.save": 1,
    "save_file": 1,  # safetensors
    "save_model": 1,  # safetensors
    "save_pretrained": 0,
    "save_state": 0,
    "save_checkpoint": 0,
}
PATH_KEYWORDS = (
    "f",
    "path",
    "filename",
    "output_dir",
    "save_directory",
    "save_dir",
    "checkpoint_id",
)
FOLDERS = ("save_pretrained", "save_state")  # calls that write files into the path
# A call of another name that begins or ends so: its path is the first argument that names weights.
OTHER_SAVES = re.compile(r"^_?(save|write|store|dump|export)|(save|dump)$")
MOVES = {
    "os.replace": True,
    "os.rename": True,
    "os.renames": True,
    "shutil.move": True,
}  # -> whether the source goes
MOVES |= dict.fromkeys(
    ("os.link", "os.symlink", "shutil.copy", "shutil.copy2", "shutil.copyfile"), False
)
MOVES |= {"shutil.copytree": False}
METHODS = {
    "rename": True,
    "replace": True,
    "move": True,
    "mv": True,
    "copy": False,
    "cp": False,
}  # PATH.rename(TARGET)
LINKS = ("symlink_to", "hardlink_to")  # NAME.symlink_to(PATH)
REMOVES = ("os.remove", "os.unlink", "shutil.rmtree")
MOVES_MAX = 16  # of one file
# In a path that is not the last one of its file, and in the code of such a path.
TEMPORARY = re.compile(
    r"(?<![a-z])(tmp|temp|partial|incomplete|unfinished)(?![a-z])|[._]part$|~$", re.IGNORECASE
)
TEMPORARY_CODE = re.compile(
    r"\btmp|tempfile|mkstemp|mkdtemp|TemporaryDirectory|NamedTemporaryFile", re.IGNORECASE
)
TEMPORARY_END = re.compile(r"[._](tmp|temp|part|partial|incomplete)$", re.IGNORECASE)
# In the name of a checkpoint, or of what varies in it. Any other fixed name is taken for a result.
CHECKPOINT = re.compile(
    r"ckpt|checkpoint|check_point|step|epoch|iter|snapshot|last|latest|resume|state", re.IGNORECASE
)
WEIGHTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".tar", ".pkl", ".pickle", ".h5")
ANY = "*"


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A file that a script saves; its name is a shell pattern."""

    pattern: str  # as typed in the script, with * for what is not literal: */ckpt_*.pt
    where: str  # file and line
    is_checkpoint: bool
    # why it is only guessed to be there, or to be whole, in words; empty: it is read
    guess: str = ""
    varying: str = ""  # code of what is not literal in it: args.out step

    def find_pattern_below_output(self, *, has_folder_knob: bool) -> str | None:
        """Return the pattern relative to the output folder; None where the file is in another
        folder.

        With a knob for the output folder, the first part of the path must be that folder, not a
        literal.
        """
        first, _, rest = self.pattern.partition("/")
        relative = (
            rest if has_folder_knob and first == ANY else "" if has_folder_knob else self.pattern
        )
        is_elsewhere = relative.startswith(("/", "*/", "~")) or ".." in relative.split("/")
        has_name = re.search(r"\w", PurePosixPath(relative.removesuffix("/*")).stem) is not None
        return relative if relative and has_name and not is_elsewhere else None


@dataclass(frozen=True, slots=True)
class _Write:
    """A call in the code that writes, moves or removes a file, with the path of that file."""

    text: str  # of its path, or of what it moves
    order: tuple[tuple[int, int], ...]
    in_loop: bool
    is_certain: bool
    where: str
    target: str | None = None  # of a move
    goes: bool = False  # whether nothing is left under `text`
    is_folder: bool = False


def find_saved_files(trees: Sequence[tuple[str, ast.Module]]) -> Iterator[SavedFile]:
    """Yield the files that a run of the code has left at its end, in the order in which they are
    saved.

    `trees` are (file name, syntax tree), the script first. Code that is nested too deep gives
    nothing.
    """
    with suppress(RecursionError):
        yield from _iterate_saved_files(trees)


def _iterate_saved_files(trees: Sequence[tuple[str, ast.Module]]) -> Iterator[SavedFile]:
    calls = CallReader([tree for _, tree in trees])
    files = dict[int, str]()
    for file, tree in trees:
        files |= {id(node): file for node in ast.walk(tree) if isinstance(node, ast.Call)}
    paths = PathReader(calls)
    writes = list[_Write]()
    moves = list[_Write]()
    for call, place in calls.calls:
        for frame in calls.list_call_paths(place.scope):
            move = _read_moving_call(call, frame, place, paths, files[id(call)])
            write = (
                _read_saving_call(call, frame, place, paths, files[id(call)])
                if move is None
                else None
            )
            moves += [move] if move is not None else []
            writes += [write] if write is not None else []
    moves.sort(key=lambda move: move.order)
    sources = {write.text for write in writes}
    # what an unknown call has written under a temporary name
    writes += [
        replace(move, target=None)
        for move in moves
        if move.goes and move.target and _is_temporary_path(move.text, paths)
        if not any(source == move.text or source.startswith(f"{move.text}/") for source in sources)
    ]
    for write in sorted(writes, key=lambda write: write.order):
        for left in islice(_apply_moves(write, moves), MOVES_MAX):
            yield from _iterate_files_of_write(left, paths)


def _apply_moves(write: _Write, moves: Sequence[_Write]) -> Iterator[_Write]:
    """Yield the files that are left of a saved file, after the moves and removals that follow the
    save.
    """
    is_left = True
    for index, move in enumerate(moves, 1):
        rest = move.text == write.text or write.text.startswith(f"{move.text}/")
        if not rest or move.order < write.order:
            continue
        if move.target is not None:
            text = move.target + write.text[len(move.text) :]
            yield from _apply_moves(
                replace(move, text=text, target=None, is_folder=write.is_folder), moves[index:]
            )
        if move.goes and (move.in_loop or not write.in_loop):
            # an older checkpoint is removed, the newest is left
            is_left = move.target is None and write.in_loop
            break
    if is_left:
        yield write


def _iterate_files_of_write(write: _Write, path_reader: PathReader) -> Iterator[SavedFile]:
    """Yield the file that a write leaves, unless it is temporary or no checkpoint or result."""
    pattern = path_reader.make_shell_pattern(write.text)
    is_temporary = _is_temporary_path(write.text, path_reader)
    name = PurePosixPath(pattern).name
    if is_temporary and TEMPORARY_END.search(name):
        pattern = TEMPORARY_END.sub("", pattern)
        name = PurePosixPath(pattern).name
    elif is_temporary:
        return
    varying = path_reader.describe_unknown_parts(write.text)
    is_fixed = ANY not in name
    is_checkpoint = CHECKPOINT.search(name) is not None or (
        not is_fixed and CHECKPOINT.search(varying) is not None
    )
    is_at_end = write.is_certain and not write.in_loop
    is_checkpoint = is_checkpoint and not (is_fixed and is_at_end)
    if not name.strip("*.") or not (is_checkpoint or is_fixed):
        return
    guess = "under a temporary name" if is_temporary else ""
    if path_reader.is_unsure(write.text):
        guess = "under one of several names"
    if not guess and not is_checkpoint and not is_at_end:
        guess = "in a loop" if write.in_loop else "not in every run"
    if write.is_folder and not is_checkpoint:
        pattern += "/*"  # a folder that is written again keeps its time
    yield SavedFile(pattern, write.where, is_checkpoint, guess, varying)


def _is_temporary_path(path_text: str, path_reader: PathReader) -> bool:
    return bool(
        TEMPORARY.search(path_reader.make_shell_pattern(path_text))
        or TEMPORARY_CODE.search(path_reader.describe_unknown_parts(path_text))
    )


def _read_saving_call(
    call: ast.Call,
    call_path: CallPath,
    position: CodePosition,
    path_reader: PathReader,
    file_name: str,
) -> _Write | None:
    """Return the write that a saving call makes; None for other calls, and for functions of the
    script's own code.
    """
    path = (
        None
        if path_reader.calls.find_functions(call, position)
        else _find_path_argument(call, call_path, path_reader)
    )
    if path is None:
        return None
    name = ast.unparse(call.func).rpartition(".")[2]
    return replace(
        _make_write(call, path, call_path, position, path_reader, file_name),
        is_folder=name in FOLDERS,
    )


def _find_path_argument(
    call: ast.Call, call_path: CallPath, path_reader: PathReader
) -> ast.expr | None:
    name = path_reader.calls.find_dotted_name(call.func)
    last = name.rpartition(".")[2]
    index = SAVES.get(name, SAVES.get(last))
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    is_projects = last == "save_checkpoint" or (
        index is None and OTHER_SAVES.search(last) is not None
    )
    for argument in arguments if is_projects else ():
        text = path_reader.make_shell_pattern(path_reader.read_path(argument, call_path))
        if TEMPORARY_END.sub("", text).endswith(WEIGHTS):
            return argument
    if index is None:
        return None
    keywords = (keyword.value for keyword in call.keywords if keyword.arg in PATH_KEYWORDS)
    return call.args[index] if len(call.args) > index else next(keywords, None)


def _read_moving_call(
    call: ast.Call,
    call_path: CallPath,
    position: CodePosition,
    path_reader: PathReader,
    file_name: str,
) -> _Write | None:
    """Return the move, copy or removal of a file that this call makes; None for other calls."""
    name = path_reader.calls.find_dotted_name(call.func)
    arguments = list(call.args)
    arguments += [
        keyword.value for keyword in call.keywords if keyword.arg in ("src", "dst", "target")
    ]
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
    last = name.rpartition(".")[2]
    source = None
    target = None
    goes = True
    if name in REMOVES and arguments:
        source = arguments[0]
    elif last == "unlink" and receiver is not None and not arguments:
        source = receiver
    elif len(arguments) == 2 and (
        name in MOVES or (last in METHODS and last != "replace")
    ):  # fs.mv(a, b)
        source, target = arguments
        goes = MOVES.get(name, METHODS.get(last, True))
    elif (
        len(arguments) == 1 and receiver is not None and last in METHODS and len(call.keywords) <= 1
    ):
        source = receiver
        target = arguments[0]
        goes = METHODS[last]
    elif len(arguments) == 1 and receiver is not None and last in LINKS:
        source = arguments[0]
        target = receiver
        goes = False
    if source is None:
        return None
    write = replace(
        _make_write(call, source, call_path, position, path_reader, file_name), goes=goes
    )
    if target is None:
        return write
    text = path_reader.read_path(target, call_path)
    if (
        name.startswith("shutil.")
        and PurePosixPath(write.text).suffix
        and not PurePosixPath(text).suffix
    ):
        text = f"{text.rstrip('/')}/{PurePosixPath(write.text).name}"  # into a folder, it seems
        path_reader.mark_unsure(text)
    return replace(write, target=text)


def _make_write(
    call: ast.Call,
    path_expression: ast.expr,
    call_path: CallPath,
    position: CodePosition,
    path_reader: PathReader,
    file_name: str,
) -> _Write:
    return _Write(
        path_reader.read_path(path_expression, call_path),
        (*call_path.order, (call.lineno, call.col_offset)),
        call_path.in_loop or position.in_loop,
        call_path.is_certain and position.is_certain,
        f"{file_name}:{path_expression.lineno}",
    )
