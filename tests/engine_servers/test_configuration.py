"""What a configuration says about servers, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.config import ResolvedConfig, load_config
from headway.engines.servers.server_dialect import ServerDialect
from headway.errors import ConfigError
from headway.launch.inference_servers import ServerOptions, make_server_command
from headway.placement.component_places import ComponentPlace
from headway.placement.server_requirements import check_server_requirements, check_shared_gpu_memory
from headway.weights.transports import TransportPlan

pytest.importorskip("aiohttp")

from headway.engines.servers.sglang_dialect import SglangDialect
from headway.engines.servers.vllm_dialect import _WORKER_PATH as WORKER_PATH
from headway.engines.servers.vllm_dialect import VllmDialect

URL = "http://127.0.0.1:8000"
BASE = "actor_infer.strategy_args"


def given(name: str | None = "vllm", role: str = "actor_infer", top: Any = None, **settings: Any) -> ResolvedConfig:
    words: dict[str, Any] = {f"{role}.strategy_args.strategy_config.{key}": value for key, value in settings.items()}
    if name is not None:
        words[f"{role}.strategy_args.strategy_name"] = name
    return load_config(None, words | (top or {}))


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_our_own_engine_stands_in_unless_it_is_said_where_the_server_is(name: str) -> None:
    plain = given(name)
    assert plain.derived.strategies["actor_infer"] == "native"
    assert any(f"{name} is not installed for this interpreter, native is used" in note for note in plain.notes)
    with pytest.raises(ConfigError, match="is not installed for this interpreter, and strict is set"):
        given(name, top={"strict": True})
    for settings in ({"url": URL}, {"url": [URL, "http://other:8000"]}, {"launch": True}):
        served = given(name, **settings)
        assert served.derived.strategies["actor_infer"] == name
        assert not [note for note in served.notes if BASE in note]
        assert load_config(served.changed()).derived.strategies["actor_infer"] == name, "children read it again"


def has_version(directory: Path, version: str) -> str:
    """An interpreter for which this version is installed."""
    python = directory / f"python-{version}"
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    return str(python)


def test_a_server_that_is_installed_is_used_by_its_name(tmp_path: Path) -> None:
    for name, version, option in (("vllm", "0.26.0", "in_process"), ("sglang", "0.5.16", "launch")):
        resolved = given(name, server_python=has_version(tmp_path, version), top={"strict": True})
        config = resolved.config.actor_infer.strategy_args.strategy_config
        assert resolved.derived.strategies["actor_infer"] == name and getattr(config, option)
        assert not [note for note in resolved.notes if name in note]
        check_server_requirements(resolved)
    newer = given("vllm", server_python=has_version(tmp_path, "0.40.1")).notes
    assert [note for note in newer if "vllm 0.40.1 is newer than what was tried (vllm 0.26 to 0.32)" in note]
    with pytest.raises(ConfigError, match=r"vllm 0.25.0 is too old: 0.26 is needed"):
        given("vllm", server_python=has_version(tmp_path, "0.25.0"))
    images = given("vllm", server_python=has_version(tmp_path, "0.32.0"), top={"denoising.algorithm": "flow_grpo"})
    assert images.derived.strategies["actor_infer"] == "native"
    assert [note for note in images.notes if "vllm makes no images, native is used instead" in note]


@pytest.mark.parametrize(
    ("name", "role", "settings", "said"),
    [
        ("native", "actor_infer", {"url": URL}, "this is no server"),
        (None, "actor_infer", {"launch": True}, "this is no server"),
        ("fsdp2_train", "actor_train", {"url": URL}, "unknown key"),
        ("vllm", "actor_infer", {"url": URL, "launch": True}, "either runs already or is started by us"),
        ("vllm", "actor_infer", {"url": "127.0.0.1:8000"}, "no address of a server"),
        ("vllm", "actor_infer", {"url": "http://host:port"}, "no address of a server"),
        ("vllm", "actor_infer", {"url": [URL, URL]}, "given twice"),
        ("vllm", "actor_infer", {"url": URL, "server_args": {"seed": 1}}, "for servers that we start"),
        ("native", "actor_infer", {"server_python": "python3"}, "for servers that we start"),
    ],
)
def test_mistakes_are_refused_with_the_key(name: str | None, role: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        given(name, role, **settings)
    assert "strategy_args" in str(refused.value)


def test_pictures_are_not_served() -> None:
    words = {f"{BASE}.strategy_name": "vllm", f"{BASE}.strategy_config.url": URL, "denoising.algorithm": "flow_grpo"}
    with pytest.raises(ConfigError, match="serves no images"):
        load_config(None, words)


def test_sglang_with_a_truncated_distribution_is_noted() -> None:
    words = {f"{BASE}.strategy_name": "sglang", f"{BASE}.strategy_config.url": URL}
    assert not [note for note in load_config(None, words).notes if "SGLang" in note]
    noted = load_config(None, {**words, "actor_infer.generating_args.top_p": 0.9}).notes
    assert [note for note in noted if "before top_p" in note]


def test_memory_of_the_trainer_is_opened_only_by_servers_on_its_gpus() -> None:
    places = {
        "trainer": ComponentPlace(name="trainer", devices=(0,), cards=(0,)),
        "engine/0": ComponentPlace(name="engine/0", devices=(0,), cards=(0,)),
    }
    by_ipc = {"weight_transfer.transport": "cuda_ipc", "processes": True}
    check_shared_gpu_memory(given(launch=True, top=by_ipc), places)
    with pytest.raises(ConfigError, match="loads files"):
        check_shared_gpu_memory(
            given(launch=True, tensor_model_parallel_size=2, top={"actor_infer.device_mapping": [0, 1]}), places
        )
    places["engine/0"] = ComponentPlace(name="engine/0", devices=(1,), cards=(1,))
    with pytest.raises(ConfigError, match=r"cuda_ipc.*engine/0 is on no GPU of the trainer"):
        check_shared_gpu_memory(given(launch=True), places)
    check_shared_gpu_memory(given("native"), places)
    on_card = ServerOptions(
        resolved=given(launch=True),
        model=Path("/model"),
        device="cuda",
        replicas=1,
        slots=8,
        transport=TransportPlan(kind="cuda_ipc"),
    )
    line, environment = make_server_command(on_card, VllmDialect(launched=True), 0, 9)
    assert '{"backend": "ipc"}' in line and environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
    assert "headway_ipc_worker.IpcExtension" in line


def test_a_worker_of_vllm_imports_its_ipc_back_end_where_ray_is_not_installed(tmp_path: Path) -> None:
    backend = tmp_path / "vllm" / "distributed" / "weight_transfer" / "ipc_engine.py"
    backend.parent.mkdir(parents=True)
    backend.write_text("import ray\nray_file = getattr(ray, '__file__', None)\n")
    code = (
        "import sys, headway_ipc_worker, vllm.distributed.weight_transfer.ipc_engine as backend;"
        "print(backend.ray_file, 'ray' in sys.modules, headway_ipc_worker.IpcExtension.headway_load.__name__)"
    )
    command, path = [sys.executable, "-S", "-c", code], os.pathsep.join([str(tmp_path), str(WORKER_PATH)])
    said = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["None", "False", "headway_load"]
    (tmp_path / "ray.py").touch()
    said = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, check=True).stdout
    assert said.split() == [str(tmp_path / "ray.py"), "True", "headway_load"]


def test_fewer_bits_are_noted_and_adapters_beside_the_policy_are_refused() -> None:
    noted = given("vllm", launch=True, server_args={"quantization": "fp8"}).notes
    assert [note for note in noted if "computes in fewer bits" in note]
    with pytest.raises(ConfigError, match="a run serves one policy"):
        given("vllm", launch=True, server_args={"enable-lora": True})


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_servers_recompute_whatever_is_asked_for_and_say_so(name: str) -> None:
    assert not [note for note in given(name, url=URL).notes if "inflight_update" in note]
    quiet = given(name, url=URL, top={"inflight_update": "recompute"}).notes
    assert not [note for note in quiet if "inflight_update" in note]
    assert [
        note for note in given(name, url=URL, top={"inflight_update": "keep"}).notes if f"{name} recomputes" in note
    ]


def test_a_broadcast_does_not_reach_servers_over_http_and_a_line_says_so() -> None:
    wanted = {"weight_transfer.transport": "broadcast"}
    assert [note for note in given(url=URL, top=wanted).notes if "which load files" in note]
    assert not [note for note in given(in_process=True, top=wanted).notes if "which load files" in note]


def test_a_server_cannot_be_started_without_its_package() -> None:
    with pytest.raises(ConfigError, match="is no program"):
        check_server_requirements(given(launch=True, server_python="/nowhere/bin/python"))
    for settings in ({}, {"server_python": sys.executable}):
        with pytest.raises(ConfigError, match=r"sglang is not installed for .*server_python"):
            check_server_requirements(given("sglang", launch=True, **settings))
    check_server_requirements(given(url=URL))
    check_server_requirements(given())


def test_a_temperature_that_vllm_refuses_is_refused_before_anything_starts() -> None:
    for role in ("actor_infer", "validation"):
        hot = {f"{role}.generating_args.temperature": 2.5}
        with pytest.raises(ConfigError, match=f"{role}.generating_args.temperature = 2.5"):
            check_server_requirements(given(url=URL, top=hot))
        check_server_requirements(given("sglang", url=URL, top=hot))


@pytest.mark.parametrize(
    ("dialect", "wanted"),
    [
        (
            VllmDialect(),
            ["--logprobs-mode processed_logprobs", "--generation-config vllm", "--max-num-seqs 8", "--port 9"],
        ),
        (SglangDialect(), ["--sampling-defaults openai", "--max-running-requests 8", "--port 9"]),
    ],
)
def test_a_server_is_started_with_what_a_run_needs(dialect: ServerDialect, wanted: list[str]) -> None:
    resolved = given(dialect.name, launch=True, server_python="/venv/bin/python", server_args={"enforce_eager": True})
    servers = ServerOptions(resolved=resolved, model=Path("/model"), device="cpu", replicas=1, slots=8)
    line, found = make_server_command(servers, dialect, 0, 9)
    environment = dict(found)
    assert line[:2] == ["/venv/bin/python", "-m"]
    text = " ".join(line)
    assert all(part in text for part in [*wanted, "/model", "--dtype float32", "--enforce-eager"]), text
    if dialect.name == "vllm":
        path = environment.pop("PYTHONPATH").partition(os.pathsep)[0]
        assert (
            Path(path) / "headway_worker.py"
        ).exists() and "--worker-extension-cls headway_worker.WeightReloadExtension" in text
        assert environment == {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        assert "--kv-cache-memory-bytes" not in text, "nobody knows what this model needs"


def test_a_server_on_a_cpu_gets_its_threads_and_the_cache_that_its_slots_need(tmp_path: Path) -> None:
    config = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30}
    (tmp_path / "config.json").write_text(json.dumps(config))
    resolved = given(launch=True, top={"prompt_length": 200, "response_length": 56})
    line, environment = make_server_command(
        ServerOptions(resolved=resolved, model=tmp_path, device="cpu", replicas=1, slots=8, threads=3),
        VllmDialect(),
        0,
        9,
    )
    token = 2 * 4 * 30 * 3 * 64  # keys and values, four bytes, layers, heads, width of a head
    assert line[line.index("--kv-cache-memory-bytes") + 1] == str(token * 128 * 2 * (8 * 2 + 1))
    assert environment["OMP_NUM_THREADS"] == "3" and environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    line, environment = make_server_command(
        ServerOptions(resolved=resolved, model=tmp_path, device="cuda", replicas=1, slots=8, threads=3),
        VllmDialect(),
        0,
        9,
    )
    assert "--kv-cache-memory-bytes" not in line and "OMP_NUM_THREADS" not in environment
