"""No command passes control sequences of others to a terminal: whatever it prints goes through one door.

Every command of the application is called, so that a new one is covered: with poisoned words, with poisoned files, and
against a service whose every answer is poisoned, made by the schema of its routes.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.panel import Panel
from rich.style import Style
from rich.table import Table
from rich.text import Text
from typer.core import TyperArgument, TyperGroup

from orchestrator import cli
from orchestrator.cli import app, main
from orchestrator.planning.picture import Mark
from orchestrator.service.terminal.output import (
    clean_streams,
    make_console,
    print_answer,
    show_spinner,
    write_log_piece,
)
from tests.scheduling.factories import DEVICE
from tests.service.worlds import World

ROOT = Path(__file__).parents[2]
CLIPBOARD = "\x1b]52;c;cHduZWQ=\x07"
POISON = f"a{CLIPBOARD}\x1b[2J\x9b2J\x9d0;t\x9c\x7f\u202eb"
STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
REQUESTS_MAX = 8  # of one command


class Screen(io.StringIO):
    """A stream that is a terminal, or is none."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def commands(
    group: TyperGroup, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (arguments, command) of each command of the application."""
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


APPLICATION = typer.main.get_command(app)

# `orc launch` runs what it is given in the foreground, with signals and a folder of its own
COMMANDS = [entry for entry in commands(APPLICATION) if entry[0] != ("launch",)]
STARTING = {
    ("demo",),
    ("up",),
    ("join",),
}  # would start a service or Ray of their own, were their arguments good


def printed(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], *, is_terminal: bool = False
) -> tuple[str, int]:
    """Return all that a command printed, and its exit code. It ends by itself, with no traceback."""
    out, error = (Screen(is_terminal=is_terminal) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", error)
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n" * 9))
    with pytest.raises(SystemExit) as end:
        main(arguments)
    text = out.getvalue() + error.getvalue()
    assert "Traceback (most" not in text
    return text, int(end.value.code or 0)


def values_of(parameter: Any, value: str) -> list[str]:
    """Return the arguments that give a parameter this text; [] where it takes none or has no need of one."""
    if isinstance(parameter, TyperArgument):
        return [value] if parameter.nargs != 0 else []
    return [parameter.opts[0], value] if parameter.required else []


@pytest.mark.parametrize("words", [[POISON], ["python", "-c", f"raise SystemExit({POISON!r})"]])
def test_orc_launch_writes_poisoned_words_as_readable_escapes(
    tmp_path: Path, words: list[str]
) -> None:
    """The watcher prints what its core says; what the command itself writes passes as it is."""
    program = [sys.executable, "-m", "orchestrator.orc", "launch", "--dry-run", *words]
    ended = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "[orc] attempt 1" in ended.stderr
    assert not STEERING.search(ended.stderr)


@pytest.mark.parametrize(
    ("path", "command"), COMMANDS, ids=[" ".join(path) for path, _ in COMMANDS]
)
def test_poisoned_words_come_back_as_readable_escapes(
    path: tuple[str, ...], command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ORC_HOME", str(tmp_path))
    text, code = printed(monkeypatch, [*path, f"--no-{POISON}"])
    assert not STEERING.search(text)
    assert code in (0, 1, 2)
    if path not in STARTING:
        arguments = [word for parameter in command.params for word in values_of(parameter, POISON)]
        text, _ = printed(monkeypatch, [*path, *arguments])
        assert not STEERING.search(text), text


class PoisonedService:
    """Answers each route with what its schema allows, and poison in each text."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._schemas = document["components"]["schemas"]
        self._routes = [
            (method.upper(), re.compile(re.sub(r"\{\w+\}", "[^/]+", path) + "$"), operation)
            for path, operations in document["paths"].items()
            for method, operation in operations.items()
        ]
        self.requests = 0
        service = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, body, headers = service.answer(self.command, self.path)
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _answer

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, method: str, address: str) -> tuple[int, bytes, dict[str, str]]:
        """Return status, body and headers; after REQUESTS_MAX requests a poisoned refusal ends what asks again."""
        self.requests += 1
        if self.requests > REQUESTS_MAX:
            return 503, json.dumps({"error": POISON}).encode(), {}
        path, _, query = address.partition("?")
        for allowed, pattern, operation in self._routes:
            content = operation["responses"].get("200", {}).get("content", {})
            if allowed == method and pattern.match(path) and "application/json" in content:
                body = self.example(content["application/json"]["schema"])
                return 200, json.dumps(body).encode(), {"Content-Type": "application/json"}
        log = b"" if re.search(r"offset=[1-9]", query) else f"{POISON}\n".encode()
        return 200, log, {"X-Next-Offset": str(len(f"{POISON}\n".encode()))}

    def example(self, schema: dict[str, Any], name: str = "") -> Any:
        if "$ref" in schema:
            return self.example(self._schemas[schema["$ref"].rpartition("/")[2]], name)
        if choices := [entry for entry in schema.get("anyOf", ()) if entry.get("type") != "null"]:
            return None if name in ("next", "device_index") else self.example(choices[0], name)
        if name == "device" and schema.get("type") != "string":  # that of a node has no schema
            return DEVICE.model_dump(mode="json") | {"name": POISON}
        if "enum" in schema:
            return "failed" if "failed" in schema["enum"] else schema["enum"][0]
        match schema.get("type"):
            case "array" if "prefixItems" in schema:
                return [self.example(entry) for entry in schema["prefixItems"]]
            case "array":
                return [self.example(schema["items"])] if schema.get("items") else []
            case "object":
                properties = schema.get("properties", {}).items()
                return {name: self.example(inner, name) for name, inner in properties}
            case "string":
                return {"status": "failed", "mark": next(iter(Mark)).value}.get(name, POISON)
            case "boolean":
                return True
            case "integer" | "number":
                return 1
        return schema.get("const")


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, PoisonedService]]:
    """The home of a service whose answers are poisoned, and the service."""
    home = tmp_path_factory.mktemp("poisoned")
    world = World(tmp_path_factory.mktemp("world"))
    service = PoisonedService(world.app.openapi())
    world.journal.close()
    (home / "token").write_text("token")
    (home / "service.json").write_text(json.dumps({"pid": 1, "port": service.server.server_port}))
    (home / "cluster.yaml").write_text("{}")
    yield home, service
    service.server.shutdown()
    service.server.server_close()


