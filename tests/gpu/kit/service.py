"""The service on a device: what it finds there, a job that fits, one whose profile lies, scripts of other people's.

python -m tests.gpu.kit.service ours|launch|strangers full|tiny
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.sdk import Client, Job
from orchestrator.service.client.client import Client as Connection
from tests.gpu.kit.runner import PATIENCE, TAIL, recording

ORC = (sys.executable, "-m", "orchestrator.cli")
HERE = Path(__file__).parent
COMMAND_TIMEOUT_S = 40 * PATIENCE
JOB_TIMEOUT_S, LYING_TIMEOUT_S = (
    35 * PATIENCE,
    55 * PATIENCE,
)  # what it has come to by then is in its line
LAUNCH_TIMEOUT_S = 75 * PATIENCE
RECORDS_S, POLL_S = 10.0, 0.2
EXPERIMENT = "orchestrator"  # of backends/mlflow/tracker.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of the jobs. `batch` samples at a time are far more than the device holds."""

    hidden: int
    layers: int
    vocabulary: int
    tokens: int  # of a sample
    batch: int
    lie: str  # of a sample's activations
    options: str  # of transformers' script, likewise
    mib: int  # of a sample of the script that swallows errors


SIZES = {
    "full": Size(
        hidden=768, layers=12, vocabulary=32000, tokens=4096, batch=96, lie="20MiB",
        options="--per_device_train_batch_size 12288 --samples 12288 --block_size 512", mib=4096,
    ),
    "tiny": Size(
        hidden=64, layers=4, vocabulary=256, tokens=256, batch=192, lie="100KiB",
        options="--per_device_train_batch_size 640 --samples 640 --block_size 128", mib=32,
    ),
}  # fmt: skip


