"""Reads the configuration of a model that a job names by its hub name."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.published import (
    WRITTEN,
    find_nearest_models,
    find_project_job,
    find_published_config,
    load_published,
)

TRY_S = 10.0  # the one try to reach the hub
CONFIG = "config.json"


def hub_config(name: str) -> JsonObject:
    """Return the configuration from the local cache, one request to the hub, or our table; {} where none has it.

    The use of the table is printed on stderr: a fine-tuned model under the same name may have other sizes.
    """
    config = _download(name)
    if config:
        return config
    config = find_published_config(name)
    if config:
        print(
            f"{name}: the hub did not answer; its sizes are those of our table of {WRITTEN}",
            file=sys.stderr,
        )
    return config


def hint_for(name: str) -> str:
    """Return what to do about a model of which neither cache, hub nor table says the sizes."""
    job = find_project_job(name)
    near = ", ".join(find_nearest_models(name))
    advice = (
        f"{job} of the repository is the job of its project's own trainer. "
        if job is not None
        else ""
    )
    return (
        f"{advice}It is not in the local cache, and the hub did not give it within {TRY_S:g} s. Our table of {WRITTEN} "
        f"has {len(load_published())} other models (`orc fit hf:` lists them), such as {near}. Set HF_ENDPOINT to a "
        "mirror, HF_TOKEN for a model behind a licence, name a folder, or write its configuration under `config:` "
        "beside `hf`"
    )


def _download(name: str) -> JsonObject:
    """Return the configuration from the hub's library, which retries: it runs in a thread for TRY_S at most."""
    answer: list[JsonObject] = []

    def download() -> None:
        try:
            from huggingface_hub import hf_hub_download  # late: it needs the extra `finetune`
            from huggingface_hub.utils.logging import set_verbosity_error

            set_verbosity_error()  # type: ignore[no-untyped-call]  # it tells each of its tries
            config = json.loads(Path(hf_hub_download(name, CONFIG, etag_timeout=TRY_S)).read_text())
        except (ImportError, OSError, ValueError):  # what the hub's library raises is one of these
            return
        if isinstance(config, dict):
            answer.append(config)

    thread = threading.Thread(target=download, daemon=True, name="hub")
    thread.start()
    thread.join(TRY_S)
    return answer[0] if answer else {}
