"""Translates rollouts of verl in several turns with tools: an agentic run in the environment `tools`.

verl names its tools in a file of their classes and signatures. Classes of verl that have a tool of the same kind here
become that tool, under their own name and with their own signature; classes of users are run as they are. Files that
come with verl are known by their names where they are not on this machine.
"""

from pathlib import Path
from typing import Any

from headway.config.document import is_existing_file
from headway.config.foreign_entries import ForeignEntries
from headway.config.launch_arguments import LaunchArguments
from headway.config.yaml_source import read_yaml_file, to_plain_numbers
from headway.errors import ConfigError

_ROLLOUT = "actor_rollout_ref.rollout"
_TURNS, _FILE = f"{_ROLLOUT}.multi_turn", f"{_ROLLOUT}.multi_turn.tool_config_path"
_TAG = "tools"
_ANSWER = "reward_model.ground_truth"
_TOOL_CLASSES: dict[str, tuple[str, dict[str, str]]] = {
    "Gsm8kTool": ("check_answer", {}),
    "SearchTool": ("retrieval", {"retrieval_service_url": "url", "topk": "most", "timeout": "timeout_s"}),
    "SandboxFusionTool": ("python", {"sandbox_fusion_url": "sandbox_url", "default_timeout": "timeout_s"}),
}
_TOOL_CLASSES["CustomSandboxFusionTool"] = _TOOL_CLASSES["SandboxFusionTool"]
"""Classes of verl, our tools of the same kind, and which of their settings ours read."""
_CODE_PARAMETERS = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
_SHIPPED_FILES: dict[str, dict[str, Any]] = {
    "gsm8k_tool_config": {"class_name": "Gsm8kTool", "tool_schema": {"function": {"name": "calc_gsm8k_reward"}}},
    "search_tool_config": {
        "class_name": "SearchTool",
        "config": {"retrieval_service_url": "http://127.0.0.1:8000/retrieve"},
    },
    "sandbox_fusion_tool_config": {
        "class_name": "SandboxFusionTool",
        "tool_schema": {"function": {"name": "code_interpreter", "parameters": _CODE_PARAMETERS}},
    },
}
"""Tools of the files that come with verl, where they can be had."""
_AGENT_LOOPS = (
    *("single_turn_agent", "tool_agent", "partial_single_turn_agent"),
    *("partial_tool_agent", "async_partial_tool_agent"),
)
"""Agent loops of verl whose episodes are those of a single turn or of the environment `tools`; all go on with new
weights here."""
_SHIPPED_TURNS = {"gsm8k": 5, "search": 2}
"""Turns in the files of the same names that come with verl."""
_TOOL_TEXT = 256
"""Characters of a tool's answer that the policy sees unless told."""


def asks_for_tools(given: ForeignEntries, launch: LaunchArguments) -> bool:
    """Return whether episodes have several turns."""
    return given.get(f"{_TURNS}.enable") is True or bool(given.get(_FILE)) or "multiturn" in launch.name


def find_missing_loop(values: dict[str, Any]) -> tuple[str, Any, str, str] | None:
    """Return key, value, feature and alternative of an agent loop or of tools that cannot be run here."""
    loop = (
        "an agent loop of verl's own kind",
        "an environment of your own (custom_envs.<tag>.env_type: module:Class with reset and step), or an agent that "
        "asks an OpenAI endpoint (env_type: openai_agent)",
    )
    tools = ("tools in a file of verl's own kind", "custom_envs.<tag>.env_config.tools: [module:function]")
    for key, known in (
        (f"{_ROLLOUT}.agent.agent_loop_config_path", ()),
        (f"{_ROLLOUT}.agent.default_agent_loop", _AGENT_LOOPS),
        (f"{_TURNS}.function_tool_path", ()),
        (f"{_TURNS}.tool_env_manifest_path", ()),
    ):
        if values.get(key) not in (None, "", *known):
            return key, values[key], *(tools if "multi_turn" in key else loop)
    return None


def translate_verl_tools(given: ForeignEntries, launch: LaunchArguments) -> None:
    """Replace the keys of rollouts in several turns by an environment of ours."""
    given.take(f"{_ROLLOUT}.agent.default_agent_loop")  # its value is known, and tools or their absence decide
    if not asks_for_tools(given, launch):
        return
    given.take(f"{_TURNS}.enable")
    source = f"{_TURNS}.enable"
    members, prompts = given.get(f"{_ROLLOUT}.n") or 1, given.take("data.train_batch_size")
    if isinstance(members, int) and isinstance(prompts, int) and given.get("rollout_batch_size") is None:
        given.give("rollout_batch_size", prompts * members, f"data.train_batch_size × {_ROLLOUT}.n")
    elif isinstance(entry := given.get("rollout_batch_size"), int) and isinstance(members, int):
        given.take("rollout_batch_size")
        given.give("rollout_batch_size", entry * members, f"prompts × {_ROLLOUT}.n")
    given.give("train_env_manager.group_size", members, f"{_ROLLOUT}.n")
    given.give("train_env_manager.tags", [_TAG], source)
    base = f"custom_envs.{_TAG}"
    given.give(f"{base}.env_type", "tools", source)
    for name, value in _make_environment(given, launch).items():
        given.give(f"{base}.env_config.{name}", value, source)
    given.notes.append(
        f"{_TURNS}: episodes are played in the environment `tools`; a call stands between <tool_call> tags, and "
        f"the policy is told of mistakes in it, where verl takes them for an answer"
    )


