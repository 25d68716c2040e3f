"""A loop that ends in the way that its first argument names."""

import json
import os
import signal
import sys
import traceback
from pathlib import Path

import loop
import torch

LAST_STEP = 12


class Ends(loop.Loop):
    """A script of which one step, or its start, goes another way."""

    def __init__(self, args: object, way: str) -> None:
        super().__init__(args)
        self.way = way
        begin = getattr(self, f"begin_{way}", None)
        if begin is not None:
            begin()

    def is_first(self) -> bool:
        """Return whether no earlier attempt came here, and remember that this one did."""
        marker = Path(self.args.output) / "came-here"
        is_new = not marker.exists()
        marker.touch()
        return is_new

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

    def batch(self) -> torch.Tensor:
        change = getattr(self, f"at_{self.way}", None)
        if change is not None and self.step == LAST_STEP:
            change()
        return super().batch()


way = sys.argv.pop(1)
ends = Ends(loop.parse(), way)
if way == "no_step":
    # as fp16's scaler, which passes over steps that overflow
    ends.optimizer.step = lambda: None
ends.run()
