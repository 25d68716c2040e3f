"""Real processes under the guard, as the launcher starts them."""

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from orchestrator.specs.run import OOM_EXIT_CODE, STALE_EXIT_CODE, GuardSettings, write_json
from orchestrator.training import progress
from orchestrator.training.guard import guard, oom_report
from orchestrator.training.guard.monitor import count_restored_steps
from tests.training.fake_cuda import ON_CUDA
from tests.uncompiled import WITHOUT_COMPILER

MIB = 2**20
TRAIN = (
    WITHOUT_COMPILER
    + """
import argparse, os
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--adversary", action="store_true")
parser.add_argument("--catch", type=int)
parser.add_argument("--bug", action="store_true")
parser.add_argument("--tell", type=int)
args = parser.parse_args()
if "MASTER_PORT" in os.environ:
    torch.distributed.init_process_group("gloo")
model = nn.Linear(args.width, args.width)
optimizers = [torch.optim.AdamW(model.parameters()) for _ in range(1 + args.adversary)]
rank = int(os.environ.get("RANK", "0"))
try:
    for step in range(args.steps):
        for optimizer in optimizers:
            model(torch.ones(8, args.width)).sum().backward()
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(model.weight.grad)
            optimizer.step()
            optimizer.zero_grad()
        if rank == 1 and step == 2:
            torch.zeros(64, 2**20)
        if args.tell:
            from orchestrator.training import progress
            progress.step_completed(args.tell + step, loss=0.5)
        if args.bug:
            {}["missing"]
except torch.OutOfMemoryError:
    if args.catch is None:
        raise
    print("caught")
    sys.exit(args.catch)
print("trained")
"""
)


DATA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        tokens = torch.arange(index, index + 32) % 512
        return {"input_ids": tokens, "labels": tokens}

config = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=4)
model = LlamaForCausalLM(config)
print(f"parameter_bytes={sum(p.nbytes for p in model.parameters())} ")
"""

LLAMA = (
    DATA
    + """
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters())
for step, batch in zip(range(3), torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1)):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)

TRAINER = (
    DATA
    + """
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(output_dir="out", max_steps=3, per_device_train_batch_size=2, bf16=True, use_cpu=True,
                              dataloader_num_workers=1, report_to=[], save_strategy="no", disable_tqdm=True)
Trainer(model=model, args=arguments, train_dataset=Data()).train()
"""
)


# a rank that beats every 0.01 s, on a busy machine too, is never silent for so long
SILENCE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    exit_code: int
    out: str
    folder: Path

    def read(self, name: str, rank: int = 0) -> dict[str, Any]:
        return json.loads((self.folder / f"rank{rank}.{name}.json").read_text())

    def has(self, name: str, rank: int = 0) -> bool:
        return (self.folder / f"rank{rank}.{name}.json").exists()


def start(
    folder: Path, *target: str, rank: int = 0, env: dict[str, str] | None = None, **settings: Any
) -> Any:
    attempt = folder / "attempts" / "1"
    attempt.mkdir(parents=True, exist_ok=True)
    path = attempt / "guard.json"
    settings = {"virtual_capacity_bytes": None, "heartbeat_interval_s": 0.01, **settings}
    write_json(path, GuardSettings(attempt_folder=str(attempt), **settings))
    return subprocess.Popen(
        [sys.executable, guard.__file__, str(path), "--", *target],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), **(env or {})},
        start_new_session=True,
    )


def end(process: Any, folder: Path, timeout_s: float = 120) -> End:
    try:
        out, _ = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return End(exit_code=process.returncode, out=out, folder=folder / "attempts" / "1")


def run(folder: Path, *target: str, **settings: Any) -> End:
    return end(start(folder, *target, **settings), folder)


def script(folder: Path, text: str, name: str = "train.py") -> str:
    (folder / name).write_text(text)
    return name


def train(folder: Path, *args: str, **settings: Any) -> End:
    return run(
        folder, script(folder, TRAIN), *args, **{"virtual_capacity_bytes": 100 * MIB, **settings}
    )


