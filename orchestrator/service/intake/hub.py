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
    load_published,
    load_published_config,
)

TRY_S = 10.0  # the one try to reach the hub
CONFIG = "config.json"


def load_hub_config(hub_name: str) -> JsonObject:
    """Return a model's configuration from the local cache, one request to the hub, or our table; {}
    where none has it.

    A use of our table is printed on stderr: a fine-tuned model under the same name may have other
    sizes.
    """
    config = _download_config(hub_name)
    if config:
        return config
    config = load_published_config(hub_name)
    if config:
        print(
            f"{hub_name}: the hub did not answer; its sizes are those of our table of {WRITTEN}",
            file=sys.stderr,
        )
    return config


def make_hint_for_unknown_model(hub_name: str) -> str:
    """Return a hint on what to do about a model whose sizes are in neither cache, hub nor table."""
    job = find_project_job(hub_name)
    near = ", ".join(find_nearest_models(hub_name))
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


def _download_config(hub_name: str) -> JsonObject:
    """Return a model's configuration from the hub; {} where that fails. The download may take TRY_S
    seconds.
    """
    answer: list[JsonObject] = []

    def download() -> None:
        try:
            from huggingface_hub import hf_hub_download  # late: it needs the extra `finetune`
            from huggingface_hub.utils.logging import set_verbosity_error

            set_verbosity_error()  # type: ignore[no-untyped-call]  # it tells each of its tries
            config = json.loads(
                Path(hf_hub_download(hub_name, CONFIG, etag_timeout=TRY_S)).read_text()
            )
        except (ImportError, OSError, ValueError):  # what the hub's library raises is one of these
            return
        if isinstance(config, dict):
            answer.append(config)

    thread = threading.Thread(target=download, daemon=True, name="hub")
    thread.start()
    thread.join(TRY_S)
    return answer[0] if answer else {}
