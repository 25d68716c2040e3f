"""A loop whose log or output folder is strange in the way that its first argument names."""

import os
import sys
from pathlib import Path

import ways


class Outputs(ways.Ways):
    """A script that a tool for well-behaved ones stumbles over."""

    def begin_large_log(self) -> None:
        """Print 64 MiB of lines."""
        line = "x" * 1023 + "\n"
        for _ in range(64):
            sys.stdout.write(line * 1024)

    def at_long_line(self) -> None:
        """Print 100 MB without an end of line."""
        for _ in range(100):
            sys.stdout.write("x" * 1_000_000)
        sys.stdout.flush()

    def at_binary(self) -> None:
        """Print bytes of every value, move the cursor, and fail with colours."""
        os.write(1, bytes(range(256)) * 64)
        os.write(1, b"\x1b[2J\x1b]52;c;aGk=\x07\xff\xfe\r\x00\n")
        raise RuntimeError("\x1b[31mbroken batch\x1b[0m\x1b]0;title\x07")

    def begin_many_files(self) -> None:
        """Write 20,000 files."""
        folder = Path(self.args.output) / "samples"
        folder.mkdir(exist_ok=True)
        for number in range(20_000):
            (folder / f"{number}.txt").touch()

    def begin_links(self) -> None:
        """Leave links out of the output folder, into it, and to nothing."""
        if not self.is_first():
            return
        precious = Path(os.environ["PRECIOUS"])
        precious.mkdir(parents=True)
        (precious / "weights.bin").write_bytes(b"weights")
        targets = {"outside": precious, "root": "/", "loop": ".", "nothing": "/no/such/file"}
        for name, target in targets.items():
            (Path(self.args.output) / name).symlink_to(target)
        (Path(self.args.output) / "checkpoint-0001.pt").symlink_to(precious / "weights.bin")


Outputs.start()
