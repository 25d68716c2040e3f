"""A Service of given parts, for tests that serve a controller of their own."""

from __future__ import annotations

import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.backends.journal.accounts import Accounts
from orchestrator.backends.journal.journal import Journal
from orchestrator.service.server.controller import Controller
from orchestrator.service.server.forecasts import Forecasts
from orchestrator.service.server.purger import Purger
from orchestrator.service.server.reasons import Reasons
from orchestrator.service.server.routes.dependencies import Service
from orchestrator.service.server.sweeps.sweeper import Sweeper
from orchestrator.specs.keep import UNLIMITED, KeepSpec

TOKEN = "the-right-token"


@cache
def _empty() -> bytes:
    """A journal without rows, as its migrations leave it: they take 0.1 s."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.sqlite"
        Journal(f"sqlite:///{path}").close()
        return path.read_bytes()


def new_journal(home: Path) -> Journal:
    """Return the journal of a new home."""
    path = home / "journal.sqlite"
    if not path.exists():
        path.touch(0o600)
        path.write_bytes(_empty())
    return Journal(f"sqlite:///{path}")


def service_of(
    controller: Controller, journal: Journal, home: Path, keep: KeepSpec = UNLIMITED, **parts: Any
) -> Service:
    """The service of this controller; `parts` replace any of its fields."""
    accounts = parts.pop("accounts", None) or Accounts(journal.database.transaction, time.time)
    defaults = {
        "token": TOKEN,
        "cluster": "cluster",
        "trackers": {},
        "shut_down": lambda: None,
        "reasons": Reasons(lambda: controller.state),
        "forecasts": Forecasts(lambda: controller.state),
        "sweeper": Sweeper(controller, journal.sweeps, home),
        "purger": Purger(home, keep, (), controller, journal, accounts),
        "set_aside": journal.set_aside,
    }
    return Service(controller=controller, accounts=accounts, home=home, **{**defaults, **parts})
