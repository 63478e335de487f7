"""Reads the command line of another project's trainer: the module, the named file, and the overrides.

    python3 -m verl.trainer.main_ppo --config-path=config --config-name=ppo_trainer data.train_batch_size=256 …

The words may be given as they stand, from the interpreter or from `-m` on. A named file that exists is read; one of the
files that come with the project stands for its defaults, which the tables of dialects have.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config.document import DOTTED_ROOTS, ConfigEntries, ConfigEntry, Source, is_existing_file
from headway.errors import ConfigError

_OPTIONS = {
    "--config-path": "path",
    "-cp": "path",
    "--config-dir": "path",
    "-cd": "path",
    "--config-name": "name",
    "-cn": "name",
}
_PROGRAM = re.compile(r"(?:[^=]*/)?(?:python[\d.]*|torchrun|[^=]*\.py)")
_GROUP = re.compile(r"[+]*[\w/]+@[\w.]+=\S*")
_OWN_FILE = re.compile(r"\w*(?:(?:ppo|grpo|dapo)\w*trainer|multiturn\w*grpo\w*)(?:\.ya?ml)?")
_PARTS = ("critic", "reward", "reward_model", "distillation", "transfer_queue")
"""Sections of verl, beside the dotted ones, that have files of their own."""
_OTHER_MODULES = {
    "sft": "supervised fine-tuning",
    "vla": "vision-language-action models",
    "generation": "generation alone",
    "main_eval": "evaluation alone",
    "distill": "distillation",
    "gkd": "distillation",
    "prime": "implicit process rewards (PRIME)",
    "sppo": "preference optimisation (SPPO)",
    "flowrl": "distribution matching (FlowRL)",
    "dpo": "preference optimisation (DPO)",
    "spin": "preference optimisation (SPIN)",
}
"""Part of a module's name → what it trains or does."""


@dataclass(frozen=True, slots=True)
class LaunchArguments:
    """How the trainer of another project is started."""

    module: str = ""
    path: str = ""
    name: str = ""
    groups: tuple[str, ...] = ()
    """Words that choose among files of the project, such as `actor@actor_rollout_ref.actor=megatron_actor`."""

    @property
    def is_fully_async(self) -> bool:
        """Return whether the trainer streams samples past several weight syncs."""
        return "fully_async" in self.module

    def find_other_pipeline(self) -> ConfigError | None:
        """Return the problem of a module, or of a named file, for a kind of training that is not offered."""
        for part, pipeline in _OTHER_MODULES.items():
            if part in re.split(r"[./]", self.module) or f"{part}_trainer" in self.module:
                return ConfigError(f"{self.module}: this starts {pipeline}, which Headway does not offer")
        return None

    def choose_source(self, source: Source, notes: list[str], problems: list[ConfigError]) -> Source:
        """Return the file that the command line names, or `source` if it names none that is there."""
        if self.groups:
            notes.append(f"{', '.join(self.groups)}: changes nothing here; the trainer of Headway is used")
        if not self.name:
            return source
        if (file := self._find_file()) is not None and source is None:
            return file
        if comes_with_verl(self.name):
            notes.append(f"--config-name={self.name}: the defaults of that project are used for what is not given")
        elif file is None:
            hint = "the file has values of the run; --config-path names its directory"
            problems.append(ConfigError(f"--config-name={self.name}: no such file in {self.path or '.'}", hint=hint))
        return source

    def add_to(self, entries: ConfigEntries) -> ConfigEntries:
        """Return the entries with what the module itself means."""
        key = ("actor_rollout_ref", "rollout", "async_strategy")
        if "one_step_off" not in self.module or key in entries:
            return entries
        return {**entries, key: ConfigEntry("one-step-off", f"-m {self.module}")}

    def _find_file(self) -> Path | None:
        name = self.name if self.name.endswith((".yaml", ".yml")) else f"{self.name}.yaml"
        file = Path(self.path) / name
        return file if self.name and is_existing_file(file) else None


def comes_with_verl(name: str, package: str = "") -> bool:
    """Return whether a file, or one for the section `package`, comes with verl and stands for its defaults."""
    part = package.partition(".")[0] in (*DOTTED_ROOTS, *_PARTS) and package != ""
    return part or _OWN_FILE.fullmatch(name.rpartition("/")[2]) is not None


def begins_launch(word: str) -> bool:
    """Return whether a word of a command line begins the start of a trainer: `-m`, an interpreter or a script."""
    return word == "-m" or word.partition("=")[0] in _OPTIONS or _PROGRAM.fullmatch(word) is not None


def split_launch_arguments(
    overrides: Iterable[str] | Mapping[str, Any],
) -> tuple[Iterable[str] | Mapping[str, Any], LaunchArguments]:
    """Return the overrides without the words that start a trainer, and what those words say."""
    if isinstance(overrides, Mapping | str):
        return overrides, LaunchArguments()
    words, rest, groups = list(overrides), list[str](), list[str]()
    if not any(map(begins_launch, words)):
        return words, LaunchArguments()
    found, wanted = {"module": "", "path": "", "name": ""}, ""
    started = not any(word == "-m" or _PROGRAM.fullmatch(word) for word in words)
    for word in words:
        option, equals, value = word.partition("=")
        if wanted:
            found[wanted], wanted, started = word, "", True
        elif option in _OPTIONS and equals:
            found[_OPTIONS[option]] = value.strip("\"'")
        elif option in _OPTIONS:
            wanted = _OPTIONS[option]
        elif word == "-m":
            wanted = "module"
        elif word.endswith(".py") and "=" not in word:
            found["module"], started = word, True
        elif _GROUP.fullmatch(word):
            groups.append(word)
        elif started or ("=" in word and not word.startswith("-")):
            rest.append(word)
    return rest, LaunchArguments(**found, groups=tuple(groups))
