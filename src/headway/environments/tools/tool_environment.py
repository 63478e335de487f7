"""A question, tools, and an answer that can be checked.

Each turn the policy calls tools or answers. A turn without a call is the answer and ends the episode: a right answer
scores 1, a wrong one 0. Calls that cannot be parsed are counted, reported to the policy, and cost `malformed_penalty`;
calls that a tool refuses are reported and free. Questions come with the task (`question`, `answer`), from a file, or,
if there is neither, are sums drawn from the seed. With `messages`, the name of a column, the task brings a conversation
instead, and the environment judges nothing: a reward of the run does. With `retry_until`, the column of a number, an
answer that is another number is called wrong, and the policy tries again.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

from headway.environments.base import STATE_REWARDS, TOOL_PROBLEMS, TOOL_REWARDS
from headway.environments.response_parsing import find_tagged_answer, parse_tool_calls
from headway.environments.text_environment import Reply
from headway.environments.tools.base import StaticToolSource
from headway.environments.tools.toolbox import CutSide, Toolbox, describe_tools, is_user_tool, make_tool_source
from headway.environments.tools.verl_tool import VerlToolSource
from headway.errors import ConfigError, EnvironmentFailed
from headway.rewards.base import get_expected_answer
from headway.rewards.verl_rewards import score_gsm8k
from headway.seeding import make_rng
from headway.user_code import import_function

AnswerJudge = Callable[[str, Mapping[str, Any]], float]
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_PLAIN_NUMBER = re.compile(r"[-+]?[0-9.]{1,50}(?:/[0-9]{1,50})?")
_ANSWER_WORD = re.compile(r"(?<!\w)-?\d+(?:[.,:/-]\d+)*|[^\W\d]+|\d+")
_WRONG = "Your response is incorrect! You need to reflect on your answer and try again."
_TASK = (
    "Answer the question. Call tools where they help; when you know the answer, write it as <answer>answer</answer>."
)


class ToolEnvironment:
    """`judge`: `module:function` that scores an answer and the task's data from 0 to 1; default: exact answers."""

    def __init__(
        self,
        *,
        tools: Sequence[str | Mapping[str, Any]] = ("calculator",),
        questions: str = "",
        judge: str = "",
        max_steps: int = 8,
        malformed_penalty: float = 0.1,
        messages: str = "",
        retry_until: str = "",
        most_calls: int | None = None,
        longest: int = 8000,
        cut_side: CutSide = "middle",
    ) -> None:
        if max_steps < 1:
            raise ConfigError("must be at least 1", key="max_steps", value=max_steps)
        if cut_side not in get_args(CutSide):
            raise ConfigError("must be left, middle or right", key="cut_side", value=cut_side)
        self.max_steps = max_steps
        self._malformed_penalty = malformed_penalty
        sources = [make_tool_source(one) for one in tools]
        self._toolbox = Toolbox(sources, longest=longest, cut_side=cut_side)
        self.runs_user_code = any(map(is_user_tool, tools))
        self.reusable = not any(isinstance(one, VerlToolSource) for one in sources)  # instances end with their episode
        self._messages, self._retry_until, self._most_calls = messages, retry_until, most_calls
        self._static_tools = [tool for one in sources if isinstance(one, StaticToolSource) for tool in one.tools]
        self._judge: AnswerJudge = import_function(judge, key="judge") if judge else score_exact_answer
        self._questions = _read_questions(questions) if questions else ()
        self.instructions = f"{_TASK}\n\n{describe_tools(self._static_tools)}" if self._static_tools else _TASK

    async def reset(self, seed: int, data: Mapping[str, Any]) -> str | Reply:
        self._counts = {"malformed": 0, "refused": 0, "called": 0}
        self._rewards: list[float] = []
        self._state_rewards: dict[str, float] = {}
        self._problems: list[str] = []
        if self._messages:
            await self._toolbox.begin(data)
            self._expected = str(get_expected_answer(data, self._retry_until)) if self._retry_until else ""
            return self._open_conversation(data)
        self._data = data if "question" in data else self._draw_question(seed)
        if self._judge is score_exact_answer and "answer" not in self._data:
            raise EnvironmentFailed(f"the task has a question and no answer: {self._data['question']!r}")
        await self._toolbox.begin(self._data)
        new_tools = [tool for tool in self._toolbox.tools.values() if tool not in self._static_tools]
        question = str(self._data["question"])
        return f"{describe_tools(new_tools)}\n\n{question}" if new_tools else question

    async def step(self, action: str) -> Reply:
        response = parse_tool_calls(action)
        if not response.calls and self._messages:
            is_wrong = self._retry_until and not score_gsm8k(response.text, self._expected, "flexible")
            return Reply(_WRONG if is_wrong else "", done=not is_wrong, info=self._make_info())
        if not response.calls:
            score = self._judge(extract_final_answer(response.text), self._data)
            return Reply("", score, done=True, success=score >= 1.0, info=self._make_info())
        results = await self._toolbox.call_tools(response.calls[: self._most_calls])
        for name, count in results.counts.items():
            self._counts[name] += count
        self._rewards += results.rewards
        self._state_rewards.update(results.state_rewards)
        self._problems += results.problems
        malformed = results.counts["malformed"]
        reward = 0.0 - self._malformed_penalty * malformed  # never -0.0
        return Reply(
            results.text,
            reward,
            valid=not malformed,
            info=self._make_info(),
            tool_answers=results.answers if self._messages else (),
        )

    def _make_info(self) -> dict[str, Any]:
        """Return the counts of calls, what tools gave for them, and what went wrong inside of tools."""
        given = {TOOL_REWARDS: list(self._rewards), STATE_REWARDS: dict(self._state_rewards)} if self._messages else {}
        problems = {TOOL_PROBLEMS: list(self._problems)} if self._problems else {}
        return {**self._counts, **given, **problems}

    def _open_conversation(self, data: Mapping[str, Any]) -> Reply:
        """Return the conversation of a task: its system messages, the tools, and all other messages as one text."""
        given = data.get(self._messages)
        given = json.loads(given) if isinstance(given, str) and given.startswith("[{") else given
        rows = given if isinstance(given, list) else [{"role": "user", "content": given}]
        if not given or not all(isinstance(one, Mapping) and isinstance(one.get("content"), str) for one in rows):
            raise EnvironmentFailed(f"the column {self._messages!r} has no conversation: {str(given)[:200]!r}")
        system = [str(one["content"]) for one in rows if one.get("role") == "system"]
        others = [one for one in rows if one.get("role") != "system"]
        roles = ["" if len(others) == 1 else f"{one.get('role')}: " for one in others]
        said = [f"{role}{one['content']}" for role, one in zip(roles, others, strict=True)]
        tools = [tool.signature for tool in self._toolbox.tools.values()]
        return Reply("\n\n".join(said), instructions="\n\n".join(system), tools=tools)

    async def close(self) -> None:
        await self._toolbox.close()

    def _draw_question(self, seed: int) -> Mapping[str, Any]:
        rng = make_rng(seed, "tools")
        if self._questions:
            return self._questions[rng.randrange(0, len(self._questions))]
        a, b, c = (rng.randrange(11, 1000) for _ in range(3))
        return {"question": f"What is {a} * {b} + {c}?", "answer": str(a * b + c)}


