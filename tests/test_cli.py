"""Laws of the commands: exit codes, one clear error, nothing stored of bad input, answers that programs can read."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from orchestrator.cli import main
from orchestrator.service.client import lifecycle
from orchestrator.specs.job.spec import make_job_json_schema
from orchestrator.specs.units import format_bytes
from tests.commands import run_orc

DECODER = """\
name: lm
gpus: {min: 1, max: 2}
global_batch_size: 16
model:
  decoder: {vocab_size: 256, hidden_size: 128, intermediate_size: 256, num_hidden_layers: 2, num_attention_heads: 4}
data: {text: [corpus.txt], sequence_length: 128}
"""
LLAMA_70B = """\
name: llama-70b
gpus: {min: 64, max: 512}
global_batch_size: 1024
precision: bf16
model:
  decoder: {vocab_size: 128256, hidden_size: 8192, intermediate_size: 28672, num_hidden_layers: 80,
            num_attention_heads: 64, num_key_value_heads: 8}
data: {text: [corpus.txt], sequence_length: 4096}
"""
H100 = """\
name: 64x8-h100
nodes:
  - name: n
    count: 64
    devices: 8
    host_memory: 1TiB
    device: {name: H100, memory: 80GiB, bf16_tflops: 989, fp32_tflops: 67, memory_bandwidth: 3350GB/s,
             link_bandwidth: 450GB/s}
network_bandwidth: 400GB/s
"""
SCRIPT = "name: {name}\ngpus: 1\nglobal_batch_size: 1\ncommand: python {name}.py\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The output and exit code of a command."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shell:
    """A folder with job files, and a home for a service."""

    folder: Path
    home: Path

    def ask(self, *arguments: str) -> Answer:
        """Run a command in this process: as good as another one where no service is asked, and faster."""
        out, err = io.StringIO(), io.StringIO()
        variables = {"ORC_HOME": str(self.home), "COLUMNS": "200"}
        with (
            contextlib.chdir(self.folder),
            mock.patch.dict(os.environ, variables),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):
            main(arguments)
        return Answer(code=int(ended.value.code or 0), out=out.getvalue(), err=err.getvalue())

    def orc(self, *arguments: str) -> Answer:
        """Run a command as a person would, in a process of its own."""
        env = {**os.environ, "ORC_HOME": str(self.home), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
        env["ORC_MLFLOW"] = "http://127.0.0.1:1"  # nothing answers there, and none is started
        ended = run_orc(arguments, env=env, cwd=self.folder)
        return Answer(code=ended.returncode, out=ended.stdout, err=ended.stderr)

    def write(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text)
        return name


def make_shell(folder: Path) -> Shell:
    shell = Shell(folder=folder, home=folder / "home")
    shell.write("corpus.txt", "a" * 10_000)
    shell.write("lm.yaml", DECODER)
    shell.write("h100.yaml", H100)
    return shell


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A desk without a service."""
    return make_shell(tmp_path_factory.mktemp("desk"))


