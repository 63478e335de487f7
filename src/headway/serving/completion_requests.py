"""Completion requests, parsed and checked.

Guarantees: a parameter that would change the answer and is not supported is refused by name, and so is an unknown
parameter. Parameters without an effect here (`user`, `store`, …) are ignored.
"""

from dataclasses import dataclass, field
from typing import Any

from headway.errors import suggest_close_match
from headway.serving.chat_messages import ChatMessage, parse_messages
from headway.serving.request_errors import RequestFields, RequestRefused, invalid_field
from headway.types import SamplingParams

MAX_CHOICES = 128
MAX_TOKENS = 1 << 30
_COMMON = "model max_tokens n temperature top_p top_k min_p stop stream stream_options seed logprobs return_token_ids"
_CHAT = "messages max_completion_tokens tools tool_choice parallel_tool_calls top_logprobs chat_template_kwargs"
_TEXT_PARAMETERS = frozenset(f"{_COMMON} prompt".split())
_CHAT_PARAMETERS = frozenset(f"{_COMMON} {_CHAT}".split())
_IGNORED = (
    "user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention reasoning_effort "
    "verbosity"
)
_IGNORED_PARAMETERS = frozenset(_IGNORED.split())
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
"""Unsupported parameters and the values that are accepted because they change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """Fields that chat and text requests have in common."""

    model: str
    sampling: SamplingParams
    """Sampling parameters; the backend lowers `max_new_tokens` to what fits into the context."""
    max_tokens: int | None
    """Largest number of tokens of the answer, if the client sets one."""
    num_choices: int = 1
    stream: bool = False
    include_usage: bool = False
    """Whether to end a stream with token counts."""
    seed: int | None = None
    logprobs: bool = False
    return_token_ids: bool = False
    """Whether to return token ids beside the text, an extension that other servers have too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCompletionRequest(CompletionRequest):
    """A request to `/v1/chat/completions`."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[dict[str, Any], ...] = ()
    template_variables: dict[str, Any] = field(default_factory=dict)
    """Further variables of the chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCompletionRequest(CompletionRequest):
    """A request to `/v1/completions`."""

    prompt: str | tuple[int, ...]


def parse_chat_request(body: Any) -> ChatCompletionRequest:
    """Parse the body of a chat request. Raises `RequestRefused`."""
    fields = _check_parameters(body, _CHAT_PARAMETERS)
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise invalid_field("tool_choice", choice, "auto or none: answers are not forced into a form here")
    limit = fields.integer("max_completion_tokens", 1, MAX_TOKENS) or fields.integer("max_tokens", 1, MAX_TOKENS)
    return ChatCompletionRequest(
        **_parse_common_fields(fields, limit, logprobs=fields.boolean("logprobs")),
        messages=parse_messages(fields.get("messages")),
        tools=_parse_tools(fields.get("tools")) if choice != "none" else (),
        template_variables=fields.mapping("chat_template_kwargs"),
    )


def parse_text_request(body: Any) -> TextCompletionRequest:
    """Parse the body of a text completion request. Raises `RequestRefused`."""
    fields = _check_parameters(body, _TEXT_PARAMETERS)
    top = fields.integer("logprobs", 0, 5)
    if top:
        expected = "0, for the log-probabilities of the tokens drawn; those of others are not kept"
        raise invalid_field("logprobs", top, expected)
    limit = fields.integer("max_tokens", 1, MAX_TOKENS)
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
            problem = f"{name} = {value!r} is not supported here{f'; {usable} is' if usable else ''}"
            raise RequestRefused(problem, param=name, code="unsupported_parameter")
        if name not in known and name not in _IGNORED_PARAMETERS and name not in _NEUTRAL_VALUES:
            problem = f"unknown parameter {name!r}{suggest_close_match(name, known)}"
            raise RequestRefused(problem, param=name, code="unknown_parameter")
    return RequestFields(body)


def _parse_common_fields(fields: RequestFields, limit: int | None, *, logprobs: bool) -> dict[str, Any]:
    model = fields.get("model")
    if not isinstance(model, str) or not model:
        raise invalid_field("model", model, "the name of the model")
    stream = fields.boolean("stream")
    return {
        "model": model,
        "max_tokens": limit,
        "sampling": SamplingParams(
            max_new_tokens=MAX_TOKENS if limit is None else limit,
            temperature=fields.number("temperature", 1.0, 0.0, 2.0),
            top_p=fields.number("top_p", 1.0, 1e-9, 1.0),
            top_k=max(fields.integer("top_k", -1, MAX_TOKENS) or 0, 0),
            min_p=fields.number("min_p", 0.0, 0.0, 1.0),
            stop=fields.texts("stop", 16),
        ),
        "num_choices": fields.integer("n", 1, MAX_CHOICES) or 1,
        "stream": stream,
        "include_usage": stream and fields.mapping("stream_options").get("include_usage") is True,
        "seed": fields.integer("seed", -(1 << 63), (1 << 63) - 1),
        "logprobs": logprobs,
        "return_token_ids": fields.boolean("return_token_ids"),
    }


def _parse_prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value):
        return tuple(value)
    expected = "one text or one list of tokens, not empty; several prompts are several requests"
    raise invalid_field("prompt", value, expected)


def _parse_tools(value: Any) -> tuple[dict[str, Any], ...]:
    listed = [] if value is None else value
    if not isinstance(listed, list) or not all(_is_function_tool(tool) for tool in listed):
        raise invalid_field("tools", value, 'a list of {"type": "function", "function": {"name": …}}')
    return tuple(listed)


def _is_function_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
