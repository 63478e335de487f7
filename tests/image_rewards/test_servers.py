"""Vision models and scorers behind HTTP, against servers of our own."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headway.errors import ConfigError, RewardError
from headway.rewards import server_requests
from headway.rewards.images.image_reward import png_base64_to_image
from headway.rewards.images.image_server_reward import make_image_server_reward
from headway.rewards.judge_rewards import VisionJudgeReward
from headway.types import Score
from tests.image_rewards.factory import episode, scored, written

PICTURE = written("4711")


@contextmanager
def server(respond: Callable[[dict[str, Any]], object]) -> Iterator[str]:
    """Answers JSON on the loopback with what `respond` says; a number is a status."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer = respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(answer if isinstance(answer, int) else 200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *args: Any) -> None:
            return

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}"
    finally:
        running.shutdown()
        running.server_close()


def test_a_vision_model_sees_the_picture_and_the_words() -> None:
    seen: list[dict[str, Any]] = []

    def respond(body: dict[str, Any]) -> object:
        seen.append(body)
        return {"choices": [{"message": {"content": "Fine.\nScore: 7"}}]}

    with server(respond) as url:
        reward = VisionJudgeReward(base_url=f"{url}/v1", model="m")
        assert scored(reward, PICTURE, prompt="draw 4711", answer="4711").value == 0.7
    image, text = seen[0]["messages"][0]["content"]
    kind, _, data = image["image_url"]["url"].partition(",")
    assert kind == "data:image/png;base64" and png_base64_to_image(data) == PICTURE
    assert "draw 4711" in text["text"] and "{" not in text["text"]


def test_a_vision_model_without_a_score_gives_no_verdict() -> None:
    with server(lambda body: {"choices": [{"message": {"content": "Lovely."}}]}) as url:
        reward = VisionJudgeReward(base_url=f"{url}/v1", model="m", retries=1, pause_s=0.001)
        with pytest.raises(RewardError, match="vision judge m: no score"):
            scored(reward, PICTURE, prompt="x")


def scores_of(url: str, count: int, **options: Any) -> list[Score | BaseException]:
    reward = make_image_server_reward(url=url, pause_s=0.001, **options)

    async def scene() -> list[Score | BaseException]:
        verdicts = (reward.score(episode(PICTURE, answer=number)) for number in range(count))
        return await asyncio.gather(*verdicts, return_exceptions=True)

    return asyncio.run(scene())


def test_a_scorer_gets_pictures_in_batches_and_each_sample_its_own_score() -> None:
    sizes: list[int] = []

    def respond(body: dict[str, Any]) -> object:
        sizes.append(len(body["samples"]))
        assert all(png_base64_to_image(sample["png"]) == PICTURE for sample in body["samples"])
        return {"scores": [sample["task"]["answer"] / 2 for sample in body["samples"]]}

    with server(respond) as url:
        scores = scores_of(url, 10, batch=4, concurrency=1)
    assert [score.value for score in scores if isinstance(score, Score)] == [number / 2 for number in range(10)]
    assert sizes == [4, 4, 2]


def test_a_sample_that_the_scorer_cannot_judge_takes_no_other_with_it() -> None:
    def respond(body: dict[str, Any]) -> object:
        judged = {0: 1, 1: {"error": "no face"}, 2: {"score": 0.5, "beauty": 3}, 3: "?"}
        return {"scores": [judged[sample["task"]["answer"]] for sample in body["samples"]]}

    with server(respond) as url:
        first, second, third, fourth = scores_of(url, 4)
    assert first == Score(value=1.0) and third == Score(value=0.5, parts={"beauty": 3.0})
    assert isinstance(second, RewardError) and "no face" in str(second)
    assert isinstance(fourth, RewardError) and "not a number" in str(fourth)


@pytest.mark.parametrize("answer", [{"scores": []}, {"score": 1}, [1], {"scores": "x"}, 500])
def test_a_reply_that_is_no_list_of_scores_is_asked_for_again_and_then_no_verdict(answer: object) -> None:
    asked: list[int] = []
    with server(lambda body: asked.append(1) or answer) as url:
        (failed,) = scores_of(url, 1, retries=2)
    assert isinstance(failed, RewardError) and str(failed).startswith("image server: ")
    assert len(asked) == 3


def test_an_address_must_be_one() -> None:
    with pytest.raises(ConfigError, match="http://"):
        make_image_server_reward(url="localhost:80")
    with pytest.raises(ConfigError, match="at least 1"):
        make_image_server_reward(url="http://localhost", batch=0)


def test_the_scorer_of_the_examples_speaks_the_protocol() -> None:
    path = Path(__file__).parents[2] / "examples" / "image_scorer.py"
    spec = importlib.util.spec_from_file_location("image_scorer", path)
    assert spec is not None and spec.loader is not None
    scorer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scorer)

    class Quiet(scorer.Handler):  # type: ignore[misc, name-defined]
        def log_message(self, *args: Any) -> None:
            return

    running = ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    try:
        (score,) = scores_of(f"http://127.0.0.1:{running.server_port}", 1)
    finally:
        running.shutdown()
        running.server_close()
    assert isinstance(score, Score) and 0.5 < score.value <= 1.0 and 0.0 < score.parts["ink"] < 0.5
    assert "error" in scorer.score_sample({"png": "?", "task": {}})


def test_what_a_connection_needs_is_made_once_not_for_every_question(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    make = server_requests.urllib.request.build_opener
    monkeypatch.setattr(
        server_requests.urllib.request, "build_opener", lambda *handlers: made.append(1) or make(*handlers)
    )
    server_requests._make_opener.cache_clear()
    with server(lambda body: {"scores": [0.5] * len(body["samples"])}) as url:
        for _ in range(3):
            assert scored(make_image_server_reward(url=url), PICTURE).value == 0.5
    assert len(made) == 1
