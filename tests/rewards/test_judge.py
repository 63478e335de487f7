"""The judge against a server of our own: scores, retries, refusals, many at a time."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from headway.errors import ConfigError, RewardError
from headway.rewards.judge_rewards import JudgeReward, ScoreParser, fill_template
from tests.rewards.factory import episode, judged

Answer = tuple[int, dict[str, str], str]


@contextmanager
def server(respond: Callable[[dict[str, Any], dict[str, str]], Answer | str]) -> Iterator[str]:
    """A chat server on the loopback that answers with what `respond` says."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = respond(body, {**self.headers, "path": self.path})
            if isinstance(answer, str):
                answer = (200, {}, json.dumps({"choices": [{"message": {"content": answer}}]}))
            status, headers, text = answer
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: Any) -> None:
            return

    class Server(ThreadingHTTPServer):
        def handle_error(self, *args: Any) -> None:
            return  # a client that has given up is part of the tests

    running = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}/v1"
    finally:
        running.shutdown()
        running.server_close()


def test_the_judge_sees_question_reference_and_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[dict[str, Any], dict[str, str]]] = []

    def respond(body: dict[str, Any], headers: dict[str, str]) -> str:
        seen.append((body, headers))
        return "Good. Score: 2\nNo, better:\n**Score:** 7.5"

    monkeypatch.setenv("JUDGE_KEY", "k")
    with server(respond) as url:
        reward = JudgeReward(base_url=url + "/", model="m", api_key_env="JUDGE_KEY")
        assert judged(reward, "forty {two}", prompt="6*7?", answer=42) == 0.75
    body, headers = seen[0]
    content = body["messages"][0]["content"]
    assert headers["path"] == "/v1/chat/completions" and headers["Authorization"] == "Bearer k"
    assert (
        "6*7?" in content and "forty {two}" in content and "\n42\n" in content and "from 0 (useless) to 10" in content
    )
    assert body["model"] == "m" and body["temperature"] == 0


def test_a_busy_server_is_asked_again() -> None:
    answers: list[Answer | str] = [
        (429, {"Retry-After": "0.05"}, "slow down"),
        (503, {}, "x"),
        "no idea",
        (200, {}, "not JSON"),
        "score: 10",
    ]
    times: list[float] = []

    def respond(body: dict[str, Any], headers: dict[str, str]) -> Answer | str:
        times.append(time.monotonic())
        return answers[len(times) - 1]

    with server(respond) as url:
        assert judged(JudgeReward(base_url=url, model="m", retries=4, pause_s=0.01), "x") == 1
    assert len(times) == 5 and times[1] - times[0] >= 0.05


@pytest.mark.parametrize(
    ("answer", "calls", "message"),
    [
        ((401, {}, "bad key"), 1, "401 Unauthorized: bad key"),
        ((404, {}, "no such model"), 1, "no such model"),
        ((302, {"Location": "http://127.0.0.1:1/"}, ""), 1, "302"),
        ((500, {}, "oops"), 3, "500"),
        ("I refuse.", 3, "no score in the reply"),
        ("Score: 11", 3, "outside 0.0 … 10.0"),
        ((200, {}, '{"choices": []}'), 3, "something else than a chat completion"),
        ((200, {}, '{"choices": [{"message": {"content": null}}]}'), 3, "without a text"),
    ],
)
def test_no_score_is_no_verdict(answer: Answer | str, calls: int, message: str) -> None:
    asked = []

    def respond(body: dict[str, Any], headers: dict[str, str]) -> Answer | str:
        asked.append(1)
        return answer

    with server(respond) as url, pytest.raises(RewardError, match=message):
        judged(JudgeReward(base_url=url, model="m", retries=2, pause_s=0.001), "x")
    assert len(asked) == calls


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(RewardError, match=r"127\.0\.0\.1:9.*refused"):
        judged(JudgeReward(base_url="http://127.0.0.1:9/v1", model="m", retries=1, pause_s=0.001), "x")


def test_a_server_that_hangs_is_given_up() -> None:
    release = threading.Event()

    def respond(body: dict[str, Any], headers: dict[str, str]) -> str:
        release.wait(5)
        return "Score: 1"

    with server(respond) as url:
        with pytest.raises(RewardError, match="timed out"):
            judged(JudgeReward(base_url=url, model="m", retries=0, timeout_s=0.1), "x")
        release.set()


@pytest.mark.parametrize(
    ("said", "pause_s", "message"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\n{" + b" " * 400, 0.01, "had not ended in time"),
        (b"HTTP/1.0 500 Broken\r\n\r\n" + b"x" * 400, 0.01, "had not ended in time"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 90\r\n\r\n{}", 0.0, "the connection ended after 2 bytes"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", 0.0, "SSH-2.0"),
        (b"", 0.0, "closed connection without response"),
    ],
    ids=["slow bytes", "slow error", "torn", "no HTTP", "nothing"],
)
def test_a_server_that_speaks_badly_is_given_up_and_named(said: bytes, pause_s: float, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.recv(65536)
                head = said.index(b"\r\n\r\n") + 4 if pause_s else len(said)
                connection.sendall(said[:head])
                for place in range(head, len(said)):
                    connection.sendall(said[place : place + 1])
                    time.sleep(pause_s)

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        with pytest.raises(RewardError, match=f"{url}.*{message}"):
            judged(JudgeReward(base_url=url, model="m", retries=0, timeout_s=0.3), "x")


def test_judgements_run_side_by_side_up_to_the_limit() -> None:
    lock, now, most = threading.Lock(), [0], [0]

    def respond(body: dict[str, Any], headers: dict[str, str]) -> str:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.05)
        with lock:
            now[0] -= 1
        return "Score: 5"

    async def scene(url: str) -> list[float]:
        reward = JudgeReward(base_url=url, model="m", concurrency=4)
        return [score.value for score in await asyncio.gather(*(reward.score(episode("x")) for _ in range(12)))]

    with server(respond) as url:
        assert asyncio.run(scene(url)) == [0.5] * 12
    assert 2 <= most[0] <= 4


def test_scores_are_read_from_json_or_by_pattern() -> None:
    as_json = ScoreParser("(x)", "grade", 1, 5)
    assert as_json.parse('Sure:\n```json\n{"why": "{", "grade": 3}\n```') == 0.5
    assert as_json.parse('{"grade": "5"}') == 1
    for reply in ('{"grade": true}', '{"note": 3}', "3", '{"grade": null}', "[" * 50_000):
        with pytest.raises(ValueError, match="grade"):
            as_json.parse(reply)
    assert ScoreParser(r"\[\[(\d)\]\]", None, 0, 1).parse("[[0]] … [[1]]") == 1


def test_what_the_answer_says_is_never_a_field() -> None:
    assert fill_template("{a} {b} {c}", {"a": "{b}", "b": "x"}) == "{b} x {c}"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"base_url": "localhost:80"}, "http://"),
        ({"pattern": "("}, "regular expression"),
        ({"pattern": "x"}, "group"),
        ({"lowest": 10}, "highest"),
        ({"api_key_env": "HEADWAY_NO_SUCH_KEY"}, "not set"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JudgeReward(**{"base_url": "http://localhost/v1", "model": "m", **wrong})
