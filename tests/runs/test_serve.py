"""`headway serve` as a process: it comes up, answers, and goes with everything it started."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from pathlib import Path

import pytest

from tests.runs.factory import Run, Runs

pytest.importorskip("aiohttp")


def serve(runs: Runs, directory: Path, *words: str) -> Run:
    return runs.start(directory / "serve", "serve", *words)


def test_a_model_is_served_until_it_is_interrupted(runs: Runs, tmp_path: Path) -> None:
    words = ("--port", "0", "--token", "t", "sequence_length=64", "processes=false")
    run = serve(runs, tmp_path, str(runs.model), *words)
    assert run.until(lambda: "/v1" in run.text), run.text
    (address,) = re.findall(r"http://\S+/v1", run.text)
    body = {"model": "model", "prompt": "1+2=", "max_tokens": 4, "return_token_ids": True}
    headers = {"Authorization": "Bearer t"}
    asked = urllib.request.Request(f"{address}/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked) as answer:
        assert 1 <= len(json.load(answer)["choices"][0]["token_ids"]) <= 4
    run.kill(signal.SIGTERM)
    assert run.end() == 0, run.text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("MODEL", "--host", "0.0.0.0"), "there is no token"),
        ((".",), "neither a model nor a run"),
        (("MODEL", "sequence_lenght=9"), "did you mean"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    runs: Runs, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    run = serve(runs, tmp_path, *(str(runs.model) if word == "MODEL" else word for word in words))
    assert run.end() == 2
    assert said in run.text and "Traceback" not in run.text
