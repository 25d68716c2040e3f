"""`orc forecast`: when jobs are expected to start and end."""

from __future__ import annotations

from orchestrator.service.terminal.options import AsJson, Home, client_of
from orchestrator.service.terminal.output import show_spinner, tell
from orchestrator.specs.run import DEFAULT_HOME


def forecast(home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Forecast start and end of each running and waiting job, with nothing more submitted."""
    from orchestrator.service.terminal.expected import expected_table

    with show_spinner("playing the queue"):
        expected = client_of(home).fetch_forecast()
    tell(
        {"jobs": expected},
        as_json,
        expected_table(expected) if expected else "No job runs or waits.",
    )
