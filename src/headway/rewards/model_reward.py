"""The reward of a learned model: a conversation in, one number out.

The model sees the task's prompt and the answer as a conversation, through its own chat template. It runs in processes
of its own, which the launcher starts (`RewardModelClient`).
"""

from dataclasses import dataclass, field
from math import exp

from headway.codec import JsonValue
from headway.errors import ConfigError, RewardError
from headway.rewards.base import final_text
from headway.rewards.reward_model_client import RewardModelClient
from headway.types import Episode, Score


@dataclass(kw_only=True, eq=False)
class ModelReward:
    """The output of the sequence-classification model that `rewards.<name>.model_args` names.

    `question` is the task's column with the prompt: a text, or a list of messages. With `sigmoid` the output is mapped
    to 0 … 1, and the output itself is reported beside it.
    """

    question: str = "prompt"
    sigmoid: bool = False
    concurrency: int = 64
    """Requests that one process has at a time, of which it makes its batches."""
    client: RewardModelClient | None = field(init=False, default=None)
    """The processes of the model; set by whoever starts them."""

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError("must be at least 1", key="concurrency", value=self.concurrency)

    async def score(self, episode: Episode) -> Score:
        if self.client is None:
            raise RewardError("its model was not started")
        output = float(await self.client.ask("score", JsonValue(make_conversation(episode, self.question))))
        if not self.sigmoid:
            return Score(value=output)
        return Score(value=1.0 / (1.0 + exp(-max(min(output, 500.0), -500.0))), parts={"output": output})


def make_conversation(episode: Episode, column: str) -> list[dict[str, str]]:
    """Return the prompt of the task and the last answer as messages. Raises `RewardError` if there is no prompt."""
    prompt = episode.task.data.get(column)
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list) and all(
        isinstance(one, dict) and {"role", "content"} <= one.keys() for one in prompt
    ):
        messages = [{"role": str(one["role"]), "content": str(one["content"])} for one in prompt]
    else:
        raise RewardError(f"the task has no prompt in {column!r} that a reward model could read, only {prompt!r}")
    return [*messages, {"role": "assistant", "content": final_text(episode)}]
