"""The plans of files that people have, for three machines, as a table to be read.

`tests/data/plans.txt` holds the table; the environment variable HEADWAY_WRITE_PLANS=1 lets this file write it again.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headway.config import load_config
from headway.errors import ConfigError
from headway.placement.machine import Machine
from headway.placement.placement import plan_on_machine
from headway.placement.plan_table import describe_plan

DATA = Path(__file__).parents[1] / "data"
ROLL = Path(__file__).parents[3] / "shared" / "peers" / "roll"
MACHINES = {
    "8 × 80": Machine(cores=64, gpus=8, gpu_memory_gib=80),
    "2 nodes of 8 × 80": Machine(cores=128, gpus=8, gpu_memory_gib=80, nodes=2),
    "1 × 141": Machine(cores=64, gpus=1, gpu_memory_gib=141),
}
SEEDS = ("frozen_lake_async", "rlvr_async", "webshop_async")
PEERS = (
    "qwen2.5-0.5B-agentic/agent_val_frozen_lake.yaml",
    "qwen2.5-0.5B-agentic/agentic_val_sokoban_native.yaml",
    "qwen2.5-7B-rlvr_megatron/rlvr_config.yaml",
    "qwen2.5-7B-rlvr_megatron/rlvr_config_lora.yaml",
    "qwen2.5-7B-rlvr_megatron/rlvr_qwen2.5_7B_seperate.yaml",
    "qwen3-8B-rlvr_fsdp2/rlvr_config.yaml",
    "qwen3-30BA3B-rlvr_megatron/rlvr_config_amd.yaml",
    "qwen3-235BA22B-rlvr_megatron/rlvr_config_140GB.yaml",
)


def plan_file(name: str, path: Path) -> str:
    """Return the plans of one file; what does not fit is the line that a user reads."""
    lines = [f"== {name}"]
    for machine in MACHINES.values():
        resolved = load_config(path, ["cluster.kind=ray"] if machine.nodes > 1 else [])
        try:
            lines += describe_plan(resolved, plan_on_machine(resolved, machine))
        except ConfigError as error:
            lines += [f"{machine.gpus * machine.nodes} × {machine.gpu_memory_gib:g} GiB: {error}"]
        lines.append("")
    return "\n".join(lines)


def read_golden() -> dict[str, str]:
    parts = (DATA / "plans.txt").read_text(encoding="utf-8").split("== ")[1:]
    return {part.splitlines()[0]: f"== {part}".rstrip() for part in parts}


def list_files() -> dict[str, Path]:
    return {name: DATA / "configs" / f"{name}.yaml" for name in SEEDS} | {name: ROLL / name for name in PEERS}


@pytest.mark.parametrize("name", list_files())
def test_plans_are_as_written_down(name: str) -> None:
    path = list_files()[name]
    if not path.exists():
        pytest.skip("the files of other projects are not here")
    assert plan_file(name, path).rstrip() == read_golden()[name]


@pytest.mark.skipif("HEADWAY_WRITE_PLANS" not in os.environ, reason="writes the table")
def test_write_the_table() -> None:
    parts = [plan_file(name, path) for name, path in list_files().items()]
    (DATA / "plans.txt").write_text("\n".join(parts), encoding="utf-8")
