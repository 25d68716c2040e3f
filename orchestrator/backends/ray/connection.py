"""Connects this process to a Ray cluster, in the namespace of its home."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from orchestrator.backends.ray.address import LOOPBACK, stay_at
from orchestrator.backends.ray.embedded import accepts, find, token_env
from orchestrator.specs.errors import ServiceError


def connect(address: str, home: Path) -> None:
    """Connect this process to Ray. Raises ServiceError where it does not answer.

    `ray.init` on a dead address never returns (41 s per internal attempt, still blocked after 300 s), so the port is
    tried first. A cluster that is not ours takes its token from the caller's environment.
    """
    if not accepts(address, 5.0):
        raise ServiceError(
            f"no Ray answers at {address}: start it with `orc up`, or check the address"
        )
    is_ours = (find(home) or "") == address
    host = address.rpartition(":")[0]
    if is_ours:
        _take_token(home)
    if is_ours or host == LOOPBACK:  # its head is on this machine
        stay_at(host)
    import ray

    try:
        ray.init(
            address=address,
            namespace=namespace(home),
            log_to_driver=False,
            logging_level=logging.WARNING,
            ignore_reinit_error=True,
        )
    except ConnectionError as error:  # a wrong token too, after 20 s
        raise ServiceError(f"Ray at {address} does not let us in: {error}") from error


def namespace(home: Path) -> str:
    """Return the Ray namespace of this home. Another home may have a job of the same id."""
    return f"orc-{hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:12]}"


def _take_token(home: Path) -> None:
    """Make Ray of this process use the embedded cluster's token.

    Ray reads these variables once, when it is imported (`ray/_private/authentication_test_utils.py` forgets them so).
    """
    os.environ.update(token_env(home))
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
