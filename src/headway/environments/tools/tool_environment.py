"""A question, tools, and an answer that can be checked.

Each turn the policy calls tools or answers. A turn without a call is the answer and ends the episode: right is worth 1,
wrong 0. Calls that cannot be read are counted, told to the policy, and cost `malformed_penalty`; what a tool refuses is
told and free. Questions come with the task (`question`, `answer`), from a file of them, or, where there are none, are
sums from the seed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from headway.environments.response_parsing import parse_tool_calls
from headway.environments.text_environment import Reply
from headway.environments.tools.base import StaticToolSource
from headway.environments.tools.toolbox import Toolbox, describe_tools, make_tool_sources
from headway.errors import ConfigError, EnvironmentFailed
from headway.seeding import make_rng
from headway.user_code import import_function

AnswerJudge = Callable[[str, Mapping[str, Any]], float]
_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL | re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_TASK = (
    "Answer the question. Call tools where they help; when you know the answer, write it as <answer>answer</answer>."
)


class ToolEnvironment:
    """`judge`: `module:function` that scores the answer from 0 to 1; default `score_exact_answer`."""

    reusable = True

    def __init__(
        self,
        *,
        tools: Sequence[str | Mapping[str, Any]] = ("calculator",),
        questions: str = "",
        judge: str = "",
        max_steps: int = 8,
        malformed_penalty: float = 0.1,
    ) -> None:
        if max_steps < 1:
            raise ConfigError("must be at least 1", key="max_steps", value=max_steps)
        self.max_steps = max_steps
        self._penalty = malformed_penalty
        sources = make_tool_sources(tools)
        self._box = Toolbox(sources)
        self._known = [tool for source in sources if isinstance(source, StaticToolSource) for tool in source.tools]
        self._judge: AnswerJudge = import_function(judge, key="judge") if judge else score_exact_answer
        self._questions = _read_questions(questions) if questions else ()
        self.instructions = f"{_TASK}\n\n{describe_tools(self._known)}" if self._known else _TASK

    async def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        self._data = data if "question" in data else self._question(seed)
        if self._judge is score_exact_answer and "answer" not in self._data:
            raise EnvironmentFailed(f"the task has a question and no answer: {self._data['question']!r}")
        self._counts = {"malformed": 0, "refused": 0, "called": 0}
        await self._box.begin()
        learned = [tool for tool in self._box.tools.values() if tool not in self._known]
        return f"{describe_tools(learned)}\n\n{self._data['question']}" if learned else str(self._data["question"])

    async def step(self, action: str) -> Reply:
        said = parse_tool_calls(action)
        if not said.calls:
            score = self._judge(extract_final_answer(said.text), self._data)
            return Reply("", score, done=True, success=score >= 1.0, info=dict(self._counts))
        answers = await self._box.answer(said.calls)
        for name in self._counts:
            self._counts[name] += getattr(answers, name)
        return Reply(
            answers.text,
            0.0 - self._penalty * answers.malformed,
            valid=not answers.malformed,
            info=dict(self._counts),
        )

    async def close(self) -> None:
        await self._box.close()

    def _question(self, seed: int) -> Mapping[str, Any]:
        rng = make_rng(seed, "tools")
        if self._questions:
            return self._questions[rng.randrange(0, len(self._questions))]
        a, b, c = (rng.randrange(11, 1000) for _ in range(3))
        return {"question": f"What is {a} * {b} + {c}?", "answer": str(a * b + c)}


def extract_final_answer(text: str) -> str:
    """The answer inside an answer: between tags, in a box, or all of it."""
    for pattern in (_ANSWER, _BOXED):
        found = pattern.findall(text)
        if found:
            return str(found[-1]).strip()
    return text.strip()


def score_exact_answer(answer: str, data: Mapping[str, Any]) -> float:
    """1 where the answer is one of `answer`: equal as a number, or in its words, whatever their case and dots."""
    wanted = data["answer"]
    accepted = wanted if isinstance(wanted, list) else [wanted]
    return float(any(_is_same_answer(answer, str(one)) for one in accepted))


def _is_same_answer(one: str, other: str) -> bool:
    numbers = _parse_number(one), _parse_number(other)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return _normalize_words(one) == _normalize_words(other)


def _parse_number(text: str) -> Fraction | None:
    plain = text.strip().rstrip(".").replace(",", "").replace("−", "-").lstrip("$")
    try:
        return Fraction(plain) if len(plain) <= 100 and "e" not in plain.lower() else None
    except (ValueError, ZeroDivisionError):
        return None


def _normalize_words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


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
