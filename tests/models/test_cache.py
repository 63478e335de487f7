"""Whole or not at all, and made once."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.models.model_cache import cache_root, make_once

SPAWN = multiprocessing.get_context("spawn")


def write(directory: Path) -> None:
    (directory / "content").write_text("whole")


def write_and_count(directory: Path) -> None:
    with (directory.parent / "count").open("a") as file:
        file.write("x")
    write(directory)


def die_in_the_middle(directory: Path) -> None:
    (directory / "content").write_text("ha")
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    for _ in range(2):
        assert make_once(tmp_path, "a", write_and_count) == (tmp_path / "a").resolve()
    assert (tmp_path / "count").read_text() == "x"


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        write(directory)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        make_once(tmp_path, "a", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["a.lock"]
    assert (make_once(tmp_path, "a", write) / "content").read_text() == "whole"


def test_a_kill_in_the_middle_leaves_nothing_half_made(tmp_path: Path) -> None:
    killed = SPAWN.Process(target=make_once, args=(tmp_path, "a", die_in_the_middle))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert not (tmp_path / "a").exists()
    assert (make_once(tmp_path, "a", write) / "content").read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.lock"]


def test_two_processes_at_once_make_it_once(tmp_path: Path) -> None:
    both = [SPAWN.Process(target=make_once, args=(tmp_path, "a", write_and_count)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert (tmp_path / "count").read_text() == "x"
    assert (tmp_path / "a" / "content").read_text() == "whole"


def test_a_cache_that_cannot_be_written_names_the_variable_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="HEADWAY_CACHE"):
        make_once(tmp_path / "file" / "models", "a", write)


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("HEADWAY_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "headway"