FOLLOWING = {
    ("open",),
    ("get",),
    ("down",),
    ("restore",),
}  # a browser, files, and the end of the process 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize(
    ("path", "command"), COMMANDS, ids=[" ".join(path) for path, _ in COMMANDS]
)
def test_a_poisoned_service_steers_no_terminal(
    path: tuple[str, ...],
    command: Any,
    is_terminal: bool,
    poisoned: tuple[Path, PoisonedService],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if path in STARTING | FOLLOWING:
        pytest.skip("it asks no service, or starts what a test cannot")
    monkeypatch.chdir(tmp_path)
    home, service = poisoned
    service.requests = 0
    monkeypatch.setenv("ORC_HOME", str(home))
    job = tmp_path / f"job{CLIPBOARD}.yaml".replace("/", "")
    job.write_text(
        "name: a\nglobal_batch_size: 1\ncommand: python train.py\n'\\e]52;x\\a': 1\n\"\\e]52;x\\a\": 1\n"
    )
    arguments = [word for parameter in command.params for word in values_of(parameter, str(job))]
    arguments += ["--every", "0.2"] if path == ("watch",) else []
    text, _ = printed(monkeypatch, [*path, *arguments], is_terminal=is_terminal)
    if path == ("logs",) and not is_terminal:
        assert POISON in text, "a log reaches a file as it is"
    elif is_terminal:
        assert "\x1b]" not in text
        assert not re.search(r"\x1b\[2J|[\x7f-\x9f\u202a-\u202e]", text), text
    else:
        assert not STEERING.search(text), text


def test_a_key_of_a_job_file_steers_no_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        'name: a\nglobal_batch_size: 1\ncommand: python train.py\n"\\e]52;c;x\\a\\e[31m": "\\u009d"\n'
    )
    for is_terminal in (False, True):
        for arguments in (
            ["plan", str(job)],
            ["plan", str(job), "--json"],
            ["submit", str(job), "--home", str(tmp_path)],
        ):
            text, code = printed(monkeypatch, arguments, is_terminal=is_terminal)
            assert code == 2
            assert "\x1b]" not in text
            assert "\\x1b]52;c;x\\x07" in text or "\\u001b]52;c;x\\u0007" in text, (
                "all of it can be read"
            )
            assert not re.search("[\x07\x80-\x9f]", text)


