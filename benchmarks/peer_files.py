"""Do files of other projects train here? Some of them, with nothing changed but model, data, sizes and devices.

    python benchmarks/peer_files.py --peers ../shared/peers               # all of them, three steps each, on the CPU
    python benchmarks/peer_files.py --peers ../shared/peers --only roll-rlvr --model tiny-sums

Each is `headway train` with the file, or the words of the command line, as its project ships them, and the overrides
that the functions below list. Data are made here, in the columns that the projects' own preparation writes. A row says
how many steps were trained, how many samples and actions, and the mean reward of each step; `--out` appends it as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.monitor.event_files import read_event_log

ROOT = Path(__file__).parents[1]
STEPS = 3
ROLL_RLVR = "roll/qwen2.5-7B-rlvr_megatron/rlvr_config_async.yaml"
ROLL_LAKE = "roll/qwen2.5-0.5B-agentic/agent_val_frozen_lake_async.yaml"
VERL_GRPO = "examples/grpo_trainer/run_qwen2-7b_math.sh"
VERL_ONE_STEP = "verl/experimental/one_step_off_policy/shell/grpo_0.6b_gsm8k_fsdp2_sglang_2_6.sh"
VERL_TOOLS = "examples/sglang_multiturn/run_qwen2.5-3b_gsm8k_multiturn.sh"
VERL_TOKEN_BASELINE = "examples/otb_trainer/run_qwen2_5-7b.sh"
VERL_REMAX = "examples/remax_trainer/run_qwen2.5-3b_seq_balance.sh"
GERL = "examples/flowgrpo_trainer/run_sd3_fast_1p.sh"


def write_roll_data(folder: Path) -> Path:
    """Rows as ROLL's `math_deepmath_deal.jsonl` has them."""
    path = folder / "math_deepmath_deal.jsonl"
    rows = [
        {
            "id": str(number),
            "messages": json.dumps([{"role": "user", "content": f"What is {number} + {number % 7}?"}]),
            "ground_truth": str(number + number % 7),
            "tag": "deepmath_103k",
            "difficulty": 0.5,
        }
        for number in range(64)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_verl_data(folder: Path) -> Path:
    """Rows as verl's preparation of GSM8K writes them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "gsm8k.parquet"
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"Tom has {number} apples and buys {number % 5}. How many?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number + number % 5)},
            "extra_info": {"split": "train", "index": number},
        }
        for number in range(64)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_gerl_data(folder: Path) -> Path:
    """Lines as GeRL's data for OCR, as short as the prompts of the built-in model are: the text alone."""
    path = folder / "ocr.txt"
    path.write_text("".join(f"{number * 271:04d}\n" for number in range(32)), encoding="utf-8")
    return path


def roll_rlvr(model: str, folder: Path) -> list[str]:
    return [
        f"pretrain={model}",
        f"reward_pretrain={model}",
        f"actor_train.data_args.file_name={write_roll_data(folder)}",
        *("rollout_batch_size=4", "num_return_sequences_in_group=2", "prompt_length=128", "response_length=24"),
        *("actor_train.device_mapping=[0]", "actor_infer.device_mapping=[1]", "reference.device_mapping=[0]"),
        "actor_train.strategy_args.strategy_config.tensor_model_parallel_size=1",
        *("actor_train.training_args.gradient_accumulation_steps=8", "num_gpus_per_node=2"),
    ]


def roll_lake(model: str, folder: Path) -> list[str]:
    return [
        *(f"pretrain={model}", f"reward_pretrain={model}"),
        *("rollout_batch_size=4", "val_batch_size=4", "sequence_length=4096"),
        *("max_tokens_per_step=8", "max_actions_per_traj=3", "actor_infer.generating_args.max_new_tokens=8"),
        *("train_env_manager.num_env_groups=2", "train_env_manager.group_size=2"),
        *("train_env_manager.num_groups_partition=[2]", "train_env_manager.max_env_num_per_worker=4"),
        *("val_env_manager.num_env_groups=4", "val_env_manager.num_groups_partition=[1,1,1,1]"),
        *("actor_train.device_mapping=[0]", "actor_infer.device_mapping=[1]", "reference.device_mapping=[0]"),
        *("actor_train.training_args.gradient_accumulation_steps=2", "num_gpus_per_node=2"),
    ]


def verl_grpo(model: str, folder: Path) -> list[str]:
    path = write_verl_data(folder)
    return [
        *(f"actor_rollout_ref.model.path={model}", f"data.train_files=['{path}']", f"data.val_files=['{path}']"),
        *("data.train_batch_size=4", "data.max_prompt_length=160", "data.max_response_length=24"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"),
        *("actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=1"),
        *("trainer.n_gpus_per_node=1", "data.val_max_samples=4"),
    ]


def verl_one_step(model: str, folder: Path) -> list[str]:
    return [
        *(word for word in verl_grpo(model, folder) if not word.startswith("trainer.")),
        *("trainer.n_gpus_per_node=1", "rollout.n_gpus_per_node=1"),
    ]


def verl_tools(model: str, folder: Path) -> list[str]:
    return [*verl_grpo(model, folder), "data.max_prompt_length=640", "data.max_response_length=48"]


def gerl(model: str, folder: Path) -> list[str]:
    path = write_gerl_data(folder)
    return [
        *("actor_rollout_ref.model.path=text-images", f"data.train_files={path}", f"data.val_files={path}"),
        *("data.train_batch_size=2", "data.val_max_samples=2", "actor_rollout_ref.rollout.n=2"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=1", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"),
    ]


FILES: dict[str, tuple[str, str, Callable[[str, Path], list[str]]]] = {
    "roll-rlvr": ("ROLL", ROLL_RLVR, roll_rlvr),
    "roll-frozen-lake": ("ROLL", ROLL_LAKE, roll_lake),
    "verl-grpo": ("verl", VERL_GRPO, verl_grpo),
    "verl-one-step-off": ("verl", VERL_ONE_STEP, verl_one_step),
    "verl-tools": ("verl", VERL_TOOLS, verl_tools),
    "verl-remax": ("verl", VERL_REMAX, verl_grpo),
    "verl-token-baseline": ("verl", VERL_TOKEN_BASELINE, verl_grpo),
    "gerl-flow-grpo": ("gerl", GERL, gerl),
}


def make_arguments(name: str, peers: Path, model: str, folder: Path) -> list[str]:
    """Return what follows `headway train`."""
    system, file, override = FILES[name]
    words = [*override(model, folder), f"output_dir={folder / 'run'}", f"max_steps={STEPS}", "device=cpu"]
    if system == "ROLL":
        return [str(peers / file), *words]
    lines = (peers / f"{system}.jsonl").read_text(encoding="utf-8").splitlines()
    argv = next(one["argv"] for one in map(json.loads, lines) if one["script"] == file)
    return ["--", *argv, *words]


def train(name: str, peers: Path, model: str, folder: Path, timeout_s: float) -> dict[str, Any]:
    """Train one file; return what came of it."""
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "headway", "train", *make_arguments(name, peers, model, folder)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    row: dict[str, Any] = {"file": name, "seconds": round(time.monotonic() - began_s, 1), "exit": done.returncode}
    if done.returncode:
        return {**row, "error": (done.stdout + done.stderr).strip()[-2000:]}
    return {**row, **summarise(folder / "run")}


def summarise(run: Path) -> dict[str, Any]:
    """Count steps and samples in the event log of a run."""
    events = list(read_event_log(run))
    steps = [event.data for event in events if event.kind == "step.end"]
    trained = [event.data for event in events if event.kind == "group.train"]
    return {
        "steps": len(steps),
        "samples": sum(step.get("samples") or 0 for step in steps),
        "actions": sum(step.get("actions") or 0 for step in steps),
        "rewards": [round(step["reward"], 3) for step in steps if step.get("reward") is not None],
        "largest_lag": max((group["trained"] - group["oldest"] for group in trained), default=None),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="folder with roll/, verl.jsonl and gerl.jsonl")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--only", nargs="*", choices=FILES, default=list(FILES))
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    failed = 0
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            row = train(name, args.peers.resolve(), args.model, Path(folder), args.timeout_s)
        failed += row.get("steps") != STEPS
        print(json.dumps(row, ensure_ascii=False), flush=True)
        if args.out is not None:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
