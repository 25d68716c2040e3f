"""Laws of all commands of `orc`: one form of each runs here, and no word, number or pattern gives a traceback."""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import typer.main
from typer.core import TyperGroup

from docs import generate
from orchestrator.cli import app
from tests.test_cli import Answer, Shell

SCRIPT = "name: own\ngpus: 1\nglobal_batch_size: 8\ncommand: python train.py\nsteps: 20\nspeeds: {1: 1s}\n"
TRAIN = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--batch-size', type=int, default=8)\n"
NIGHT = "jobs:\n  - {file: own.yaml}\n  - {at: 10min, file: own.yaml}\n"
# Command -> (arguments, exit code) in a home without a service, where nothing is started: 1 is a
# refusal by the world,
# 2 one of what was typed. A command that would start a service or a training meets a missing file.
FORMS = {
    "up": ("--cluster missing.yaml", 2),
    "down": ("", 1),
    "doctor": ("", None),  # 1 where the machine lacks something
    "backup": ("new/backup.orc", None),
    "restore": ("missing.orc", 2),
    "submit": ("missing.yaml", 2),
    "run": ("missing.yaml", 2),
    "rehearse": ("missing.yaml --fail oom --step 20", 2),
    "queue": ("", 1),
    "teams": ("", 1),
    "show": ("own-1", 1),
    "explain": ("own-1", 1),
    "logs": ("own-1", 1),
    "get": ("own-1", 1),
    "cancel": ("own-1", 1),
    "hold": ("own-1", 1),
    "release": ("own-1", 1),
    "suspend": ("own-1", 1),
    "resume": ("own-1", 1),
    "update": ("own-1 priority=high", 1),
    "retry": ("own-1", 1),
    "drain": ("", 1),
    "demo": ("--folder own.yaml", 1),
    "open": ("", 1),
    "plan": ("own.yaml --gpu rtx3090", 0),
    "estimate": ("own.yaml --gpu rtx3090", None),
    "fit": ("own.yaml", 0),
    "launch": ("--dry-run python train.py", 0),
    "init": ("python train.py --batch-size 4", 0),
    "compare": ("missing.yaml", 1),
    "simulate": ("night.yaml", 0),
    "forecast": ("", 1),
    "replay": ("", 2),
    "report": ("", None),
    "diagnose": ("error.log", 0),
    "watch": ("", 1),
    "calibrate": ("--from-mlflow missing", None),
    "schema": ("job", 0),
    "purge": ("--dry-run", 1),
    "join": ("127.0.0.1:1", None),
    "leave": ("", 1),
    "login": ("https://127.0.0.1:1", None),
    "logout": ("https://127.0.0.1:1", None),
    "whoami": ("", 1),
    "audit": ("", None),
    "cluster show": ("", 0),
    "user set": ("ada --role viewer", None),
    "user remove": ("ada", None),
    "user list": ("", None),
    "token create": ("ada --expires 90d", None),
    "token list": ("", None),
    "token revoke": ("none", None),
    "token join": ("", None),
    "notify test": ("", None),
}
HOSTILE = (
    *("-1", "0", "1e400", "1e300", "nan", "9" * 400, "(", "[z-a]", "(a+)+$", "\\u0041"),
    *("", " ", "../..", "/", "a=b=c", "{}", "\u00e9\n", "\x1b]52;c;x"),
)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    folder = tmp_path_factory.mktemp("desk")
    shell = Shell(folder=folder, home=folder / "home")
    shell.write("own.yaml", SCRIPT)
    shell.write("train.py", TRAIN)
    shell.write("night.yaml", NIGHT)
    shell.write("error.log", "Traceback (most recent call last):\nKeyError: 'labels'\n")
    return shell


def ask(desk: Shell, *arguments: str) -> Answer:
    """Return the answer of a command without a terminal, a browser and a service."""
    with (
        mock.patch.object(sys, "stdin", io.StringIO()),
        mock.patch.dict(os.environ, {"BROWSER": "true"}),
    ):
        return desk.ask(*arguments)


def breaches_of(answer: Answer) -> list[str]:
    """Return what an answer breaks of the promise: a documented exit code, and no traceback."""
    breaches = []
    if answer.code not in (0, 1, 2):
        breaches.append(f"exit code {answer.code}")
    if "Traceback (most recent" in answer.err:
        breaches.append(answer.err)
    return breaches


def test_each_command_has_a_form_and_options_are_tried() -> None:
    assert len(OPTIONS) > 80
    assert set(FORMS) == {name for name, _ in generate.commands(app)}


@pytest.mark.parametrize("name", FORMS)
def test_one_form_of_each_command_ends_as_documented(desk: Shell, name: str) -> None:
    typed, code = FORMS[name]
    answer = ask(desk, *name.split(), *shlex.split(typed))
    assert breaches_of(answer) == []
    assert code is None or answer.code == code, answer
    assert answer.code == 0 or answer.err, "a refusal says why"


def options_of(command: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield (command, option that takes a value) of a command and those in it; "" is an argument."""
    if isinstance(command, TyperGroup):
        for inner in command.commands:
            yield from options_of(command.commands[inner], f"{name} {inner}".strip())
        return
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            yield name, ""
        elif not getattr(parameter, "is_flag", False) and parameter.name != "home":
            yield name, parameter.opts[0]


OPTIONS = [pair for pair in options_of(typer.main.get_command(app)) if pair[0] in FORMS]
# doctor looks at the whole machine each time; a demo would begin, and launch would run the word
ALONE = ("doctor", "demo", "launch")


def ask_with(desk: Shell, name: str, option: str, value: str) -> Answer:
    """Return the answer of a command whose option, or first argument, has this value."""
    typed = shlex.split(FORMS[name][0])
    arguments = [*typed, option, value] if option else [value, *typed[1:]]
    return ask(desk, *name.split(), *arguments)


@pytest.mark.parametrize(("name", "option"), [pair for pair in OPTIONS if pair[0] not in ALONE])
def test_no_value_of_an_option_gives_a_traceback(desk: Shell, name: str, option: str) -> None:
    """Try a value for each option; `make test-long` tries all."""
    value = HOSTILE[OPTIONS.index((name, option)) % len(HOSTILE)]
    assert breaches_of(ask_with(desk, name, option, value)) == [], value


@pytest.mark.long
@pytest.mark.parametrize("value", HOSTILE)
def test_no_hostile_word_gives_a_traceback_in_any_option(desk: Shell, value: str) -> None:
    for name, option in OPTIONS:
        if name not in ALONE:
            assert breaches_of(ask_with(desk, name, option, value)) == [], (name, option)
