"""What the README says works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from headway.cli import parse_arguments
from headway.config import load_config
from headway.config.field_types import iterate_options
from headway.config.schema import Config
from headway.flow.stage import STAGES
from tests.cli.factory import EXAMPLES

ROOT = EXAMPLES.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_stage_of_ones_own_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 1
    monkeypatch.chdir(ROOT)
    exec(compile(blocks[0], "README.md", "exec"), {"__name__": "readme"})
    STAGES.pop("short_only")
    assert "finished=True" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["README.md", "docs/start.md"])
def test_every_command_can_be_parsed_and_every_file_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^    headway (.*)$", text, re.MULTILINE)
    assert len(commands) >= 5
    for command in commands:
        words = shlex.split(command, comments=True)
        assert parse_arguments(words).command == words[0]
    for path in re.findall(r"\b(?:examples|docs)/[\w./]+\w", text):
        assert (ROOT / path).exists(), path


def test_the_tree_names_every_package() -> None:
    package = ROOT / "src" / "headway"
    parts = {path.name for path in package.iterdir() if (path / "__init__.py").exists()}
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py", "__main__.py"}
    named = {Path(name).name for name in re.findall(r"^      ([\w.]+/?) ", README, re.MULTILINE)}
    assert parts | modules <= named


def test_the_run_of_ones_own_is_a_configuration_and_what_is_compared_with_others_exists() -> None:
    start = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    (written,) = re.findall(r"```yaml\n(.*?)```", start, re.DOTALL)
    assert load_config(yaml.safe_load(written)).derived.samples_per_step == 64
    keys = {part for option in iterate_options(Config) for part in (option.key, option.key.rpartition(".")[2])}
    table = start.partition("## Coming from TRL")[2].partition("\n## ")[0]
    ours = re.findall(r"^\|.*\|(.*)\|$", table, re.MULTILINE)[2:]
    said = {word.partition("=")[0].lstrip(".") for cell in ours for word in re.findall(r"`([\w.<>=]+)`", cell)}
    assert len(said) > 12 and said <= keys, said - keys
