"""Questions of a data set, each answered once and judged by a reward: `math`, `qa`, `logic` and `code` of GEM.

    roll_math, math:NAME          the answer in `\\boxed{}` equals the row's in value
    roll_qa, qa:NAME, logic:NAME  the answer between `<answer>` tags, or in a box, has the words of the row's
    roll_code, code:NAME          the last program passes the row's tests, in the sandbox

`dataset_name` is a file, a folder or a data set of the hub; the seed draws a row. A task that brings the columns itself
is asked as it is. With `tools`, a turn that holds a Python program runs it in the sandbox and goes on with what it
printed, and one with a query between `<search>` tags with what a retrieval server found; `max_tool_uses` such turns are
played, and any other turn is the answer.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from headway.config import DataArgs
from headway.data.data_entries import open_entries
from headway.environments.text_environment import Reply
from headway.environments.tools.base import Tool
from headway.environments.tools.python_tool import make_python_tool
from headway.environments.tools.retrieval_tool import make_retrieval_tool
from headway.errors import ConfigError, EnvironmentFailed, RewardError
from headway.rewards.base import make_extractor
from headway.rewards.code_reward import make_code_reward
from headway.rewards.scoring_functions import BuiltInReward
from headway.rewards.solver_rewards import make_math_reward
from headway.rewards.text_rewards import make_exact_reward
from headway.seeding import make_rng

_PROGRAM = re.compile(r"<python>(.*?)</python>|```\s*python\n(.*?)```", re.DOTALL)
_ANSWER_HINTS = {
    "boxed": "Give the final answer in \\boxed{}.",
    "tag:answer": "Give the final answer between <answer> and </answer>.",
    "all": "Answer with one Python program in a fenced block.",
}
_TOOL_HINT = (
    "You may run a Python program first: write it between <python> and </python> or in a fenced block. "
    "What it prints is the next message."
)
_SEARCH_HINT = "You may search first: write a query between <search> and </search>. What is found is the next message."
_QUERY = re.compile(r"<search>(.*?)</search>", re.DOTALL)
_LAST_CALL = "No more programs are run. Give the final answer."
_DEFAULT_KEYS = {"math": ("problem", "answer"), "qa": ("question", "answer"), "code": ("problem", "tests")}
_DEFAULT_KEYS["logic"] = _DEFAULT_KEYS["qa"]


class QuestionEnvironment:
    """Asks one question of a kind: `math`, `qa`, `logic` or `code`.

    `seed`, `mode` and the settings of GEM's own graders (`max_workers`, `use_mp`, …) change nothing: the run draws the
    seeds, and rewards have limits of their own.
    """

    reusable = True

    def __init__(
        self,
        kind: str,
        *,
        dataset_name: str = "",
        split: str | None = None,
        question_key: str | None = None,
        answer_key: str | None = None,
        test_key: str | None = None,
        extract_boxed: bool | None = None,
        max_tests: int = 12,
        max_steps: int | None = None,
        tools: Mapping[str, Any] | None = None,
        seed: int = 0,
        mode: str = "train",
        max_workers: int = 0,
        use_mp: bool = True,
        verbose: bool = False,
        sandbox_type: str = "none",
        load_from_cache_file: bool = True,
    ) -> None:
        question, answer = _DEFAULT_KEYS[kind]
        self._question, self._answer = question_key or question, (test_key if kind == "code" else answer_key) or answer
        boxed = kind != "qa" if extract_boxed is None else extract_boxed
        self._part = "all" if kind == "code" else "boxed" if boxed or kind == "math" else "tag:answer"
        self._extract = make_extractor(self._part)
        self._reward = self._make_reward(kind, max_tests)
        self._tools = _ToolCalls(tools) if tools else None
        self.max_steps = max_steps or (1 if self._tools is None else self._tools.most + 1)
        hints = [_ANSWER_HINTS[self._part], *([] if self._tools is None else self._tools.hints)]
        self.instructions = "\n".join(hints)
        self._rows = _read_questions(dataset_name, split or "train") if dataset_name else ()
        for column in (self._question, self._answer):
            if self._rows and column not in self._rows[0]:
                hint = f"question_key and answer_key name columns; here are {', '.join(self._rows[0])}"
                raise ConfigError(f"has no column {column!r}", key="dataset_name", value=dataset_name, hint=hint)

    def _make_reward(self, kind: str, max_tests: int) -> BuiltInReward:
        if kind == "math":
            return make_math_reward(answer=self._answer, part="boxed", question=self._question)
        if kind == "code":
            return make_code_reward(tests=self._answer, most_tests=max_tests)
        loose = {"ignore_case": True, "ignore_space": True, "ignore_punctuation": True, "ignore_articles": True}
        return make_exact_reward(answer=self._answer, part=self._part, **loose)

    def reset(self, seed: int, data: Mapping[str, Any]) -> str:
        if self._question not in data and not self._rows:
            problem = f"no question: neither dataset_name nor the task's column {self._question!r} is given"
            raise EnvironmentFailed(problem)
        has_own = self._question in data
        self._row = data if has_own else self._rows[make_rng(seed, "questions").randrange(0, len(self._rows))]
        self._calls = 0
        return str(self._row[self._question])

    async def step(self, action: str) -> Reply:
        if (
            self._tools is not None
            and self._calls < self._tools.most
            and (call := self._tools.find(action)) is not None
        ):
            self._calls += 1
            return await self._tools.run(*call, is_last=self._calls == self._tools.most)
        try:
            score = (await self._reward.score_text(action, self._row)).value
        except RewardError as error:
            raise EnvironmentFailed(f"the answer cannot be judged: {error}") from error
        valid = self._extract(action) is not None
        return Reply("", score, done=True, valid=valid, success=score >= 1.0, info={"programs": self._calls})


def find_program(action: str) -> str | None:
    """Return the first Python program of a turn, or `None`."""
    found = _PROGRAM.search(action)
    return None if found is None else (found[1] or found[2] or "").strip()


class _ToolCalls:
    """What a turn with a program or a query earns, and how many there may be."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        given = dict(options)
        configs = given.pop("tool_configs", ())
        self.most = int(given.pop("max_tool_uses", None) or 10)
        self._reward = float(given.pop("tool_reward", 0.0))
        self._success_reward = float(given.pop("tool_success_reward", 0.0))
        if given:
            raise ConfigError("has other options", key="tools", value=list(given), hint="max_tool_uses, tool_reward, …")
        self._python: Tool | None = None
        self._search: Tool | None = None
        for config in configs or [{"tool_id": "python_code"}]:
            kind, arguments = config.get("tool_id"), config.get("tool_args") or {}
            timeout_s = float(arguments.get("timeout", 5))
            if kind == "python_code":
                self._python = make_python_tool(timeout_s=timeout_s)
            elif kind == "search" and arguments.get("search_url"):
                most = int(arguments.get("topk", 3))
                self._search = make_retrieval_tool(url=arguments["search_url"], most=most, timeout_s=timeout_s)
            else:
                hint = "python_code; search with a search_url; or env_type: tools with {name: mcp, command: …}"
                raise ConfigError("needs a server of its own", key="tool_id", value=kind, hint=hint)
        self.hints = [*([_TOOL_HINT] if self._python else []), *([_SEARCH_HINT] if self._search else [])]

    def find(self, action: str) -> tuple[str, str] | None:
        """Return the kind of a turn's call, and its program or query; `None` for an answer."""
        if self._search is not None and (query := _QUERY.search(action)) is not None:
            return "search", query[1].strip()
        program = None if self._python is None else find_program(action)
        return None if program is None else ("python", program)

    async def run(self, kind: str, content: str, *, is_last: bool) -> Reply:
        if kind == "search" and self._search is not None:
            text, failed = f"<information>{await self._search.call({'query': content})}</information>", False
        else:
            assert self._python is not None
            printed = str(await self._python.call({"code": content}))
            failed = printed.endswith("]") and ("[exit code" in printed or "[ended:" in printed)
            text = f"Code execution result: {printed}"
        reward = self._reward + (0.0 if failed else self._success_reward)
        return Reply(f"{text}\n{_LAST_CALL}" if is_last else text, reward)


@lru_cache(maxsize=8)
def _read_questions(name: str, split: str) -> tuple[Mapping[str, Any], ...]:
    """Return the rows of a file, a folder or a data set of the hub. Raises `ConfigError`."""
    path = Path(name).expanduser()
    entry = name if path.is_file() or name.startswith("hf:") else f"hf:{name}"
    args = DataArgs(file_name=(entry,), options={} if path.is_file() else {"split": split})
    (found,) = open_entries(args, key="dataset_name", seed=0, part="all")
    rows = tuple(row for _, row in found.rows)
    if not rows:
        raise ConfigError("has no rows", key="dataset_name", value=name)
    return rows