def orc(*arguments: str) -> str:
    """Return the output of a command. Raises RuntimeError with the output where the command fails."""
    ended = subprocess.run(
        [*ORC, *arguments], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    print(ended.stdout, ended.stderr, flush=True)
    if ended.returncode:
        raise RuntimeError(
            f"orc {arguments[0]} exits with {ended.returncode}: {(ended.stdout + ended.stderr)[-TAIL:]}"
        )
    return ended.stdout


@contextlib.contextmanager
def service() -> Iterator[Path]:
    """The home of a service that has started on the devices of this machine; it goes down at the end."""
    with tempfile.TemporaryDirectory(prefix="kit-") as name:
        home = Path(name) / "home"
        os.environ["ORC_HOME"] = str(home)
        with recording("orc up") as line:
            line["output"] = orc("up")[-TAIL:]
        try:
            yield home
        finally:
            with contextlib.suppress(OSError):
                shutil.copy(home / "service.log", os.environ["KIT_LOGS"])
            with recording("orc down"):
                orc("down", "--force")


def job_of(size: Size, folder: Path, **fields: Any) -> dict[str, Any]:
    """A fine-tune by our engine of a few samples a step, as a job file says it; `fields` replace its keys."""
    text = folder / "text.txt"
    text.write_text(
        "All work and no play makes a dull corpus.\n" * (size.batch * size.tokens // 40)
    )
    return {
        "name": "fits",
        "gpus": 1,
        "global_batch_size": 4,
        "precision": "bf16",
        "model": {
            "decoder": {
                "vocab_size": size.vocabulary,
                "hidden_size": size.hidden,
                "intermediate_size": 3 * size.hidden,
                "num_hidden_layers": size.layers,
                "num_attention_heads": 4,
            }
        },
        "data": {"text": [str(text)], "sequence_length": size.tokens},
        "training": {"max_steps": 10},
        **fields,
    }


def report_of(job: Job, timeout_s: float = JOB_TIMEOUT_S) -> dict[str, Any]:
    """Return the end of a job: attempt by attempt the plan, predictions and measurements."""
    try:
        view = job.wait(timeout_s)
    except TimeoutError:
        view = job.info()
    fields = (
        "outcome",
        "plan",
        "predicted_bytes",
        "needed_bytes",
        "peak_bytes",
        "predicted_step_s",
        "step_s",
    )
    attempts = [
        {
            **{name: attempt[name] for name in fields},
            "why": (attempt["failure"] or {}).get("reason"),
        }  # type: ignore[literal-required]
        for attempt in view["attempts"]
    ]
    with contextlib.suppress(Exception):
        print(job.logs()[-4000:], flush=True)
    return {"status": view["status"], "reason": view["reason"], "attempts": attempts}


def record_ours(size: Size) -> None:
    """Doctor, up, what it found beside nvidia-smi; a job that fits, one that runs out; the records by REST."""
    with recording("nvidia-smi") as line:
        query = (
            "--query-gpu=name,memory.total,memory.free,driver_version,compute_mode,mig.mode.current"
        )
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        line["output"] = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout.strip()
    with recording("orc doctor") as line:
        line["output"] = orc("doctor")
    with service() as home, Client(home) as client:
        with recording("orc cluster show") as line:
            line["output"] = orc("cluster", "show")
            line["nodes"] = Connection(home).fetch_cluster()["nodes"]
        with recording("job that fits") as line:
            line |= report_of(client.submit(job_of(size, home.parent)))
        with recording("job whose profile lies") as line:
            profile = {
                "parameters": 12 * size.layers * size.hidden**2,
                "layers": size.layers,
                "activations_per_sample": size.lie,
                "checkpointed_per_sample": size.lie,
                "selective_per_sample": size.lie,
            }
            lying = job_of(
                size, home.parent, name="lies", global_batch_size=size.batch, profile=profile
            )
            lying["training"]["max_steps"] = 4
            line |= report_of(client.submit(lying), LYING_TIMEOUT_S)
        with recording("records of MLflow by REST") as line:
            line["runs"] = records(home)


def records(home: Path) -> list[dict[str, Any]]:
    """Name and state of each run, once all have ended or RECORDS_S are over; all of it goes to a file."""
    uri = f"{Connection(home).fetch_cluster()['trackers']['mlflow']}/api/2.0/mlflow"
    signed = {
        "Authorization": f"Bearer {(home / 'token').read_text()}",
        "Content-Type": "application/json",
    }
    named = urllib.request.Request(
        f"{uri}/experiments/get-by-name?experiment_name={EXPERIMENT}", headers=signed
    )
    with urllib.request.urlopen(named, timeout=30) as reply:
        body = {
            "experiment_ids": [json.load(reply)["experiment"]["experiment_id"]],
            "max_results": 100,
        }
    request = urllib.request.Request(f"{uri}/runs/search", json.dumps(body).encode(), signed)
    until_s = time.monotonic() + RECORDS_S
    while True:
        with urllib.request.urlopen(request, timeout=30) as reply:
            runs = json.load(reply).get("runs", [])
        states = [{name: run["info"][name] for name in ("run_name", "status")} for run in runs]
        if time.monotonic() > until_s or all(state["status"] != "RUNNING" for state in states):
            break
        time.sleep(POLL_S)
    Path(os.environ["KIT_LOGS"], "mlflow.json").write_text(json.dumps(runs))
    return states


def record_strangers(size: Size) -> None:
    """Scripts of other people's that run out, one that says nothing of it, and a service that is killed."""
    script = {
        "gpus": 1,
        "probe": "never",
        "workdir": str(HERE.parents[1] / "trainers" / "frameworks"),
        "trainer": "hf",
    }
    batch = int(size.options.split()[1])
    with service() as home, Client(home) as client:
        with recording("a script swallows its errors") as line:
            knobs = {
                "micro_batch_size": {"flag": "--batch-size", "default": 64},
                "gradient_accumulation_steps": {"flag": "--accumulate", "default": 1},
            }
            program = ["python", "swallows.py", "--mib", str(size.mib)]
            job = {
                "name": "swallows",
                "command": program,
                "workdir": str(HERE),
                "gpus": 1,
                "probe": "never",
            }
            line |= report_of(client.submit({**job, "global_batch_size": 64, "knobs": knobs}))
        with recording("kill -9 of the service") as line:
            job = job_of(size, home.parent, name="survives", training={"max_steps": 300})
            survivor = client.submit(job)
            begun_by_s = time.monotonic() + COMMAND_TIMEOUT_S
            while (
                not (step := (survivor.info()["progress"] or {}).get("step"))
                and time.monotonic() < begun_by_s
            ):
                time.sleep(POLL_S)
            line["killed_at_step"] = step
            os.kill(json.loads((home / "service.json").read_text())["pid"], signal.SIGKILL)
            orc("up")
            with Client(home) as again:
                line |= report_of(again.job(survivor.id))
        with recording("transformers' Trainer runs out") as line, Client(home) as again:
            command = f"python hf.py --max_steps 1 --report_to none {size.options}"
            line |= report_of(
                again.submit(
                    {"name": "hf", "command": command, "global_batch_size": batch, **script}
                )
            )


def record_launch(size: Size) -> None:
    """Another's script runs out under `orc launch`, without a service, and goes on to its end."""
    script = HERE.parents[1] / "trainers" / "frameworks" / "hf.py"
    with tempfile.TemporaryDirectory(prefix="kit-") as name:
        shutil.copy(script, name)
        os.environ["ORC_HOME"] = str(Path(name) / "home")
        typed = (
            f"{sys.executable} hf.py --max_steps 4 --save_steps 2 --report_to none {size.options}"
        )
        for what, command in (
            ("what would run", ("launch", "--dry-run", *typed.split())),
            ("transformers' Trainer runs out", ("launch", *typed.split())),
        ):
            with recording(f"orc launch: {what}") as line:
                ended = subprocess.run(
                    [*ORC, *command],
                    capture_output=True,
                    text=True,
                    timeout=LAUNCH_TIMEOUT_S,
                    check=False,
                    cwd=name,
                )
                print(ended.stdout, ended.stderr, flush=True)
                line["code"] = ended.returncode
                line["output"] = (ended.stdout + ended.stderr)[-4 * TAIL :]


if __name__ == "__main__":
    {"ours": record_ours, "launch": record_launch, "strangers": record_strangers}[sys.argv[1]](
        SIZES[sys.argv[2]]
    )
