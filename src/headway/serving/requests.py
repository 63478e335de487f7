"""What a client asks for, checked.

Guarantees: a parameter that would change the answer and cannot be honoured is refused by name, as is one that nobody
knows; those that change nothing here (`user`, `store`, …) are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from headway.serving.fields import Fields, wrong
from headway.serving.messages import Message, messages_of
from headway.serving.refusals import Refused
from headway.types import SamplingParams

MOST_CHOICES = 128
MOST_TOKENS = 1 << 30
_COMMON = frozenset(
    [
        "model",
        "max_tokens",
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "stream",
        "stream_options",
        "seed",
        "logprobs",
        "return_token_ids",
    ]
)
_CHAT = _COMMON | frozenset(
    [
        "messages",
        "max_completion_tokens",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "top_logprobs",
        "chat_template_kwargs",
    ]
)
_TEXT = _COMMON | {"prompt"}
_IGNORED = frozenset(
    [
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "verbosity",
    ]
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "top_logprobs": (0,),
    "web_search_options": (),
}
"""Parameters that can have no other values here: they would change the answer, and nothing here can do that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What both kinds of request have in common."""

    model: str
    sampling: SamplingParams
    """`max_new_tokens` as far as it goes: the caller says what room there is."""
    limit: int | None
    """Most tokens of the answer, where the client says so."""
    choices: int = 1
    stream: bool = False
    usage: bool = False
    """Also at the end of a stream."""
    seed: int | None = None
    logprobs: bool = False
    token_ids: bool = False
    """Tokens as numbers beside the text: an extension of ours and of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAsk(Ask):
    """`/v1/chat/completions`."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    template: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextAsk(Ask):
    """`/v1/completions`."""

    prompt: str | tuple[int, ...]


def chat_ask(body: Any) -> ChatAsk:
    """Raises `Refused`."""
    fields = _fields(body, _CHAT)
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise wrong("tool_choice", choice, "auto or none: answers are not forced into a form here")
    limit = _limit(fields, "max_completion_tokens") or _limit(fields, "max_tokens")
    return ChatAsk(
        **_common(fields, limit, logprobs=fields.truth("logprobs")),
        messages=messages_of(fields.get("messages")),
        tools=_tools(fields.get("tools")) if choice != "none" else (),
        template=fields.mapping("chat_template_kwargs"),
    )


def text_ask(body: Any) -> TextAsk:
    """Raises `Refused`."""
    fields = _fields(body, _TEXT)
    top = fields.integer("logprobs", 0, 5)
    if top:
        raise wrong("logprobs", top, "0, for the log-probabilities of the tokens drawn; those of others are not kept")
    limit = _limit(fields, "max_tokens")
    return TextAsk(
        **_common(fields, 16 if limit is None else limit, logprobs=top is not None),
        prompt=_prompt(fields.get("prompt")),
    )


def _fields(body: Any, known: frozenset[str]) -> Fields:
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    for name, value in body.items():
        if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]:
            usable = " or ".join(repr(one) for one in _NEUTRAL[name])
            raise Refused(
                f"{name} = {value!r} is not supported here{f'; {usable} is' if usable else ''}",
                param=name,
                code="unsupported_parameter",
            )
        if name not in known and name not in _IGNORED and name not in _NEUTRAL:
            close = get_close_matches(name, known, n=1)
            meant = f", did you mean {close[0]!r}?" if close else ""
            raise Refused(f"unknown parameter {name!r}{meant}", param=name, code="unknown_parameter")
    return Fields(body)


def _common(fields: Fields, limit: int | None, *, logprobs: bool) -> dict[str, Any]:
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise wrong("model", model, "the name of the model")
    stream = fields.truth("stream")
    return {
        "model": model,
        "limit": limit,
        "sampling": SamplingParams(
            max_new_tokens=MOST_TOKENS if limit is None else limit,
            temperature=fields.number("temperature", 1.0, 0.0, 2.0),
            top_p=fields.number("top_p", 1.0, 1e-9, 1.0),
            top_k=max(fields.integer("top_k", -1, MOST_TOKENS) or 0, 0),
            min_p=fields.number("min_p", 0.0, 0.0, 1.0),
            stop=fields.texts("stop", 16),
        ),
        "choices": fields.integer("n", 1, MOST_CHOICES) or 1,
        "stream": stream,
        "usage": stream and fields.mapping("stream_options").get("include_usage") is True,
        "seed": fields.integer("seed", -(1 << 63), (1 << 63) - 1),
        "logprobs": logprobs,
        "token_ids": fields.truth("return_token_ids"),
    }


def _limit(fields: Fields, name: str) -> int | None:
    return fields.integer(name, 1, MOST_TOKENS)


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value):
        return tuple(value)
    raise wrong("prompt", value, "one text or one list of tokens, not empty; several prompts are several requests")


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    listed = [] if value is None else value
    if not isinstance(listed, list) or not all(_is_function(tool) for tool in listed):
        raise wrong("tools", value, 'a list of {"type": "function", "function": {"name": …}}')
    return tuple(listed)


def _is_function(tool: Any) -> bool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return False
    function = tool.get("function")
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)
