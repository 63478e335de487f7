"""Tools that users wrote for verl: classes with `create`, `execute`, `calc_reward` and `release`.

A class is loaded once a process, as verl does, and an episode has one instance of it: `create` before the first call,
`release` when the episode is over, however it ended. What `execute` raises is told to the policy, as verl does, and a
line of the run says so. What it gives as rewards goes to the reward function of the run (`ToolAnswer`).

Such code belongs in worker processes, where the deadline of environments and the memory limit of workers hold. verl
itself does not have to be installed.
"""

import asyncio
import importlib
import inspect
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from traceback import extract_tb
from typing import Any
from uuid import uuid4

from headway.environments.text_environment import to_finite_float
from headway.environments.tools.base import Tool, ToolAnswer, ToolArguments
from headway.environments.tools.verl_stand_in import has_verl, install_verl, provide_verl
from headway.errors import ConfigError, EnvironmentFailed
from headway.user_code import import_object

_RELEASE_S = 1.0
"""How long the end of an episode waits for `release`, which goes on by itself afterwards."""
_STAND_IN = "without verl a tool may import BaseTool, schemas and rollout_trace_op of it; or install verl"
_LOADING = threading.Lock()
"""Environments are made on several threads, and a class is made once."""
_RELEASING: set[asyncio.Task[None]] = set()


class VerlToolSource:
    """Provides the tool of one class. Raises `ConfigError` if the class cannot be loaded."""

    def __init__(
        self, *, class_name: str, config: Mapping[str, Any] | None = None, tool_schema: Mapping[str, Any] | None = None
    ) -> None:
        with provide_verl(), _LOADING:
            self._loaded = load_verl_tool(class_name, json.dumps(config or {}), json.dumps(tool_schema))
        self._kwargs: Mapping[str, Any] = {}
        self._instance: str | None = None

    async def begin(self, data: Mapping[str, Any]) -> Sequence[Tool]:
        await self.close()
        install_verl()  # a method may import more of it; episodes are played in worker processes
        self._kwargs = _find_kwargs(data, self._loaded.name)
        function = self._loaded.signature
        description, parameters = function.get("description") or "", function.get("parameters") or {}
        return [Tool(name=self._loaded.name, description=description, parameters=parameters, call=self._call)]

    async def close(self) -> None:
        instance, self._instance = self._instance, None
        if instance is not None:
            task = asyncio.create_task(self._loaded.release(instance, self._get_kwargs("release")))
            _RELEASING.add(task)
            task.add_done_callback(_RELEASING.discard)
            await asyncio.wait({task}, timeout=_RELEASE_S)

    def _get_kwargs(self, method: str) -> Mapping[str, Any]:
        found = self._kwargs.get(f"{method}_kwargs")
        return {name: value for name, value in found.items() if value is not None} if isinstance(found, Mapping) else {}

    async def _call(self, arguments: ToolArguments) -> ToolAnswer:
        loaded = self._loaded
        try:
            if self._instance is None:
                self._instance = await loaded.create(self._get_kwargs("create"))
            return await loaded.execute(self._instance, arguments, self._get_kwargs)
        except EnvironmentFailed:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}".removesuffix(": ")
            problem = loaded.report(f"raised {what}{_locate(error)}")
            return ToolAnswer(
                text=f"Error when executing tool: {error}", outcome="refused", reward=0.0, problem=problem
            )


