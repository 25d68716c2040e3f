"""`orc`: the commands of `orchestrator.service.terminal`, what stands before each, and their exit codes.

Exit codes: 0 done, 1 it failed (or the job did), 2 bad input: nothing was stored or started.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
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
    error_view,
)
from orchestrator.specs.plain_text import why_no_text

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


def _say_version(shown: bool) -> None:
    if shown:
        from importlib.metadata import version

        print(f"orc {version('orchestrator')}")
        raise typer.Exit


@app.callback()
def before_a_command(
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
            "--version", is_eager=True, callback=_say_version, help="Say the version, and end."
        ),
    ] = False,
) -> None:
    """What stands before the command."""
    if server and context.invoked_subcommand in ON_THIS_MACHINE:
        raise SpecError(
            f"`orc {context.invoked_subcommand}` works on this machine alone",
            source="--server",
            got=server,
        )
    SERVER.set(server or None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; ends the process with its exit code."""
    with clean_streams():
        _run(arguments)


def _run(arguments: Sequence[str] | None) -> None:
    command_line = sys.argv[1:] if arguments is None else list(arguments)
    try:
        for word in command_line:
            if why := why_no_text(word):
                raise SpecError(
                    why, source="the command line", got=word[:GIVEN_MAX], allowed="text in UTF-8"
                )
        app(args=arguments)
    except OrchestratorError as error:
        _refuse(error, as_json="--json" in command_line)
    except OSError as error:  # of a path that was typed, or of this machine
        reason = error.strerror or str(error)
        text = reason if error.filename is None else f"{str(error.filename)[:GIVEN_MAX]}: {reason}"
        _refuse(ServiceError(text), as_json="--json" in command_line)


def _refuse(error: OrchestratorError, *, as_json: bool) -> Never:
    print(json.dumps(error_view(error)) if as_json else error, file=sys.stderr)
    sys.exit(2 if isinstance(error, SpecError | IllegalPlan) else 1)


# the service
app.command()(home.up)
app.command()(home.down)
app.command()(home.doctor)
app.command()(home.backup)
app.command()(home.restore)

# the jobs
app.command()(jobs.submit)
app.command()(jobs.run)
app.command()(jobs.rehearse)
app.command()(verbs.queue)
app.command()(machines.teams)
app.command()(jobs.show)
app.command()(jobs.explain)
app.command()(jobs.logs)
app.command()(jobs.get)
app.command()(verbs.cancel)
app.command()(verbs.hold)
app.command()(verbs.release)
app.command()(verbs.suspend)
app.command()(verbs.resume)
app.command()(verbs.update)
app.command()(verbs.retry)
app.command()(machines.drain)

# looking ahead
app.command()(demo)
app.command("open")(browse.open_pages)
app.command()(planning.plan)
app.command()(planning.estimate)
app.command()(planning.fit)
app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
    files.init
)
app.command()(comparing.compare)
app.command()(simulation.simulate)
app.command()(forecast.forecast)
app.command()(simulation.replay)
app.command()(report.report)
app.command()(diagnosis.diagnose)
app.command()(watch.watch)
app.command()(planning.calibrate)
app.command()(files.schema)
app.command()(purge.purge)
app.command()(machines.join)
app.command()(machines.leave)
app.add_typer(machines.clusters, name="cluster")
access.tokens.command("join")(machines.join_token)
app.command()(access.login)
app.command()(access.logout)
app.command()(access.whoami)
app.command()(access.audit)
app.add_typer(access.users, name="user")
app.add_typer(access.tokens, name="token")
app.add_typer(notify.notify, name="notify")


if __name__ == "__main__":
    main()