REFUSED = {
    "unknown key": (["submit", "typo.yaml"], ["typo.yaml:2: prioriti", "did you mean 'priority'?"]),
    "one bad of two": (["submit", "lm.yaml", "typo.yaml"], ["typo.yaml:2"]),
    "run": (["run", "typo.yaml"], ["typo.yaml:2"]),
    "plan": (["plan", "typo.yaml"], ["typo.yaml:2"]),
    "plan of no script": (
        [
            "plan",
            "lm.yaml",
            "--set",
            "model=null",
            "--set",
            "data={}",
            "--set",
            "command=python nowhere.py",
        ],
        ["the script does not exist", "nowhere.py"],
    ),
    "missing file": (["submit", "nothing.yaml"], ["nothing.yaml: the file does not exist"]),
    "bad override": (
        ["submit", "lm.yaml", "--set", "training.max_step=3"],
        ["training.max_step", "max_steps"],
    ),
    "bad cluster": (["up", "--cluster", "lm.yaml"], ["lm.yaml", "nodes", "required"]),
    "illegal plan": (
        ["estimate", "lm.yaml", "--set", "zero_stage=1", "--set", "pp=2"],
        ["zero_stage=1 with pp > 1", "reduces gradients once a step"],
    ),
    "indivisible batch": (
        ["estimate", "lm.yaml", "--set", "dp=2", "--set", "micro_batch=3"],
        ["divisor of"],
    ),
    "other global batch": (
        ["estimate", "lm.yaml", "--set", "gradient_accumulation_steps=3"],
        ["the global batch would change", "16 = 16 / (1 x 1)"],
    ),
    "unknown setting": (
        ["estimate", "lm.yaml", "--set", "zero_sage=2"],
        ["did you mean 'zero_stage'?"],
    ),
    "unknown word": (
        ["estimate", "lm.yaml", "--set", "offload=cpu"],
        ["none, optimizer, parameters"],
    ),
    "too many devices": (["estimate", "lm.yaml", "--set", "dp=8"], ["at most 2"]),
    "rank that never is": (["rehearse", "lm.yaml", "--fail", "oom", "--rank", "2"], ["0 to 1"]),
    "step that never is": (
        ["rehearse", "lm.yaml", "--fail", "oom", "--step", "101"],
        ["max_steps=100"],
    ),
    "unknown fault": (["rehearse", "lm.yaml", "--fail", "flood"], ["flood", "preempt"]),
    "unknown command": (["sumbit", "lm.yaml"], ["sumbit"]),
}


@pytest.mark.parametrize(("arguments", "phrases"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_one_error_with_exit_code_2_and_leaves_nothing_behind(
    shell: Shell, arguments: list[str], phrases: list[str]
) -> None:
    shell.write("typo.yaml", DECODER.replace("gpus:", "prioriti: 1\ngpus:"))
    answer = shell.ask(*arguments)
    assert (answer.code, answer.out) == (2, ""), answer
    assert [phrase for phrase in phrases if phrase not in answer.err] == [], answer.err
    assert "Traceback" not in answer.err
    assert not shell.home.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            ["queue"],
            ["show", "a"],
            ["explain", "a"],
            ["logs", "a"],
            ["cancel", "a"],
            ["submit", "lm.yaml"],
            ["down"],
        ),
        ["calibrate", "--from-mlflow", "http://127.0.0.1:1"],
    ],
)
def test_without_a_service_commands_say_how_to_start_it(shell: Shell, arguments: list[str]) -> None:
    answer = shell.ask(*arguments)
    assert (answer.code, answer.out) == (1, "")
    assert "`orc up`" in answer.err


def test_plan_shows_the_choice_the_frontier_the_limit_and_the_reasons(shell: Shell) -> None:
    shell.write(
        "wide.yaml", DECODER.replace("16", "512").replace("hidden_size: 128", "hidden_size: 512")
    )
    answer = shell.ask("plan", "wide.yaml")
    assert answer.code == 0, answer
    for phrase in (
        "→",
        "memory ends here: 256.00 MiB",
        "predicted",
        "activations",
        "█",
        "Why the faster plans were",
    ):
        assert phrase in answer.out, answer.out
    for phrase in (
        "fits with > 99.9 %",
        "Bytes by moment",
        "● chosen",
        "· too big",
        "memory ends: 256.00 MiB",
    ):
        assert phrase in answer.out, answer.out


def test_plan_of_a_script_of_unknown_memory_says_what_is_measured_before_it_trains(
    shell: Shell,
) -> None:
    (shell.folder / "foreign.py").touch()
    flags = "micro_batch_size: {flag: --b}, gradient_accumulation_steps: {flag: --a}"
    knobs = f"knobs: {{{flags}, output_dir: {{flag: --o}}}}\n"
    shell.write("foreign.yaml", SCRIPT.format(name="foreign").replace("size: 1", "size: 8") + knobs)
    answer = shell.ask("plan", "foreign.yaml")
    assert answer.code == 0, answer
    for phrase in (
        "short attempts",
        "1 gpu · dp1 · micro 1x2, ended after 2 optimizer steps",
        "`probe: never`",
    ):
        assert phrase in answer.out, answer.out
    assert "→" not in answer.out, "nobody knows yet"
    unprobed = shell.ask("plan", "foreign.yaml", "--set", "probe=never").out
    assert "the script's own micro-batch is assumed to fill a device" in unprobed
    assert "short attempts" not in unprobed


