"""Laws of reading job and cluster files."""

from __future__ import annotations

import re
from typing import Any

import pytest

from orchestrator.specs.cluster import ClusterSpec
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.parse import check_storable, parse_cluster, parse_job, parse_job_data
from orchestrator.specs.yaml_text import DEPTH_MAX, read_document

HEAD = "name: a\nglobal_batch_size: 8\n"
SCRIPT = f"{HEAD}command: python train.py\n"
MODEL = (
    f"{HEAD}model:\n  decoder: {{vocab_size: 256, hidden_size: 64, intermediate_size: 128,"
    " num_hidden_layers: 2, num_attention_heads: 4}\ndata: {text: [corpus.txt]}\n"
)
NODE = "name: n, devices: 2, host_memory: 4GiB"
DEVICE = "name: d, memory: 80GiB, bf16_tflops: 1, fp32_tflops: 1, memory_bandwidth: 1TB/s, link_bandwidth: 9GB/s"
CLUSTER = f"name: c\nnodes:\n  - {{{NODE}, device: {{{DEVICE}}}}}\n"

REFUSED: dict[str, tuple[str, list[str]]] = {
    # text of the file -> everything that the error must say
    "unknown key, near one": (
        f"{SCRIPT}priorty: 1\n",
        ["job.yaml:4: priorty", "unknown key", "mean 'priority'"],
    ),
    "unknown key of another section": (
        f"{SCRIPT}max_steps: 9\n",
        ["max_steps", "under `training:`"],
    ),
    "misspelt key of another section": (
        f"{SCRIPT}checkpoint_every_step: 9\n",
        ["checkpoint_every_step", "did you mean `training.checkpoint_every_steps`"],
    ),
    "unknown key, deep": (
        f"{SCRIPT}knobs:\n  micro_batch_size: {{flga: --b, default: 1}}\n",
        [
            "job.yaml:5: knobs.micro_batch_size.flga",
            "flag, switch, override, key, env, accelerate, default, values",
            "mean 'flag'",
        ],
    ),
    "unknown key of a decoder": (
        MODEL.replace("vocab_size: 256", "vocab_size: 256, heads: 4"),
        ["job.yaml:4: model.decoder.heads", "did you mean 'num_attention_heads'"],
    ),
    "unknown key, an array meant": (
        f"{SCRIPT}aray: {{}}\n",
        ["job.yaml:4: aray", "did you mean 'array'"],
    ),
    "missing key": ("name: a\ncommand: x\n", ["global_batch_size", "required"]),
    "wrong unit of size": (
        f"{SCRIPT}profile: {{parameters: 1, activations_per_sample: 1.5G}}\n",
        [
            "job.yaml:4: profile.activations_per_sample",
            "'1.5G'",
            "KiB, MiB, GiB",
            "did you mean 1.5GiB?",
        ],
    ),
    "wrong unit of time": (
        f"{SCRIPT}hang_timeout: 10m\n",
        ["hang_timeout", "s, min, h, d", "'10m'"],
    ),
    "no unit": (f"{SCRIPT}startup_timeout: 30\n", ["startup_timeout", "such as 10min", "30"]),
    "wrong word": (
        f"{SCRIPT}precision: fp8\n",
        ["precision", "'fp8'", "'fp32', 'bf16' or 'fp16'", "did you mean 'fp32'?"],
    ),
    "wrong kind": (f"{SCRIPT}steps: many\n", ["steps", "'many'", "a valid integer"]),
    "class of priority": (
        f"{SCRIPT}priority: urgent\n",
        ["priority", "'urgent'", "high, normal, low or a whole number"],
    ),
    "a number where a word stands": (
        f"{SCRIPT}env: {{A: 1}}\n",
        ["env.A", 'write it in quotes: "1"'],
    ),
    "out of range": (f"{SCRIPT}gpus: 0\n", ["gpus.min", "0", "greater than or equal to 1"]),
    "empty section": (
        f"{SCRIPT}degrade:\n",
        ["job.yaml:4: degrade", "nothing stands behind the key"],
    ),
    "name": (SCRIPT.replace("name: a", "name: A/b"), ["name", "'A/b'", "lower-case letters"]),
    "script and model": (f"{MODEL}command: x\n", ["either `command` (a script) or `model`"]),
    "neither script nor model": (HEAD, ["either `command` (a script) or `model`"]),
    "gpu range": (
        f"{SCRIPT}gpus: {{min: 4, max: 2}}\n",
        ["gpus", "gpus.max=2 is below gpus.min=4"],
    ),
    "knob in two ways": (
        f"{SCRIPT}knobs: {{precision: {{flag: -p, env: P}}}}\n",
        ["knobs.precision", "exactly one way"],
    ),
    "semantic change not allowed": (
        f"{SCRIPT}degrade: {{sequence_lengths: [64]}}\n",
        ["`degrade.sequence_lengths` changes the training", "`degrade.allow: semantic`"],
    ),
    "heads do not divide the width": (
        MODEL.replace("hidden_size: 64", "hidden_size: 66"),
        ["model.decoder.hidden_size", "66 over 4 heads", "an even number"],
    ),
    "no steps": (
        f"{SCRIPT}training: {{max_steps: 0}}\n",
        ["job.yaml:4: training.max_steps", "equal to 1", "0"],
    ),
    "unclosed quote in a command": (
        f'{HEAD}command: "x \'y"\n',
        ["command", "No closing quotation"],
    ),
    "repeated key": (f"{SCRIPT}name: b\n", ["job.yaml:4: name", "a second time", "lines 1 and 4"]),
    "a knob's key without a file": (
        f"{SCRIPT}knobs:\n  micro_batch_size: {{key: data.batch_size}}\n",
        ["job.yaml:5: knobs.micro_batch_size.key", "config: {file: config.yaml}"],
    ),
    "a knob of a phase that no log line tells": (
        f"{SCRIPT}knobs:\n  micro_batch_size: {{flag: -b, also: [{{flag: -e, phase: evaluation, default: 1}}]}}\n",
        ["knobs.micro_batch_size.also[0].phase", "phases: {evaluation: "],
    ),
    "a phase without a number of its own": (
        f"{SCRIPT}knobs:\n  micro_batch_size: {{flag: -b, also: [{{flag: -e, phase: encoding}}]}}\n",
        ["knobs.micro_batch_size.also[0]", "needs its own `default`"],
    ),
    "accelerate's file without accelerate": (
        f"{SCRIPT}knobs: {{zero_stage: {{accelerate: fsdp}}}}\n",
        ["knobs.zero_stage.accelerate", "needs `launch: accelerate`"],
    ),
    "a launcher's own words": (
        SCRIPT.replace("python train.py", "torchrun train.py") + "launch: torchrun\n",
        ["command", "python script.py", "leave out torchrun's own words"],
    ),
    "dora without dora": (f"{SCRIPT}launch: dora\n", ["command", "`dora run`"]),
    "sharded in two ways": (
        f"{SCRIPT}knobs: {{zero_stage: {{flag: -z}}, deepspeed_config: {{flag: -d}}}}\n",
        ["knobs", "in one way"],
    ),
    "a counter without a number": (f"{SCRIPT}progress: 'epoch .*'\n", ["progress", "one group"]),
    "a pattern that is none": (
        f"{SCRIPT}success: {{log: '('}}\n",
        ["success.log", "regular expression"],
    ),
    "a phase that is none": (
        f"{SCRIPT}phases: {{warmup: x}}\n",
        ["phases.warmup", "startup, encoding"],
    ),
    "syntax": ("name: [a\nb: c", ["job.yaml:2:2", "not readable as YAML"]),
    "tab": ("a:\n\tb: 1", ["job.yaml:2:1", "not with tabs"]),
    "a backslash in double quotes": (
        'progress: "step (\\d+)"',
        ["unknown escape character", "in single quotes"],
    ),
    "two documents": (f"{SCRIPT}---\n{SCRIPT}", ["job.yaml:4:1", "single document"]),
    "empty": ("# nothing\n", ["job.yaml: the file is empty", "orc schema"]),
    "no mapping": ("- a\n", ["the top level must be a mapping"]),
    "a key that is no word": ("? [a]\n: 1\n", ["a key must be a word"]),
    "a tag": (
        "name: !!python/object/apply:os.getcwd []\n",
        ["job.yaml:1: name", "tags are not read"],
    ),
    "an alias of itself": ("name: &a [*a]\n", [f"{DEPTH_MAX} levels"]),
    "too deep": ("[" * 5000, ["nested too deeply"]),
}


