"""Processes under other interpreters, and families of processes that end together."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headway.config import ResolvedConfig, load_config
from headway.errors import ConfigError
from headway.launch.in_process_engines import make_in_process_spec
from headway.launch.inference_servers import ServerOptions
from headway.placement.server_requirements import check_server_requirements
from headway.processes.base import ChildSpec
from headway.processes.child_process import ChildProcess, spawn_with_interpreter

BASE = "actor_infer.strategy_args"


def given(**settings: Any) -> ResolvedConfig:
    words = {f"{BASE}.strategy_config.{key}": value for key, value in settings.items()}
    return load_config(None, {f"{BASE}.strategy_name": "vllm", f"{BASE}.strategy_config.in_process": True, **words})


def test_a_child_under_another_interpreter_finds_this_package_and_nothing_else_of_ours() -> None:
    async def started(target: str) -> None:
        child = await ChildProcess.start(
            ChildSpec(name="engine/0", target=target), 60.0, spawn=spawn_with_interpreter(sys.executable)
        )
        await child.close()

    asyncio.run(started("builtins:dict"))
    with pytest.raises(ConfigError, match="No module named 'tests'"):
        asyncio.run(started("tests.engine_vllm.fake_core:engine"))


LEADER = """
import json, os, subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory
from headway.processes.parent_watchdog import tie_process_group_to_parent

tie_process_group_to_parent()
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print(json.dumps([other.pid, SharedMemory(create=True, size=64).name]), flush=True)
time.sleep(100)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc and /dev/shm")
def test_a_family_ends_with_its_leader_and_what_it_shared_is_taken_away() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LEADER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as leader:
        assert leader.stdout is not None
        other, segment = json.loads(leader.stdout.readline())
        there = [Path(f"/proc/{other}"), Path(f"/dev/shm/{segment}")]
        assert all(path.exists() for path in there)
        leader.kill()
        deadline = time.monotonic() + 20
        while any(path.exists() for path in there):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_an_engine_is_started_with_what_a_server_would_be(tmp_path: Path) -> None:
    config = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    resolved = given(server_python="/venv/bin/python", server_args={"enforce_eager": True})
    servers = ServerOptions(resolved=resolved, model=tmp_path, device="cpu", replicas=1, slots=8, threads=3)
    spec = make_in_process_spec(servers, 0, [5])
    assert spec.args["launch"]["slots"] == 8 and spec.args["launch"]["extra"] == {"enforce_eager": True}
    assert spec.args["ends"] == [5] and json.loads(json.dumps(dict(spec.args))) == spec.args
    assert spec.env["OMP_NUM_THREADS"] == "3" and spec.env["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_what_cannot_be_run_inside_is_refused_before_anything_starts(tmp_path: Path) -> None:
    assert given().derived.strategies["actor_infer"] == "vllm"
    with pytest.raises(ConfigError, match="only vllm runs in our processes"):
        load_config(None, {f"{BASE}.strategy_name": "sglang", f"{BASE}.strategy_config.in_process": True})
    with pytest.raises(ConfigError, match=r"in one way.*launch or in_process"):
        given(launch=True)
    with pytest.raises(ConfigError, match=r"in_process = True: vllm is not installed for"):
        check_server_requirements(given(server_python=sys.executable))
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\ncase "$2" in *version_info*) exit 1;; esac\n')
    old.chmod(0o755)
    with pytest.raises(ConfigError, match=r"needs Python 3.11"):
        check_server_requirements(given(server_python=str(old)))
    old.write_text("#!/bin/sh\nexit 0\n")
    check_server_requirements(given(server_python=str(old)))
    with pytest.raises(ConfigError, match="processes = False"):
        check_server_requirements(load_config({**given(server_python=str(old)).changed(), "processes": False}))
