"""`orc`: the commands of `orchestrator.service.terminal`, what stands before each, and their exit codes.

Exit codes: 0 done, 1 it failed (or the job did), 2 bad input: nothing was stored or started.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Never

import typer

from orchestrator.service.demo.command import demo
from orchestrator.service.terminal import (
    access,
    browse,
    comparing,
    diagnosis,
    files,
    forecast,
    home,
    jobs,
    launching,
    machines,
    notify,
    planning,
    purge,
    report,
    simulation,
    verbs,
    watch,
)
from orchestrator.service.terminal.command_group import Commands
from orchestrator.service.terminal.options import SERVER
from orchestrator.service.terminal.output import clean_streams
from orchestrator.specs.errors import (
    GIVEN_MAX,
    IllegalPlan,
    OrchestratorError,
    ServiceError,
    SpecError,
    convert_error_to_json,
)
from orchestrator.specs.plain_text import explain_unstorable

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Plans, places, recovers and compares GPU training jobs by the memory they need.",
)

# commands about the home folder itself
ON_THIS_MACHINE = (
    "demo",
    "up",
    "down",
    "doctor",
    "replay",
    "backup",
    "restore",
    "cluster",
    "join",
    "leave",
)


def _print_version(is_requested: bool) -> None:
    """Print the version of `orc` and end the process, if `--version` was given; else do nothing."""
    if is_requested:
        from importlib.metadata import version

        print(f"orc {version('orchestrator')}")
        raise typer.Exit


@app.callback()
def read_global_options(
    context: typer.Context,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            envvar="ORC_SERVER",
            metavar="URL",
            help="Service of another machine; see `orc login`.",
        ),
    ] = None,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Say the version, and end."
        ),
    ] = False,
) -> None:
    """Read the options that stand before a command's name: `--server`, and `--version`.

    Raises SpecError where `--server` is given for a command that only works on this machine.
    """
    if server and context.invoked_subcommand in ON_THIS_MACHINE:
        raise SpecError(
            f"`orc {context.invoked_subcommand}` works on this machine alone",
            source="--server",
            got=server,
        )
    SERVER.set(server or None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the `orc` command of these arguments; None means those of the process. Ends the process
    with the command's exit code.
    """
    with clean_streams():
        _run_command(arguments)


def _run_command(arguments: Sequence[str] | None) -> None:
    """Run the `orc` command of these arguments; end the process with an error code where it raises."""
    command_line = sys.argv[1:] if arguments is None else list(arguments)
    try:
        for word in command_line:
            if why := explain_unstorable(word):
                raise SpecError(
                    why, source="the command line", got=word[:GIVEN_MAX], allowed="text in UTF-8"
                )
        app(args=arguments)
    except OrchestratorError as error:
        _exit_with_error(error, as_json="--json" in command_line)
    except OSError as error:  # of a path that was typed, or of this machine
        reason = error.strerror or str(error)
        text = reason if error.filename is None else f"{str(error.filename)[:GIVEN_MAX]}: {reason}"
        _exit_with_error(ServiceError(text), as_json="--json" in command_line)


def _exit_with_error(error: OrchestratorError, *, as_json: bool) -> Never:
    """Print the error on stderr, as JSON or text, and end the process: 2 for bad input, else 1."""
    print(json.dumps(convert_error_to_json(error)) if as_json else error, file=sys.stderr)
    sys.exit(2 if isinstance(error, SpecError | IllegalPlan) else 1)


COMMANDS: tuple[Callable[..., object], ...] = (
    # the service
    home.up,
    home.down,
    home.doctor,
    home.backup,
    home.restore,
    # the jobs
    jobs.submit,
    jobs.run,
    jobs.rehearse,
    verbs.queue,
    machines.teams,
    jobs.show,
    jobs.explain,
    jobs.logs,
    jobs.get,
    verbs.cancel,
    verbs.hold,
    verbs.release,
    verbs.suspend,
    verbs.resume,
    verbs.update,
    verbs.retry,
    machines.drain,
    # looking ahead
    demo,
    planning.plan,
    planning.estimate,
    planning.fit,
    comparing.compare,
    simulation.simulate,
    forecast.forecast,
    simulation.replay,
    report.report,
    diagnosis.diagnose,
    watch.watch,
    planning.calibrate,
    files.schema,
    purge.purge,
    machines.join,
    machines.leave,
    access.login,
    access.logout,
    access.whoami,
    access.audit,
)

for command in COMMANDS:
    app.command()(command)
app.command("open")(browse.open_pages)
app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
    files.init
)
app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
    launching.launch
)
app.add_typer(machines.clusters, name="cluster")
access.tokens.command("join")(machines.join_token)
app.add_typer(access.users, name="user")
app.add_typer(access.tokens, name="token")
app.add_typer(notify.notify, name="notify")


if __name__ == "__main__":
    main()
