"""Rows are judged by their `data_source` as in verl, and programs may run on a server."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from headway.errors import ConfigError, RewardError
from headway.rewards.reward_registry import make_reward

ANSWER = "reward_model.ground_truth"


def score(source: str, text: str, truth: Any, **options: Any) -> float:
    reward: Any = make_reward("data_source", options, answer=ANSWER)
    return float(asyncio.run(reward.score_text(text, {"data_source": source, ANSWER: truth})).value)


CASES: list[tuple[str, str, Any, float]] = [
    ("openai/gsm8k", "so\n#### 1,234", "1234", 1),
    ("openai/gsm8k", "the answer is 1234", "1234", 0),
    ("openai/gsm8k", "#### 12 no, #### 13", "13", 1),
    ("lighteval/MATH", r"thus \boxed{\frac{1}{2}}", r"\frac12", 1),
    ("lighteval/MATH", "it is 1/2", r"\frac12", 0),
    ("math_dapo", "…\nAnswer: 34", "34", 1),
    ("math_dapo", "…\nAnswer: 35", "34", -1),
    ("aime24", "it is 34", "34", -1),
    ("numina_cn_k12", r"so \boxed{7}", "7", 1),
    ("searchR1_nq", "<answer>The  Beatles.</answer>", {"target": ["beatles"]}, 1),
    ("searchR1_nq", "Beatles", {"target": ["beatles"]}, 0),
    ("taco", "```python\nprint(int(input())+1)\n```", '{"inputs": ["1", "2"], "outputs": ["2", "4"]}', 0.5),
    ("apps", "```python\ndef f(x):\n    return [x]\n```", {"fn_name": "f", "inputs": [[3]], "outputs": [[3]]}, 1),
    ("my/own", "the value is 0.5", "1/2", 1),
]


def test_the_source_of_a_row_chooses_its_judge() -> None:
    reward: Any = make_reward("data_source", answer=ANSWER)

    async def judge(source: str, text: str, truth: Any) -> float:
        return float((await reward.score_text(text, {"data_source": source, ANSWER: truth})).value)

    async def judge_all() -> list[float]:
        return [await judge(*case[:3]) for case in CASES]

    assert asyncio.run(judge_all()) == [case[3] for case in CASES]


def test_the_last_number_counts_where_the_method_is_flexible() -> None:
    assert score("openai/gsm8k", "the answer is 1,234.", "1234", method="flexible") == 1
    with pytest.raises(ConfigError, match="strict or flexible"):
        score("openai/gsm8k", "1", "1", method="loose")


class _FusionHandler(BaseHTTPRequestHandler):
    """Runs what it is sent, as a Sandbox Fusion server answers; every second request fails first."""

    requests: list[str]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(self.path)
        if len(self.requests) == 1:
            answer: dict[str, Any] = {"status": "SandboxError", "message": "busy", "run_result": None}
        else:
            done = subprocess.run(
                [sys.executable, "-c", body["code"]], input=body["stdin"], capture_output=True, text=True, check=False
            )
            run = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
            answer = {"status": "Success" if not done.returncode else "Failed", "run_result": run}
        payload = json.dumps(answer).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def fusion() -> Iterator[tuple[str, list[str]]]:
    requests: list[str] = []
    server = HTTPServer(("127.0.0.1", 0), type("Handler", (_FusionHandler,), {"requests": requests}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/run_code", requests
    server.shutdown()
    server.server_close()


def test_programs_run_on_the_server_that_is_named(fusion: tuple[str, list[str]]) -> None:
    url, requests = fusion
    tests = {"inputs": ["1", "2"], "outputs": ["2", "4"]}
    assert score("taco", "print(int(input())+1)", tests, sandbox_url=url, concurrency=1) == 0.5
    assert requests == ["/run_code"] * 3  # the first was answered by an error of the server, and asked again


def test_a_server_that_is_not_there_gives_no_score() -> None:
    with pytest.raises(ConfigError, match="http"):
        score("taco", "print(1)", {"inputs": [""], "outputs": ["1"]}, sandbox_url="nowhere")
    reward: Any = make_reward("code", {"sandbox_url": "http://127.0.0.1:9"})
    reward_score = reward.score_text("print(1)", {"tests": [{"input": "", "output": "1"}]})
    with pytest.raises(RewardError, match=r"127\.0\.0\.1:9/run_code"):
        asyncio.run(reward_score)
