"""A model with one number as its output, in the process that serves it: requests in, batches through the model.

Guarantees: what waits when the model is free goes through it together, the longest first, up to `batch_tokens` with
padding. A number does not depend on what else is in its batch, up to rounding. A conversation that is longer than the
model can read is refused; nothing is cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headway.errors import ConfigError, RewardError
from headway.models.model_checks import check_model_directory
from headway.models.model_loading import hide_progress_bars, load_tokenizer, max_sequence_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TOKEN_HEAD, _SEQUENCE_HEAD = "ForTokenClassification", "ForSequenceClassification"


def find_classifier_head(path: Path | str) -> str:
    """Return the kind of the model's head. Raises `ConfigError` unless it gives one number."""
    from transformers import AutoConfig

    directory = check_model_directory(Path(path), str(path))
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    names = [str(name) for name in config.architectures or ()]
    head = next((kind for kind in (_SEQUENCE_HEAD, _TOKEN_HEAD) for name in names if name.endswith(kind)), None)
    if head is None:
        hint = "a model with a head of one number; a model that writes its verdict is reward_fn: judge"
        raise ConfigError(f"holds {', '.join(names) or 'no known model'}", key="model_args", value=str(path), hint=hint)
    if config.num_labels != 1:
        problem = f"its head gives {config.num_labels} numbers, and a reward is one"
        raise ConfigError(problem, key="model_args", value=str(path))
    return head


def load_classifier(path: Path | str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Load the model on `device`. Raises `ConfigError`."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    kind = (
        AutoModelForTokenClassification
        if find_classifier_head(path) == _TOKEN_HEAD
        else (AutoModelForSequenceClassification)
    )
    with hide_progress_bars():
        model: PreTrainedModel = kind.from_pretrained(path, dtype=dtype, local_files_only=True)
    return model.eval().requires_grad_(False).to(device)


@dataclass(frozen=True, slots=True, eq=False)
class _WaitingRequest:
    tokens: Mapping[str, Sequence[int]]
    """What the tokenizer made of the conversation; `input_ids` always."""
    answer: asyncio.Future[float]

    @property
    def length(self) -> int:
        return len(self.tokens["input_ids"])


class SequenceClassifier:
    """Serves one model. `score` may be called any number of times at once."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, longest: int | None, batch_tokens: int
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._longest, self._batch_tokens = longest, batch_tokens
        self._has_token_head = type(model).__name__.endswith(_TOKEN_HEAD)
        self._padding = getattr(model.config, "pad_token_id", None)
        self._waiting: list[_WaitingRequest] = []
        self._worker: asyncio.Task[None] | None = None
        self.batches = 0
        """Forward passes so far."""

    @classmethod
    def load(cls, path: Path | str, *, dtype: torch.dtype, device: str, batch_tokens: int) -> SequenceClassifier:
        """Load model and tokenizer from a directory. Raises `ConfigError`."""
        model = load_classifier(path, dtype, device)
        return cls(model, load_tokenizer(path), longest=max_sequence_length(path), batch_tokens=batch_tokens)

    async def score(self, conversation: Sequence[Mapping[str, str]]) -> float:
        """Return the output of the model. Raises `RewardError` if it cannot read the conversation."""
        tokens = self._encode(conversation)
        request = _WaitingRequest(tokens, asyncio.get_running_loop().create_future())
        if self._longest is not None and request.length > self._longest:
            raise RewardError(f"{request.length} tokens, and the reward model reads at most {self._longest}")
        self._waiting.append(request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work(), name="reward model")
        return await request.answer

    async def close(self) -> None:
        """Drop what waits."""
        if self._worker is not None:
            self._worker.cancel()

    def _encode(self, conversation: Sequence[Mapping[str, str]]) -> Mapping[str, Sequence[int]]:
        """Return the tokens of a conversation; without a chat template, those of the pair of question and answer."""
        tokenizer = self._tokenizer
        try:
            if tokenizer.chat_template is not None:
                text = tokenizer.apply_chat_template([dict(one) for one in conversation], tokenize=False)
                return {"input_ids": tokenizer.encode(text, add_special_tokens=False)}
            question = "\n".join(one["content"] for one in conversation[:-1])
            pair: Any = tokenizer(question, conversation[-1]["content"])
            return {name: pair[name] for name in ("input_ids", "token_type_ids") if name in pair}
        except Exception as error:
            raise RewardError(f"its tokenizer refuses the conversation: {type(error).__name__}: {error}") from error

    async def _work(self) -> None:
        while batch := self._take_batch():
            try:
                outputs = await asyncio.to_thread(self._compute, batch)
            except torch.OutOfMemoryError as error:
                self._batch_tokens = max(request.length for request in batch)  # from now on one long one at a time
                torch.cuda.empty_cache()
                if len(batch) == 1:
                    _fail(batch, error)
                else:
                    self._waiting += batch
            except Exception as error:
                _fail(batch, error)
            else:
                for request, output in zip(batch, outputs, strict=True):
                    if not request.answer.done():
                        request.answer.set_result(output)

    def _take_batch(self) -> list[_WaitingRequest]:
        """Take the longest waiting requests that fit together, at least one."""
        self._waiting = sorted((one for one in self._waiting if not one.answer.done()), key=lambda one: -one.length)
        if not self._waiting:
            return []
        count = max(self._batch_tokens // max(self._waiting[0].length, 1), 1)
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    def _compute(self, batch: Sequence[_WaitingRequest]) -> list[float]:
        """Return the output for each request, padded to one length at the end."""
        last = [request.length - 1 for request in batch]
        ends = {request.tokens["input_ids"][-1] for request in batch}
        # A model without a padding token takes the last one that is no padding: any token that ends no row will do.
        padding = self._padding if self._padding is not None else next(one for one in range(10**9) if one not in ends)
        self._model.config.pad_token_id = padding
        device = self._model.device
        inputs: dict[str, Tensor] = {
            name: _stack([request.tokens[name] for request in batch], padding if name == "input_ids" else 0).to(device)
            for name in batch[0].tokens
        }
        inputs["attention_mask"] = _stack([[1] * request.length for request in batch], 0).to(device)
        with torch.no_grad():
            logits = self._model(**inputs).logits
        self.batches += 1
        chosen = logits[torch.arange(len(batch)), torch.tensor(last), 0] if self._has_token_head else logits[:, 0]
        return [float(one) for one in chosen.float().tolist()]


def _stack(rows: Sequence[Sequence[int]], padding: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows], dtype=torch.long)


def _fail(batch: Sequence[_WaitingRequest], error: Exception) -> None:
    for request in batch:
        if not request.answer.done():
            request.answer.set_exception(RewardError(f"the reward model failed: {type(error).__name__}: {error}"))
