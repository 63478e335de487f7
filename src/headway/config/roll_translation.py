"""Translates classes of ROLL, and options that only one class reads, onto rewards and environments of our own.

A file of ROLL names Python classes of ROLL for its rewards and environment managers. The class says which of the other
keys count; the rest of them are named in a note. `dialects/roll.yaml` has the keys that are merely renamed.
"""

from collections.abc import Mapping
from typing import Any

from headway.config.document import ConfigEntries, join_key
from headway.config.foreign_entries import ForeignEntries
from headway.errors import ConfigError

_REWARD_WORKERS = {
    "MathRuleRewardWorker": "math_rule",
    "GSM8KMathRewardWorker": "math_rule",
    "CodeSandboxRewardWorker": "code_sandbox",
    "LLMJudgeRewardWorker": "llm_judge",
    "GeneralRuleRewardWorker": "ifeval",
    "GeneralValRuleRewardWorker": "general_val",
    "CrossThinkQARuleRewardWorker": "crossthinkqa",
    "MultipleChoiceBoxedRuleRewardWorker": "multiple_choice",
}
"""Classes of ROLL's rewards, and our rewards."""
_PICTURE_WORKERS = ("DetectionRewardWorker", "VideoR1RewardWorker", "RoboticsRewardWorker")
_REWARD_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "code_url": (),
    "use_local": (),
    "format_pattern": (),
    "reward_type": ("math_rule", "crossthinkqa"),
    "response_length_penalty_coef": ("crossthinkqa",),
}
"""Options of ROLL's rewards, and the rewards that read them."""
_UNREAD_OPTIONS = {
    "code_url": "programs run in the sandbox of this machine",
    "format_pattern": "ROLL matches it and adds the result to no reward; the reward `regex` does",
}
_STEP_MANAGERS = ("StepEnvManager", "StepConcatEnvManager")
_EPISODE_MANAGERS = ("TrajEnvManager", "ProxyEnvManager", "AgentNativeStepEnvManager")
_INSTRUCTION = "{env_instruction}"


def translate_roll(entries: ConfigEntries, notes: list[str], problems: list[ConfigError]) -> ConfigEntries:
    """Return the entries with ROLL's rewards and environments under our own keys."""
    given = ForeignEntries(entries, notes, problems)
    for name in dict.fromkeys(path[1] for path in entries if path[0] == "rewards" and len(path) > 2):
        _translate_reward(given, f"rewards.{name}", name)
    for tag in dict.fromkeys(path[1] for path in entries if path[0] == "custom_envs" and len(path) > 2):
        _translate_environment(given, f"custom_envs.{tag}")
    return given.entries


def _translate_reward(given: ForeignEntries, key: str, name: str) -> None:
    """Translate the class of one reward, and the options that it reads."""
    worker = given.take(f"{key}.worker_cls")
    if isinstance(worker, str):
        _translate_worker(given, key, worker)
    function = given.get(f"{key}.reward_fn") or name
    if function == "ifeval" and worker is not None:
        given.give(f"{key}.reward_args.repetition_penalty", 0.5, f"{key}.worker_cls")
    for option, readers in _REWARD_OPTIONS.items():
        value = given.take(f"{key}.{option}")
        if value is None or (option, value) == ("use_local", True):
            continue
        if function in readers:
            given.give(f"{key}.reward_args.{option}", value, f"{key}.{option}")
            continue
        reason = _UNREAD_OPTIONS.get(option, f"{function} does not read it")
        reason = _UNREAD_OPTIONS["code_url"] if option == "use_local" else reason
        given.notes.append(f"{key}.{option}: changes nothing here; {reason}")


def _translate_worker(given: ForeignEntries, key: str, worker: str) -> None:
    """Give the reward that a class of ROLL stands for; refuse classes that have none."""
    known = _REWARD_WORKERS.get(worker.rpartition(".")[2])
    if known is not None:
        given.give(f"{key}.reward_fn", known, f"{key}.worker_cls")
        return
    if given.get(f"{key}.reward_fn") is not None:
        given.notes.append(f"{key}.worker_cls: changes nothing here; reward_fn is given")
        return
    pictures = worker.rpartition(".")[2] in _PICTURE_WORKERS
    problem = "judges pictures or video, not offered here" if pictures else "is no class that has a counterpart here"
    hint = f"one of {', '.join(_REWARD_WORKERS)}, or reward_fn: module:function of your own"
    given.problems.append(ConfigError(problem, key=f"{key}.worker_cls", value=worker, hint="" if pictures else hint))


def _translate_environment(given: ForeignEntries, key: str) -> None:
    """Translate the class that plays an environment, its penalty and its tools."""
    manager = given.take(f"{key}.env_manager_cls")
    manager = manager.rpartition(".")[2] if isinstance(manager, str) else manager
    if manager in _STEP_MANAGERS:
        given.give(f"{key}.sample", "turn", f"{key}.env_manager_cls")
        given.give(f"{key}.history", False, f"{key}.env_manager_cls")
    elif manager is not None and manager not in _EPISODE_MANAGERS:
        given.notes.append(f"{key}.env_manager_cls: {manager}: changes nothing here; whole episodes are trained")
    _translate_templates(given, key, manager)
    runner = given.take(f"{key}.agent_runner_cls")
    if runner is not None:
        given.notes.append(f"{key}.agent_runner_cls: changes nothing here; the environment plays as any other does")
    penalty = given.take(f"{key}.env_config.format_penalty")
    if penalty is not None:
        given.give(f"{key}.format_penalty", penalty, f"{key}.env_config.format_penalty")
    if given.has_below(f"{key}.tool_wrapper"):
        given.give(f"{key}.env_config.tools", _take_tools(given, f"{key}.tool_wrapper"), f"{key}.tool_wrapper")


def _translate_templates(given: ForeignEntries, key: str, manager: Any) -> None:
    """Make templates for `str.format` ours; the policy gets the environment's instructions as it does there."""
    names = ("agent_system_template", "agent_template")
    found = {name: given.take(f"{key}.{name}") for name in names}
    if manager == "AgentNativeStepEnvManager":
        if any(found.values()):
            given.notes.append(f"{key}.agent_template: changes nothing here; the environment writes its own messages")
        return
    texts = {name: text.replace("{{", "{").replace("}}", "}") for name, text in found.items() if isinstance(text, str)}
    if "agent_system_template" in texts and _INSTRUCTION not in "".join(texts.values()):
        texts["agent_system_template"] = f"{texts['agent_system_template'].rstrip()}\n\n{_INSTRUCTION}"
    for name, text in texts.items():
        given.give(f"{key}.{name}", text, f"{key}.{name}")


def _take_tools(given: ForeignEntries, key: str) -> dict[str, Any]:
    """Return the tools of an environment as one value: what a call earns, how many there are, and which."""
    parts = given.split(key)
    found: dict[str, Any] = {}
    for path in [path for path in given.entries if path[: len(parts)] == parts]:
        name = path[-1] if path[len(parts) : -1] == ("wrapper_args",) else join_key(path[len(parts) :])
        found[name] = given.entries.pop(path).value
    return found
