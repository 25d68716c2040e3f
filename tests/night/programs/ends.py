"""A loop that ends in the way that its first argument names."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import traceback
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import torch
import ways


class Ends(ways.Ways):
    """A script of which one step, or its start, goes another way."""

    def begin_broken_data(self) -> None:
        """Read a file that was written in part."""
        Path("samples.json").write_text('[{"text": "a"}, {"te')
        json.loads(Path("samples.json").read_text())

    def begin_gone_module(self) -> None:
        """Import what is not installed, as a library that wraps the error."""
        try:
            import module_that_nobody_installed  # noqa: F401
        except ImportError as error:
            raise RuntimeError(
                "Failed to import models.gone (look up to see its traceback)"
            ) from error

    def begin_hub_away(self) -> None:
        """Meet a hub that does not answer, the first time."""
        if self.is_first():
            raise ConnectionError("HTTPSConnectionPool(host='hub'): Max retries exceeded")

    def at_stops_early(self) -> None:
        """Leave before the last step, as a training that no longer gets better."""
        sys.exit(0)

    def at_handled_disk(self) -> None:
        """Handle a full disk, then meet a bug."""
        try:
            raise OSError(28, "No space left on device", "/tmp/cache/a.arrow")
        except OSError:
            traceback.print_exc()
        print("going on without a cache", flush=True)
        raise KeyError("labels")

    def at_killed_for_memory(self) -> None:
        """End as a killer of memory in user space ends a process, the first time."""
        if self.is_first():
            name = f'process {os.getpid()} uid 1000 "python": oom_score 1190, VmRSS 27388 MiB'
            print(f"earlyoom[845]: sending SIGTERM to {name}", flush=True)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def at_interrupted(self) -> None:
        """Save and leave with 0 after SIGINT, the first time."""
        if self.is_first():
            try:
                os.kill(os.getpid(), signal.SIGINT)
                torch.zeros(1)
            except KeyboardInterrupt:
                self.save()
                sys.exit(0)

    def begin_no_step(self) -> None:
        """Pass over every step, as the scaler of fp16 does at an overflow."""
        self.optimizer.step = lambda: None

    def begin_prompt(self) -> None:
        """Ask the person at the keyboard."""
        input("the output folder exists. Overwrite? [y/N] ")

    def begin_hub_401(self) -> None:
        """Meet a hub that wants another key."""
        ask_hub(401)

    def begin_hub_429(self) -> None:
        """Meet a hub that has had too many requests, the first time."""
        ask_hub(429 if self.is_first() else 200)

    def begin_port_in_use(self) -> None:
        """Want a port that another process still has, the first time."""
        with socket.socket() as server, socket.socket() as late:
            server.bind(("127.0.0.1", 0))
            late.bind(("127.0.0.1", server.getsockname()[1] if self.is_first() else 0))

    def at_child(self) -> None:
        """Leave a child that holds memory of the device."""
        program = "import time, torch; held = torch.zeros(2**22); time.sleep(900)"
        subprocess.Popen([sys.executable, "-c", program])

    def at_double_fork(self) -> None:
        """Leave a process that nobody is the parent of, in a session of its own."""
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp("sleep", ["sleep", "900"])
            os._exit(0)

    def at_stays(self) -> None:
        """Leave a thread that keeps the finished program for ever."""
        threading.Thread(target=threading.Event().wait).start()

    def at_deleted_folder(self) -> None:
        """Delete the folder of the output."""
        shutil.rmtree(self.args.output)

    def at_other_shape(self) -> None:
        """End by a signal; the next attempt has another network."""
        self.preempt()

    def build(self) -> None:
        super().build()
        if self.way == "other_shape" and self.args.resume:
            self.model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 1))


def ask_hub(status: int) -> None:
    """Send a request to a hub that answers with a status. Raises requests.HTTPError."""
    import requests

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Hub) as server, requests.Session() as session:
        session.trust_env = False
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/api/models/gated"
        session.get(url, timeout=30).raise_for_status()


Ends.start()
