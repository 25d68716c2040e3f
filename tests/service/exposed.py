"""A process that serves a home with few descriptors, on the loopback and under TLS, until its input ends."""

from __future__ import annotations

import resource
import sys
from dataclasses import replace
from pathlib import Path

from orchestrator.service.client.endpoint import make_endpoint
from orchestrator.service.server.connections import raise_limit_of_open_files
from orchestrator.service.server.daemon import serve_http
from tests.service.worlds import World

if __name__ == "__main__":
    home, descriptors = Path(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors // 4, descriptors))
    raise_limit_of_open_files()
    world = World(home)
    endpoint = replace(make_endpoint(home, "127.0.0.1:1", None, None, ()), port=0)
    with serve_http(world.app) as port, serve_http(world.app, endpoint) as tls_port:
        print(port, tls_port, flush=True)
        sys.stdin.read()