@pytest.mark.parametrize(("text", "phrases"), REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_job_is_refused_in_one_error_that_says_where_and_what(
    text: str, phrases: list[str]
) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job(text, "job.yaml")
    message = str(caught.value)
    assert message.startswith("job.yaml")
    assert [phrase for phrase in phrases if phrase not in message] == [], message


@pytest.mark.parametrize(
    ("before", "after", "phrases"),
    [
        ("80GiB", "80G", ["c.yaml:3: nodes[0].device.memory", "did you mean 80GiB?"]),
        ("9GB/s", "9Gbit", ["nodes[0].device.link_bandwidth", "GB/s"]),
        ("devices: 2", "gpus: 2", ["nodes[0].gpus", "unknown key", "name, count, devices"]),
        ("name: c", "name: c\nhost_memory: 4GiB", ["host_memory", "under `nodes:`"]),
        (NODE, f"{NODE}, count: 0", ["nodes[0].count", "greater than or equal to 1"]),
    ],
)
def test_a_bad_cluster_is_refused_in_one_error(before: str, after: str, phrases: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        parse_cluster(CLUSTER.replace(before, after), "c.yaml")
    assert [phrase for phrase in phrases if phrase not in str(caught.value)] == [], str(
        caught.value
    )


@pytest.mark.parametrize("key", ["colour", "trace", "measure", "segments"])
def test_no_error_lists_keys_that_a_file_cannot_set(key: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_job(f"{SCRIPT}{key}: 1\n", "job.yaml")
    assert not {"member", "traced", "measured"} & set(
        re.findall(r"\w+", f"{caught.value.allowed} {caught.value.hint}")
    )


def test_all_problems_of_a_file_are_reported_at_once() -> None:
    text = f"{SCRIPT}precision: fp8\ntraining: {{max_step: 1}}\nhang_timeout: 3\n"
    with pytest.raises(SpecError) as caught:
        parse_job(text, "job.yaml")
    message = str(caught.value)
    assert all(
        path in message for path in ("3 problems", "precision", "training.max_step", "hang_timeout")
    ), message


def test_a_small_file_cannot_become_a_large_one() -> None:
    rows = [
        f"k{i}: &k{i} [{', '.join([f'*k{i - 1}' if i else 'x'] * 9)}]" for i in range(6)
    ]  # 600,000 values
    with pytest.raises(SpecError, match="too large"):
        read_document("\n".join(rows), "job.yaml")


def test_traces_of_a_model_with_two_towers_are_data_and_ten_of_them_are_too_much() -> None:
    moments = [[0] * 16] * 3_100  # of gemma3 with its vision tower
    check_storable({"traced": [moments] * 4}, "job")
    with pytest.raises(SpecError, match="too large"):
        check_storable({"traced": [moments] * 10}, "job")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("010", 10),
        ("12:30", "12:30"),
        ("yes", "yes"),
        ("2026-01-01", "2026-01-01"),
        ("true", True),
        ("~", None),
        ('"1"', "1"),
        ("0.5", 0.5),
        ("v1.5", "v1.5"),
        (".inf", ".inf"),
    ],
)
def test_values_are_read_as_yaml_1_2_reads_them(text: str, value: Any) -> None:
    read = read_document(f"value: {text}", "x").data["value"]
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    "text", [SCRIPT, MODEL, f"{SCRIPT}env: {{A: b}}\nhang_timeout: 2min\ngpus: {{max: 4}}\n"]
)
def test_a_job_survives_the_way_over_json(text: str) -> None:
    job = parse_job(text, "job.yaml")
    assert isinstance(job, JobSpec)
    assert parse_job_data(job.model_dump(mode="json"), "request") == job


