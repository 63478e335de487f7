"""Conversations with the tools of verl's files: checked answers, retrieval over HTTP, signatures of their own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from headway.environments.environment_registry import make_environment
from headway.environments.text_environment import Reply
from headway.errors import ConfigError, EnvironmentFailed, RewardError

ROW = {
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 4?"}],
    "reward_model": {"ground_truth": "7"},
}
SCHEMA = {"type": "function", "function": {"name": "calc_gsm8k_reward", "description": "Check a number."}}
CHECK = {"name": "check_answer", "answer": "reward_model.ground_truth", "schema": SCHEMA}


def play(options: Mapping[str, Any], *turns: str, row: Mapping[str, Any] = ROW) -> list[Reply]:
    async def scene() -> list[Reply]:
        environment: Any = make_environment("tools", messages="prompt", **options)
        replies = [await environment.reset(0, row)]
        replies += [await environment.step(turn) for turn in turns]
        await environment.close()
        return replies

    return asyncio.run(scene())


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_a_task_brings_its_conversation_and_the_answer_is_left_to_a_reward() -> None:
    wrong, right = call("calc_gsm8k_reward", answer="8"), call("calc_gsm8k_reward", answer="#### 7")
    opening, first, second, last = play({"tools": [CHECK]}, wrong, right, "#### 7")
    assert opening.text == "What is 3 + 4?"
    assert opening.instructions is not None
    assert opening.instructions.startswith("Be brief.\n\n")
    assert '"calc_gsm8k_reward"' in opening.instructions
    assert "reward=0.0" in first.text
    assert "reward=1.0" in second.text
    assert (last.done, last.reward, last.info["called"]) == (True, 0.0, 2)


def test_a_wrong_number_may_be_tried_again() -> None:
    _, first, second = play({"tools": [], "retry_until": "reward_model.ground_truth"}, "It is 8.", "It is 7.")
    assert (first.done, second.done) == (False, True)
    assert "incorrect" in first.text


def test_only_so_many_calls_of_a_turn_are_made_and_answers_are_cut() -> None:
    twice = call("calc_gsm8k_reward", answer="1" * 300) + call("calc_gsm8k_reward", answer="2")
    (_, reply) = play({"tools": [CHECK], "most_calls": 1, "longest": 40}, twice)
    assert reply.text.count("<tool_response>") == 1
    assert "characters left out" in reply.text


def test_a_row_without_what_the_environment_needs_is_named() -> None:
    with pytest.raises(EnvironmentFailed, match="no conversation"):
        play({"tools": []}, row={"prompt": [{"role": "user"}]})
    with pytest.raises(RewardError, match=r"no 'reward_model\.ground_truth'"):
        play({"tools": [CHECK]}, row={"prompt": "What?"})
    with pytest.raises(ConfigError, match="signature"):
        play({"tools": [{"name": "calculator", "schema": {"function": {}}}]})


class _RetrievalHandler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = [[{"document": {"contents": f"{query}\nAll about it."}}] * asked["topk"] for query in asked["queries"]]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"result": found}).encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def retrieval() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _RetrievalHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve"
    server.shutdown()
    server.server_close()


def test_a_search_asks_the_retrieval_server(retrieval: str) -> None:
    tools = {"tools": [{"name": "retrieval", "url": retrieval, "most": 2}]}
    (_, reply, bad) = play(tools, call("search", query_list=["Rome", "Oslo"]), call("search", query_list=[1]))
    assert "Doc 2 (Title: Rome)\nAll about it.\n---\nDoc 1 (Title: Oslo)" in reply.text
    assert "Error" in bad.text


def test_a_query_in_a_world_of_roll_asks_the_server_too(retrieval: str) -> None:
    search = {"tool_id": "search", "tool_args": {"search_url": retrieval, "topk": 1}}

    async def scene() -> tuple[str, Reply, Reply]:
        world: Any = make_environment("roll_qa", tools={"tool_configs": [search], "max_tool_uses": 1})
        world.reset(0, {"question": "Where?", "answer": "Oslo"})
        first = await world.step("<search>Norway</search>")
        return world.instructions, first, await world.step("<search>Oslo</search> <answer>Oslo</answer>")

    instructions, found, answered = asyncio.run(scene())
    assert "<search>" in instructions
    assert "<information>Doc 1 (Title: Norway)" in found.text
    assert (answered.done, answered.reward) == (True, 1)


def test_a_server_that_is_silent_ends_the_episode() -> None:
    tools = {"tools": [{"name": "retrieval", "url": "http://127.0.0.1:9", "retries": 0}]}
    with pytest.raises(EnvironmentFailed, match=r"search: http://127\.0\.0\.1:9"):
        play(tools, call("search", query_list=["Rome"]))
