"""LLM as judge: another model reads the question and the answer, or sees a picture, and gives a score.

The judge is a server with the OpenAI protocol; requests run on their own threads, with a limit. Or it is a model that
the run serves itself (`ServedJudgeReward`). Overload, network failures and replies without a score are retried with
growing pauses; after that the sample has no score.

The answer stands between marks with a code that depends on all of its text, so that it cannot contain its own end and
go on as the judge's instructions. A score that the judge merely quotes is not taken for its verdict.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib.resources import files
from typing import Any, ClassVar

from headway.codec import JsonValue
from headway.errors import ConfigError, RewardError
from headway.rewards.base import final_text, read_question
from headway.rewards.images.image_reward import get_episode_image, image_to_png_base64
from headway.rewards.reward_model_client import RewardModelClient
from headway.rewards.server_requests import normalise_url, read_api_key, request_completion, retry_with_backoff
from headway.rewards.thread_limiter import ThreadLimiter
from headway.types import Episode, Score

JUDGE_TEMPLATE = files("headway.rewards").joinpath("judge_prompt.txt").read_text(encoding="utf-8")
VISION_JUDGE_TEMPLATE = files("headway.rewards").joinpath("vision_judge_prompt.txt").read_text(encoding="utf-8")
SCORE_PATTERN = r"(?i)score\W{0,5}(-?\d+(?:\.\d+)?)"
_SCORE_LINE = re.compile(r"\W*score\W{0,5}(-?\d+(?:\.\d+)?)(?:\s*(?:/|out of)\s*\d+)?\W*", re.IGNORECASE)
"""A line that says nothing but a score."""
_MAX_REPLY_CHARACTERS = 20_000


class ScoreParser:
    """Finds the score in a judge's reply and scales it to 0 … 1."""

    def __init__(self, pattern: str, json_key: str | None, lowest: float, highest: float) -> None:
        if not lowest < highest:
            raise ConfigError("must be less than highest", key="lowest", value=lowest)
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"is no regular expression: {error}", key="pattern", value=pattern) from error
        if not self._pattern.groups:
            raise ConfigError("needs a group around the score", key="pattern", value=pattern)
        self._json_key, self._lowest, self._highest = json_key, lowest, highest

    def parse(self, reply: str) -> float:
        """Return the scaled score. Raises `ValueError` if there is none, or one outside the range."""
        reply = reply[-_MAX_REPLY_CHARACTERS:]
        value = self._parse_json(reply) if self._json_key else self._parse_text(reply)
        if not self._lowest <= value <= self._highest:
            raise ValueError(f"score {value} is outside {self._lowest} … {self._highest}")
        return (value - self._lowest) / (self._highest - self._lowest)

    def _parse_text(self, reply: str) -> float:
        found = list(self._pattern.finditer(reply))
        if not found:
            raise ValueError("no score in the reply")
        scores = [float(one.group(1)) for one in found]
        if self._pattern.pattern != SCORE_PATTERN or len(set(scores)) == 1:
            return scores[-1]
        last = _SCORE_LINE.fullmatch(reply.rstrip().rpartition("\n")[2])
        if last is None:
            raise ValueError("several scores in the reply, and its last line is not one of them")
        return float(last.group(1))

    def _parse_json(self, reply: str) -> float:
        start, end = reply.find("{"), reply.rfind("}")
        try:
            value = json.loads(reply[start : end + 1])[self._json_key]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f"no JSON object with {self._json_key!r} in the reply") from None
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"{self._json_key} is {value!r}")
        return float(value)


class VerdictParser(ScoreParser):
    """Finds a yes or no in a judge's reply, which is 1 or 0; else the score."""

    def parse(self, reply: str) -> float:
        words = re.findall(r"\b(?:yes|no)\b", reply.lower())
        if not words:
            return super().parse(reply)
        last = re.sub(r"\W", "", reply.rstrip().rpartition("\n")[2].lower())
        if len(set(words)) > 1 and last not in ("yes", "no"):
            raise ValueError("yes and no in the reply, and its last line is neither")
        return float((last if last in ("yes", "no") else words[-1]) == "yes")


