"""Laws of bad input: each malformed file or request is one clear SpecError, and nothing is stored of it.

500 inputs of each kind in `make test`, 10,000 of each in `make test-long`; the seed is the number of the input.
"""

from __future__ import annotations

import ast
import json
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.backends.journal import accounts
from orchestrator.service.commands.job_list import read_job_list
from orchestrator.service.server.access import gate
from orchestrator.specs.errors import SpecError
from orchestrator.specs.parse import parse_cluster, parse_jobs
from orchestrator.training.checkpoint.folder import (
    MANIFEST,
    find_damage,
    find_latest_complete,
    make_manifest_entry,
    write_manifest,
)
from tests.service.worlds import World, job_spec

ROOT = Path(__file__).parents[2]
COUNTS = [100, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(3000)])]
CHARACTERS_MAX = 10_000  # of one error
NASTY = (
    *(
        "",
        "null",
        "true",
        "-1",
        "0",
        "1e999",
        ".nan",
        "-.inf",
        "9" * 400,
        "0x10",
        "1_000",
        "١٢",
        "1.5GB",
        "½GiB",
    ),
    *(
        "[]",
        "{}",
        "[" * 200,
        "{a: " * 200,
        "a" * 5000,
        "\x00",
        "\t",
        "\r",
        "\u2028",
        "\u202e",
        "\ud83d\ude00",
        "\ufeff",
    ),
    *(
        "&a [*a, *a]",
        "*gone",
        "<<: *gone",
        "!!python/object/apply:os.system [id]",
        "!!binary aGk=",
        "? a",
        "- - -",
    ),
    *(
        "../../etc/passwd",
        "/etc/passwd",
        "~root",
        "$(id)",
        "`id`",
        "'; DROP TABLE jobs; --",
        "%s%n{0}",
        "{name}",
    ),
    *(
        "2026-99-99T99:99",
        "25:61",
        "01:00-01:00",
        "1h",
        "-5min",
        '"',
        "'",
        "#",
        ": :",
        ",,,",
        "%YAML 9.9",
        "---\n---",
    ),
)
LIST_OF_JOBS = """\
begins: 2026-11-23T18:00
jobs:
  - {file: job.yaml}
  - {at: 10min, file: job.yaml}
"""


