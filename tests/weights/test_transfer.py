"""Ways of weights in whole runs: the same answers by each of them, engines that are killed, and what is refused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from headway.config import ResolvedConfig, load_config
from headway.errors import ConfigError
from headway.placement.placement import Placement, make_visible_devices_env, plan_placement
from headway.runs.run_directory import check_disk_space
from headway.weights.delta_transport import DeltaTransport
from headway.weights.transports import (
    TransportPlan,
    choose_bucket_mb,
    make_transport,
    plan_transport,
    select_transport_kind,
)
from tests.runs.factory import Runs, audit, count, events, parts

SMALL_BUCKETS = {"weight_transfer.bucket_mb": 0.05, "processes": True}
DISK = {"weight_transfer.transport": "disk"}
BROADCAST = {"weight_transfer.transport": "broadcast"}
DELTA = {"weight_transfer.delta": True}
LORA = {"actor_train.model_args.lora_rank": 2, "actor_train.model_args.lora_target": "[q_proj]"}
SLOW = {"reliability.transfer_timeout_s": 12, "reliability.restart_backoff_s": 0}
"""A broadcast to somebody who is dead is given up after a second."""


def answers(directory: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    return sorted(rows, key=json.dumps)


def test_every_way_brings_the_same_weights(runs: Runs, tmp_path: Path) -> None:
    """Without running ahead a run is what its seed and its weights make it."""
    ways = {"memory": {}, "disk": DISK, "broadcast": BROADCAST, "delta": {**DISK, **DELTA}}
    options = {"async_generation_ratio": 0, "max_steps": 3, "save_steps": 0, **SMALL_BUCKETS, **LORA}
    started = {name: runs.train(tmp_path / name, **options, **way) for name, way in ways.items()}
    for run in started.values():
        assert run.end() == 0, run.text
    wanted = answers(tmp_path / "memory")
    assert len(wanted) == 3 * 6 and len({row["answer"] for row in wanted}) > 3
    for name in ways:
        assert answers(tmp_path / name) == wanted, name
    assert len(list((tmp_path / "disk" / "weights").iterdir())) == 3, "the newest versions stay"


@pytest.mark.parametrize("way", [{**DISK, **DELTA, **LORA}, BROADCAST], ids=["disk, delta", "broadcast"])
def test_an_engine_that_is_killed_is_given_the_newest_weights_and_the_run_goes_on_later(
    runs: Runs, tmp_path: Path, way: dict[str, Any]
) -> None:
    options = {**SMALL_BUCKETS, **SLOW, **way, "save_steps": 2, "response_length": 24}
    run = runs.train(tmp_path / "run", max_steps=8, **options)
    assert run.until(lambda: count(run.directory, "step.end") >= 2), run.text
    os.kill(parts(run)["engine-0"], signal.SIGKILL)
    assert run.end() == 0, run.text
    (back,) = [event for event in events(run.directory, "up") if event.who == "engine/0" and event.data["version"] > 0]
    assert [event for event in events(run.directory, "down") if event.time_s < back.time_s]
    again = runs.train(run.directory, max_steps=10, **options)
    assert again.end() == 0, again.text
    assert [event.data["trained"] for event in events(run.directory, "step.end")] == list(range(1, 11))
    audit(run.directory)


def test_a_directory_that_cannot_be_written_is_refused_before_anything_starts(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = runs.train(tmp_path / "run", **DISK, processes=True, **{"weight_transfer.directory": tmp_path / "file"})
    assert run.end() == 2, run.text
    assert "weight_transfer.directory" in run.text and "cannot be written" in run.text
    assert not (run.directory / "ledger.sqlite").exists()
    with pytest.raises(ConfigError, match="versions need about"):
        check_disk_space(tmp_path, 1 << 60, key="weight_transfer.directory", contents="3 versions need")


def of(**options: Any) -> ResolvedConfig:
    return load_config({"device": "cpu", **{f"weight_transfer.{key}": value for key, value in options.items()}})


@pytest.mark.parametrize(
    ("options", "key", "problem"),
    [
        ({"weight_transfer.transport": "disk", "processes": False}, "transport", "processes is false"),
        ({"weight_transfer.delta": True, "processes": False}, "delta", "processes is false"),
        ({"weight_transfer.delta": True, "weight_transfer.transport": "cuda_ipc"}, "delta", "cuda_ipc"),
        ({"weight_transfer.directory": "/tmp"}, "directory", "only by transport: disk"),
        ({"weight_transfer.address": "h", "weight_transfer.transport": "disk"}, "address", "only by transport: broad"),
        ({"weight_transfer.transport": "cuda_ipc"}, "transport", "needs a GPU"),
        ({"weight_transfer.transport": "broadcast", "weight_transfer.address": "h:x"}, "address", "no address"),
        ({"weight_transfer.backend": "nccl"}, "backend", "only by transport: broadcast"),
        ({"weight_transfer.timeout_s": 5}, "timeout_s", "only by transport: broadcast"),
        ({"weight_transfer.transport": "broadcast", "weight_transfer.backend": "nccl"}, "backend", "needs GPUs"),
    ],
)
def test_what_contradicts_itself_is_refused(options: dict[str, Any], key: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        plan_placement(load_config({"device": "cpu", **options}))
    assert f"weight_transfer.{key}" in str(refused.value)


def test_nccl_is_planned_where_the_trainer_and_every_engine_have_a_gpu_of_their_own() -> None:
    nccl = {**BROADCAST, "weight_transfer.backend": "nccl", "actor_train.device_mapping": [0]}
    apart = load_config({**nccl, "actor_infer.device_mapping": [1, 2]})
    assert plan_transport(apart, device="cuda", processes=True).backend == "nccl"
    shared = load_config({**nccl, "actor_infer.device_mapping": [0], "hybrid_engine": True})
    with pytest.raises(ConfigError, match="device 0 is the trainer's and an engine's"):
        plan_transport(shared, device="cuda", processes=True)
    ranks = "actor_train.strategy_args.strategy_config.distributed_backend"
    with pytest.raises(ConfigError, match=f"{ranks}.*needs GPUs"):
        plan_placement(load_config({"device": "cpu", "processes": True, ranks: "nccl"}))


def test_servers_are_given_whole_versions() -> None:
    base = "actor_infer.strategy_args"
    server = {f"{base}.strategy_name": "vllm", f"{base}.strategy_config.url": ["http://127.0.0.1:1"]}
    with pytest.raises(ConfigError, match="director"):
        load_config({**server, **DELTA})
    for options in (BROADCAST, DISK):
        assert load_config({**server, **options}).config.weight_transfer.transport in ("broadcast", "disk")


def test_threads_of_one_process_hand_weights_over() -> None:
    assert select_transport_kind(of(), device="cuda", processes=False) == "in_process"
    assert select_transport_kind(of(), device="cuda", processes=True) == "shared_memory"
    for options in ({"transport": "broadcast"}, {"delta": True}):
        with pytest.raises(ConfigError, match="handed over"):
            select_transport_kind(of(**options), device="cuda", processes=False)


def test_the_plan_says_what_both_ends_need(tmp_path: Path) -> None:
    plan = plan_placement(of(transport="broadcast", address="10.0.0.1")).transport
    assert plan.rendezvous.startswith("10.0.0.1:") and plan == TransportPlan(**json.loads(json.dumps(plan.to_json())))
    assert plan_placement(of(transport="broadcast", address="h:70")).transport.rendezvous == "h:70"
    assert plan_placement(of(transport="disk", directory=str(tmp_path))).transport.directory == str(tmp_path)
    assert plan_placement(of(transport="disk")).transport.directory.endswith("/output/weights")
    assert plan_placement(of(transport="disk", delta=True)).without_trainer().transport == TransportPlan(
        kind="shared_memory"
    )
    assert isinstance(make_transport(of(), TransportPlan(kind="disk", delta=True)), DeltaTransport)
    assert [choose_bucket_mb(of(**one)) for one in ({}, {"delta": True}, {"bucket_mb": 3})] == [128, 16, 3]


def test_who_reads_from_the_trainers_gpu_sees_it_after_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made = Placement(
        device="cuda",
        processes=True,
        train_threads=1,
        infer_threads=1,
        replicas=1,
        gpus={"trainer": 2, "engine/0": 3},
        transport=TransportPlan(kind="cuda_ipc"),
    )
    seen = [make_visible_devices_env(made, name)["CUDA_VISIBLE_DEVICES"] for name in ("trainer", "engine/0")]
    assert seen == ["2", "3,2"]