class LoadedVerlTool:
    """An object of a user's class, which all episodes of this process share."""

    def __init__(self, class_name: str, made: Any, signature: Mapping[str, Any]) -> None:
        self.name, self.signature = str(signature["name"]), signature
        self._class_name, self._made = class_name, made
        self._faults: Counter[str] = Counter()
        self._late_problem = ""
        """Says what went wrong after an episode; the next answer tells it."""

    async def create(self, kwargs: Mapping[str, Any]) -> str:
        """Make an instance and return its id, which the class may choose."""
        instance, method = str(uuid4()), getattr(self._made, "create", None)
        if method is None:
            return instance
        known = inspect.signature(method).parameters
        named = {name: value for name, value in kwargs.items() if name in known}
        offered = {"instance_id": instance, "create_kwargs": dict(kwargs)}
        made = await _finish(method(**{**named, **_select_accepted(method, offered)}))
        chosen = made[0] if isinstance(made, tuple) and made else made
        return chosen if isinstance(chosen, str) and chosen else instance

    async def execute(
        self, instance: str, arguments: ToolArguments, get_kwargs: Callable[[str], Mapping[str, Any]]
    ) -> ToolAnswer:
        """Make one call. Raises what the class raises, and `TypeError` if it returned something else than an answer."""
        method = self._made.execute
        result = await _finish(method(instance, dict(arguments), **_select_accepted(method, get_kwargs("execute"))))
        if not isinstance(result, tuple) or len(result) != 3:
            raise TypeError(f"execute returned {str(result)[:200]!r}, not (response, reward, metrics)")
        text, reward = self._read_text(result[0]), result[1]
        method = getattr(self._made, "calc_reward", None)
        kwargs = {} if method is None else _select_accepted(method, get_kwargs("calc_reward"))
        state = None if method is None else await _finish(method(instance, **kwargs))
        for value in (reward, state):
            if value is not None and to_finite_float(value) is None:
                raise TypeError(f"gave the reward {str(value)[:200]!r}, which is no finite number")
        problem, self._late_problem = self._late_problem, ""
        return ToolAnswer(
            text=text, reward=to_finite_float(reward), state_reward=to_finite_float(state), problem=problem
        )

    async def release(self, instance: str, kwargs: Mapping[str, Any]) -> None:
        """Release an instance. A failure is told by the next answer."""
        method = getattr(self._made, "release", None)
        try:
            if method is not None:
                await _finish(method(instance, **_select_accepted(method, kwargs)))
        except Exception as error:
            what = f"release raised {type(error).__name__}: {error}{_locate(error)}"
            self._late_problem = self.report(what) or self._late_problem

    def report(self, what: str) -> str:
        """Return a line about a fault: the first one, the tenth, the hundredth. Return nothing for the others."""
        kind = what.partition(":")[0]
        self._faults[kind] += 1
        count = self._faults[kind]
        if str(count).strip("0") != "1":
            return ""
        return f"the tool {self.name} ({self._class_name}) {what}{f', {count} times so far' if count > 1 else ''}"

    def _read_text(self, response: Any) -> str:
        """Return the text of a response: a text, a mapping or an object that has one."""
        if response is None or isinstance(response, str):
            return response or ""
        names = ("text", "image", "video")
        found = {name: getattr(response, name, None) for name in names}
        found = dict(response) if isinstance(response, Mapping) else found
        if found.get("image") or found.get("video"):
            problem = "answered with a picture or a film, which policies here do not see"
            raise EnvironmentFailed(f"the tool {self.name} ({self._class_name}) {problem}")
        text = found.get("text")
        return "" if text is None else str(text)


@cache
def load_verl_tool(class_name: str, config_json: str, schema_json: str) -> LoadedVerlTool:
    """Import a class and make its object, once a process. Raises `ConfigError`."""
    module, _, name = class_name.rpartition("." if ":" not in class_name else ":")
    try:
        found = import_object(f"{module}:{name}", key="class_name", kind="Class")
    except ConfigError as error:
        if "No module named 'verl" in str(error) and not has_verl():
            raise ConfigError(f"{error}", key="class_name", value=class_name, hint=_STAND_IN) from error
        raise
    schema = json.loads(schema_json)
    try:
        made = found(config=json.loads(config_json), tool_schema=_make_schema(schema))
    except (Exception, SystemExit) as error:
        problem = f"cannot be made: {type(error).__name__}: {error}{_locate(error)}"
        raise ConfigError(
            problem, key="class_name", value=class_name, hint="called with config, tool_schema"
        ) from error
    execute = getattr(made, "execute", None)
    if not callable(execute):
        raise ConfigError("has no method execute", key="class_name", value=class_name)
    needed = inspect.signature(execute).parameters.get("agent_data")
    if needed is not None and needed.default is needed.empty:
        problem = "needs agent_data, the state of verl's own loop, which is not here"
        raise ConfigError(problem, key="class_name", value=class_name, hint="give the parameter a default")
    return LoadedVerlTool(class_name, made, _read_signature(class_name, schema, made))


def _make_schema(schema: Mapping[str, Any] | None) -> Any:
    schemas = importlib.import_module("verl.tools.schemas")  # of verl, or what stands in for it
    return None if schema is None else schemas.OpenAIFunctionToolSchema.model_validate(schema)


def _read_signature(class_name: str, schema: Mapping[str, Any] | None, made: Any) -> Mapping[str, Any]:
    """Return what the policy is told: the signature of the file, or else that of the object."""
    given: Any = schema if schema is not None else getattr(made, "tool_schema", None)
    if hasattr(given, "model_dump"):
        given = given.model_dump(exclude_unset=True, exclude_none=True)
    function = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        hint = "tool_schema: {type: function, function: {name: …, description: …, parameters: …}}"
        raise ConfigError("has no signature with a name", key="class_name", value=class_name, hint=hint)
    return function


def _find_kwargs(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return what the row gives to the methods of a tool: `extra_info.tools_kwargs.NAME`, or `tools_kwargs.NAME`."""
    extra = data.get("extra_info")
    given = (extra.get("tools_kwargs") if isinstance(extra, Mapping) else None) or data.get("tools_kwargs")
    found = given.get(name) if isinstance(given, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _select_accepted(method: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a method takes."""
    parameters = inspect.signature(method).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {name: value for name, value in offered.items() if takes_all or name in parameters}


def _locate(error: BaseException) -> str:
    """Return ` at file:line` for the line that raised an error."""
    frames = extract_tb(error.__traceback__)
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


async def _finish(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result