def _make_environment(given: ForeignEntries, launch: LaunchArguments) -> dict[str, Any]:
    """Return the options of the environment."""
    limits = [given.take(f"{_TURNS}.max_assistant_turns"), given.take(f"{_TURNS}.max_user_turns")]
    shipped = next((turns for name, turns in _SHIPPED_TURNS.items() if launch.name.startswith(name)), None)
    turns = [limits[0], None if not isinstance(limits[1], int) else limits[1] + 1]
    known = [one for one in turns if isinstance(one, int)] or [one for one in (shipped,) if one is not None]
    options: dict[str, Any] = {
        "tools": _read_tools(given),
        "messages": given.get("data.prompt_key") or "prompt",
        "malformed_penalty": 0.0,
        "most_calls": given.take(f"{_TURNS}.max_parallel_calls") or 1,
        "longest": given.take(f"{_TURNS}.max_tool_response_length") or _TOOL_TEXT,
        "max_steps": max(1, min(known)) if known else 64,
    }
    if given.take(f"{_TURNS}.interaction_config_path"):
        options["retry_until"] = _ANSWER
        given.notes.append(f"{_TURNS}.interaction_config_path: a wrong number is called wrong, as by Gsm8kInteraction")
    style, side = given.take(f"{_TURNS}.format"), given.take(f"{_TURNS}.tool_response_truncate_side")
    if side is not None:
        options["cut_side"] = side
    if style not in (None, "hermes", "qwen"):
        given.notes.append(f"{_TURNS}.format: {style}: changes nothing here; calls are JSON between <tool_call> tags")
    if side not in (None, "left", "middle", "right"):
        problem, key = "is no side", f"{_TURNS}.tool_response_truncate_side"
        given.problems.append(ConfigError(problem, key=key, value=side, hint="left, middle or right"))
    return options


def _read_tools(given: ForeignEntries) -> list[dict[str, Any]]:
    path = given.take(_FILE)
    given.take("data.tool_config_path")
    if path is None:
        return []
    file = Path(str(path))
    if is_existing_file(file):
        entry = read_yaml_file(file, given.problems).get(("tools",))
        rows = to_plain_numbers(entry.value) if entry is not None and isinstance(entry.value, list) else []
    elif (shipped := _SHIPPED_FILES.get(file.stem)) is not None:
        given.notes.append(f"{_FILE}: {file.name} is not here; the tool of verl's own file of that name is used")
        rows = [shipped]
    else:
        hint = f"a file with tools; {', '.join(_SHIPPED_FILES)} are known without their files"
        given.problems.append(ConfigError("there is no such file", key=_FILE, value=path, hint=hint))
        return []
    return [tool for row in rows for tool in _translate_tool(given, row, file.parent)]


def _translate_tool(given: ForeignEntries, row: Any, folder: Path) -> list[dict[str, Any]]:
    """Return our tool of the same kind, or those of MCP servers. A class without one is a problem."""
    name = str(row.get("class_name", "")) if isinstance(row, dict) else str(row)
    if isinstance(row, dict) and isinstance(row.get("mcp"), dict):
        return _translate_servers(given, row["mcp"], folder)
    found = _TOOL_CLASSES.get(name.rpartition(".")[2])
    if found is None:
        return _translate_class(given, name, row)
    kind, settings = found
    config, schema = row.get("config") or {}, row.get("tool_schema")
    tool = {"name": kind, **{ours: config[key] for key, ours in settings.items() if config.get(key) is not None}}
    if kind == "check_answer":
        tool["answer"] = _ANSWER
    return [{**tool, "schema": schema} if schema else tool]


def _translate_class(given: ForeignEntries, name: str, row: Any) -> list[dict[str, Any]]:
    """Return the tool of a class that the user wrote. One of verl, or one without a place, is a problem."""
    module, _, _ = name.rpartition("." if ":" not in name else ":")
    if not isinstance(row, dict) or not module or module.split(".")[0] == "verl":
        problem = f"the tool {name} of verl has no counterpart here" if module else f"names no class: {row}"
        hint = f"{', '.join(_TOOL_CLASSES)}; or class_name: my.module.MyTool"
        given.problems.append(ConfigError(problem, key=_FILE, value=name, hint=hint))
        return []
    known = {key: row[key] for key in ("config", "tool_schema") if row.get(key) is not None}
    given.notes.append(f"{_FILE}: {name} runs as it is, in worker processes; verl does not have to be installed")
    return [{"name": "verl_class", "class_name": name, **known}]


def _translate_servers(given: ForeignEntries, settings: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Return the MCP servers of a file, which have a URL or are programs."""
    path = Path(str(settings.get("mcp_servers_config_path")))
    found = next((file for file in (path, folder / path.name) if is_existing_file(file)), None)
    entries = {} if found is None else read_yaml_file(found, given.problems)  # JSON is YAML
    servers: dict[str, dict[str, Any]] = {}
    for place, entry in entries.items():
        if place[0] == "mcpServers" and len(place) > 2:
            servers.setdefault(place[1], {})[place[2]] = entry.value
    if not servers or any("auth_token" in server for server in servers.values()):
        problem = "asks for an MCP server with a token" if servers else "names no MCP servers"
        hint = "mcpServers: {name: {url: …}} or {name: {command: …, args: […]}}, without a token"
        given.problems.append(ConfigError(problem, key=f"{_FILE}: mcp_servers_config_path", value=str(path), hint=hint))
        return []
    only = settings.get("tool_selected_list") or []
    return [{"name": "mcp", **server, **({"only": only} if only else {})} for server in servers.values()]