@dataclass(kw_only=True, eq=False)
class JudgeReward:
    """The score of `model` at `base_url` (`…/v1`), scaled from `lowest` … `highest` to 0 … 1.

    `template` may use {question}, {reference}, {answer}, {mark}, {lowest} and {highest}. `question` and `answer` are
    the task's columns of the first two; {mark} is a code that the answer cannot know. The score is the last match of
    `pattern`, or `json_key` of a JSON object; by default, what the last line says if the reply names several scores.
    """

    title: ClassVar[str] = "judge"
    base_url: str
    model: str
    template: str = JUDGE_TEMPLATE
    question: str = "prompt"
    answer: str = "answer"
    api_key_env: str | None = None
    """Variable of the environment that holds the key; it is read once, when the reward is made."""
    pattern: str = SCORE_PATTERN
    json_key: str | None = None
    lowest: float = 0.0
    highest: float = 10.0
    verdicts: bool = False
    """Whether the judge may answer with yes or no instead of a score."""
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """Only the k most likely tokens; 0 is off. Servers get it only where it is given: not all of them know it."""
    max_tokens: int = 512
    timeout_s: float = 60.0
    retries: int = 3
    pause_s: float = 1.0
    concurrency: int = 16
    proxy: str | None = None

    def __post_init__(self) -> None:
        parser = VerdictParser if self.verdicts else ScoreParser
        self._parser = parser(self.pattern, self.json_key, self.lowest, self.highest)
        self._open_connection()

    def _open_connection(self) -> None:
        """Check the address and the key of the server."""
        self._url = f"{normalise_url(self.base_url, 'base_url')}/chat/completions"
        self._key = read_api_key(self.api_key_env)
        self._threads = ThreadLimiter(self.concurrency, f"reward {self.title}")

    async def score(self, episode: Episode) -> Score:
        prompt = fill_template(self.template, self._make_fields(episode))

        async def attempt() -> float:
            return self._parser.parse(await self._complete(episode, prompt))

        name = f"{self.title} {self.model}"
        return Score(value=await retry_with_backoff(attempt, name, retries=self.retries, pause_s=self.pause_s))

    def _make_fields(self, episode: Episode) -> dict[str, str]:
        data = episode.task.data
        fields = {
            "question": read_question(data.get(self.question)) or "(none)",
            "reference": _column_to_text(data.get(self.answer)),
            "answer": final_text(episode),
        }
        return fields | {
            "response": fields["answer"],
            "mark": blake2b("\0".join(fields.values()).encode("utf-8", "replace"), digest_size=6).hexdigest(),
            "lowest": f"{self.lowest:g}",
            "highest": f"{self.highest:g}",
        }

    async def _complete(self, episode: Episode, prompt: str) -> str:
        """Return the judge's reply to `prompt`."""
        return await self._threads.run(self._ask, episode, prompt)

    def _ask(self, episode: Episode, prompt: str) -> str:
        """Return the judge's reply; blocking."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": self._make_content(episode, prompt)}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            **({} if self.top_p == 1.0 else {"top_p": self.top_p}),
            **({"top_k": self.top_k} if self.top_k else {}),
        }
        return request_completion(self._url, body, key=self._key, timeout_s=self.timeout_s, proxy=self.proxy)

    def _make_content(self, episode: Episode, prompt: str) -> Any:
        """Return the content of the message to the judge."""
        return prompt


@dataclass(kw_only=True, eq=False)
class VisionJudgeReward(JudgeReward):
    """A judge that sees the picture of the episode, as PNG inside the request. `template` has no {answer}."""

    title: ClassVar[str] = "vision judge"
    template: str = VISION_JUDGE_TEMPLATE

    def _make_content(self, episode: Episode, prompt: str) -> Any:
        url = f"data:image/png;base64,{image_to_png_base64(get_episode_image(episode))}"
        return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": prompt}]


@dataclass(kw_only=True, eq=False)
class ServedJudgeReward(JudgeReward):
    """A judge that the run serves itself, in processes of its own; the model is `rewards.<name>.model_args`."""

    base_url: str = ""
    model: str = ""
    client: RewardModelClient | None = field(init=False, default=None)
    """The processes of the model; set by whoever starts them."""

    def _open_connection(self) -> None:
        for key in ("base_url", "model", "api_key_env", "proxy"):
            if getattr(self, key):
                problem = "is about a server, and the judge is served here: its model is given by model_args"
                raise ConfigError(problem, key=key, value=getattr(self, key), hint="keep one of them")

    async def _complete(self, episode: Episode, prompt: str) -> str:
        if self.client is None:
            raise RewardError("its model was not started")
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        reply: str = await self.client.ask("complete", prompt, self.max_tokens, JsonValue(sampling))
        return reply


ROLL_PROMPTS = {
    "Qwen2.5-7B-Instruct-RLVR-prompt": files("headway.rewards")
    .joinpath("verdict_prompt.txt")
    .read_text(encoding="utf-8"),
}
"""Prompts that files of ROLL call by name, in words of our own."""


def make_llm_judge(
    judge_prompt: str = "Qwen2.5-7B-Instruct-RLVR-prompt",
    judge_model_type: str = "inference",
    judge_model_name: str | None = None,
    judge_api_url: str | None = None,
    judge_api_key: str | None = None,
    **options: Any,
) -> JudgeReward:
    """Return the judge that the options of ROLL's `llm_judge` describe; `options` are those of `judge`.

    `judge_prompt` is the name of a prompt or a text with {question}, {response} and {reference}. The model is served
    here (`inference`), or asked at an address (`api`); `judge_api_key` then names a variable of the environment.
    """
    template = ROLL_PROMPTS.get(judge_prompt, judge_prompt)
    if template is judge_prompt and not re.search(r"\{(response|answer)\}", template):
        hint = f"{', '.join(ROLL_PROMPTS)}, or a text with {{question}}, {{response}} and {{reference}}"
        raise ConfigError(
            "is neither a known prompt nor one with a place for the answer",
            key="judge_prompt",
            value=judge_prompt,
            hint=hint,
        )
    common = {"template": template, "verdicts": True, **options}
    if judge_model_type == "inference":
        return ServedJudgeReward(**common)
    if judge_model_type != "api":
        raise ConfigError("must be inference or api", key="judge_model_type", value=judge_model_type)
    if not judge_api_url:
        raise ConfigError("where is the judge?", key="judge_api_url", value=judge_api_url, hint="such as https://…/v1")
    return JudgeReward(
        base_url=judge_api_url.removesuffix("/chat/completions"),
        model=judge_model_name or "default",
        api_key_env=judge_api_key,
        **common,
    )


def fill_template(template: str, fields: Mapping[str, str]) -> str:
    """Replace each placeholder once: placeholders inside a field's value are not replaced."""
    return re.sub(r"\{(\w+)\}", lambda found: fields.get(found.group(1), found.group(0)), template)


def _column_to_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "(none)" if value is None else json.dumps(value, ensure_ascii=False)
