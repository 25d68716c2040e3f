"""Laws of links that a job exchanges while its files are read: what lies outside its folder is never sent."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from orchestrator.service.transfer.archive import Limits, list_files
from tests.examples import examples

LIMITS = Limits(entries=100, total_bytes=10_000)
PATIENCE_S = 120.0
SECRET, HARMLESS = b"the token of the home", b"weights of the model!"
PATHS = (".", "model", "folder", "folder/model", "folder/inner", "folder/inner/model")


def lay(root: Path) -> None:
    """Make the same tree, with files of the same length, in a job's folder and outside."""
    content = SECRET if root.name == "home" else HARMLESS
    (root / "folder" / "inner").mkdir(parents=True, exist_ok=True)
    for path in ("model", "folder/model", "folder/inner/model"):
        (root / path).write_bytes(content)


@contextmanager
def exchanging(output: Path, home: Path, draw: random.Random) -> Iterator[None]:
    """Replace files and folders of the output by links into the home and back, without end."""
    over = threading.Event()

    def exchange() -> None:
        while not over.is_set():
            path = draw.choice(PATHS)
            with suppress(OSError):
                link = output.parent / "link"
                link.unlink(missing_ok=True)
                link.symlink_to(home / path)
                victim = output / path
                if victim.is_dir() and not victim.is_symlink():
                    shutil.move(victim, output.parent / "aside")
                os.replace(link, victim)
                victim.unlink()
                shutil.rmtree(output.parent / "aside", ignore_errors=True)
                lay(output)

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("seed", range(3))
def test_no_exchanged_link_sends_what_lies_outside(tmp_path: Path, seed: int) -> None:
    output, home = tmp_path / "output", tmp_path / "home"
    lay(output)
    lay(home)
    # Each archive that was sent whole counts. Where the other thread rests between two steps, thousands
    # of reads in a row find nothing: a count of reads says nothing.
    whole, wanted, until_s = 0, examples(5_000, short=300), time.monotonic() + PATIENCE_S
    with exchanging(output, home, random.Random(seed)):
        while whole < wanted and time.monotonic() < until_s:
            content = bytearray()
            try:
                for chunk in list_files(output, LIMITS).iterate_bytes():
                    content += chunk
            except OSError:  # it was exchanged, and the answer ends short of its length
                pass
            else:
                whole += HARMLESS in content
            assert SECRET not in content
    assert whole == wanted, f"{whole} archives were sent within {PATIENCE_S:g} s"


def test_an_output_that_is_a_link_sends_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    lay(home)
    for path in PATHS:
        output = tmp_path / f"output-{path.replace('/', '-')}"
        output.symlink_to(home / path)
        content = bytearray()
        with suppress(OSError):
            for chunk in list_files(output, LIMITS).iterate_bytes():
                content += chunk
        assert SECRET not in content
