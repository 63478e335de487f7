"""The directory of a run: one process at a time, one run at a time, and nothing half-written."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway.config import ResolvedConfig, load_config
from headway.errors import ConfigError, HeadwayError
from headway.ledger import Ledger, list_recorded_checkpoints
from headway.monitor.event_files import LOG_FILE
from headway.monitor.event_log import LoggedEvent, encode_event, read_events
from headway.monitor.events import StateChange
from headway.runs.dashboard_link import DashboardLink
from headway.runs.run_changes import hash_reward_code, hash_weights
from headway.runs.run_directory import RunDirectory, check_disk_space, find_checkpoint_of_run
from headway.trainers.checkpoint_mark import write_completion_mark


def configuration(**options: Any) -> ResolvedConfig:
    return load_config({"rollout_batch_size": 8, "num_return_sequences_in_group": 4, **options})


def begin(path: Path, trained: int = 0) -> None:
    """A ledger, with a checkpoint where something was trained."""
    ledger = Ledger(path / "ledger.sqlite")
    if trained:
        ledger.checkpoint(trained, f"checkpoints/step-{trained:08d}")
    ledger.close()


def test_two_processes_never_work_in_one_directory(tmp_path: Path) -> None:
    with RunDirectory(tmp_path):
        code = (
            "from pathlib import Path; from headway.runs.run_directory import RunDirectory\n"
            f"with RunDirectory(Path({str(tmp_path)!r})): pass"
        )
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert other.returncode and "a run is at work here (process" in other.stderr
    with RunDirectory(tmp_path):
        pass


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    code = (
        "import os, signal; from pathlib import Path; from headway.runs.run_directory import RunDirectory\n"
        f"RunDirectory(Path({str(tmp_path)!r})).__enter__(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    with RunDirectory(tmp_path):
        pass


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output_dir .* cannot be written"), RunDirectory(tmp_path / "file" / "run"):
        pass


def test_the_written_configuration_is_the_same_configuration(tmp_path: Path) -> None:
    resolved = configuration(rewards={"sums": {"reward_fn": "numeric", "reward_args": {"take": "first"}}}, seed=7)
    with RunDirectory(tmp_path) as directory:
        directory.write_identity(resolved, {"pretrain": "model"})
    again = load_config(str(tmp_path / "config.yaml"))
    assert again.config == resolved.config and again.derived == resolved.derived
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["rewards"]["sums"]["reward_args"] == {"take": "first"}


def test_what_follows_from_an_override_follows_anew_when_a_run_goes_on(tmp_path: Path) -> None:
    begun = configuration(async_generation_ratio=1, prompt_length=16, response_length=4, output_dir="runs/here")
    with RunDirectory(tmp_path) as directory:
        directory.write_identity(begun, {"pretrain": "model"})
    overrides = ["async_generation_ratio=2", "response_length=8", "rollout_batch_size=4", "output_dir=runs/moved"]
    again = load_config(str(tmp_path / "config.yaml"), overrides)
    assert (again.derived.pipeline_depth, again.derived.sequence_length, again.derived.mini_batch_samples) == (
        2,
        24,
        16,
    )
    assert again.config.checkpoint_dir == "runs/moved/checkpoints"


@pytest.mark.parametrize(
    ("identity", "options", "key"),
    [
        ({"pretrain": "other", "data": "1"}, {}, "pretrain"),
        ({"pretrain": "model", "data": "2"}, {}, "data = 'the contents of the files changed'"),
        (
            {"pretrain": "model", "data": "2"},
            {"rewards": {"mine": {"reward_fn": "exact"}}},
            "data = 'rewards.mine.*exact",
        ),
        ({"pretrain": "model", "data": "2"}, {"seed": 8}, "seed: 42 .* 8.*other tasks|seed"),
        ({"pretrain": "model", "data": "1", "weights": "b"}, {}, "pretrain = 'its files changed'"),
        ({"pretrain": "model", "data": "1"}, {"num_return_sequences_in_group": 8}, "num_return_sequences_in_group"),
        ({"pretrain": "model", "data": "1"}, {"actor_train": {"model_args": {"lora_rank": 4}}}, "lora_rank"),
    ],
)
def test_a_run_does_not_become_another_one(
    tmp_path: Path, identity: dict[str, str], options: dict[str, Any], key: str
) -> None:
    with RunDirectory(tmp_path) as directory:
        directory.write_identity(configuration(), {"pretrain": "model", "data": "1", "weights": "a"})
        begin(tmp_path)
        before = (tmp_path / "config.yaml").read_text()
        for compare in (directory.write_identity, directory.compare_identity):
            with pytest.raises(ConfigError, match=f"{key}.*was begun with"):
                compare(configuration(**options), identity, {})
        assert (tmp_path / "config.yaml").read_text() == before
        directory.write_identity(configuration(max_steps=900), {"pretrain": "model", "data": "1", "weights": "a"})
    assert load_config(str(tmp_path / "config.yaml")).config.max_steps == 900


def test_samples_of_a_run_that_was_killed_after_its_last_checkpoint_get_their_end(tmp_path: Path) -> None:
    begin(tmp_path, trained=3)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.start_group(0, 0)
    ledger.start_sample("0.0", 0)
    ledger.flush()
    ledger.close()
    with RunDirectory(tmp_path) as directory:
        directory.save_open_samples()
        directory.save_open_samples()
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert (ledger.counts()["open"], ledger.counts()["saved"], ledger.audit()) == (0, 1, [])
    assert [group.open for group in ledger.restore(3).groups] == [("0.0",)], "more steps go on with it"
    ledger.close()


def test_a_model_is_known_by_its_weights_wherever_it_lies(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "transformer").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    for file in (model / "model.safetensors", model / "transformer" / "weights.safetensors"):
        file.write_bytes(bytes(3_000_000))
    known = hash_weights(model)
    (model / "config.json").write_text('{"note": "edited"}')
    moved = model.rename(tmp_path / "moved")
    assert hash_weights(moved) == known
    weights = moved / "transformer" / "weights.safetensors"
    for changed in (bytes(3_000_001), bytes(1_500_000) + b"x" + bytes(1_499_999), b"x" + bytes(2_999_999)):
        weights.write_bytes(changed)
        assert hash_weights(moved) != known
    assert hash_weights(weights), "a model may be one file"


def test_checkpoints_of_a_directory_that_cannot_be_written_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path, trained=3)
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    assert [version for version, _ in list_recorded_checkpoints(tmp_path / "ledger.sqlite")] == [3]
    assert sorted(tmp_path.iterdir()) == before, "reading leaves nothing there"


def test_a_page_whose_server_ends_is_served_again_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = tmp_path / "starts"
    server = tmp_path / "server"
    server.write_text(f"#!/bin/sh\necho x >> {starts}\n")
    server.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(server))

    async def visit() -> None:
        with DashboardLink(tmp_path) as link:
            host, port = link.address.removeprefix("http://").split(":")
            _, visitor = await asyncio.open_connection(host, int(port))  # which nobody accepts
            for _ in range(6000):
                if not link.address:
                    break
                await asyncio.sleep(0.01)
            visitor.close()

    asyncio.run(visit())
    assert starts.read_text().split() == ["x"] * 5


def test_a_full_disk_is_refused_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"key": "checkpoint_dir", "contents": "one checkpoint needs"}
    check_disk_space(tmp_path / "checkpoints", 1000, **options)
    with pytest.raises(ConfigError, match=r"GB free, and one checkpoint needs about \d+"):
        check_disk_space(tmp_path / "checkpoints", 10**18, **options)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 200_000))
    with pytest.raises(ConfigError, match=r"has 0\.20 MB free, and one checkpoint needs about 1\.00 MB"):
        check_disk_space(tmp_path / "checkpoints", 10**6, **options)


@pytest.mark.parametrize("torn", ["", '[7000000,"state","tr', "x" * 200_000])
def test_the_log_goes_on_where_a_killed_process_left_it(tmp_path: Path, torn: str) -> None:
    whole = "".join(
        encode_event(LoggedEvent(second, StateChange(who="train", old="idle", new="running"))) + "\n"
        for second in (1.0, 3.5)
    )
    with RunDirectory(tmp_path) as directory:
        assert directory.read_last_event_s() == 0.0
        log = tmp_path / LOG_FILE
        log.write_text(whole + torn)
        assert directory.read_last_event_s() == 3.5
        assert log.read_text() == whole
        assert len(list(read_events(log.open()))) == 2


def test_the_newest_checkpoint_is_the_one_that_the_ledger_names(tmp_path: Path) -> None:
    assert find_checkpoint_of_run(tmp_path) is None
    begin(tmp_path, trained=12)
    newest = tmp_path / "checkpoints" / "step-00000012"
    newest.mkdir(parents=True)
    (newest / "model.safetensors").write_bytes(b"weights")
    write_completion_mark(newest, version=12, kl={})
    assert find_checkpoint_of_run(tmp_path) == newest
    with RunDirectory(tmp_path) as directory:
        assert directory.started and directory.count_trained_steps() == 12


def test_a_damaged_checkpoint_is_passed_over_and_told(tmp_path: Path) -> None:
    told: list[str] = []
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for step in (4, 8):
        directory = tmp_path / "checkpoints" / f"step-{step:08d}"
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(b"weights")
        write_completion_mark(directory, version=step, kl={})
        ledger.checkpoint(step, f"checkpoints/{directory.name}")
    ledger.close()
    (directory / "model.safetensors").write_bytes(b"weight\0")
    assert find_checkpoint_of_run(tmp_path, told.append) == tmp_path / "checkpoints" / "step-00000004"
    assert len(told) == 1 and "model.safetensors is damaged: its checksum differs" in told[0]
    (tmp_path / "checkpoints" / "step-00000004" / "trainer.json").write_bytes(b"")
    with pytest.raises(HeadwayError, match=r"none of the checkpoints of .* can be read; the newest: .*step-00000008"):
        find_checkpoint_of_run(tmp_path)


@pytest.mark.parametrize("ledger", ["missing", "empty", "without a write-ahead log"])
def test_checkpoints_without_their_ledger_are_never_overwritten(tmp_path: Path, ledger: str) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-00000004"
    checkpoint.mkdir(parents=True)
    write_completion_mark(checkpoint, version=4, kl={})
    if ledger == "empty":
        (tmp_path / "ledger.sqlite").write_bytes(b"")
    elif ledger != "missing":
        Ledger(tmp_path / "ledger.sqlite").close()
    with RunDirectory(tmp_path) as directory:
        what = r"has checkpoints of a run, and .*ledger.sqlite is (missing|empty)"
        with pytest.raises(ConfigError, match=what) as told:
            directory.refuse_lost_ledger(tmp_path / "checkpoints")
        assert f"resume={checkpoint}" in str(told.value)
        directory.refuse_lost_ledger(tmp_path / "elsewhere")
        begin(tmp_path, trained=4)
        directory.refuse_lost_ledger(tmp_path / "checkpoints")


def test_a_checkpoint_of_another_run_can_be_a_beginning(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    with RunDirectory(tmp_path / "mine") as directory:
        with pytest.raises(ConfigError, match=r"resume = .*is no checkpoint"):
            directory.start_from_checkpoint(theirs)
        (theirs / "trainer.json").write_text('{"version": 5}')
        directory.start_from_checkpoint(theirs)
        assert directory.count_trained_steps() == 5
    assert find_checkpoint_of_run(tmp_path / "mine") == theirs.resolve()


def go_on(path: Path, options: dict[str, Any], contents: dict[str, str] | None = None) -> list[str]:
    with RunDirectory(path) as directory:
        directory.write_identity(configuration(**options), {"pretrain": "model", "data": "1"}, contents)
        return [str(change) for change in directory.changes]


def test_what_changed_since_the_last_start_is_told_value_by_value(tmp_path: Path) -> None:
    rate = {"actor_train": {"training_args": {"learning_rate": 1e-5}}}
    assert go_on(tmp_path, {"rewards": {"math": {}}}, {"the held-out data": "aaaa"}) == []
    begin(tmp_path)
    assert go_on(tmp_path, {"rewards": {"math": {}}}, {"the held-out data": "aaaa"}) == []
    told = go_on(tmp_path, {"rewards": {"math": {}}, "pg_variant": "tis", **rate}, {"the held-out data": "bbbb"})
    assert "actor_train.training_args.learning_rate: 1e-06 (the default) → 1e-05" in told
    assert "the held-out data: version aaaa → version bbbb" in told
    assert [line for line in told if line.startswith("pg_variant: ") and line.endswith(" → tis")]
    back = go_on(tmp_path, {"rewards": {"math": {}}}, {"the held-out data": "bbbb"})
    assert "actor_train.training_args.learning_rate: 1e-05 → 1e-06 (the default)" in back


@pytest.mark.parametrize(
    ("rewards", "contents", "told"),
    [
        ({"sums": {"reward_fn": "math"}}, {}, "rewards.sums.reward_fn = 'math': it was numeric in the run"),
        ({"sums": {"reward_fn": "numeric", "weight": 2.0}}, {}, "rewards.sums.weight = '2.0': it was 1.0 in the run"),
        ({"sums": {"reward_fn": "numeric"}, "x": {"reward_fn": "math"}}, {}, "rewards.x.reward_fn = 'math'"),
        ({"sums": {"reward_fn": "numeric"}}, {"rewards.sums.reward_fn, the code in a.py": "2"}, "the code in a.py"),
    ],
)
def test_another_reward_is_refused_unless_it_is_accepted_which_holds_once(
    tmp_path: Path, rewards: dict[str, Any], contents: dict[str, str], told: str
) -> None:
    code = {"rewards.sums.reward_fn, the code in a.py": "1"}
    go_on(tmp_path, {"rewards": {"sums": {"reward_fn": "numeric"}}}, code)
    begin(tmp_path)
    written = (tmp_path / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=re.escape(told)) as refused:
        go_on(tmp_path, {"rewards": rewards}, contents or code)
    assert "accept_changed_reward=true" in str(refused.value) and (tmp_path / "config.yaml").read_text() == written
    assert go_on(tmp_path, {"rewards": rewards, "accept_changed_reward": True}, contents or code)
    assert "accept_changed_reward" not in (tmp_path / "config.yaml").read_text()
    assert go_on(tmp_path, {"rewards": rewards}, contents or code) == []


def test_how_a_reward_is_run_may_change(tmp_path: Path) -> None:
    go_on(tmp_path, {"rewards": {"a": {"reward_fn": "ifeval"}}})
    begin(tmp_path)
    other = {"reward_fn": "ifeval", "reward_args": {"concurrency": 4}, "device_mapping": [0]}
    assert len(go_on(tmp_path, {"rewards": {"a": other}})) == 2


def test_the_code_of_a_reward_is_known_by_what_it_does_not_by_its_comments(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"

    def hashed(text: str) -> dict[str, str]:
        file.write_text(text)
        return hash_reward_code(configuration(rewards={"mine": {"reward_fn": f"{file}:f"}, "math": {}}))

    first = hashed("def f(text, row):\n    return 1.0\n")
    assert list(first) == ["rewards.mine.reward_fn, the code in mine.py"]
    assert hashed("# one\ndef f(text, row):  # more\n    return 1.0\n") == first
    assert hashed("def f(text, row):\n    return 2.0\n") != first
