"""Conversations with the tools of verl's files: checked answers, retrieval over HTTP, signatures of their own."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from headway.environments.environment_registry import make_environment
from headway.environments.text_environment import Reply, read_traits
from headway.environments.tools.toolbox import CutSide, shorten
from headway.environments.tools.verl_stand_in import has_verl, remove_stand_in
from headway.errors import ConfigError, EnvironmentFailed, RewardError
from headway.rewards.base import get_task_data
from headway.types import Episode, FinishReason, Generation, Task, Turn

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
    assert opening.instructions == "Be brief."
    assert [tool["function"]["name"] for tool in opening.tools] == ["calc_gsm8k_reward"]
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


PYTHON_TOOL = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

ENDED = []


class Adder(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.sums = {}

    async def create(self, instance_id=None, **kwargs):
        self.sums[instance_id] = kwargs["create_kwargs"]["start"]
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        if parameters["number"] == 13:
            raise ValueError("unlucky")
        self.sums[instance_id] += parameters["number"]
        return ToolResponse(text=f"{self.name}: {self.sums[instance_id]}"), self.config["pay"], {}

    async def calc_reward(self, instance_id, **kwargs):
        return float(self.sums[instance_id])

    async def release(self, instance_id, **kwargs):
        ENDED.append(self.sums.pop(instance_id))
"""
ADDER_SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}


@pytest.fixture(autouse=True)
def forget_verl() -> Iterator[None]:
    """Take out what stands in for verl, which a worker process would keep."""
    yield
    remove_stand_in()


def write_tool(directory: Path, code: str = PYTHON_TOOL) -> dict[str, Any]:
    (directory / "adder.py").write_text(code)
    class_name = f"{directory / 'adder.py'}:Adder"
    return {"name": "verl_class", "class_name": class_name, "config": {"pay": 0.5}, "tool_schema": ADDER_SCHEMA}


def test_a_class_written_for_verl_is_a_tool_without_verl(tmp_path: Path) -> None:
    row = {**ROW, "extra_info": {"tools_kwargs": {"add": {"create_kwargs": {"start": 10}, "release_kwargs": None}}}}
    turns = call("add", number=1), call("add", number=13), call("add", number=2), "13"
    opening, first, second, _, last = play({"tools": [write_tool(tmp_path)]}, *turns, row=row)
    assert opening.tools == [ADDER_SCHEMA]
    assert first.tool_answers == ["add: 11"]
    assert second.tool_answers == ["Error when executing tool: unlucky"]
    assert (last.info["called"], last.info["refused"]) == (2, 1)
    assert (last.info["tool_rewards"], last.info["rollout_reward_scores"]) == ([0.5, 0.0, 0.5], {"add": 13.0})
    (problem,) = last.info["tool_problems"]
    assert "raised ValueError: unlucky" in problem
    assert "adder.py:" in problem
    (module,) = [one for name, one in sys.modules.items() if getattr(one, "__file__", "") == str(tmp_path / "adder.py")]
    assert module.ENDED == [13]


def test_environments_on_several_threads_share_one_object_of_a_class(tmp_path: Path) -> None:
    slow = PYTHON_TOOL.replace("self.sums = {}", "__import__('time').sleep(0.02); ENDED.append(1)")
    tool = write_tool(tmp_path, slow)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: make_environment("tools", tools=[tool]), range(8)))
    (module,) = [one for name, one in sys.modules.items() if getattr(one, "__file__", "") == str(tmp_path / "adder.py")]
    assert module.ENDED == [1]
    assert "verl" not in sys.modules or has_verl()


def test_rewards_of_tools_reach_a_reward_function_of_verl() -> None:
    info = {"tool_rewards": [0.5], "rollout_reward_scores": {"add": 3.0}, "called": 1}
    generation = Generation(actions=(), logps=(), runs=(), finish=FinishReason.STOP, text="13")
    task = Task(position=0, data={"extra_info": {"index": 7}})
    turn = Turn(observation=(), generation=generation)
    seen = get_task_data(Episode(sample_id="0.0", task=task, turns=(turn, turn), info=info))["extra_info"]
    expected = {"index": 7, "tool_rewards": [0.5], "rollout_reward_scores": {"add": 3.0}, "num_turns": 4}
    assert seen == {**expected, "turn_scores": []}


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("from verl.utils.reward_score import gsm8k\n", "No module named 'verl.utils.reward_score'.*install verl"),
        ("class Adder:\n    def __init__(self, config, tool_schema): 1 / 0\n", "cannot be made: ZeroDivisionError"),
        ("class Adder:\n    def __init__(self, config, tool_schema): pass\n", "has no method execute"),
        (PYTHON_TOOL.replace("parameters, **kwargs", "parameters, agent_data"), "needs agent_data"),
        ("", "has no 'Adder'"),
    ],
)
def test_a_class_that_cannot_work_is_refused_before_anything_starts(tmp_path: Path, code: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_environment("tools", tools=[write_tool(tmp_path, code)])
    assert "verl" not in sys.modules or has_verl()


def test_tools_of_users_are_played_in_worker_processes(tmp_path: Path) -> None:
    assert read_traits(make_environment("tools", tools=[write_tool(tmp_path)])).runs_user_code
    assert not read_traits(make_environment("tools", tools=["calculator"])).runs_user_code


@pytest.mark.parametrize(("side", "expected"), [("left", "abcd\n…"), ("right", "…\nefgh"), ("middle", "ab\n… 4")])
def test_a_long_answer_is_cut_on_the_side_that_verl_means(side: CutSide, expected: str) -> None:
    shortened = shorten("abcdefgh", 4, side)
    assert shortened.startswith(expected) if side != "right" else shortened.endswith(expected)


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
