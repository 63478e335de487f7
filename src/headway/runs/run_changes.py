"""What a run that goes on does differently from the process before it.

Options are compared as they were given; one that was not given has its default. Held-out data and the code of a user's
rewards are compared by their hashes. A changed reward is refused unless `accept_changed_reward` is given, because
rewards before and after it are different numbers under one name; then finished samples that were not trained yet are
scored anew. Everything else that changed is said.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from headway.config import Config, ResolvedConfig, RewardConfig
from headway.config.document import nest_values
from headway.config.resolved_config import list_leaves
from headway.errors import ConfigError
from headway.monitor.run_record import flatten_mapping
from headway.rewards.reward_registry import find_reward_function
from headway.runs.stored_paths import make_paths_absolute

CONFIG_FILE = "config.yaml"
WEIGHTS = "weights"
"""Key of the weights' hash in the identity of a run."""
_WEIGHT_FILES = (".safetensors", ".bin", ".gguf")
_SAMPLES_PER_FILE, _SAMPLED_BYTES = 16, 65536
ACCEPT_KEY = "accept_changed_reward"
_UNIMPORTANT = frozenset({ACCEPT_KEY, "resume", "output_dir"})
"""Options that say where and how to go on, not what to do."""
_SAME_REWARD = ("device_mapping", "timeout_s", "concurrency", "gpu_memory_utilization", "max_num_seqs", "num_threads")
"""Options of a reward that do not change its numbers."""


class OptionChange(NamedTuple):
    """One value that is not what it was."""

    key: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.key}: {self.before} → {self.after}"

    @property
    def is_reward(self) -> bool:
        """Whether rewards after the change cannot be compared with those before it."""
        return self.key.startswith("rewards.") and not self.key.endswith(_SAME_REWARD)


def make_config_tree(resolved: ResolvedConfig) -> dict[str, Any]:
    """Return the given options as a tree, without the permission to change the reward, which holds for one start."""
    given = {key: value for key, value in resolved.given().items() if key != ACCEPT_KEY}
    tree: dict[str, Any] = nest_values({tuple(key.split(".")): value for key, value in given.items()})
    return tree


def find_option_changes(run_dir: Path, resolved: ResolvedConfig, started_in: Path) -> list[OptionChange]:
    """Compare a configuration with the file that the process before wrote; a file that is not there changes nothing.

    That process worked in `started_in`. Paths are equal if they mean the same file, also when the run was moved.
    Raises `ConfigError` if the file cannot be read.
    """
    config_file = run_dir / CONFIG_FILE
    try:
        written = yaml.safe_load(config_file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = f"{config_file} cannot be read, so nobody knows what has changed: {' '.join(str(error).split())}"
        raise ConfigError(problem, hint="put it back from a copy, or remove it") from error
    written = written if isinstance(written, dict) else {}
    before = flatten_mapping(make_paths_absolute(written, started_in, moved_to=run_dir))
    given = yaml.safe_load(yaml.safe_dump(make_config_tree(resolved)))
    after = flatten_mapping(make_paths_absolute(given, Path.cwd()))
    usual = _list_defaults(before, after)
    changes = []
    for key in dict.fromkeys([*before, *after]):
        values = [_drop_empty(options.get(key, usual.get(key))) for options in (before, after)]
        if values[0] != values[1] and key not in _UNIMPORTANT:
            told = [_format_value(options, key, usual) for options in (before, after)]
            changes.append(OptionChange(key, *told))
    return changes


def _list_defaults(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return what options have that are not given. A reward that was added or removed shows by its weight at least."""
    names = [{key.split(".")[1] for key in options if key.startswith("rewards.")} for options in (before, after)]
    leaves = list_leaves(Config())
    for name in names[0] | names[1]:
        own = list_leaves(RewardConfig(), f"rewards.{name}.")
        leaves += own if name in names[0] & names[1] else [leaf for leaf in own if not leaf[0].endswith(".weight")]
    return {key: list(value) if isinstance(value, tuple) else value for key, value in leaves}


def _drop_empty(value: Any) -> Any:
    """Return a value; an empty list or mapping counts as none."""
    return None if value in ([], {}) else value


def _format_value(options: Mapping[str, Any], key: str, usual: Mapping[str, Any]) -> str:
    if key in options:
        return "null" if options[key] is None else str(options[key])
    return "not given" if usual.get(key) is None else f"{usual[key]} (the default)"


def hash_reward_code(resolved: ResolvedConfig) -> dict[str, str]:
    """Return a hash of the file of each reward that the user wrote. Comments and layout do not count."""
    hashes = {}
    for name, reward in resolved.config.rewards.items():
        function = find_reward_function(reward.reward_fn or name)
        try:
            file = inspect.getsourcefile(inspect.unwrap(function)) if function is not None else None
            if file is not None:
                code = ast.dump(ast.parse(Path(file).read_bytes()))
                hashes[f"rewards.{name}.reward_fn, the code in {Path(file).name}"] = _hash(code)
        except (OSError, TypeError, SyntaxError, ValueError):
            continue  # written at a prompt, or in C: there is no file to compare
    return hashes


def hash_weights(model: Path) -> str:
    """Return a hash of sizes and samples of the files with weights, so that the largest model costs milliseconds."""
    digest = blake2b(digest_size=16)
    files = [model] if model.is_file() else sorted([*model.glob("*.*"), *model.glob("*/*.*")])
    for file in (file for file in files if file.suffix in _WEIGHT_FILES):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as data:
            for part in range(_SAMPLES_PER_FILE):
                data.seek(size * part // _SAMPLES_PER_FILE)
                digest.update(data.read(_SAMPLED_BYTES))
    return digest.hexdigest()


def find_content_changes(before: Mapping[str, Any], after: Mapping[str, str]) -> list[OptionChange]:
    """Compare hashes of what options only name. What has no hash on one side is not compared."""
    common = [key for key in after if key in before and before[key] != after[key]]
    return [OptionChange(key, f"version {str(before[key])[:8]}", f"version {after[key][:8]}") for key in common]


def refuse_changed_reward(changes: list[OptionChange], path: Path) -> None:
    """Raise `ConfigError` if a change concerns the reward."""
    rewards = [change for change in changes if change.is_reward]
    if rewards:
        more = "".join(f"; {change}" for change in rewards[1:])
        problem = f"it was {rewards[0].before} in the run in {path}{more}. Rewards before and after would be different"
        problem += " numbers under one name"
        hint = f"{ACCEPT_KEY}=true to go on all the same, or choose another output_dir"
        raise ConfigError(problem, key=rewards[0].key, value=rewards[0].after, hint=hint)


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()
