"""`headway train` with its rollout on a server that serves the weights it is given."""

from __future__ import annotations

import json
import socket
import threading
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from tests.runs.factory import Runs, audit, events


def lottery(text: str, task: Any) -> float:
    """Other answers have other rewards, so that every group has something to say."""
    return zlib.crc32(text.encode()) / 2**32


@contextmanager
def served(runs: Runs, kind: str, seen: dict[str, Any]) -> Iterator[str]:
    """The address of a fake server with the model of `runs`; afterwards `seen` has what it has seen."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    target, url = "tests.engine_servers.fake_servers:serve_model", f"http://127.0.0.1:{port}"
    server = threading.Thread(target=runs.template.call, args=(target, kind, port, str(runs.model)))
    server.start()
    try:
        yield url
    finally:
        with urllib.request.urlopen(urllib.request.Request(f"{url}/end", b"{}")) as answer:
            seen |= json.load(answer)
        server.join(10.0)


@pytest.mark.skipif(find_spec("torch") is None, reason="trains")
@pytest.mark.parametrize("kind", ["vllm", pytest.param("sglang", marks=pytest.mark.soak)])
def test_a_run_trains_on_what_a_server_makes(runs: Runs, tmp_path: Path, kind: str) -> None:
    strategy, seen = "actor_infer.strategy_args", dict[str, Any]()
    with served(runs, kind, seen) as url:
        words = (
            f"{strategy}.strategy_name={kind}",
            f"{strategy}.strategy_config.url={url}",
            "actor_infer.generating_args.temperature=0.7",
            f"rewards.arithmetic.reward_fn={Path(__file__)}:lottery",
            "async_generation_ratio=0",
            "filter_zero_variance=true",  # every group that is trained has a gradient
            "max_steps=2",
            f"processes={kind == 'vllm'}".lower(),
        )
        run = runs.train(tmp_path / "run", *words)
        code = run.end()
    assert code == 0, run.text
    audit(tmp_path / "run")
    assert seen == {"loads": ["v0", "v1", "v2"], "running": 0, "stale": 0}
    steps = [event.data for event in events(tmp_path / "run", "step.end")]
    assert len(steps) == 2 and all(step["train/grad_norm"] > 0 for step in steps)
    for step in steps:  # synchronous: the server's log-probabilities are the trainer's own
        assert step["train/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        assert step["train/ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert not (tmp_path / "run" / "served" / "engine-0").exists()
