"""A tool that tells the policy whether a number is the answer of its task, as verl's `Gsm8kTool` does.

The policy learns the answer's score and not the answer. A call costs and earns nothing by itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from headway.environments.tools.base import Tool, ToolArguments, make_schema
from headway.rewards.base import get_expected_answer
from headway.rewards.verl_rewards import score_gsm8k


class AnswerCheckSource:
    """Provides the tool with the answer of each task, which stands in the column `answer`."""

    def __init__(self, *, answer: str = "answer") -> None:
        self._answer = answer

    async def begin(self, data: Mapping[str, Any]) -> Sequence[Tool]:
        expected = str(get_expected_answer(data, self._answer))

        async def call(arguments: ToolArguments) -> str:
            answer = str(arguments["answer"]).removeprefix("#### ")
            score = score_gsm8k(f"#### {answer}", expected, "flexible")
            return f"Current parsed answer={answer!r} reward={score}"

        description = "Check whether a number is the answer to the question; answers with its reward."
        parameters = make_schema({"answer": "string"})
        return [Tool(name="check_answer", description=description, parameters=parameters, call=call)]

    async def close(self) -> None:
        return None