def test_plan_as_json_holds_the_chosen_plan_and_why_faster_ones_were_rejected(shell: Shell) -> None:
    shell.write(
        "wide.yaml", DECODER.replace("16", "512").replace("hidden_size: 128", "hidden_size: 512")
    )
    data = shell.ask("plan", "wide.yaml", "--json").data
    faster, chosen = data["frontier"][: data["chosen"]], data["frontier"][data["chosen"]]
    assert faster
    assert all(
        candidate["rejected"] and candidate["needed_bytes"] > candidate["capacity_bytes"]
        for candidate in faster
    )
    assert all(
        candidate["fit_probability"] < 0.99 <= chosen["fit_probability"] for candidate in faster
    )
    assert chosen["rejected"] is None
    assert chosen["needed_bytes"] <= chosen["capacity_bytes"] == 256 * 2**20


def test_a_job_that_nothing_fits_gets_the_breakdown_and_what_would_make_it_fit(
    shell: Shell,
) -> None:
    shell.write("huge.yaml", LLAMA_70B.replace("64, max: 512", "1, max: 2"))
    answer = shell.ask("plan", "huge.yaml")
    assert answer.code == 1
    assert [
        phrase for phrase in ("no plan fits", "closest", "would fit") if phrase not in answer.out
    ] == [], answer.out


def test_estimate_derives_accumulation_from_the_global_batch(shell: Shell) -> None:
    settings = ["--set", "zero_stage=3", "--set", "micro_batch=2", "--set", "dp=2"]
    data = shell.ask("estimate", "lm.yaml", *settings, "--json").data
    assert data["settings"]["gradient_accumulation_steps"] == "4"
    assert data["settings"]["global_batch_size"] == "16"
    assert data["estimate"]["allocated_bytes"] == sum(data["estimate"]["by_cause"].values())


def test_plan_loads_none_of_the_heavy_packages(shell: Shell) -> None:
    program = (
        "import sys; from orchestrator.cli import main\n"
        "heavy = {'ray', 'torch', 'mlflow', 'fastapi', 'numpy', 'httpx', 'sqlalchemy'}\n"
        "try: main(['plan', 'lm.yaml', '--json'])\n"
        "except SystemExit: print(heavy & set(sys.modules), file=sys.stderr)"
    )
    env = {**os.environ, "ORC_HOME": str(shell.home)}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=shell.folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stderr.strip() == "set()"