def extract_final_answer(text: str) -> str:
    """Return the last answer in tags, else the last one in a box, else the whole text."""
    tagged, boxed = find_tagged_answer(text), _BOXED.findall(text)
    if tagged is not None:
        return tagged
    return str(boxed[-1] if boxed else text).strip()


def score_exact_answer(answer: str, data: Mapping[str, Any]) -> float:
    """Return 1 if the answer equals an accepted one, as a number or in its words without case and punctuation."""
    wanted = data["answer"]
    accepted = wanted if isinstance(wanted, list) else [wanted]
    return float(any(_is_same_answer(answer, str(one)) for one in accepted))


def _is_same_answer(one: str, other: str) -> bool:
    numbers = _parse_number(one), _parse_number(other)
    if None not in numbers:
        return numbers[0] == numbers[1]
    words = _split_answer(one), _split_answer(other)
    return words[0] == words[1] if all(words) else one.strip() == other.strip()


def _split_answer(text: str) -> list[str]:
    """Return the words and numbers of an answer; sign, decimals and fraction belong to a number."""
    return _ANSWER_WORD.findall(text.casefold().replace("−", "-"))


def _parse_number(text: str) -> Fraction | None:
    digits = text.strip().rstrip(".").replace(",", "").replace("−", "-").lstrip("$")
    try:
        return Fraction(digits) if _PLAIN_NUMBER.fullmatch(digits) else None
    except (ValueError, ZeroDivisionError):
        return None


@lru_cache(maxsize=8)
def _read_questions(path: str) -> tuple[Mapping[str, Any], ...]:
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
        entries = tuple(json.loads(line) for line in lines if line.strip())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot be read: {error}", key="questions", value=path) from error
    if not entries or not all(isinstance(one, dict) and {"question", "answer"} <= one.keys() for one in entries):
        raise ConfigError("needs lines with question and answer", key="questions", value=path)
    return entries
