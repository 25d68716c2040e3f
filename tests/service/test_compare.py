"""Laws of `orc compare`: the strategies that it asks for, and its answer from jobs that really ran."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console

from orchestrator.backends.attempts.backend import ProcessBackend
from orchestrator.backends.journal.journal import Journal
from orchestrator.backends.mlflow.frontier_png import draw_figure
from orchestrator.cli import main
from orchestrator.scheduling.reports.comparison_rows import LossCurve
from orchestrator.service.client.client import Client
from orchestrator.service.client.lifecycle import write_service_file
from orchestrator.service.commands.compare import STEPS, choose_strategies, make_comparison_jobs
from orchestrator.service.pages.compare import make_comparison_rows
from orchestrator.service.server.controller import Controller
from orchestrator.service.server.daemon import serve_http
from orchestrator.service.server.routes.api import create_app
from orchestrator.service.terminal import comparing
from orchestrator.service.terminal.comparing import PICTURES, write_picture_or_explain
from orchestrator.service.terminal.comparison_files import WRITERS, format_with_error
from orchestrator.service.terminal.comparison_tables import make_comparison_panel
from orchestrator.service.views.comparison import ComparisonView, make_comparison_view
from orchestrator.service.views.records import parse_picture_view
from orchestrator.specs.attempt import FailureKind
from orchestrator.specs.choices import MicroBatchChoice, ZeroStage
from orchestrator.specs.cluster import make_idle_nodes
from orchestrator.specs.errors import ServiceError, SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.parse import parse_cluster
from tests.local_cluster import LocalLaunchers, LocalNodes
from tests.scheduling.factories import decoder_spec, job, script_spec
from tests.scheduling.test_comparison import ON_ONE, ON_TWO, measured_job, of, repeated
from tests.service.services import TOKEN, service_of

CLUSTER = parse_cluster(
    """\
name: two-small-devices
launch_cost: 5s
nodes:
  - name: virtual
    devices: 2
    host_memory: 4GiB
    device:
      name: virtual-64MiB
      kind: virtual
      memory: 64MiB
      bf16_tflops: 0.02
      fp32_tflops: 0.05
      memory_bandwidth: 8GB/s
      link_bandwidth: 1GB/s
      price_per_hour: 3.6
""",
    "cluster.yaml",
)
# The profile is wrong on purpose: a sample needs 1,000 times what it says.
JOB = """\
name: wrong
global_batch_size: 64
gpus: {min: 1, max: 2}
model:
  decoder: {vocab_size: 256, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2}
