"""Where values come from, and the two commands that show it."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest

from headway.cli import main
from headway.config import load_config
from headway.config.resolved_config import list_leaves

from .factory import CONFIGS

RLVR = str(CONFIGS / "rlvr_async.yaml")


def run(*arguments: str) -> int:
    return main(["config", *arguments])


@pytest.mark.parametrize(
    ("key", "origin"),
    [
        ("seed", "override"),
        ("rollout_batch_size", "rlvr_async.yaml:5"),
        ("staleness_policy", "default"),
        ("sequence_length", "derived: prompt_length + response_length"),
        ("save_steps", "rlvr_async.yaml:11"),
        ("eval_steps", "translated from trainer.test_freq (override)"),
        ("pipeline_depth", "derived: async_generation_ratio"),
        ("actor_infer.generating_args.max_new_tokens", "rlvr_async.yaml:52"),
        ("reference.model_args.model_name_or_path", "derived: pretrain"),
        ("actor_infer.device_mapping", "rlvr_async.yaml:63"),
    ],
)
def test_every_value_says_where_it_came_from(key: str, origin: str) -> None:
    assert load_config(RLVR, ["seed=1", "trainer.test_freq=3"]).provenance[key] == origin


def test_every_leaf_has_an_origin() -> None:
    resolved = load_config(RLVR)
    assert [key for key, _ in list_leaves(resolved.config)] == list(resolved.provenance)


@pytest.mark.parametrize("name", ["rlvr_async", "frozen_lake_async", "webshop_async"])
def test_loading_what_was_resolved_gives_the_same_again(name: str) -> None:
    first = load_config(CONFIGS / f"{name}.yaml")
    again = load_config(first.changed())
    assert (again.config, again.derived) == (first.config, first.derived)


@pytest.mark.parametrize("ahead", [0, 1])
def test_devices_that_are_shared_are_shared_again(ahead: int) -> None:
    first = load_config({"num_gpus_per_node": 4, "async_generation_ratio": ahead, "allow_uncorrected_async": True})
    again = load_config(first.changed())
    assert (again.config, again.derived) == (first.config, first.derived)
    assert again.derived.devices["actor_train"] == again.derived.devices["actor_infer"] == (0, 1, 2, 3)


def test_blocks_that_exist_only_by_name_survive_the_round_trip() -> None:
    first = load_config({"custom_envs": {"lake": {}}, "train_infer_correction": {"filters": [{"ratio_low": 0.5}]}})
    assert load_config(first.changed()).config == first.config


def test_check_says_ok_with_notes_and_plans_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", RLVR, "--gpus", "8") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok: rlvr, α = 1 (bound 1), 128 slots, 64 groups × 8 = 512 samples per step")
    plan = lines.index("8 GPUs × 80 GiB: processes")
    assert all(line.startswith("note: ") for line in lines[1:plan])
    assert lines[plan + 2].split()[:3] == ["trainer/0–3", "0–3", "alone"]
    assert max(map(len, lines[plan:])) <= 80 and "85 sequences of 10240" in " ".join(lines)
    assert run("check", RLVR, "num_gpus_per_node=2", "--gpus", "8") == 0
    assert "8 GPUs × 80 GiB: processes" in capsys.readouterr().out, "one machine, also for a file for a smaller one"


def test_check_refuses_what_would_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", RLVR, "--gpus", "2", "--gpu-memory", "24") == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    assert "a step of trainer needs" in captured.err and "devices for actor_train" in captured.err
    assert run("check", RLVR, "--gpus", "0") == 2


def test_check_prints_each_problem_on_a_line_and_returns_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", RLVR, "max_steps=0", "sed=1") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.split(" = ")[0] for line in captured.err.splitlines()] == ["max_steps", "sed"]


def test_check_works_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "actor_rollout_ref.hybrid_engine=False", "+actor_rollout_ref.rollout.mode=async") == 0
    assert "α = 1" in capsys.readouterr().out


def test_check_reads_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("async_generation_ratio: 3\n"))
    assert run("check", "-") == 0
    assert "α = 3" in capsys.readouterr().out


def test_explain_shows_derived_values_first_and_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", RLVR) == 0
    out = capsys.readouterr().out
    assert out.index("groups_per_step") < out.index("rlvr_async.yaml:5")
    assert "16–23 (8)" in out
    assert "derived: prompt_length + response_length" in out


def test_explain_as_json_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", RLVR, "seed=9", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["derived"]["slots"] == 128
    assert shown["options"]["seed"] == {"value": 9, "from": "override"}
    assert len(shown["options"]) == len(load_config(RLVR).provenance)
    assert len(shown["notes"]) == 6


def test_the_command_does_not_import_torch() -> None:
    code = "import sys, headway.cli.config_command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
