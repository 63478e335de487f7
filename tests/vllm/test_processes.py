"""Real servers of our own: how they fail at the start, and that they end with us. How they are missed: the contract."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from headway.engines.servers.server_engine import ServerEngine
from headway.engines.servers.vllm_dialect import VllmDialect
from headway.errors import ConfigError, EngineCrashed
from tests.engines import factory
from tests.vllm.server_pool import PYTHON, SETTINGS, SHAPE, ServerPool, children, family, gone, owned, save


def refused(place: ServerPool, tmp_path: Path, model: Path, **args: object) -> str:
    """What is said about a server that cannot be used."""
    said = ""

    async def scenario() -> None:
        nonlocal said
        server = owned("engine/9", model, tmp_path / "server.log", **args)
        engine = ServerEngine("engine/9", server, VllmDialect(launched=True), SETTINGS, root=tmp_path / "served")
        try:
            await engine.start()
        except (EngineCrashed, ConfigError) as error:
            said = str(error)
        finally:
            await engine.close()

    place.run(scenario())
    return said


def test_an_option_that_vllm_does_not_know_is_shown_as_it_says_it(place: ServerPool, tmp_path: Path) -> None:
    said = refused(place, tmp_path, place.model, nonsense=3)
    assert "exit code 2" in said and "unrecognized arguments: --nonsense" in said


def test_a_server_that_dies_while_it_loads_says_why(place: ServerPool, tmp_path: Path) -> None:
    model = save(factory.counting_model(**SHAPE), tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"no weights at all")
    said = refused(place, tmp_path, model)
    assert "exit code 1" in said and "SafetensorError: Error while deserializing header" in said


def test_a_server_with_log_probabilities_before_the_temperature_is_refused(place: ServerPool, tmp_path: Path) -> None:
    model = save(place.random, tmp_path / "model")
    said = refused(place, tmp_path, model, **{"logprobs-mode": "raw_logprobs"})
    assert "before the temperature" in said


PARENT = """
import asyncio, sys, time
from pathlib import Path
from tests.vllm.server_pool import SETTINGS, VllmDialect, ServerEngine, owned

async def main():
    server = owned("engine/0", Path(sys.argv[1]))
    engine = ServerEngine("engine/0", server, VllmDialect(launched=True), SETTINGS, root=Path(sys.argv[2]))
    await engine.start()
    print(server.pid, flush=True)
    time.sleep(1000)

asyncio.run(main())
"""


def test_a_server_ends_with_us_and_all_its_children_do_when_we_are_killed(place: ServerPool, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HEADWAY_VLLM": PYTHON}
    line = [sys.executable, "-c", PARENT, str(place.model), str(tmp_path)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        guard = int(parent.stdout.readline())
        everybody = family(guard)
        assert len(everybody) >= 3 and children(guard), "guard, server, engine core"
        parent.kill()
    assert gone(everybody)
