"""Run a short night on two virtual devices, and write its guide with what was seen: `python -m docs.overnight`.

Six jobs stand for a night's: one is killed from outside, one runs out of memory, one has a bug, one hangs, one is too
large, three are an array. Chromium takes the pictures. `make docs` does not run it: it takes four minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import sync_playwright

from docs.overnight_text import GUIDE
from orchestrator.sdk import Client

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "tests/night/programs"
GUIDES = Path(__file__).parent / "guides"
ORC = str(Path(sys.executable).with_name("orc"))
NIGHT_S = 600  # longer than this night takes: 240 s on two idle cores
PICTURES = (("overview", "/ui/overview", 1100), ("phone", "/ui/night?hours=1", 390))
KNOBS = """\
gpus: 1
global_batch_size: {batch}
steps: {steps}
probe: never
knobs:
  micro_batch_size: {{flag: --batch-size, default: {batch}}}
  gradient_accumulation_steps: {{flag: --accumulate, default: 1}}
  output_dir: {{flag: --output}}
  resume_from: {{flag: --resume}}
resume: {{checkpoints: checkpoint-*.pt}}
success: {{artifacts: [model.pt]}}
"""
JOBS = {
    "voice": ("python loop.py --steps 900", 8, 900, ""),
    "wide-batch": ("python wide.py 50 --steps 54", 512, 54, ""),
    "typo": ("python bug.py --steps 40", 8, 40, ""),
    "stuck": ("python hang.py --steps 40", 8, 40, "hang_timeout: 15s\n"),
    "too-large": ("python too_large.py --steps 20", 8, 20, ""),
    "seeds-{seed}": ("python loop.py --steps 6{seed}", 8, 60, "array: {seed: [0, 1, 2]}\n"),
}


def write_jobs(folder: Path) -> None:
    """Write the job files, and the programs as a user's own scripts."""
    (folder / "jobs").mkdir()
    for number, (name, (command, batch, steps, more)) in enumerate(JOBS.items(), start=1):
        text = f"name: {name}\ncommand: {command}\nworkdir: ..\n"
        text += KNOBS.format(batch=batch, steps=steps) + more
        (folder / f"jobs/{number}-{name.partition('-{')[0]}.yaml").write_text(text)
    for program in PROGRAMS.glob("*.py"):
        shutil.copy(program, folder)


def ranks_of(home: Path, job: str) -> Iterator[int]:
    """Yield the process ids of a job's newest attempt, as its heartbeats tell them."""
    for beat in sorted((home / "jobs" / job / "attempts").glob("*/rank0.heartbeat.json")):
        yield int(beat.read_text().partition('"pid": ')[2].partition(",")[0])


def run_night(folder: Path) -> dict[str, str]:
    """Run the night in a folder; return what each command printed, by its name in the guide."""
    home = folder / "home"
    env = {**os.environ, "ORC_HOME": str(home), "COLUMNS": "100"}
    texts = {}

    def orc(*words: str) -> str:
        ended = subprocess.run(
            [ORC, *words], cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        return (ended.stdout + ended.stderr).replace(str(folder), "/home/ada").rstrip()

    orc("up")
    began_s = time.time()
    files = sorted(f"jobs/{path.name}" for path in (folder / "jobs").iterdir())
    texts["submit"] = orc("submit", *files)
    with Client(home) as client:
        voice = client.job(texts["submit"].split()[0])
        is_killed = False
        while time.time() < began_s + NIGHT_S:
            live = [job for job in client.queue() if job["status"] in ("queued", "running")]
            if not live:
                break
            progress = voice.info()["progress"] or {}
            if not is_killed and (progress.get("step") or 0) > 100:
                texts["queue"] = orc("queue")
                os.kill(list(ranks_of(home, voice.id))[-1], signal.SIGKILL)
                is_killed = True
            time.sleep(1.0)
    texts["report"] = orc("report", "--since", "1h")
    texts["show"] = orc("show", texts["submit"].split()[1])
    texts["took"] = f"{(time.time() - began_s) / 60:.0f}"
    take_pictures(home, env)
    orc("down", "--force")
    return texts


def take_pictures(home: Path, env: dict[str, str]) -> None:
    """Write the overview as a desk shows it, and the report as a phone does."""
    url = f"http://127.0.0.1:{(home / 'port').read_text()}"
    link = subprocess.run(
        [ORC, "open", "--json"], env=env, capture_output=True, text=True, check=True
    )
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium", path=env["PATH"])
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 844})
        page.goto(json.loads(link.stdout)["link"])
        page.wait_for_url("**/ui/overview")
        page.wait_for_load_state("networkidle")
        for name, page_path, width in PICTURES:
            page.set_viewport_size({"width": width, "height": 844})
            page.goto(url + page_path)
            page.wait_for_load_state("networkidle")
            page.screenshot(path=GUIDES / f"overnight-{name}.png", full_page=True)
        browser.close()


def main() -> None:
    """Write the guide and its pictures."""
    with tempfile.TemporaryDirectory(prefix="overnight-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_jobs(folder)
        example = (folder / "jobs/2-wide-batch.yaml").read_text()
        texts = run_night(folder)
    (GUIDES / "overnight.md").write_text(GUIDE.format(example=example, **texts))


if __name__ == "__main__":
    main()
