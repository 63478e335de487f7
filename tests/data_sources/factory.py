"""Small makers that the tests of data share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.config import ResolvedConfig, load_config
from headway.data import DataSources, SizedSource, make_sources
from headway.types import Task


class Characters:
    """A tokenizer with one token a character and a chat template of two marks; token 1 begins raw text."""

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **variables: Any,
    ) -> str:
        assert not tokenize and add_generation_prompt
        if any(message["role"] == "stranger" for message in conversation):
            raise ValueError("unknown role")
        return "".join(f"<{message['role'][0]}>{message['content']}" for message in conversation) + variables.get(
            "answer", "<a>"
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + [ord(character) for character in text]


def text_of(task: Task | None) -> str:
    """The prompt that `Characters` made."""
    assert task is not None
    return "".join(map(chr, task.prompt))


def configured(
    data_args: Mapping[str, Any], validation: Mapping[str, Any] | None = None, **more: Any
) -> ResolvedConfig:
    """A configuration with these data."""
    given: dict[str, Any] = {"prompt_length": 64, "response_length": 16, "actor_train": {"data_args": dict(data_args)}}
    return load_config({**given, "validation": {"data_args": dict(validation or {})}, **more})


def sources(data_args: Mapping[str, Any], validation: Mapping[str, Any] | None = None, **more: Any) -> DataSources:
    """Their sources."""
    return make_sources(configured(data_args, validation, **more), Characters())


def epoch(source: SizedSource | None, start: int = 0) -> list[Task]:
    """The tasks of one epoch."""
    assert source is not None
    found = [source.task(start + place) for place in range(len(source))]
    return [task for task in found if task is not None]


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """A JSON-lines file; its name."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def sums(count: int) -> list[dict[str, Any]]:
    """Rows with a prompt and an answer."""
    return [{"prompt": f"{number}+1", "answer": str(number + 1)} for number in range(count)]