def files(*patterns: str) -> list[str]:
    texts = [path.read_text() for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    assert len(texts) > 5
    return texts


def mutate(draw: random.Random, text: str) -> str:
    """The text after one to three small changes."""
    for _ in range(draw.randint(1, 3)):
        cut, end = sorted(draw.randrange(len(text) + 1) for _ in range(2))
        end = min(end, cut + draw.choice((1, 5, 40)))
        nasty = draw.choice(NASTY)
        match draw.randrange(6):
            case 0:
                text = text[:cut] + text[end:]
            case 1:
                text = text[:cut] + nasty + text[end:]
            case 2:
                text = text[:end] + text[cut:end] * draw.choice((1, 50)) + text[end:]
            case 3:
                text = (
                    text[:cut]
                    + chr(draw.choice((0, 9, 10, 13, 27, 34, 39, 44, 58, 123, 0x85, 0x2028)))
                    + text[cut:]
                )
            case 4:  # the value of a line
                lines = text.split("\n")
                number = draw.randrange(len(lines))
                key, colon, _ = lines[number].partition(":")
                lines[number] = f"{key}{colon} {nasty}"
                text = "\n".join(lines)
            case _:
                lines = text.split("\n")
                number, other = draw.randrange(len(lines)), draw.randrange(len(lines))
                lines[number], lines[other] = lines[other], lines[number]
                text = "\n".join(lines)
    return text


def refuse_mutations(
    count: int, texts: list[str], read: Callable[[str], object]
) -> Iterator[tuple[int, str]]:
    """Changed texts that are refused, each with one clear SpecError; fails on any other exception."""
    number = refused = 0
    while refused < count:
        assert number < 20 * count, "most changes are harmless: the mutator is too tame"
        draw = random.Random(number)
        text = mutate(draw, draw.choice(texts))
        try:
            read(text)
        except SpecError as error:
            refused += 1
            message = str(error)
            assert message.strip(), number
            assert len(message) < CHARACTERS_MAX, (number, len(message))
            assert "Traceback" not in message, number
            yield number, text
        except Exception as error:
            raise AssertionError(f"input {number} raised {error!r}:\n{text[:3000]}") from error
        number += 1


@pytest.mark.parametrize("count", COUNTS)
def test_a_malformed_job_file_is_one_clear_error(count: int) -> None:
    texts = files("jobs/*/*.yaml")
    assert (
        sum(1 for _ in refuse_mutations(count, texts, lambda text: parse_jobs(text, "job.yaml")))
        == count
    )


@pytest.mark.parametrize("count", COUNTS)
def test_a_malformed_cluster_file_is_one_clear_error(count: int) -> None:
    texts = files("clusters/*.yaml")
    assert (
        sum(
            1
            for _ in refuse_mutations(
                count, texts, lambda text: parse_cluster(text, "cluster.yaml")
            )
        )
        == count
    )


@pytest.mark.parametrize("count", COUNTS)
def test_a_malformed_list_of_jobs_is_one_clear_error(count: int, tmp_path: Path) -> None:
    path = tmp_path / "night.yaml"
    (tmp_path / "job.yaml").write_text(
        "name: job\ncommand: python x.py\nglobal_batch_size: 4\nsteps: 100\nspeeds: {1: 2s}\n"
    )
    (tmp_path / "x.py").write_text("")

    def read(text: str) -> object:
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        return read_job_list(path, tmp_path)

    assert sum(1 for _ in refuse_mutations(count, [LIST_OF_JOBS], read)) == count


@pytest.mark.parametrize("count", COUNTS)
def test_a_malformed_manifest_makes_a_checkpoint_a_damaged_one_and_nothing_worse(
    count: int, tmp_path: Path
) -> None:
    """Half of them carry a right checksum, as a forger's would; the older checkpoint is then the newest whole one."""
    for step in (1, 2):
        folder = tmp_path / f"step-{step:08d}"
        folder.mkdir()
        (folder / "data").write_bytes(b"1234")
        write_manifest(folder, {"data": make_manifest_entry(4, zlib.crc32(b"1234"))})
    newest = tmp_path / "step-00000002"
    whole = (newest / MANIFEST).read_text()
    _, _, entries = whole.partition("\n")
    refused = 0
    for number in range(count):
        draw = random.Random(number)
        text = mutate(draw, whole)
        if number % 2:
            text = mutate(draw, entries)
            text = f"{zlib.crc32(text.encode(errors='surrogatepass')):08x}\n{text}"
        (newest / MANIFEST).write_bytes(text.encode(errors="surrogatepass"))
        try:
            problems = find_damage(newest)
            newest_complete = find_latest_complete(tmp_path)
        except Exception as error:
            raise AssertionError(f"input {number} raised {error!r}:\n{text[:3000]}") from error
        refused += bool(problems)
        assert newest_complete == (
            newest if not find_damage(newest, read_files=False) else tmp_path / "step-00000001"
        ), number
        assert all(len(problem) < CHARACTERS_MAX for problem in problems), number
    assert refused > 0.8 * count


STATUS_CODES = (200, 400, 404, 409, 413, 422)


@pytest.mark.parametrize("count", COUNTS)
def test_nothing_is_stored_of_a_malformed_request(count: int, tmp_path: Path) -> None:
    world = World(tmp_path)
    whole = json.dumps({"jobs": [{"spec": job_spec()}]}, indent=1)
    paths = (
        "/jobs/batch",
        "/jobs",
        "/jobs/cancel",
        "/observations",
        "/tokens",
        "/nodes/virtual/drain",
        "/jobs/a-1/retry",
    )
    events, refused = len(list(world.journal.iterate_events())), 0
    for number in range(count):
        draw = random.Random(number)
        path = draw.choice(paths)
        body = mutate(draw, whole).encode(errors="surrogatepass")
        answer = world.client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (200, 400, 404, 409, 413, 422), (
            number,
            path,
            answer.status_code,
            answer.text[:500],
        )
        now = (
            len(list(world.journal.iterate_events()))
            if answer.status_code == 200 or number % 50 == 0
            else events
        )
        if answer.status_code == 200:
            events = now
        else:
            refused += 1
            assert now == events, (number, path)
            assert answer.json()["error"].strip(), number
    assert refused > 0.5 * count
    assert len(list(world.journal.iterate_events())) == events
    world.journal.close()


def test_a_token_is_compared_in_constant_time_or_by_its_digest() -> None:
    """Check the syntax, since times are noise: no `==` touches a token or what a client claims to be one."""
    for module in (gate, accounts):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        for compared in (node for node in ast.walk(tree) if isinstance(node, ast.Compare)):
            expression = ast.unparse(compared)
            if any(isinstance(operator, ast.Eq | ast.NotEq) for operator in compared.ops):
                assert "token" not in expression.replace("_tokens.c.", ""), expression
                assert "secret" not in expression, expression
                assert "given" not in expression, expression
    calls = [
        ast.unparse(node.func)
        for node in ast.walk(ast.parse(Path(str(gate.__file__)).read_text()))
        if isinstance(node, ast.Call)
    ]
    assert "hmac.compare_digest" in calls
