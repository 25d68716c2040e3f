"""Seeds and cases of properties are the same for every test on every machine."""

from __future__ import annotations

import random
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

SEED = 0
pytest_plugins = ["tests.budget"]

# `make test` draws the same cases everywhere; `make test-long` draws new ones
# (--hypothesis-profile=new) and prints
# what repeats a failing one. No case fails because the machine is slow.
settings.register_profile(
    "same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "new",
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("same")

# A shell starts a command in the background with SIGINT ignored, and each process of a test would
# inherit it: Ctrl-C and its handlers would be tested in no run of that kind.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Random numbers that a test draws without a generator of its own do not depend on the tests before it."""
    random.seed(SEED)
    # A thread of the test before may be importing either just now.
    if hasattr(numpy := sys.modules.get("numpy"), "random"):
        numpy.random.seed(SEED)
    if hasattr(torch := sys.modules.get("torch"), "manual_seed"):
        torch.manual_seed(SEED)
