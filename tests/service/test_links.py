"""Laws of links to MLflow: nobody waits for one, and it is there once it was found."""

from __future__ import annotations

import threading
import time

from orchestrator.service.server.routes import links as links_module
from orchestrator.service.server.routes.links import MlflowLinks


def test_nobody_waits_for_a_link_and_it_is_looked_up_once_at_a_time() -> None:
    may, keys = threading.Event(), list[str]()

    def look(_: str, key: str, __: int) -> str | None:
        keys.append(key)
        assert may.wait(60.0)
        return None if len(keys) == 1 else f"http://mlflow/{key}"

    links = MlflowLinks(look)
    began_s = time.perf_counter()
    assert [links.find_cached_url("http://mlflow", "a", 2) for _ in range(50)] == [None] * 50
    assert time.perf_counter() - began_s < 30.0, "each lookup waits 60 s"
    may.set()
    deadline_s = time.monotonic() + 60.0
    while (
        links.find_cached_url("http://mlflow", "a", 2) != "http://mlflow/a"
    ):  # there was no page at first: it is sought again
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert keys == ["a", "a"]


def test_a_look_that_fails_is_repeated() -> None:
    tries = list[int]()

    def look(*_: object) -> str | None:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("MLflow is odd")
        return "http://mlflow/x"

    links, deadline_s = MlflowLinks(look), time.monotonic() + 60.0
    while links.find_cached_url("u", "k", 1) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert len(tries) == 2
    assert links_module.KNOWN_MAX >= 100
