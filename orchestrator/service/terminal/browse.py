"""`orc open`: the pages in a browser."""

from __future__ import annotations

import os
import sys
import webbrowser
from contextlib import closing
from typing import Annotated

import typer

from orchestrator.service.terminal.options import AsJson, Home, connect_client
from orchestrator.service.terminal.output import print_answer
from orchestrator.specs.run import DEFAULT_HOME

NO_DISPLAY = (
    "No display here: open the link in a browser of this machine, or forward its port with"
    " `ssh -L {port}:127.0.0.1:{port} HOST`."
)


def open_pages(
    job_id: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Job whose page opens.")
    ] = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Open the pages in a browser, signed in. Prints the link, which works once, within five minutes."""
    with closing(connect_client(home)) as client:
        link = client.create_sign_in_url(job_id)
    print_answer({"link": link}, as_json, link)
    if as_json:
        return
    has_display = (
        sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
    if has_display:
        webbrowser.open(link)
    else:
        print(NO_DISPLAY.format(port=link.split("/")[2].rpartition(":")[2]), file=sys.stderr)
