"""A verl command line with a Python tool, run to its end while the tool hangs once, raises once and says too much once.

    python benchmarks/verl_tools.py DIRECTORY [--pretrain 300] [--steps 40]

Makes a character model that calls a calculator, a tool as a user of verl writes it, its file, a data set and a reward
function, all in DIRECTORY; then starts `headway train` with verl's keys and prints what the ledger, the event log and
the samples say. The calculator blocks its process when it hangs, which is the worst it can do.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from headway.monitor.event_files import read_event_log
from headway.monitor.events import ErrorReport

TEMPLATE = (
    "{{ bos_token }}{% if tools %}<system>{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ eos_token }}"
    "{% endif %}{% for message in messages %}{% if message.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<user>"
    "{% endif %}<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ eos_token }}{% endif %}"
    "{% else %}{{ '<' + message.role + '>' + message.content + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Tool messages as Qwen's template writes them, and the names of the tools alone."""
TOOL = """
import os
import time
from typing import Any, Optional
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op


class Calculator(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instances = {}

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        self._instances[instance_id] = kwargs["create_kwargs"]["ground_truth"]
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        calls = self._count()
        if calls == 9:
            time.sleep(3600)
        if calls == 15:
            raise RuntimeError("the calculator is out of order")
        if calls == 21:
            return ToolResponse(text="8" * 100_000), 0.0, {}
        a, b = parameters["e"].split("+")
        result = str(int(a) + int(b))
        return ToolResponse(text=result), float(result == self._instances[instance_id]), {}

    def _count(self) -> int:
        number = 1
        while True:
            try:
                os.close(os.open(f"{self.config['marks']}/{number}", os.O_CREAT | os.O_EXCL))
                return number
            except FileExistsError:
                number += 1

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._instances[instance_id]
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = float(solution_str.strip() == ground_truth)
    return {"score": right + 0.5 * sum(extra_info["tool_rewards"]), "right": right, "turns": extra_info["num_turns"]}
"""
DIGITS = range(1, 5)
CALL = '<tool_call>{{"name": "calc", "arguments": {{"e": "{}+{}"}}}}</tool_call>'


def pretrain(directory: Path, steps: int) -> None:
    """Make a model that calls the calculator and repeats what it says, not always rightly."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from headway.models.tiny_model import ALPHABET, make_character_tokenizer

    torch.manual_seed(0)
    tokenizer = make_character_tokenizer(ALPHABET)
    tokenizer.chat_template = TEMPLATE
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1, "tie_word_embeddings": True}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), pad_token_id=0, **sizes, **heads, **ends))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rng = random.Random(0)
    for step in range(steps):
        rows, labels = [], []
        for _ in range(16):
            ids: list[int] = []
            marks: list[int] = []
            for text, is_said in draw_conversation(rng):
                part = tokenizer.encode(text, add_special_tokens=False)
                ids += part
                marks += part if is_said else [-100] * len(part)
            rows.append(ids)
            labels.append(marks)
        longest = max(map(len, rows))
        batch = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        target = torch.tensor([row + [-100] * (longest - len(row)) for row in labels])
        loss = model(input_ids=batch, labels=target, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"pretraining step {step}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def draw_conversation(rng: random.Random) -> list[tuple[str, bool]]:
    """Return the parts of a conversation, and whether the model says them."""
    a, b = rng.choice(DIGITS), rng.choice(DIGITS)
    result = a + b if rng.random() < 0.8 else rng.randrange(2, 9)
    return [
        (f"<begin><system>calc<end><user>{a}+{b}=<end><assistant>", False),
        (f"{CALL.format(a, b)}<end>", True),
        (f"<user><tool_response>\n{a + b}\n</tool_response><end><assistant>", False),
        (f"{result}<end>", True),
    ]


def write_files(folder: Path) -> None:
    """Write the tool, its file, the data and the reward function."""
    (folder / "marks").mkdir(exist_ok=True)
    (folder / "my_tools.py").write_text(TOOL)
    (folder / "my_reward.py").write_text(REWARD)
    function = {"name": "calc", "description": "Adds.", "parameters": {"type": "object", "required": ["e"]}}
    function["parameters"]["properties"] = {"e": {"type": "string"}}  # type: ignore[index]
    schema = {"type": "function", "function": function}
    config = {"type": "native", "marks": str(folder / "marks")}
    tool = {"class_name": "my_tools.Calculator", "config": config, "tool_schema": schema}
    (folder / "tools.yaml").write_text(json.dumps({"tools": [tool]}))
    rows = []
    for a in DIGITS:
        for b in DIGITS:
            kwargs = {"calc": {"create_kwargs": {"ground_truth": str(a + b)}}}
            prompt = [{"role": "user", "content": f"{a}+{b}="}]
            truth = {"style": "rule", "ground_truth": str(a + b)}
            info = {"index": 10 * a + b, "need_tools_kwargs": True, "tools_kwargs": kwargs}
            rows.append({"data_source": "sums", "prompt": prompt, "reward_model": truth, "extra_info": info})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_command(folder: Path, steps: int) -> list[str]:
    """Return the command line that a user of verl brings, and two keys of ours."""
    rollout = "actor_rollout_ref.rollout"
    return [
        *(sys.executable, "-m", "headway", "train", "-m", "verl.trainer.main_ppo", "algorithm.adv_estimator=grpo"),
        *(f"data.train_files={folder}/train.jsonl", "data.train_batch_size=4", "data.max_prompt_length=64"),
        *("data.max_response_length=256", f"actor_rollout_ref.model.path={folder}/model", "data.return_raw_chat=True"),
        *("actor_rollout_ref.actor.optim.lr=1e-4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
        *(f"{rollout}.name=sglang", f"{rollout}.mode=async", f"{rollout}.n=4", f"{rollout}.multi_turn.enable=True"),
        *(f"{rollout}.multi_turn.tool_config_path={folder}/tools.yaml", f"{rollout}.multi_turn.format=hermes"),
        *(f"{rollout}.multi_turn.max_assistant_turns=3", f"{rollout}.multi_turn.max_tool_response_length=16"),
        *(f"{rollout}.multi_turn.tool_response_truncate_side=left", f"{rollout}.agent.default_agent_loop=tool_agent"),
        *(f"custom_reward_function.path={folder}/my_reward.py", "custom_reward_function.name=compute_score"),
        *("trainer.n_gpus_per_node=1", "trainer.nnodes=1", f"trainer.total_training_steps={steps}"),
        *("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1"),
        *(f"output_dir={folder}/run", "reliability.environment_timeout_s=20"),
    ]


def report(folder: Path) -> None:
    """Print what the run kept: how samples ended, what went wrong, and one episode."""
    run = folder / "run"
    ledger = sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro", uri=True)
    for table in ("groups", "samples"):
        rows = ledger.execute(f"select end, reason, count(*) from {table} group by 1, 2").fetchall()
        print(f"{table}: {rows}")
    errors: dict[str, int] = {}
    for logged in read_event_log(run):
        if isinstance(logged.event, ErrorReport):
            message = re.sub(r"^\d+\.\d+: ", "", logged.event.message)
            errors[message] = errors.get(message, 0) + 1
    for message, count in errors.items():
        print(f"{count} × {message}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--pretrain", type=int, default=300)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    folder = options.directory.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        pretrain(folder / "model", options.pretrain)
    write_files(folder)
    command = make_command(folder, options.steps)
    print(" ".join(command))
    ended = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, check=False)
    print(f"exit code {ended.returncode}")
    report(folder)


if __name__ == "__main__":
    main()
