"""A service that other machines reach: real processes, real TLS, a login of its own."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.service.client.endpoint import (
    compute_certificate_fingerprint,
    make_endpoint,
    parse_host_and_port,
)
from orchestrator.service.client.logins import normalise_url
from orchestrator.specs.errors import SpecError
from tests.commands import COMMAND_S, run_orc

JOB = """\
name: quick
command: {python} -c "print('done')"
global_batch_size: 1
probe: never
"""

NO_MLFLOW = "http://127.0.0.1:1"  # nothing answers there


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A user on some machine: where logins are kept, and which service commands mean."""

    folder: Path
    server: str | None = None
    # None: the service's own, which takes 6 s of processor time to start
    mlflow: str | None = NO_MLFLOW

    def orc(self, *arguments: str, token: str = "", code: int = 0) -> Any:
        """Return the JSON answer of a command; its stderr where it fails."""
        extra = {
            "XDG_CONFIG_HOME": str(self.folder),
            "ORC_HOME": str(self.folder / "home"),
            "ORC_SERVER": self.server,
        }
        extra["ORC_MLFLOW"] = self.mlflow
        dropped = {name for name in os.environ if name.startswith("ORC_")}
        inherited = {name: text for name, text in os.environ.items() if name not in dropped}
        env = {**inherited, **{name: text for name, text in extra.items() if text is not None}}
        ended = run_orc([*arguments, "--json"], env=env, stdin=token)
        assert ended.returncode == code, (arguments, ended.stdout, ended.stderr)
        return ended.stderr if code else json.loads(ended.stdout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A service with an endpoint, the machine that it runs on, and a login elsewhere."""

    here: Machine
    there: Machine
    url: str
    fingerprint: str


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def reached(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reached]:
    mlflow = getattr(request.module, "MLFLOW", NO_MLFLOW)
    here = Machine(folder=tmp_path_factory.mktemp("here"), mlflow=mlflow)
    url = f"https://127.0.0.1:{free_port()}"
    there = Machine(folder=tmp_path_factory.mktemp("there"), server=url)
    up = here.orc("up", "--listen", url.removeprefix("https://"), "--trust-users")
    try:
        here.orc("user", "set", "ada", "--role", "member")
        token = here.orc("token", "create", "ada", "--expires", "1h")["secret"]
        fingerprint = up["listen"]["fingerprint"]
        assert there.orc("login", url, "--fingerprint", fingerprint, token=token)["user"] == "ada"
        yield Reached(here=here, there=there, url=url, fingerprint=fingerprint)
    finally:
        here.orc("down", "--force")


@pytest.mark.long
def test_a_job_submitted_from_elsewhere_runs_and_belongs_to_the_user_of_the_token(
    reached: Reached,
) -> None:
    file = reached.there.folder / "job.yaml"
    file.write_text(JOB.format(python=sys.executable))
    (job_id,) = reached.there.orc("submit", str(file))["ids"]
    shown = _ended(reached, job_id)
    assert (shown["status"], shown["user"]) == ("succeeded", "ada")
    assert [job["id"] for job in reached.there.orc("queue")["jobs"]] == [job_id]
    assert "needs the role admin" in reached.there.orc("audit", code=1)
    actions = [(row["user"], row["action"]) for row in reached.here.orc("audit")["rows"]]
    assert ("ada", f"POST /jobs/batch {job_id}") in actions


PROJECT = """\
name: packed
command: python train.py --out .
global_batch_size: 1
probe: never
workdir: project
success: {artifacts: [out/model.txt]}
"""
TRAIN = "import helper, pathlib; pathlib.Path('out').mkdir(); pathlib.Path('out/model.txt').write_text(helper.WORDS)"


@pytest.mark.long
def test_a_job_whose_files_are_elsewhere_runs_there_and_its_output_is_fetched(
    reached: Reached,
) -> None:
    project = reached.there.folder / "project"
    project.mkdir()
    (project / "train.py").write_text(TRAIN)
    (project / "helper.py").write_text("WORDS = 'weights'")
    file = reached.there.folder / "packed.yaml"
    file.write_text(PROJECT)
    (job_id,) = reached.there.orc("submit", str(file))["ids"]
    assert _ended(reached, job_id)["status"] == "succeeded"
    to = reached.there.folder / "got"
    assert reached.there.orc("get", job_id, "--to", str(to)) == {
        "folder": str(to),
        "bytes": 7,
        "left_out": 0,
    }
    assert {
        path.name for path in to.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    } == {"model.txt"}
    assert "exists already" in reached.there.orc("get", job_id, "--to", str(to), code=2)
    assert not (project / "out").exists()
    uploads = list((reached.here.folder / "home" / "uploads").iterdir())
    assert {"train.py", "helper.py"} in [
        {path.name for path in (upload / "files").iterdir()} for upload in uploads
    ]
    assert not [path for upload in uploads for path in upload.rglob("logins.json")], (
        "a token was uploaded"
    )
    assert reached.there.orc("run", str(file))["status"] == "succeeded"
    assert len(list((reached.here.folder / "home" / "uploads").iterdir())) == len(uploads), (
        "it was there"
    )


MODEL = """\
name: own
global_batch_size: 8
model: {hf: {model_type: llama, vocab_size: 300, hidden_size: 8, intermediate_size: 16, num_hidden_layers: 1,
             num_attention_heads: 2}}
data: {chat: [/srv/only/there.jsonl], tokenizer: /srv/only/tokenizer}
"""


def test_a_path_of_the_service_need_not_exist_elsewhere_and_is_looked_for_there(
    reached: Reached,
) -> None:
    file = reached.there.folder / "there.yaml"
    file.write_text(MODEL)
    planned = reached.there.orc("plan", str(file))
    assert planned["chosen"] is not None
    error = reached.there.orc("submit", str(file), code=2)
    assert "data.chat[0]: the file does not exist" in error
    assert "data.tokenizer: the folder does not exist" in error


def test_a_login_is_readable_by_its_user_alone_and_holds_for_its_url_alone(
    reached: Reached,
) -> None:
    file = reached.there.folder / "orc" / "logins.json"
    assert file.stat().st_mode & 0o077 == 0
    assert set(json.loads(file.read_text())) == {reached.url}
    other = Machine(folder=reached.there.folder, server="https://127.0.0.1:1")
    assert "no login is kept" in other.orc("queue", code=1)


def test_another_certificate_than_the_pinned_one_is_refused(
    reached: Reached, tmp_path: Path
) -> None:
    wrong = f"sha256:{'0' * 64}"
    error = Machine(folder=tmp_path).orc(
        "login", reached.url, "--fingerprint", wrong, token="orc_x", code=1
    )
    assert reached.fingerprint in error
    assert not (tmp_path / "orc").exists()
    unpinned = Machine(folder=tmp_path).orc("login", reached.url, token="orc_x", code=1)
    assert "a certificate that is not trusted here" in unpinned
    assert "orc up" not in unpinned, "nothing that a user could start mends it"


def test_what_is_no_token_is_refused_and_not_kept(reached: Reached, tmp_path: Path) -> None:
    stranger = Machine(folder=tmp_path)
    error = stranger.orc(
        "login", reached.url, "--fingerprint", reached.fingerprint, token="orc_wrong", code=1
    )
    assert "wrong token" in error
    assert not (tmp_path / "orc").exists()


def test_nothing_is_served_in_the_clear(reached: Reached) -> None:
    with pytest.raises(httpx.HTTPError):
        httpx.get(reached.url.replace("https", "http") + "/healthz", timeout=10.0, trust_env=False)
    trusted = ssl.create_default_context(
        cafile=str(reached.here.folder / "home" / "tls" / "certificate.pem")
    )
    assert httpx.get(f"{reached.url}/healthz", verify=trusted, trust_env=False).json() == {
        "status": "ok"
    }


def test_commands_about_the_home_folder_are_refused_elsewhere(reached: Reached) -> None:
    for command in ("up", "down", "doctor", "replay", "backup"):
        assert "works on this machine alone" in reached.there.orc(command, code=2)


@pytest.mark.parametrize(
    "text", ["8443", "0.0.0.0:", ":8443", "0.0.0.0:0", "0.0.0.0:65536", "host:port"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="not an address"):
        parse_host_and_port(text)


@pytest.mark.parametrize(
    "url", ["http://a:1", "a:1", "https://", "https://a/b", "https://u:p@a", "https://a:x"]
)
def test_what_is_no_https_address_is_refused(url: str) -> None:
    with pytest.raises(SpecError, match="not the address of a service"):
        normalise_url(url)


def test_a_service_makes_its_certificate_once_and_its_key_is_private(tmp_path: Path) -> None:
    first = make_endpoint(tmp_path, "127.0.0.1:1", None, None, ())
    assert (
        make_endpoint(tmp_path, "0.0.0.0:2", None, None, ("orc.example",)).compute_fingerprint()
        == first.compute_fingerprint()
    )
    assert Path(first.key).stat().st_mode & 0o077 == 0
    assert first.compute_fingerprint() == compute_certificate_fingerprint(
        Path(first.certificate).read_text()
    )


def test_a_certificate_without_its_key_is_refused(tmp_path: Path) -> None:
    made = make_endpoint(tmp_path / "a", "127.0.0.1:1", None, None, ())
    other = make_endpoint(tmp_path / "b", "127.0.0.1:1", None, None, ())
    with pytest.raises(SpecError, match="go together"):
        make_endpoint(tmp_path, "127.0.0.1:1", Path(made.certificate), None, ())
    with pytest.raises(SpecError, match="cannot serve under this certificate"):
        make_endpoint(tmp_path, "127.0.0.1:1", Path(made.certificate), Path(other.key), ())


def _ended(reached: Reached, job_id: str) -> Any:
    """The job once it has ended: its log is followed to that end."""
    subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", "logs", job_id, "--follow"],
        env={**os.environ, "XDG_CONFIG_HOME": str(reached.there.folder), "ORC_SERVER": reached.url},
        check=True,
        capture_output=True,
        timeout=COMMAND_S,
    )
    return reached.there.orc("show", job_id)
