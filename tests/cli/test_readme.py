"""What the README and CONTRIBUTING say works: code, commands, files, the tree."""

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
from headway.registry import REWARDS
from tests.cli.factory import EXAMPLES

ROOT = EXAMPLES.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TREE = README.partition("    src/headway/\n")[2].partition("\n\n")[0]


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As it stands there; the example that it reads has smaller batches."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 1
    (tmp_path / "examples").mkdir()
    example = (EXAMPLES / "simulate_small.yaml").read_text(encoding="utf-8")
    smaller = example.replace("rollout_batch_size: 32 ", "rollout_batch_size: 4 ")
    assert smaller != example
    (tmp_path / "examples" / "simulate_small.yaml").write_text(smaller, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with REWARDS.isolate():
        exec(compile(blocks[0], "README.md", "exec"), {"__name__": "readme"})
        assert "closeness" in REWARDS
    assert "finished=True" in capsys.readouterr().out


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/start.md", "examples/README.md"])
def test_every_command_can_be_parsed_and_every_file_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    for command in re.findall(r"^    headway (.*)$", text, re.MULTILINE):
        words = shlex.split(command, comments=True)
        assert parse_arguments(words).command == words[0]
    for path in re.findall(r"\b(?:examples|docs)/[\w./-]+\w", text):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert ((ROOT / page).parent / link).exists(), link


def test_every_target_of_make_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md"):
        named = set(
            re.findall(r"(?:`|^    )make ([a-z][\w-]*)", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        )
        assert named and named <= targets, (page, named - targets)


def test_the_tree_names_every_package_and_nothing_else() -> None:
    package = ROOT / "src" / "headway"
    parts = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert parts | modules <= set(re.findall(r"\w+\.py|\w+/", TREE))
    for line in TREE.splitlines():
        first, *others = re.findall(r"\w+\.py|\w+/", line)
        assert (package / first).exists(), first
        for other in others:
            assert (package / first / other).exists() or (package / other).exists(), f"{first}: {other}"


def test_the_run_of_ones_own_is_a_configuration_and_what_is_compared_with_others_exists() -> None:
    start = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    (written,) = re.findall(r"```yaml\n(.*?)```", start, re.DOTALL)
    assert load_config(yaml.safe_load(written)).derived.samples_per_step == 128
    keys = {part for option in iterate_options(Config) for part in (option.key, option.key.rpartition(".")[2])}
    table = start.partition("## Coming from TRL")[2].partition("\n## ")[0]
    ours = re.findall(r"^\|.*\|(.*)\|$", table, re.MULTILINE)[2:]
    said = {word.partition("=")[0].lstrip(".") for cell in ours for word in re.findall(r"`([\w.<>=]+)`", cell)}
    assert len(said) > 12 and said <= keys, said - keys