profile: {parameters: 100000, layers: 2, activations_per_sample: 1KiB}
data: {text: [corpus.txt], sequence_length: 128}
training: {max_steps: 500}
"""
STRATEGIES = """\
- {dp: 1, micro_batch: 4}
- {dp: 1, micro_batch: 64}
- {engine: torch, zero_stage: 1, pp: 2}
"""


def pick(spec: JobSpec, strategies: str) -> list[dict[str, object]]:
    return [
        dict(pins) for pins in choose_strategies(spec, strategies, make_idle_nodes(CLUSTER), ())
    ]


def test_a_stage_is_the_fastest_plan_of_it_and_one_without_a_plan_stays_a_pin() -> None:
    strategies = pick(decoder_spec(gpus=2), "zero=0..3")
    assert [pins["zero_stage"] for pins in strategies] == [0, 1, 2, 3]
    assert all(
        {"engine", "dp", "micro_batch_size", "activation_checkpointing"} <= set(pins)
        for pins in strategies
    )
    assert pick(decoder_spec(gpus=1), "zero=0,3")[1] == {"zero_stage": 3}


def test_all_ways_differ_in_more_than_the_cut_of_their_batch() -> None:
    cut = ("micro_batch_size", "gradient_accumulation_steps", "activation_checkpointing")
    strategies = [
        {key: value for key, value in pins.items() if key not in cut}
        for pins in pick(decoder_spec(), "all")
    ]
    assert len(strategies) > 5
    assert all(pins not in strategies[:number] for number, pins in enumerate(strategies))


def test_the_frontier_is_compared_plan_by_plan_and_pins_narrow_it() -> None:
    every, narrow = (
        pick(decoder_spec(), "frontier"),
        pick(decoder_spec(plan={"dp": 1, "tp": 1}), "frontier"),
    )
    assert len(every) > len(narrow) > 0
    assert all((pins["dp"], pins["tp"]) == (1, 1) for pins in narrow)


@pytest.mark.parametrize(
    ("strategies", "message"),
    [
        ("zero=4", "no way to choose strategies"),
        ("nowhere.yaml", "no way to choose strategies"),
        ("empty.yaml", "not a list of pins"),
        ("wrong.yaml", "unknown setting of a plan"),
    ],
)
def test_what_names_no_strategies_is_refused(strategies: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("[]\n")
    (tmp_path / "wrong.yaml").write_text("- {zero: 3}\n")
    with contextlib.chdir(tmp_path), pytest.raises(SpecError, match=message):
        pick(decoder_spec(), strategies)


def test_each_strategy_is_a_short_job_that_keeps_its_plan_and_the_training_of_the_original() -> (
    None
):
    spec = decoder_spec(degrade={"allow": "numeric"}, deadline="08:00 UTC")
    jobs = make_comparison_jobs(
        spec, choose_strategies(spec, "zero=0,3", make_idle_nodes(CLUSTER), ()), None
    )
    assert [job.training.max_steps for job in jobs] == [STEPS, STEPS]
    assert all(job.degrade.keeps_plan and job.deadline is None for job in jobs)
    assert {job.family_name for job in jobs} == {spec.family_name}
    assert {(job.training.seed, job.global_batch_size, job.data) for job in jobs} == {
        (0, 8, spec.data)
    }
    assert [
        (job.member.number, job.member.of, job.member.max_concurrent) for job in jobs if job.member
    ] == [
        (0, 2, 1),
        (1, 2, 1),
    ]


def test_strategies_have_one_micro_batch_the_largest_with_which_all_fit_unless_each_shall_have_its_best() -> (
    None
):
    spec, nodes = decoder_spec(gpus=2), make_idle_nodes(CLUSTER)
    common = [
        dict(pins)["micro_batch_size"] for pins in choose_strategies(spec, "zero=0..3", nodes, ())
    ]
    best = [
        dict(pins)["micro_batch_size"]
        for pins in choose_strategies(spec, "zero=0..3", nodes, (), MicroBatchChoice.BEST)
    ]
    assert len(set(common)) == 1
    assert len(set(best)) > 1
    pinned = [
        dict(pins)["micro_batch_size"]
        for pins in choose_strategies(
            decoder_spec(gpus=2, plan={"micro_batch": 1}), "zero=0..3", nodes, ()
        )
    ]
    assert set(pinned) == {1}


def test_repeats_take_turns_with_other_seeds_and_there_are_not_too_many() -> None:
    spec = decoder_spec(gpus=2)
    wanted = choose_strategies(spec, "zero=0,3", make_idle_nodes(CLUSTER), ())
    jobs = make_comparison_jobs(spec, wanted, None, 3)
    assert [job.plan for job in jobs] == [*wanted, *wanted, *wanted]
    assert [job.training.seed for job in jobs] == [0, 0, 1, 1, 2, 2]
    assert {job.member.of for job in jobs if job.member} == {6}
    with pytest.raises(SpecError, match="too many repeats"):
        make_comparison_jobs(spec, wanted, None, 11)


def compared_view() -> ComparisonView:
    """Two strategies, three times each, and one that ran out of memory."""
    burst = measured_job(
        3, replace(ON_TWO, zero_stage=ZeroStage.PARAMETERS), 0.3, FailureKind.DEVICE_OOM
    )
    jobs = (*repeated(1, ON_ONE, 0.500, 0.504, 0.508), *repeated(2, ON_TWO, 0.2, 0.5, 0.9), burst)
    curves = {
        job.id: LossCurve(losses={1: 3.0, 2: 2 + job.order / 100}, tokens=(512,))
        for job in jobs[:6]
    }
    return make_comparison_view(of(*jobs, curves=curves), None)


def test_a_csv_has_raw_numbers_with_their_units_in_the_names() -> None:
    first, _, burst = csv.DictReader(WRITERS[".csv"](compared_view()).splitlines())
    assert [
        first[name] for name in ("micro_batch", "accumulation", "global_batch", "precision")
    ] == [
        "8",
        "1",
        "8",
        "fp32",
    ]
    assert float(first["step_low_s"]) < float(first["step_s"]) < float(first["step_high_s"])
    assert (first["device"], first["first_seed"], first["last_seed"]) == (
        "virtual-256mib",
        "0",
        "0",
    )
    text = ("strategy", "plan", "outcome", "device", "precision", "model", "data", "optimizer")
    numbers = {name: cell for name, cell in first.items() if name not in (*text, "parameters")}
    assert all(float(cell) >= 0 for cell in numbers.values() if cell)
    assert (first["learning_rate"], first["optimizer"]) == ("0.001", "adamw")
    assert first["model"].startswith("decoder of ")
    assert first["parameters"].endswith("M")
    assert (burst["outcome"], burst["step_low_s"]) == ("out of memory", "")


def test_a_table_for_a_paper_fits_its_page_in_units_for_people() -> None:
    view = compared_view()
    lines = WRITERS[".tex"](view).splitlines()
    rows = [line for line in lines if line.endswith("\\\\")]
    assert {row.count("&") for row in rows} == {7}, "eight columns"
    assert r"& Batch & Step & Peak & Tokens/s & MFU & Loss & Device-s \\" in rows[0]
    assert rows[1].split("&")[2:4] == [" (s) ", " (MiB) "]
    assert r"plain on 1 & 8$\times$1 & 0.504 $\pm$ 0.010 & 90.0 &" in rows[2]
    assert r"& 0.448 [0.0682, 2.95] &" in rows[3], (
        "too wide an interval is a range, and not below zero"
    )
    assert r"& out of memory & -- & -- & -- & -- &" in rows[4]
    caption = "\n".join(line for line in lines if line.startswith("%"))
    for fact in (
        "virtual-256mib",
        "global batch 8",
        "sequence length 128",
        "steps 100",
        "repeats 3",
        "seeds 0",
        "optimizer adamw",
        "learning rate 0.001",
        "parameters ",
        "data ",
        "orc ",
        view["verdict"],
    ):
        assert fact in caption
    head, rule, line, *_ = WRITERS[".md"](view).splitlines()
    assert head.count("|") == rule.count("|") == line.count("|") == 9
    assert "| Step (s) | Peak (MiB) |" in head


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0.5041, 0.0099, "0.504 ± 0.010"),
        (0.5041, 0.031, "0.50 ± 0.03"),
        (123.4, 12.0, "123 ± 12"),
        (2.0, 0.0, "2.000 ± 0"),
    ],
)
def test_a_number_has_the_digits_that_its_error_allows(
    value: float, error: float, text: str
) -> None:
    assert format_with_error(value, error) == text


def test_every_table_fits_eighty_columns_and_no_cell_is_cut() -> None:
    view = compared_view()
    for row in view["rows"]:
        row |= {
            "strategy": f"{row['strategy']} + checkpointing + optimizer on host",
            "tokens_per_s": 123_456_789.0,
        }
        row |= {
            "reserved_bytes": 2**40 - 1,
            "host_bytes": 2**40 - 1,
            "restarts": 3,
            "money": 1234.5,
        }
    text = StringIO()
    Console(file=text, width=80).print(make_comparison_panel(view))
    assert max(map(len, text.getvalue().splitlines())) <= 80
    assert "…" not in text.getvalue()
    columns = (
        "MICRO",
        "STEP",
        "95 % OF STEP",
        "TOKENS/S",
        "MFU",
        "END",
        "RESERVED",
        "HOST",
        "LOSS",
        "COST",
    )
    assert all(column in text.getvalue() for column in columns)
    assert text.getvalue().count("8x1") >= 1


@pytest.mark.parametrize("suffix", PICTURES)
def test_a_picture_names_the_strategies_and_its_axes_end_near_the_points(
    suffix: str, tmp_path: Path
) -> None:
    view = compared_view()
    assert view["picture"] is not None
    picture = replace(parse_picture_view(view["picture"]), capacity_bytes=80 * 2**30)
    drawn = draw_figure("Strategies", picture, "")
    assert drawn.axes[0].get_ylim()[1] < 2 * max(point.needed_bytes for point in picture.points)
    texts = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert [f"{number} {row['strategy']}" for number, row in enumerate(view["rows"], 1)] == texts[
        :3
    ]
    assert len(drawn.axes[0].containers) == 2, "an error bar for each strategy with repeats"
    write_picture_or_explain(view, tmp_path / f"picture{suffix}")
    written = (tmp_path / f"picture{suffix}").read_bytes()
    assert len(written) > 1000
    assert b"/Type3" not in written, "publishers refuse such fonts"


def test_the_list_of_comparisons_counts_strategies_and_not_their_repeats() -> None:
    specs = make_comparison_jobs(decoder_spec(), [(("dp", 1),), (("dp", 2),)], None, 3)
    jobs = [
        replace(job(spec, f"lm-{order}", order), array="lm-1")
        for order, spec in enumerate(specs, 1)
    ]
    assert [row["strategies"] for row in make_comparison_rows(jobs)] == [2]
    assert [spec.member.repeat for spec in specs if spec.member is not None] == [1, 1, 2, 2, 3, 3]


def test_a_short_file_is_compared_over_its_own_steps() -> None:
    spec = decoder_spec(training={"max_steps": 12})
    assert [job.training.max_steps for job in make_comparison_jobs(spec, [()], None)] == [12]
    assert [job.training.max_steps for job in make_comparison_jobs(spec, [()], 20)] == [20]


def test_a_script_ends_when_it_says() -> None:
    with pytest.raises(SpecError, match="a script says itself when it ends"):
        make_comparison_jobs(script_spec(), [()], 30)
    assert make_comparison_jobs(script_spec(), [()], None, 2)[0].command == script_spec().command


def test_a_script_with_one_strategy_is_told_what_would_give_another() -> None:
    with pytest.raises(SpecError, match="one strategy only") as error:
        make_comparison_jobs(script_spec(), [()], None)
    assert "model: {factory: model.py:build}" in str(error.value)
    assert "deepspeed_config" in str(error.value)


@pytest.mark.parametrize(
    ("knobs", "gpus"),
    [
        ({}, {"min": 1, "max": 2}),
        ({"micro_batch_size": {"flag": "--batch"}}, 2),
        ({"deepspeed_config": {"flag": "--deepspeed"}}, 2),
        ({"zero_stage": {"flag": "--shard"}, "micro_batch_size": {"flag": "--batch"}}, 2),
        ({"activation_checkpointing": {"switch": "--recompute"}}, {"min": 1, "max": 2}),
    ],
)
def test_every_strategy_of_a_script_pins_only_what_the_script_can_be_told(
    knobs: dict[str, object], gpus: object
) -> None:
    data = {"name": "own", "command": "python train.py", "global_batch_size": 8}
    spec = JobSpec.model_validate({**data, "knobs": knobs, "gpus": gpus})
    for choice in ("all", "frontier"):
        choices = choose_strategies(spec, choice, make_idle_nodes(CLUSTER), ())
        for member in make_comparison_jobs(spec, choices, None, 2):
            assert JobSpec.model_validate(member.model_dump(mode="json")) == member


def test_learning_rates_of_a_script_are_told_by_its_knob() -> None:
    data = {"name": "own", "command": "python train.py", "global_batch_size": 8, "gpus": 1}
    knobs = {"learning_rate": {"flag": "--lr", "default": 0.1}}
    spec = JobSpec.model_validate({**data, "knobs": knobs})
    jobs = make_comparison_jobs(spec, [()], None, 1, (1e-2, 1e-3))
    assert [job.learning_rate for job in jobs] == [1e-2, 1e-3]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """The home of a service that runs jobs on virtual devices; the current folder has a job and strategies."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "token").write_text(TOKEN)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "strategies.yaml").write_text(STRATEGIES)
    (tmp_path / "corpus.txt").write_text("the quick brown fox " * 2000)
    journal = Journal(f"sqlite:///{home / 'journal.sqlite'}")
    backend = ProcessBackend(home, CLUSTER, LocalNodes(CLUSTER), LocalLaunchers(), journal)
    controller = Controller(journal, backend, time.time)
    service = service_of(controller, journal, home, cluster=CLUSTER.name)
    stop = threading.Event()
    loop = threading.Thread(target=controller.run, args=(stop,))
    variables = {name: text for name, text in os.environ.items() if name != "ORC_SERVER"}
    variables |= {"ORC_HOME": str(home), "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    with (
        serve_http(create_app(service)) as port,
        contextlib.chdir(tmp_path),
        mock.patch.dict(os.environ, variables),
    ):
        write_service_file(home, port)
        loop.start()
        try:
            yield home
        finally:
            stop.set()
            loop.join()
            backend.close()
            journal.close()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_strategies_that_train_that_run_out_and_that_do_not_exist_are_rows_of_one_answer(
    home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = (
        "compare",
        "job.yaml",
        "--strategies",
        "strategies.yaml",
        "--steps",
        "6",
        "--picture",
        "a.svg",
        "--json",
    )
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert not ended.value.code
    comparison = json.loads(capsys.readouterr().out)
    trained, burst, absent = comparison["rows"]
    assert [row["outcome"] for row in comparison["rows"]] == [
        "finished",
        "out of memory",
        "no such plan",
    ]
    assert (trained["ooms"], burst["ooms"], burst["restarts"]) == (0, 1, 0), (
        "a plan that ran out is not changed"
    )
    assert "degrade.allow is none" in burst["reason"]
    assert "a pipeline reduces gradients once a step" in absent["reason"]
    assert trained["peak_bytes"] > trained["predicted_peak_bytes"]
    assert trained["tokens_per_s"] == pytest.approx(64 * 128 / trained["step_s"])
    assert trained["money"] == pytest.approx(trained["device_s"] * 3.6 / 3600)
    assert (trained["loss_distance"], comparison["complete"]) == (0.0, True)
    assert comparison["verdict"].startswith(
        "Only plain on 1 (micro 4x16) finished. plain on 1 (micro 64x1) ran out of memory: "
    )
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    with contextlib.closing(Client(home)) as client:
        assert client.fetch_comparison(burst["job_id"]) == {
            **comparison,
            "name": trained["job_id"],
        }, "it is shown again"
        assert client.fetch_cluster()["observations"], "what was measured calibrates"
    with pytest.raises(SystemExit):
        main(("compare", burst["job_id"]))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert comparison["verdict"] in " ".join(shown.split())


@pytest.mark.usefixtures("home")
def test_a_comparison_of_which_no_strategy_finished_exits_with_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("strategies.yaml").write_text(STRATEGIES.splitlines()[-1])
    with pytest.raises(SystemExit) as ended:
        main(
            (
                "compare",
                "job.yaml",
                "--strategies",
                "strategies.yaml",
                "--table",
                "a.csv",
                "--table",
                "a.tex",
            )
        )
    assert ended.value.code == 1
    assert "No strategy finished." in capsys.readouterr().out
    assert [Path(name).exists() for name in ("a.csv", "a.tex")] == [True, True]


def test_a_job_of_no_comparison_is_told_so(home: Path) -> None:
    with contextlib.closing(Client(home)) as client:
        spec = decoder_spec(data={"text": ["corpus.txt"]}, gpus={"min": 2, "max": 2}, name="lone")
        job_id = client.submit_job(spec.model_dump(mode="json"))
        with pytest.raises(
            ServiceError, match=r"belongs to no comparison. `orc compare FILE` makes one"
        ):
            client.fetch_comparison(job_id)
        client.cancel_jobs([job_id], whole_arrays=False)


def test_learning_rates_times_strategies_are_rows_of_one_comparison_and_losses_meet_their_own() -> (
    None
):
    spec = decoder_spec()
    jobs = make_comparison_jobs(spec, [(("dp", 1),), (("dp", 2),)], 10, 2, (1e-3, 1e-4, 1e-3))
    assert [(dict(job.plan)["dp"], job.training.learning_rate) for job in jobs[:4]] == [
        (1, 1e-3),
        (1, 1e-4),
        (2, 1e-3),
        (2, 1e-4),
    ]
    assert [job.training.seed for job in jobs] == [0] * 4 + [1] * 4
    assert [job.member.repeat for job in jobs if job.member] == [1] * 4 + [2] * 4
    with pytest.raises(SpecError, match="nothing tells the script its rate"):
        make_comparison_jobs(script_spec(), [()], None, 1, (1e-3,))


def test_a_cancelled_comparison_leaves_the_files_of_the_last_one(tmp_path: Path) -> None:
    view = compared_view()
    table = tmp_path / "rows.csv"
    comparing._write_tables_and_pictures(view, [table])
    before = table.read_text()
    view["rows"][1]["outcome"] = "cancelled"
    view["rows"][0]["step_s"] = 99.0
    comparing._write_tables_and_pictures(view, [table])
    assert table.read_text() == before
