"""`orc forecast`: when jobs are expected to start and end."""

from __future__ import annotations

from orchestrator.service.terminal.options import AsJson, Home, connect_client
from orchestrator.service.terminal.output import print_answer, show_spinner
from orchestrator.specs.run import DEFAULT_HOME


def forecast(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Forecast start and end of each running and waiting job, with nothing more submitted."""
    from orchestrator.service.terminal.expected import make_expected_table

    with show_spinner("playing the queue"):
        expected = connect_client(home).fetch_forecast()
    print_answer(
        {"jobs": expected},
        as_json,
        make_expected_table(expected) if expected else "No job runs or waits.",
    )