def test_submit_loads_nothing_that_plans_launches_or_records(shell: Shell) -> None:
    """A client reads the job file and sends it: 707 modules and 1.3 s of processor time before."""
    program = (
        "import sys; from orchestrator.cli import main\n"
        "heavy = ('ray', 'torch', 'mlflow', 'fastapi', 'numpy', 'sqlalchemy', 'pynvml')\n"
        "heavy += ('orchestrator.scheduling', 'orchestrator.backends.mlflow')\n"
        "try: main(['submit', 'lm.yaml', '--home', 'nowhere'])\n"
        "except SystemExit: print({*heavy} & set(sys.modules), len(sys.modules), file=sys.stderr)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=shell.folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "no service is up" in ended.stderr
    loaded, _, count = ended.stderr.strip().splitlines()[-1].rpartition(" ")
    assert loaded == "set()"
    assert int(count) <= 580


def test_help_loads_nothing_that_only_commands_need() -> None:
    program = (
        "import sys; from orchestrator.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print({'pydantic', 'yaml', 'httpx'} & set(sys.modules), file=sys.stderr)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert ended.stderr.strip() == "set()"


def test_doctor_leaves_a_home_alone_that_lets_jobs_of_other_users_through(
    shell: Shell, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o711)

    def verdict() -> str:
        findings = shell.ask("doctor", "--home", str(home), "--json").data["findings"]
        return str(next(finding["verdict"] for finding in findings if finding["subject"] == "home"))

    assert verdict() == "bad"
    (home / "users").mkdir()
    assert verdict() == "ok"


@pytest.mark.parametrize("noun", ["job", "cluster"])
def test_schema_prints_json_schema(shell: Shell, noun: str) -> None:
    data = shell.ask("schema", noun).data
    assert data["$schema"].startswith("https://json-schema.org/")
    assert noun == "cluster" or data == make_job_json_schema()


def test_doctor_answers_without_a_service_and_without_a_gpu(shell: Shell) -> None:
    answer = shell.ask("doctor", "--json")
    findings = {finding["subject"]: finding for finding in answer.data["findings"]}
    assert {
        "nvml",
        "cuda",
        "ray",
        "mlflow",
        "disk",
        "shm",
        "service",
        "torch",
        "python",
        "home",
    } <= set(findings)
    assert answer.code == any(finding["verdict"] == "bad" for finding in findings.values())
    assert all(finding["to_do"] for finding in findings.values() if finding["verdict"] != "ok")


def test_doctor_counts_forked_ranks_and_says_why_another_was_not(
    shell: Shell, tmp_path: Path
) -> None:
    home = tmp_path / "started"
    for number, how in (1, "forked"), (2, "nothing is known of who reads SEED"), (3, "forked"):
        folder = home / f"jobs/j{number}/attempts/1"
        folder.mkdir(parents=True)
        (folder / "starts").write_text(f"rank 0: {how}\n")
    findings = shell.ask("doctor", "--home", str(home), "--json").data["findings"]
    (row,) = (row for row in findings if row["subject"] == "starts")
    assert (row["verdict"], row["found"]) == ("ok", "2 of the last 3 ranks were forked warm")
    assert row["to_do"] == "the last that started afresh: nothing is known of who reads SEED"


@pytest.mark.parametrize("folder", ["", "missing", None])
def test_doctor_speaks_of_nvme_only_where_a_device_may_offload_to_it(
    shell: Shell, folder: str | None
) -> None:
    device: dict[str, object] = {"name": "d", "memory": "1GiB", "bf16_tflops": 1, "fp32_tflops": 1}
    device |= {"memory_bandwidth": "1GB/s", "link_bandwidth": "1GB/s"}
    device |= {} if folder is None else {"nvme_folder": str(shell.folder / folder)}
    cluster = {
        "name": "c",
        "nodes": [{"name": "n", "devices": 1, "device": device, "host_memory": "8GiB"}],
    }
    lifecycle.prepare_home(shell.home)
    (shell.home / "cluster.yaml").write_text(json.dumps(cluster))
    findings = [
        finding
        for finding in shell.ask("doctor", "--json").data["findings"]
        if finding["subject"] == "nvme"
    ]
    text = " ".join(finding["found"] + finding["to_do"] for finding in findings)
    if folder is None:
        assert findings == []
    elif folder == "missing":
        assert f"{shell.folder / folder} cannot be written to" in text
    else:  # the folder is there: tools are missing, or what has to be compiled, into the home's own extensions
        assert (
            "install" in text
            or f"TORCH_EXTENSIONS_DIR={shell.home / 'torch_extensions'} {sys.executable}" in text
        )


def test_the_token_is_for_its_owner_only_and_stays(tmp_path: Path) -> None:
    home = tmp_path / "home"
    lifecycle.prepare_home(home)
    token = (home / "token").read_text()
    (home / "token").chmod(0o644)
    home.chmod(0o755)
    lifecycle.prepare_home(home)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (home, home / "token")]
    assert (modes, (home / "token").read_text()) == ([0o700, 0o600], token)
    assert len(token) >= 32


# ---------------------------------------------------------------------------------------------- with a real service


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A desk with a service on the embedded Ray."""
    shell = make_shell(tmp_path_factory.mktemp("live"))
    shell.write("good.py", "print('all is well')")
    shell.write("bug.py", "raise ValueError('a bug of the user')")
    shell.write("long.py", "import time\nprint('waiting', flush=True)\ntime.sleep(300)")
    for name in ("good", "bug", "long"):
        shell.write(f"{name}.yaml", SCRIPT.format(name=name))
    try:
        started = shell.orc("up", "--json")
        assert started.code == 0, started
        yield shell
    finally:
        ended = shell.orc("down", "--force")
        assert ended.code == 0, ended


def test_a_second_up_finds_the_first(live: Shell) -> None:
    answer = live.orc("up", "--json")
    assert (answer.code, answer.data["started"]) == (0, False)
    assert [len(node["free_bytes"]) for node in answer.data["nodes"]] == [2]


def test_up_with_another_cluster_is_refused_while_one_is_up(live: Shell) -> None:
    answer = live.orc("up", "--cluster", "h100.yaml")
    assert answer.code == 1
    assert "`orc down` first" in answer.err


def test_nothing_is_stored_where_one_of_two_files_is_bad(live: Shell) -> None:
    live.write("typo.yaml", DECODER.replace("gpus:", "prioriti: 1\ngpus:"))
    before = live.orc("queue", "--json").data
    assert live.orc("submit", "good.yaml", "typo.yaml").code == 2
    assert live.orc("queue", "--json").data == before


def test_a_job_that_nothing_can_hold_is_called_refused_at_its_submission(live: Shell) -> None:
    live.write("large.yaml", DECODER.replace("hidden_size: 128", "hidden_size: 8192"))
    answer = live.orc("submit", "large.yaml", "good.yaml")
    assert answer.code == 1
    large, good = answer.out.split()
    assert answer.err.startswith(f"{large} was refused: no plan fits")
    assert f"{good} was refused" not in answer.err


def test_run_exits_with_the_result_of_the_job_and_its_log_can_be_read(live: Shell) -> None:
    answer = live.orc("run", "good.yaml", "--json")
    assert (answer.code, answer.data["status"]) == (0, "succeeded"), answer
    job_id = answer.data["id"]
    assert live.orc("logs", job_id).out == "all is well\n"
    assert json.loads(live.orc("logs", job_id, "--json").out)["text"] == "all is well\n"
    assert live.orc("show", job_id, "--json").data["id"] == job_id
    assert job_id in live.orc("queue").out


def test_run_of_a_bug_exits_1_with_the_traceback_of_the_user(live: Shell) -> None:
    answer = live.orc("run", "bug.yaml")
    assert answer.code == 1
    assert "ValueError: a bug of the user" in answer.err
    assert "user_error" in answer.out


@pytest.mark.long
def test_a_killed_service_comes_back_with_its_jobs_and_does_not_end_over_them(live: Shell) -> None:
    job_id = live.orc("submit", "long.yaml", "--json").data["ids"][0]
    while "waiting" not in live.orc("logs", job_id).out:  # bounded by the job's own end
        assert live.orc("show", job_id, "--json").data["status"] in ("queued", "running")
    os.kill(json.loads((live.home / "service.json").read_text())["pid"], signal.SIGKILL)
    assert live.orc("queue").code == 1
    assert live.orc("up").code == 0
    job = live.orc("show", job_id, "--json").data
    assert (job["status"], len(job["attempts"])) == ("running", 1)
    refused = live.orc("down")
    assert refused.code == 1
    assert job_id in refused.err
    assert live.orc("cancel", job_id).code == 0
    assert live.orc("logs", job_id, "-f").code == 0  # ends with the job
    assert live.orc("show", job_id, "--json").data["status"] == "cancelled"


def test_cards_stand_for_a_cluster_file_and_two_ways_to_say_the_hardware_are_refused(
    shell: Shell,
) -> None:
    there = {
        (answer.data["device"], answer.data["devices"])
        for answer in (
            shell.ask("plan", "lm.yaml", "--gpu", text, "--json")
            for text in ("2xrtx3090", "2 x RTX 3090")
        )
    }
    assert there == {("rtx3090-24gb", 2)}
    refused = shell.ask("plan", "lm.yaml", "--gpu", "a100")
    assert refused.code == 2
    assert "a100-40gb, a100-80gb" in refused.err
    assert shell.ask("plan", "lm.yaml", "--gpu", "t4", "--cluster", "h100.yaml").code == 2
    assert shell.ask("plan", "lm.yaml", "--gpu", "9xt4").code == 2
    assert "mi250" in shell.ask("estimate", "lm.yaml", "--gpu", "mi250").err


@pytest.mark.long
def test_fit_names_the_fewest_cards_with_a_plan_and_each_row_is_what_plan_answers(
    shell: Shell,
) -> None:
    heavy = (
        "--set",
        "model.decoder.hidden_size=4096",
        "--set",
        "model.decoder.num_hidden_layers=64",
    )
    rows = shell.ask("fit", "lm.yaml", *heavy, "--json").data["rows"]
    assert {row["way"] for row in rows} == {"as written"}
    sizes = [row["memory_bytes"] for row in rows]
    assert sizes == sorted(sizes)
    counts = {row["device"]: row["devices"] for row in rows}
    assert counts["b200-180gb"] == 1
    several = next(row for row in rows if (row["devices"] or 0) > 1)
    for count, code in ((several["devices"], 0), (several["devices"] // 2, 1)):
        pinned = ("--gpu", f"{count}x{several['device']}", "--set", f"gpus={count}")
        answer = shell.ask("plan", "lm.yaml", *heavy, *pinned, "--json")
        assert answer.code == code, answer.err
    output = shell.ask("fit", "lm.yaml", *heavy).out
    assert f"{several['devices']}x" in output


@pytest.mark.long
def test_fit_marks_what_waits_in_host_memory_and_says_how_much(shell: Shell) -> None:
    """Seven billion parameters in bf16 are 13 GiB: no card of 8 GB has room for them."""
    large = ("model.decoder.hidden_size=4096", "model.decoder.num_hidden_layers=32")
    options = [word for setting in (*large, "precision=bf16") for word in ("--set", setting)]
    rows = shell.ask("fit", "lm.yaml", *options, "--json").data["rows"]
    offloaded = [row for row in rows if row["offloads"]]
    assert offloaded
    assert all(" on host" in row["plan"] for row in offloaded)
    assert all(" on host" not in (row["plan"] or "") for row in rows if row not in offloaded)
    lines = shell.ask("fit", "lm.yaml", *options).out.splitlines()
    marked = [line.split()[0] for line in lines if "GiB* " in line and line[0] != " "]
    assert marked == [row["device"] for row in offloaded]
    most_bytes = max(row["host_bytes"] for row in offloaded)
    assert f"up to {format_bytes(most_bytes)}" in " ".join(lines)


@pytest.mark.long
def test_fit_of_a_model_shows_all_weights_adapters_and_4_bits_and_says_what_it_assumed(
    shell: Shell,
) -> None:
    sizes = {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
    }
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4}
    folder = shell.folder / "tiny-llama"
    folder.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **heads}
    (folder / "config.json").write_text(json.dumps(config))
    rows = shell.ask("fit", f"hf:{folder}", "--json").data["rows"]
    least = {
        (row["device"], row["way"]): row["needed_bytes"] for row in rows if row["devices"] == 1
    }
    card = "rtx3070-8gb"
    assert least[card, "adapters"] < least[card, "full"] <= 7.78 * 2**30
    output = shell.ask("fit", f"hf:{folder}", "--set", "data.sequence_length=512").out
    assert "512 tokens a sample" in output
    assert "assumed" in output
    assert "the card lacks; `--set precision=fp16`: rtx2080ti-11gb" in output
    table = [line.rstrip() for line in output.splitlines() if re.match(r"\S+-[0-9]+gb ", line)]
    cards = [line for line in table if line.startswith("rtx3090-24gb")]
    assert len(re.findall(r"1x [0-9.]+ GiB [0-9.]+ s", cards[0])) == len(
        {row["way"] for row in rows}
    )
    assert max(map(len, table)) <= 80
