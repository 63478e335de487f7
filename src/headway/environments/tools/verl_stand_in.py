"""Stands in for the few modules of verl that a tool written for verl imports, where verl is not installed.

    verl.tools.base_tool          BaseTool
    verl.tools.schemas            OpenAIFunctionToolSchema and its parts, ToolResponse
    verl.utils.rollout_trace      rollout_trace_op, which changes nothing here

Nothing else of verl is there: another import fails under its own name. The modules are known only inside
`provide_verl()`, or for good after `install_verl()`, which worker processes call.
"""

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from uuid import uuid4

_LOCK = threading.Lock()
_USERS: set[object] = set()
"""Those who need the modules now."""
_SCHEMA_NAMES = (
    *("OpenAIFunctionToolSchema", "OpenAIFunctionSchema", "OpenAIFunctionParametersSchema"),
    *("OpenAIFunctionPropertySchema", "OpenAIFunctionParsedSchema", "OpenAIFunctionCallSchema"),
    "OpenAIFunctionToolCall",
)


class FieldObject:
    """An object with the fields it was given; fields that are mappings are objects too, but for `properties`."""

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self, name, _to_fields(value, is_mapping=name == "properties"))

    @classmethod
    def model_validate(cls, given: Any) -> "FieldObject":
        """Make an object from a mapping, as pydantic does."""
        return given if isinstance(given, FieldObject) else cls(**given)

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Return the fields as plain values; the options of pydantic change nothing."""
        return {name: _to_plain(value) for name, value in vars(self).items()}

    def __getattr__(self, name: str) -> Any:
        if name not in _OPTIONAL_FIELDS:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}")
        return None


_OPTIONAL_FIELDS = frozenset(("description", "enum", "text", "image", "video", "strict", "required", "parameters"))


class VerlToolResponse(FieldObject):
    """What a tool of verl answers: `text`, and pictures that no policy here sees."""

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not (self.image or self.video)


class VerlBaseTool:
    """The class that tools of verl inherit from. Every method may be replaced."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        return getattr(self, "tool_schema", None)

    async def create(self, instance_id: str | None = None, **options: Any) -> tuple[str, VerlToolResponse]:
        return instance_id or str(uuid4()), VerlToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **options: Any
    ) -> tuple[Any, float, dict[str, Any]]:
        return VerlToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **options: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **options: Any) -> None:
        return None


def _keep_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Stand in for a decorator that records calls."""
    return function


def has_verl() -> bool:
    """Return whether verl itself is installed."""
    found = sys.modules.get("verl")
    return not isinstance(found, _StandInModule) if found is not None else importlib.util.find_spec("verl") is not None


def install_verl() -> None:
    """Provide the modules from now on, unless verl is installed."""
    with _LOCK:
        _USERS.add("for good")
        _add_modules()


@contextmanager
def provide_verl() -> Iterator[None]:
    """Provide the modules inside of the block, unless verl is installed. Threads may be in it at the same time."""
    user = object()
    with _LOCK:
        _USERS.add(user)
        _add_modules()
    try:
        yield
    finally:
        with _LOCK:
            _USERS.discard(user)
            if not _USERS:
                remove_stand_in()


def remove_stand_in() -> None:
    """Take the modules out again."""
    _USERS.clear()
    if isinstance(sys.modules.get("verl"), _StandInModule):
        for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
            del sys.modules[name]


def _add_modules() -> None:
    if not isinstance(sys.modules.get("verl"), _StandInModule) and not has_verl():
        sys.modules.update(_make_modules())


class _StandInModule(ModuleType):
    """A module of the stand-in, by which it is told from verl."""


def _make_modules() -> dict[str, ModuleType]:
    contents: dict[str, dict[str, Any]] = {
        "verl": {},
        "verl.tools": {},
        "verl.tools.base_tool": {"BaseTool": VerlBaseTool},
        "verl.tools.schemas": {
            **{name: type(name, (FieldObject,), {}) for name in _SCHEMA_NAMES},
            "ToolResponse": VerlToolResponse,
        },
        "verl.utils": {},
        "verl.utils.rollout_trace": {"rollout_trace_op": _keep_function},
    }
    contents["verl.tools.base_tool"].update(contents["verl.tools.schemas"])
    modules: dict[str, ModuleType] = {}
    for path, names in contents.items():
        modules[path] = module = _StandInModule(path, "Stands in for a module of verl.")
        module.__path__ = []
        module.__dict__.update(names)
        parent, _, name = path.rpartition(".")
        if parent:
            setattr(modules[parent], name, module)
    return modules


def _to_fields(value: Any, *, is_mapping: bool = False) -> Any:
    if not isinstance(value, Mapping):
        return value
    if is_mapping:
        return {name: _to_fields(one) for name, one in value.items()}
    return FieldObject(**{str(name): one for name, one in value.items()})


def _to_plain(value: Any) -> Any:
    if isinstance(value, FieldObject):
        return value.model_dump()
    if isinstance(value, Mapping):
        return {name: _to_plain(one) for name, one in value.items()}
    return [_to_plain(one) for one in value] if isinstance(value, list | tuple) else value