def test_a_log_steers_no_terminal_and_reaches_a_file_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coloured = "\x1b[31mred\x1b[0m 10%\r20%\n"
    for is_terminal in (True, False):
        screen = Screen(is_terminal=is_terminal)
        monkeypatch.setattr(sys, "stdout", screen)
        with clean_streams():
            write_log_piece(coloured + POISON)
        text = screen.getvalue()
        assert text.startswith(coloured)
        assert ("\x1b]" in text) == (not is_terminal)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_every_way_to_print_is_the_door(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    """A table, a panel, a title, a style, a link, JSON, plain prints, typer's echo, a spinner, and each stream."""
    out, error = (Screen(is_terminal=is_terminal) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", error)
    table = Table(title=POISON)
    table.add_column(POISON)
    table.add_row(Text(POISON, style="bold"))
    table.add_row(Panel(POISON, title=POISON))
    table.add_row(Text("here", style=Style(link=f"http://{POISON}")))
    with clean_streams(), show_spinner(POISON):
        print_answer({POISON: POISON}, False, table)
        print_answer({POISON: POISON}, False, POISON)
        for stream in (sys.stdout, sys.stderr):
            print(POISON, POISON, file=stream)
            stream.write(POISON)
            stream.writelines([POISON, "\udcff"])
            make_console(stream).print(POISON, style="red")
            make_console(stream).out(POISON)
            make_console(stream).rule(POISON)
        typer.echo(POISON)
        typer.secho(POISON, err=True, fg="red")
    text = out.getvalue() + error.getvalue()
    assert "\x1b]" not in text
    assert not re.search(r"\x1b\[2J|[\x07\x7f-\x9f\u202a-\u202e\ud800-\udfff]", text)
    assert is_terminal or not STEERING.search(text)
    assert not is_terminal or "\x1b[" in text, "colours are ours"


def test_json_stays_json_whatever_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = "".join(map(chr, range(0x300))) + "\u202e\udcff\U0001f600"
    for is_terminal in (True, False):
        screen = Screen(is_terminal=is_terminal)
        monkeypatch.setattr(sys, "stdout", screen)
        with clean_streams():
            print_answer({everything: everything}, True, "")
        assert json.loads(screen.getvalue()) == {everything: everything}
        assert not STEERING.search(screen.getvalue())


def test_a_bugs_traceback_takes_the_same_door(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(is_terminal=False)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", Screen(is_terminal=False))
    monkeypatch.setattr(cli, "_run_command", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main([])
    sys.stderr.write(f"Traceback ... {POISON}")
    assert not STEERING.search(screen.getvalue())


AROUND = {"__stdout__", "__stderr__", "buffer"}  # attributes that lead around the door
WRITERS = {
    "orchestrator/service/terminal/output.py",
    "orchestrator/service/terminal/clean_console.py",
}


def test_no_command_goes_around_the_door() -> None:
    """No console but ours, no file descriptor and no raw stream, in whatever the commands import of the service."""
    around = []
    folders = ("terminal", "commands", "demo", "views", "transfer")
    paths = [
        path
        for folder in folders
        for path in (ROOT / "orchestrator/service" / folder).rglob("*.py")
    ]
    for path in (*paths, ROOT / "orchestrator/cli.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_raw = isinstance(node, ast.Attribute) and node.attr in AROUND
            is_raw |= isinstance(node, ast.Attribute) and ast.unparse(node) == "os.write"
            is_console = (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).rpartition(".")[2] == "Console"
            )
            if (is_raw or is_console) and str(path.relative_to(ROOT)) not in WRITERS:
                around.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not around