MAINTENANCE = f"{CLUSTER}maintenance:\n  - {{start: 2026-12-24T22:00+01:00, end: 2026-12-25T06:00Z, nodes: [n]}}\n"


def test_a_maintenance_is_read_in_any_offset_from_utc() -> None:
    cluster = parse_cluster(MAINTENANCE, "c.yaml")
    assert cluster.list_maintenance("n") == ((1798146000.0, 1798178400.0),)
    assert cluster.list_maintenance("m") == ()
    assert ClusterSpec.model_validate(cluster.model_dump(mode="json")) == cluster
    assert (
        parse_cluster(MAINTENANCE.replace(", nodes: [n]", ""), "c.yaml").list_maintenance("m") != ()
    )


@pytest.mark.parametrize(
    ("before", "after", "phrases"),
    [
        ("22:00+01:00", "22:00", ["c.yaml:5: maintenance[0].start", "timezone"]),
        (
            "2026-12-24T22:00+01:00",
            "20261224",
            ["maintenance[0].start", "a date and a time with an offset is wanted"],
        ),
        (
            "2026-12-25T06",
            "2026-12-23T06",
            ["maintenance[0]", "a maintenance ends after its start"],
        ),
        (
            "[n]",
            "[n0]",
            ["c.yaml:4: maintenance: the cluster has no such node", "did you mean 'n'?"],
        ),
    ],
)
def test_a_bad_maintenance_is_refused_in_one_error(
    before: str, after: str, phrases: list[str]
) -> None:
    with pytest.raises(SpecError) as raised:
        parse_cluster(MAINTENANCE.replace(before, after), "c.yaml")
    for part in phrases:
        assert part in str(raised.value)


def test_a_cluster_is_read_in_bytes_and_bytes_per_second() -> None:
    cluster = parse_cluster(CLUSTER, "c.yaml")
    assert isinstance(cluster, ClusterSpec)
    assert (cluster.nodes[0].device.memory, cluster.nodes[0].device.memory_bandwidth) == (
        80 * 2**30,
        10**12,
    )


def test_an_override_replaces_what_stands_at_its_path() -> None:
    job = parse_job(
        f"{MODEL}gpus: {{min: 1, max: 2}}\n",
        "job.yaml",
        [("training.max_steps", "7"), ("gpus", "4")],
    )
    assert (job.training.max_steps, job.gpus.min, job.gpus.max) == (7, 4, 4)


def test_a_bad_override_is_refused_like_a_bad_file() -> None:
    with pytest.raises(
        SpecError, match=r"(?s)job.yaml with --set: training.max_stepz.*mean 'max_steps'"
    ):
        parse_job(MODEL, "job.yaml", [("training.max_stepz", "7")])
    with pytest.raises(SpecError, match="inside a value"):
        parse_job(MODEL, "job.yaml", [("name.x", "7")])
