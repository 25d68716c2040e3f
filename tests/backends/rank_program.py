#!/usr/bin/env python3
"""A rank that behaves as its argument says; prints what it was given first. Imports nothing of ours.

exit:CODE   signal:NUMBER   wait   deaf (ignores SIGTERM)   polite (exits 7 on SIGTERM)
oom:FOLDER (reports out of memory there and stays)   daemon (starts a daemon, then waits)   go:FILE (exits 0 once it is)
"""

import json
import os
import signal
import subprocess
import sys
import time

PATIENCE_S = 300


def main() -> None:
    """Says who it is, then behaves."""
    rank = int(os.environ.get("RANK", "0"))
    verb, _, argument = sys.argv[1 + rank].partition(":")
    if verb == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if verb == "polite":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    first = {
        "pid": os.getpid(),
        "cwd": os.getcwd(),
        "env": {k: v for k, v in os.environ.items() if "SECRET" not in k},
    }
    first["secret_length"] = len(os.environ.get("TEST_SECRET", ""))
    if verb == "daemon":
        sleeper = subprocess.Popen(
            ["sleep", str(PATIENCE_S)], start_new_session=True, stdout=subprocess.DEVNULL
        )
        first["child"] = sleeper.pid
    print(json.dumps(first), flush=True)
    behave(rank, verb, argument)


def behave(rank: int, verb: str, argument: str) -> None:
    """Ends as it was told; gives up after five minutes in any case."""
    if verb == "exit":
        os._exit(int(argument))
    if verb == "signal":
        os.kill(os.getpid(), int(argument))
    if verb == "oom":
        report = {
            "rank": rank,
            "step": 3,
            "phase": "forward",
            "requested_bytes": 8,
            "live_bytes": 9,
        }
        with open(os.path.join(argument, f"rank{rank}.oom.json"), "w") as file:
            json.dump({**report, "capacity_bytes": 10}, file)
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        if verb == "go" and os.path.exists(argument):
            os._exit(0)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
