"""Laws of the Python SDK, against a served application over a simulated cluster; and the examples of its guide."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import httpx
import pytest

from orchestrator import sdk
from orchestrator.sdk import AsyncClient, AsyncJob, Client, Job, JobFailed
from orchestrator.service.client.lifecycle import write_service_file
from orchestrator.service.server.daemon import serve_http
from orchestrator.specs.errors import ServiceError, SpecError
from orchestrator.specs.run import JobFolder
from tests.service.services import TOKEN
from tests.service.worlds import JOB, World
from tests.test_docs import ROOT, Block, blocks_of

EXAMPLES = [
    block for block in blocks_of(ROOT / "docs/guides/python-sdk.md") if block.language == "python"
]
SCRIPT = {"name": "s", "gpus": 1, "global_batch_size": 1, "command": "python nowhere.py"}


@pytest.fixture
def world(still: World) -> Iterator[World]:
    """A service whose jobs run."""
    stop = threading.Event()
    loop = threading.Thread(target=still.controller.run, args=(stop,))
    loop.start()
    try:
        yield still
    finally:
        stop.set()
        loop.join()


@pytest.fixture
def still(tmp_path: Path) -> Iterator[World]:
    """A served application whose jobs wait; the current folder has a job file."""
    (tmp_path / "home").mkdir()
    world = World(tmp_path / "home")
    (tmp_path / "home" / "token").write_text(TOKEN)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "corpus.txt").write_text("a" * 1000)
    variables = {name: text for name, text in os.environ.items() if name != "ORC_SERVER"}
    with (
        serve_http(world.app) as port,
        contextlib.chdir(tmp_path),
        mock.patch.dict(os.environ, {**variables, "ORC_HOME": str(tmp_path / "home")}, clear=True),
    ):
        write_service_file(tmp_path / "home", port)
        yield world
    world.journal.close()


@pytest.fixture
def client(world: World) -> Iterator[Client]:
    with Client(world.home) as client:
        yield client


def test_a_submitted_job_is_waited_for_and_has_its_record(client: Client, world: World) -> None:
    job = client.submit("job.yaml", priority="high", **{"training.max_steps": 3, "name": "other"})
    record = job.result(timeout=60)
    assert (record["id"], record["status"], record["priority"]) == (job.id, "succeeded", 100)
    assert job.id == "other-1"
    assert (job.done(), job.status()) == (True, "succeeded")
    log = JobFolder(world.home, job.id).attempt(1).log(0)
    log.parent.mkdir(parents=True)
    log.write_text("step 1\n")
    assert job.logs() == "".join(job.follow()) == "step 1\n"
    assert client.job(job.id).info() == job.info()


def test_bad_input_is_one_spec_error_and_nothing_is_submitted(client: Client, world: World) -> None:
    bad = (
        lambda: client.submit("nowhere.yaml"),
        lambda: client.submit("job.yaml", gpu=1),
        lambda: client.submit("job.yaml", name=object()),
        lambda: client.submit({**SCRIPT, "more": {1j}}),
        lambda: client.submit(SCRIPT),
        lambda: client.submit("job.yaml", array=[{"a": 1}]),
        lambda: client.map_array("job.yaml"),
        lambda: client.map_array("job.yaml", a=[1, 2], b=[1]),
        lambda: client.map_array("job.yaml", a=[]),
    )
    for wrong in bad:
        with pytest.raises(SpecError):
            wrong()
    with pytest.raises(ServiceError, match="there is no job"):
        client.job("lm-1")
    assert world.controller.state.submitted == 0


def test_an_array_has_a_job_for_each_row_of_values(client: Client, world: World) -> None:
    jobs = client.map_array(_with_placeholders(), seed=[5, 6], rate=[0.1, 0.2])
    assert [job.result(60)["name"] for job in jobs] == ["lm-5", "lm-6"]
    records = [world.controller.find_job(job.id) for job in jobs]
    assert [record.spec.training.learning_rate for record in records if record] == [0.1, 0.2]
    assert len({record.array for record in records if record}) == 1


def test_a_batch_is_submitted_together_at_its_end_and_not_at_all_after_an_exception(
    client: Client, world: World
) -> None:
    with contextlib.suppress(KeyError), client.batch():
        client.submit("job.yaml")
        raise KeyError
    assert world.controller.state.submitted == 0
    with client.batch():
        jobs = [client.submit("job.yaml") for _ in range(3)]
        with pytest.raises(ServiceError, match="no id before its batch ends"):
            _ = jobs[0].id
        with pytest.raises(ServiceError, match="a batch is open already"), client.batch():
            pass
        assert world.controller.state.submitted == 0
    assert [job.id for job in jobs] == ["lm-1", "lm-2", "lm-3"]
    assert client.submit("job.yaml").id == "lm-4"


def test_a_wait_ends_in_time_and_a_job_that_did_not_succeed_raises(still: World) -> None:
    with Client(still.home) as client:
        job = client.submit("job.yaml", depends_on=[client.submit("job.yaml").id])
        for wait in (job.wait, job.result):
            with pytest.raises(TimeoutError, match="is queued"):
                wait(timeout=0.05)
        job.cancel()
        with pytest.raises(JobFailed, match="cancelled") as caught:
            job.result(timeout=60)
        assert caught.value.job["id"] == job.id
        assert job.wait(timeout=0)["status"] == "cancelled"
        with pytest.raises(ServiceError, match="has ended already"):
            job.cancel()


def test_output_is_fetched_whole_and_one_that_is_cut_off_is_an_error(still: World) -> None:
    with Client(still.home) as client:
        job = client.submit("job.yaml")
        with pytest.raises(ServiceError, match="has left no output"):
            job.fetch("got")
        output = JobFolder(still.home, job.id).output
        output.mkdir(parents=True)
        (output / "model.pt").write_text("weights")
        assert (job.fetch("got") / "model.pt").read_text() == "weights"
        with pytest.raises(SpecError, match="exists already"):
            job.fetch("got")
        with (output / "model.pt").open("r+b") as file:
            file.truncate(2**30)  # far more than sockets hold, and no byte on the disk
            connection = client._connection._http
            with connection.stream("GET", f"/jobs/{job.id}/output") as answer:
                chunks = answer.iter_bytes()
                assert next(chunks)
                file.truncate(10)
                with pytest.raises(httpx.RemoteProtocolError):
                    list(chunks)
            file.truncate(shutil.disk_usage(".").free * 2)
        with pytest.raises(ServiceError, match="bytes free"):
            job.fetch("other")
        assert not Path("other").exists()


def test_the_twin_has_every_method_and_does_the_same(world: World) -> None:
    for twin, original in ((AsyncClient, Client), (AsyncJob, Job)):
        public = {name for name in vars(original) if not name.startswith("_")} - {"follow"}
        assert public <= set(vars(twin))
        for name in public:
            if callable(getattr(original, name)) and name != "batch":
                assert (
                    inspect.signature(getattr(original, name)).parameters.keys()
                    == inspect.signature(getattr(twin, name)).parameters.keys()
                )

    async def run() -> None:
        async with AsyncClient(world.home) as client:
            async with client.batch():
                jobs = [await client.submit("job.yaml") for _ in range(2)]
            records = await asyncio.gather(*(job.result(60) for job in jobs))
            assert [record["status"] for record in records] == ["succeeded"] * 2
            with contextlib.suppress(KeyError):
                async with client.batch():
                    await client.submit("job.yaml")
                    raise KeyError
            assert await (await client.job("lm-1")).done()

    asyncio.run(run())
    assert world.controller.state.submitted == 2


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("block", EXAMPLES, ids=lambda block: block.where)
def test_the_examples_of_the_guide_run(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block.text, block.where, "exec"), {"__name__": "example"})
    lines = capsys.readouterr().out.splitlines()
    assert lines
    if "Client" in block.text:
        assert all("succeeded" in line for line in lines)


def _with_placeholders() -> dict[str, object]:
    return {
        "name": "lm-{seed}",
        "gpus": 1,
        "global_batch_size": 8,
        "model": {
            "decoder": {
                "vocab_size": 64,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            }
        },
        "data": {"text": ["corpus.txt"], "sequence_length": 32},
        "training": {"learning_rate": "{rate}"},
    }


def test_a_notebook_plans_estimates_fits_and_exports_without_a_service(tmp_path: Path) -> None:
    job = str(Path(__file__).parents[1] / "jobs/rvc/rvc_v2_48k.yaml")
    answer = sdk.plan(job, gpu="rtx3090", global_batch_size=4)
    assert answer["chosen"] is not None
    chosen = answer["frontier"][answer["chosen"]]
    assert chosen["settings"]["micro_batch_size"] == "4"
    same = sdk.estimate(job, {"micro_batch_size": 8}, gpu="rtx3090")
    assert same["needed_bytes"] > chosen["needed_bytes"]
    rows = {row["device"]: row for row in sdk.fit(job, global_batch_size=4)}
    assert rows["rtx3090-24gb"]["plan"] == chosen["plan"]
    script = sdk.export(job, tmp_path / "plan", gpu="rtx3090", global_batch_size=4)
    assert "-bs 4" in script.read_text()
