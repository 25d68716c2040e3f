"""Connects this process to a Ray cluster, in the namespace of its home."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from orchestrator.backends.ray.address import LOOPBACK, force_node_address
from orchestrator.backends.ray.embedded import (
    accepts_connection,
    find_local_address,
    make_token_variables,
)
from orchestrator.specs.errors import ServiceError


def connect_to_ray(address: str, home: Path) -> None:
    """Connect this process to Ray at this address. Raises ServiceError where Ray does not answer.

    `ray.init` on a dead address never returns (41 s per internal attempt, still blocked after 300
    s), so the port is tried first. A cluster that this home did not start takes its token from the
    caller's environment.
    """
    if not accepts_connection(address, 5.0):
        raise ServiceError(
            f"no Ray answers at {address}: start it with `orc up`, or check the address"
        )
    is_ours = (find_local_address(home) or "") == address
    host = address.rpartition(":")[0]
    if is_ours:
        _use_token(home)
    if is_ours or host == LOOPBACK:  # its head is on this machine
        force_node_address(host)
    import ray

    try:
        ray.init(
            address=address,
            namespace=make_home_namespace(home),
            log_to_driver=False,
            logging_level=logging.WARNING,
            ignore_reinit_error=True,
        )
    except ConnectionError as error:  # a wrong token too, after 20 s
        raise ServiceError(f"Ray at {address} does not let us in: {error}") from error


def make_home_namespace(home: Path) -> str:
    """Return the Ray namespace of this home. Homes have different ones, since two homes may have a
    job of the same id.
    """
    return f"orc-{hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:12]}"


def _use_token(home: Path) -> None:
    """Make Ray in this process use the token of the home's embedded cluster.

    The token is set by environment variables. Ray reads them once, when it is imported;
    `ray/_private/authentication_test_utils.py` resets them in the same way.
    """
    os.environ.update(make_token_variables(home))
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