def test_the_services_number_of_a_rank_wins_over_variables_of_the_job(tmp_path: Path) -> None:
    ended = run(tmp_path, script(tmp_path, "pass"), rank=7, env={"ORC_RANK": "0"})
    assert ended.has("heartbeat", rank=0)
    assert not ended.has("heartbeat", rank=7)


WHO = "import json, sys; print(json.dumps([__name__, __file__, sys.argv, sys.path[0], sorted(sys.modules)]))\n"


def test_a_script_sees_what_python_would_show_it(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    name = script(tmp_path, WHO, "inner/who.py")
    name_, file, argv, first, modules = json.loads(run(tmp_path, name, "-m", "--", "x y").out)
    assert (name_, argv) == ("__main__", [name, "-m", "--", "x y"])
    assert (file, first) == (str(tmp_path / name), str(tmp_path / "inner"))
    assert not {"torch", "pydantic"} & set(modules)


def test_a_module_sees_what_python_would_show_it(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    script(tmp_path, "", "package/__init__.py")
    name = script(
        tmp_path,
        "from . import __name__ as parent\nassert parent == 'package'\n" + WHO,
        "package/who.py",
    )
    name_, file, argv, first, _ = json.loads(run(tmp_path, "-m", "package.who", "a").out)
    assert (name_, first) == ("__main__", str(tmp_path))
    assert file == argv[0] == str(tmp_path / name)
    assert argv[1:] == ["a"]


@pytest.mark.parametrize("module", ["decoder", "guard", "monitor", "yaml"])
def test_the_scripts_own_modules_win_over_ours(tmp_path: Path, module: str) -> None:
    script(tmp_path, "mine = True", f"{module}.py")
    assert run(tmp_path, script(tmp_path, f"import {module}; assert {module}.mine")).exit_code == 0


@pytest.mark.parametrize(
    ("text", "exit_code"),
    [
        ("pass", 0),
        ("import sys; sys.exit(5)", 5),
        ("raise SystemExit('sorry')", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os; os._exit(9)", 9),
        ("import atexit; atexit.register(print, 'goodbye'); raise ValueError", 1),
    ],
)
def test_a_script_ends_as_it_would_without_a_guard(
    tmp_path: Path, text: str, exit_code: int
) -> None:
    guarded = run(tmp_path, script(tmp_path, text))
    assert guarded.exit_code == exit_code
    assert ("goodbye" in guarded.out) == ("atexit" in text)
    assert guarded.has("error") == ("ValueError" in text)
    assert not guarded.has("oom")


SAVES_AT_SIGTERM = """
import os, signal, sys
def save(number, frame):
    print("saved")
    sys.exit(0)
previous = signal.signal(signal.SIGTERM, save)
assert previous is signal.SIG_DFL
assert signal.getsignal(signal.SIGTERM) is save
assert signal.signal(signal.SIGTERM, save) is save
os.kill(os.getpid(), signal.SIGTERM)
"""
SWALLOWS_AN_INTERRUPT = """
import os, signal, time
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    print("saved")
"""


@pytest.mark.parametrize(
    ("text", "number"),
    [(SAVES_AT_SIGTERM, signal.SIGTERM), (SWALLOWS_AN_INTERRUPT, signal.SIGINT)],
)
def test_a_signal_that_a_script_handles_is_recorded_and_hidden_from_nobody(
    tmp_path: Path, text: str, number: int
) -> None:
    guarded = run(tmp_path, script(tmp_path, text))
    assert (guarded.exit_code, guarded.out.strip()) == (0, "saved")
    assert guarded.read("heartbeat")["signal"] == number


def test_a_handled_out_of_memory_error_is_not_what_another_exception_reports(
    tmp_path: Path,
) -> None:
    text = """
import torch
try:
    torch.zeros(2**27)
except torch.OutOfMemoryError:
    pass
{}["labels"]
"""
    guarded = run(tmp_path, script(tmp_path, text), virtual_capacity_bytes=2**20)
    assert guarded.exit_code == 1
    assert (guarded.has("oom"), guarded.has("caught")) == (False, True)
    assert guarded.read("error")["type"] == "KeyError"


def test_an_error_report_shows_the_users_frames_only(tmp_path: Path) -> None:
    guarded = run(tmp_path, script(tmp_path, "def work():\n    {}['missing']\n\nwork()\n"))
    report = guarded.read("error")
    assert (report["type"], report["phase"], report["step"]) == ("KeyError", "startup", 0)
    assert (
        report["traceback"].splitlines()[1] == f'  File "{tmp_path}/train.py", line 4, in <module>'
    )
    assert "guard.py" not in report["traceback"] + guarded.out
    assert report["traceback"] in guarded.out


def test_a_newer_attempt_ends_an_older_one(tmp_path: Path) -> None:
    (tmp_path / "epoch").write_text("2")
    guarded = run(tmp_path, script(tmp_path, "print('ran')"))
    assert guarded.exit_code == STALE_EXIT_CODE
    assert "ran" not in guarded.out


def test_a_plain_training_is_counted_and_timed(tmp_path: Path) -> None:
    guarded = train(tmp_path, "--adversary")
    assert guarded.exit_code == 0, guarded.out
    beat = guarded.read("heartbeat")
    assert (beat["step"], beat["steps_done"]) == (4, 4)  # two optimizers that take turns
    assert beat["restored_steps"] == 0
    assert 0 < beat["step_s"] < 10
    parameter_bytes = (64 * 64 + 64) * 4
    assert 6 * parameter_bytes < beat["peak_bytes"] < 10 * parameter_bytes
    assert (beat["allocator_room_bytes"], beat["reserved_bytes"]) == (None, 0), "there is no CUDA"


class OddOptimizer(torch.optim.SGD):
    """An optimizer that keeps words where others keep their number of steps."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] = "twelve"


@pytest.mark.parametrize(
    ("kind", "restored"),
    [
        (torch.optim.AdamW, 12),
        (partial(torch.optim.Adam, fused=True), 12),
        (torch.optim.Adafactor, 12),
        (partial(torch.optim.SGD, momentum=0.9), None),
        (OddOptimizer, None),
    ],
)
def test_the_steps_before_a_restart_are_those_that_the_restored_optimizer_counts(
    kind: Any, restored: int | None
) -> None:
    model = nn.Linear(8, 8)

    def step(optimizer: Any) -> None:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    saved = kind(model.parameters())
    for _ in range(12):
        step(saved)
    resumed = kind(model.parameters())
    assert count_restored_steps(resumed, None) is None, "it has made no step"
    resumed.load_state_dict(saved.state_dict())
    step(resumed)
    assert count_restored_steps(resumed, None) == restored
    capturing = SimpleNamespace(is_current_stream_capturing=lambda: True)
    assert count_restored_steps(resumed, capturing) is None
    new = kind(model.parameters())
    step(new)
    assert count_restored_steps(new, None) == (None if restored is None else 0)


@pytest.mark.parametrize(
    "ending", ["os._exit(0)", "raise KeyboardInterrupt", "sys.exit(3)", "raise ValueError"]
)
def test_the_last_heartbeat_has_every_step_however_the_program_ends(
    tmp_path: Path, ending: str
) -> None:
    assert run(tmp_path, script(tmp_path, f"{TRAIN}{ending}\n")).read("heartbeat")["step"] == 4


@pytest.mark.parametrize(("last_step", "heartbeat_step"), [(0, 1), (4, 4)])
def test_the_declared_last_step_is_told_at_once_by_a_program_that_then_stands_still(
    tmp_path: Path, last_step: int, heartbeat_step: int
) -> None:
    text = script(tmp_path, f"{TRAIN}import signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    ended = run(tmp_path, text, heartbeat_interval_s=60.0, last_step=last_step)
    assert ended.read("heartbeat")["step"] == heartbeat_step


IN_BACKWARD = (
    WITHOUT_COMPILER
    + """
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
alone = {parameter: torch.optim.AdamW([parameter]) for parameter in model.parameters()}
def update(parameter):
    alone[parameter].step()
    parameter.grad = None
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(update)
for step in range(5):
    model(torch.ones(8, 64)).sum().backward()
model[0].weight.register_post_accumulate_grad_hook(lambda _: torch.zeros(64, 2**20))
model(torch.ones(8, 64)).sum().backward()
"""
)


def test_optimizers_that_step_within_the_backward_pass_count_one_step_for_each_pass(
    tmp_path: Path,
) -> None:
    guarded = run(tmp_path, script(tmp_path, IN_BACKWARD), virtual_capacity_bytes=100 * MIB)
    assert guarded.exit_code == OOM_EXIT_CODE, guarded.out
    report = guarded.read("oom")
    assert (report["step"], report["phase"]) == (
        6,
        "backward",
    )  # the last parameter's update, after all others
    assert 0 < report["pass_done"] <= 1


def test_the_room_of_the_allocator_on_a_cuda_device_is_its_minimum_so_far(tmp_path: Path) -> None:
    """A context and a communicator take 700 of 1000 MiB; memory that the allocator reserves or frees does not count."""
    text = (
        WITHOUT_COMPILER
        + ON_CUDA.format(free=900 * MIB)
        + (
            f"Device.free, Device.reserved = {500 * MIB}, {200 * MIB}\ntrain()\n"
            f"Device.free, Device.reserved = {100 * MIB}, {200 * MIB}\ntrain(50)\n"
            f"Device.free, Device.reserved = {800 * MIB}, {100 * MIB}\ntrain()\n"
        )
    )
    guarded = run(tmp_path, script(tmp_path, text), heartbeat_interval_s=0.0)
    assert guarded.exit_code == 0, guarded.out
    assert guarded.read("heartbeat")["allocator_room_bytes"] == 300 * MIB
    assert guarded.read("heartbeat")["reserved_bytes"] == 100 * MIB
    assert guarded.read("heartbeat")["device_model"] == "Fake Card"
    assert guarded.read("heartbeat")["device_uuid"] == "3c1f-slice-2"
    assert guarded.read("heartbeat")["python_version"] == platform.python_version()


@pytest.mark.parametrize("trouble", [pytest.param("capturing", marks=pytest.mark.long), "broken"])
def test_a_failing_memory_query_does_not_disturb_the_training(tmp_path: Path, trouble: str) -> None:
    text = (
        WITHOUT_COMPILER
        + ON_CUDA.format(free=900 * MIB)
        + (
            f"train()\nDevice.free, Device.{trouble}, asked = 1, True, Device.asked\ntrain(3)\n"
            "assert asked and (Device.asked > asked) == Device.broken\n"
            f"Device.free, Device.capturing = {900 * MIB}, False\n"
        )
    )
    guarded = run(tmp_path, script(tmp_path, text), heartbeat_interval_s=0.0)
    assert guarded.exit_code == 0, guarded.out
    assert guarded.read("heartbeat")["allocator_room_bytes"] == 900 * MIB


def test_steps_that_a_loop_reports_take_precedence(tmp_path: Path) -> None:
    beat = train(tmp_path, "--adversary", "--tell", "101").read("heartbeat")
    assert (beat["step"], beat["steps_done"], beat["loss"]) == (104, 4, 0.5)


def test_a_loop_is_told_the_peak_of_each_step_and_the_highest_stays_that_of_the_training(
    tmp_path: Path,
) -> None:
    text = """
import torch
from orchestrator.training import progress
for step, rows in enumerate((2, 8, 1), 1):
    torch.ones(rows, 2**18)
    print(progress.peak_bytes(), flush=True)
    progress.step_completed(step)
"""
    guarded = run(
        tmp_path, script(tmp_path, text), virtual_capacity_bytes=100 * MIB, heartbeat_interval_s=0.0
    )
    assert [int(line) for line in guarded.out.split()] == [2 * MIB, 8 * MIB, MIB]
    assert guarded.read("heartbeat")["peak_bytes"] == 8 * MIB


def test_without_a_guard_nobody_tells_the_peak_of_a_step() -> None:
    assert progress.peak_bytes() is None


def test_running_out_of_memory_is_reported_with_its_phase_and_bytes(tmp_path: Path) -> None:
    width = 1024
    capacity_bytes = 4 * width * width * 4  # parameters, gradients, moments; the biases do not fit
    guarded = train(tmp_path, "--width", str(width), virtual_capacity_bytes=capacity_bytes)
    assert guarded.exit_code == OOM_EXIT_CODE
    assert "OutOfMemoryError" in guarded.out
    report = guarded.read("oom")
    assert (report["phase"], report["step"], report["injected"]) == ("optimizer", 0, False)
    assert report["capacity_bytes"] == capacity_bytes
    assert report["live_bytes"] <= capacity_bytes < report["live_bytes"] + report["requested_bytes"]
    assert not guarded.has("error")


DEEP = (
    WITHOUT_COMPILER
    + """
from torch import nn
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16)])
optimizer = torch.optim.SGD(model.parameters())
for rows in map(int, sys.argv[1:]):
    model(torch.ones(rows, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)


@pytest.mark.parametrize(
    "rows", [pytest.param(["16384"], marks=pytest.mark.long), ["64", "64", "16384"]]
)
def test_an_out_of_memory_report_has_the_progress_of_the_forward_pass(
    tmp_path: Path, rows: list[str]
) -> None:
    # 4 MiB go in and each layer keeps as much: 36 MiB are full in the eighth layer of sixteen
    guarded = run(tmp_path, script(tmp_path, DEEP), *rows, virtual_capacity_bytes=36 * MIB)
    report = guarded.read("oom")
    assert (report["phase"], report["step"]) == ("forward", len(rows) - 1)
    assert report["pass_done"] == pytest.approx(7.5 / 16, abs=0.07)


OWN_LOSS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    def forward(self, rows):
        return self.layers(rows).repeat(1, 64).sum()  # 64 MiB in the code of the model itself

Model()(torch.ones(4096, 64)).backward()
"""


def test_the_models_own_code_outside_its_modules_tells_nothing_of_the_progress(
    tmp_path: Path,
) -> None:
    report = run(tmp_path, script(tmp_path, OWN_LOSS), virtual_capacity_bytes=36 * MIB).read("oom")
    assert (report["phase"], report["pass_done"]) == ("forward", None)


def test_an_out_of_memory_error_that_the_script_gives_up_on_is_reported(tmp_path: Path) -> None:
    guarded = train(
        tmp_path, "--width", "1024", "--catch", "3", virtual_capacity_bytes=4 * 1024 * 1024 * 4
    )
    assert guarded.exit_code == 3
    assert guarded.read("oom")["phase"] == "optimizer"


def test_a_script_may_survive_its_out_of_memory_error(tmp_path: Path) -> None:
    guarded = train(
        tmp_path, "--width", "1024", "--catch", "0", virtual_capacity_bytes=4 * 1024 * 1024 * 4
    )
    assert (guarded.exit_code, guarded.has("oom"), guarded.has("error")) == (0, False, False)


@pytest.mark.parametrize(
    ("kind", "exit_code"),
    [("oom", OOM_EXIT_CODE), ("kill", -9), pytest.param("preempt", -15, marks=pytest.mark.long)],
)
def test_a_rehearsed_fault_happens_for_real_before_its_step_completes(
    tmp_path: Path, kind: str, exit_code: int
) -> None:
    guarded = train(tmp_path, fault_kind=kind, fault_step=3)
    assert guarded.exit_code == exit_code
    assert guarded.read("heartbeat")["step"] <= 2
    if kind == "oom":
        report = guarded.read("oom")
        assert (report["injected"], report["step"], report["phase"]) == (True, 2, "optimizer")
        assert report["requested_bytes"] == report["capacity_bytes"] > report["live_bytes"] > 0


def test_a_rehearsed_hang_stops_the_heartbeats_and_not_the_process(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        script(tmp_path, TRAIN),
        virtual_capacity_bytes=MIB,
        fault_kind="hang",
        fault_step=2,
    )
    beat, deadline_s = tmp_path / "attempts" / "1" / "rank0.heartbeat.json", time.monotonic() + 120
    last: dict[str, Any] = {}
    while (last.get("step"), last.get("phase")) != (
        1,
        "optimizer",
    ) or time.time() - beat.stat().st_mtime < SILENCE_S:
        assert time.monotonic() < deadline_s, "it beats on"
        assert process.poll() is None, "it ended"
        time.sleep(0.05)
        last = json.loads(beat.read_text()) if beat.exists() else {}
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    process.stdout.close()


def test_a_rehearsed_loss_of_the_node_kills_the_launcher(tmp_path: Path) -> None:
    settings = tmp_path / "guard.json"
    write_json(
        settings,
        GuardSettings(
            attempt_folder=str(tmp_path),
            virtual_capacity_bytes=None,
            fault_kind="node",
            fault_step=1,
        ),
    )
    command = [sys.executable, guard.__file__, str(settings), "--", script(tmp_path, TRAIN)]
    launcher = (
        "import ctypes, subprocess, sys\n"
        "die = lambda: ctypes.CDLL('libc.so.6').prctl(1, 9)\n"
        "subprocess.run(sys.argv[1:], preexec_fn=die)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", launcher, *command], cwd=tmp_path, timeout=120, check=False
    )
    assert result.returncode == -signal.SIGKILL


def gang(folder: Path, *target: str, **settings: Any) -> tuple[End, End]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        start(folder, *target, rank=rank, env={**env, "LOCAL_RANK": str(rank)}, **settings)
        for rank in (0, 1)
    ]
    rank_1 = end(ranks[1], folder)
    return end(ranks[0], folder), rank_1


# C's exit handlers run where the interpreter ends, and do not where the process leaves.
ENDS = """
import ctypes, os, sys, torch
libc = ctypes.CDLL(None)
libc.strdup.restype = ctypes.c_void_p
libc.__cxa_atexit(libc.puts, ctypes.c_void_p(libc.strdup(b"taken down")), None)
"""
LONG = pytest.mark.long
THREAD = "import threading\nthreading.Timer(0.3, print, ['thread']).start()"
GENERATOR = "def rows():\n    try:\n        yield 1\n    finally:\n        os.write(1, b'end')\nrow = rows()"


@pytest.mark.parametrize(
    "text",
    [
        "file = open('end', 'w')\nfile.write('all of it')",
        f"{GENERATOR}\nnext(row)",
        pytest.param("class Row:\n    __del__ = lambda _: print('end')\nrow = [Row()]", marks=LONG),
        pytest.param("import gzip\nfile = gzip.GzipFile('end', 'w', mtime=0)", marks=LONG),
        pytest.param("import PIL.Image", marks=LONG),
    ],
    ids=["open file", "suspended generator", "finaliser", "compressed file", "foreign library"],
)
def test_the_end_of_a_lone_rank_does_all_that_its_interpreter_would_do(
    tmp_path: Path, text: str
) -> None:
    name = script(tmp_path, f"{ENDS}{text}\n")
    plain = subprocess.run([sys.executable, name], cwd=tmp_path, capture_output=True, timeout=60)
    expected = [path.read_bytes() for path in tmp_path.glob("end")]
    ended = run(tmp_path, name)
    assert (ended.exit_code, ended.out) == (0, plain.stdout.decode())
    assert [path.read_bytes() for path in tmp_path.glob("end")] == expected
    assert "taken down" in ended.out


@pytest.mark.parametrize(
    ("text", "exit_code", "out"),
    [
        ("import atexit\natexit.register(print, 'handler')", 0, "handler\n"),
        (
            "with open('end', 'w') as file:\n    file.write('all')\nsys.exit('reason')",
            1,
            "reason\n",
        ),
        pytest.param(f"{THREAD}\nsys.exit(5)", 5, "thread\n", marks=LONG),
    ],
)
def test_a_lone_rank_with_nothing_left_to_do_does_not_take_torch_down(
    tmp_path: Path, text: str, exit_code: int, out: str
) -> None:
    ended = run(tmp_path, script(tmp_path, f"{ENDS}{text}\n"))
    assert (ended.exit_code, ended.out) == (exit_code, out)


def test_one_rank_of_two_runs_out_of_memory_and_ends_at_once(tmp_path: Path) -> None:
    rank_0, rank_1 = gang(tmp_path, script(tmp_path, TRAIN), virtual_capacity_bytes=100 * MIB)
    assert rank_1.exit_code == OOM_EXIT_CODE, rank_1.out
    report = rank_1.read("oom", rank=1)
    assert (report["requested_bytes"], report["step"], report["phase"]) == (256 * MIB, 3, "forward")
    assert rank_0.exit_code == 1  # gloo: the peer went away
    assert rank_0.has("error", rank=0)
    assert not rank_0.has("oom", rank=0)


@pytest.mark.long
def test_a_hugging_face_model_on_two_ranks_is_counted_and_measured(tmp_path: Path) -> None:
    for rank, guarded in enumerate(
        gang(tmp_path, script(tmp_path, LLAMA), virtual_capacity_bytes=400 * MIB)
    ):
        assert guarded.exit_code == 0, guarded.out
        beat = guarded.read("heartbeat", rank=rank)
        parameter_bytes = int(guarded.out.split("parameter_bytes=")[1].split()[0])
        assert beat["step"] == 3
        assert (
            4 * parameter_bytes < beat["peak_bytes"] < 400 * MIB
        )  # parameters, DDP's buckets, two moments


@pytest.mark.long
def test_a_hugging_face_trainer_is_capped_counted_and_measured(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")
    name = script(tmp_path, TRAINER)
    guarded = run(tmp_path, name, virtual_capacity_bytes=400 * MIB)
    assert guarded.exit_code == 0, guarded.out
    beat = guarded.read("heartbeat")
    assert beat["step"] == 3
    tight = run(tmp_path, name, virtual_capacity_bytes=beat["peak_bytes"] - 1)
    assert tight.exit_code == OOM_EXIT_CODE, tight.out


@pytest.mark.long
def test_a_hugging_face_trainer_on_two_ranks_is_counted(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")
    for rank, guarded in enumerate(
        gang(tmp_path, script(tmp_path, TRAINER), virtual_capacity_bytes=400 * MIB)
    ):
        assert guarded.exit_code == 0, guarded.out
        assert guarded.read("heartbeat", rank=rank)["step"] == 3


@pytest.mark.parametrize(
    ("message", "requested", "capacity", "foreign"),
    [
        (
            "CUDA out of memory. Tried to allocate 26.00 MiB. GPU 0 has a total capacity of 11.66 GiB of which 9.81 MiB"
            " is free. Process 3893521 has 618.00 MiB memory in use. Including non-PyTorch memory, this process has"
            " 9.74 GiB memory in use.",
            26 * MIB,
            round(11.66 * 2**30),
            618 * MIB,
        ),
        (
            "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 24.00 GiB total capacity; 2.12 GiB already"
            " allocated; 19.76 GiB free; 2.22 GiB reserved in total by PyTorch)",
            2 * 2**30,
            24 * 2**30,
            0,
        ),
        ("CUDA error: out of memory", None, None, 0),
        (
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            None,
            None,
            0,
        ),
    ],
    ids=["now", "torch 1", "driver", "cublas"],
)
def test_messages_of_cuda_are_parsed(
    message: str, requested: int | None, capacity: int | None, foreign: int
) -> None:
    error = RuntimeError(message)
    wrapped = ValueError("step failed")
    wrapped.__cause__ = error
    assert oom_report.find_oom_exception(wrapped) is error
    assert oom_report.parse_requested_bytes(message) == requested
    assert oom_report.parse_capacity_bytes(message) == capacity
    assert oom_report.parse_foreign_bytes(message) == foreign


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA out of memory. Tried to allocate more than 1EB memory."),
        ValueError("CUDA out of memory. Tried to allocate 1.00 GiB"),
        MemoryError(),
        RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 33554432 bytes."
        ),
    ],
    ids=["desynchronised", "not a runtime error", "host", "host allocator"],
)
def test_other_errors_do_not_count_as_device_out_of_memory(error: BaseException) -> None:
    assert oom_report.find_oom_exception(error) is None
