"""What a client asks for, checked.

Guarantees: a parameter that would change the answer and cannot be honoured is refused by name, as is one that nobody
knows; those that change nothing here (`user`, `store`, …) are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from headway.serving.chat_messages import ChatMessage, parse_messages
from headway.serving.request_errors import RequestFields, RequestRefused, invalid_field
from headway.types import SamplingParams

MAX_CHOICES = 128
MAX_TOKENS = 1 << 30
_COMMON_PARAMETERS = frozenset(
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
_CHAT_PARAMETERS = _COMMON_PARAMETERS | frozenset(
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
_TEXT_PARAMETERS = _COMMON_PARAMETERS | {"prompt"}
_IGNORED_PARAMETERS = frozenset(
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
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
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
class CompletionRequest:
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
class ChatCompletionRequest(CompletionRequest):
    """`/v1/chat/completions`."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()
    template: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCompletionRequest(CompletionRequest):
    """`/v1/completions`."""

    prompt: str | tuple[int, ...]


def parse_chat_request(body: Any) -> ChatCompletionRequest:
    """Raises `RequestRefused`."""
    fields = _check_parameters(body, _CHAT_PARAMETERS)
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise invalid_field("tool_choice", choice, "auto or none: answers are not forced into a form here")
    limit = _parse_token_limit(fields, "max_completion_tokens") or _parse_token_limit(fields, "max_tokens")
    return ChatCompletionRequest(
        **_parse_common_fields(fields, limit, logprobs=fields.truth("logprobs")),
        messages=parse_messages(fields.get("messages")),
        tools=_parse_tools(fields.get("tools")) if choice != "none" else (),
        template=fields.mapping("chat_template_kwargs"),
    )


def parse_text_request(body: Any) -> TextCompletionRequest:
    """Raises `RequestRefused`."""
    fields = _check_parameters(body, _TEXT_PARAMETERS)
    top = fields.integer("logprobs", 0, 5)
    if top:
        raise invalid_field(
            "logprobs", top, "0, for the log-probabilities of the tokens drawn; those of others are not kept"
        )
    limit = _parse_token_limit(fields, "max_tokens")
    return TextCompletionRequest(
        **_parse_common_fields(fields, 16 if limit is None else limit, logprobs=top is not None),
        prompt=_parse_prompt(fields.get("prompt")),
    )


def _check_parameters(body: Any, known: frozenset[str]) -> RequestFields:
    if not isinstance(body, dict):
        raise RequestRefused("the body must be a JSON object")
    for name, value in body.items():
        if name in _NEUTRAL_VALUES and value is not None and value not in _NEUTRAL_VALUES[name]:
            usable = " or ".join(repr(one) for one in _NEUTRAL_VALUES[name])
            raise RequestRefused(
                f"{name} = {value!r} is not supported here{f'; {usable} is' if usable else ''}",
                param=name,
                code="unsupported_parameter",
            )
        if name not in known and name not in _IGNORED_PARAMETERS and name not in _NEUTRAL_VALUES:
            close = get_close_matches(name, known, n=1)
            meant = f", did you mean {close[0]!r}?" if close else ""
            raise RequestRefused(f"unknown parameter {name!r}{meant}", param=name, code="unknown_parameter")
    return RequestFields(body)


def _parse_common_fields(fields: RequestFields, limit: int | None, *, logprobs: bool) -> dict[str, Any]:
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise invalid_field("model", model, "the name of the model")
    stream = fields.truth("stream")
    return {
        "model": model,
        "limit": limit,
        "sampling": SamplingParams(
            max_new_tokens=MAX_TOKENS if limit is None else limit,
            temperature=fields.number("temperature", 1.0, 0.0, 2.0),
            top_p=fields.number("top_p", 1.0, 1e-9, 1.0),
            top_k=max(fields.integer("top_k", -1, MAX_TOKENS) or 0, 0),
            min_p=fields.number("min_p", 0.0, 0.0, 1.0),
            stop=fields.texts("stop", 16),
        ),
        "choices": fields.integer("n", 1, MAX_CHOICES) or 1,
        "stream": stream,
        "usage": stream and fields.mapping("stream_options").get("include_usage") is True,
        "seed": fields.integer("seed", -(1 << 63), (1 << 63) - 1),
        "logprobs": logprobs,
        "token_ids": fields.truth("return_token_ids"),
    }


def _parse_token_limit(fields: RequestFields, name: str) -> int | None:
    return fields.integer(name, 1, MAX_TOKENS)


def _parse_prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value):
        return tuple(value)
    raise invalid_field(
        "prompt", value, "one text or one list of tokens, not empty; several prompts are several requests"
    )


def _parse_tools(value: Any) -> tuple[dict[str, Any], ...]:
    listed = [] if value is None else value
    if not isinstance(listed, list) or not all(_is_function_tool(tool) for tool in listed):
        raise invalid_field("tools", value, 'a list of {"type": "function", "function": {"name": …}}')
    return tuple(listed)


def _is_function_tool(tool: Any) -> bool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return False
    function = tool.get("function")
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)
