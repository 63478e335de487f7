"""How far a trainer in float32 is from an engine in half precision, with and without replayed routing.

    PYTHONPATH=src python benchmarks/routing_replay.py [--device cuda] [--out FILE]

Random models with near ties between their experts; answers are drawn by the native engine, and their log-probabilities
are computed again by the trainer's packed forward pass. A line of JSON for each model and type. On a CPU the native
engine computes in float32, which shows that nothing is lost on the way; for bfloat16 a plain forward pass of the model
in that type takes its place there, on random answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headway.engines.base import Progress, Request
from headway.engines.native.native_engine import NativeEngine
from headway.engines.native.settings import NativeSettings
from headway.models.expert_routing import RoutingRecorder, find_mixture
from headway.trainers.local.policy_model import PolicyModel
from headway.trainers.local.settings import LocalSettings
from headway.trainers.local.token_batch import TokenRow, make_token_rows
from headway.trainers.local.tree_packing import pack_rows
from headway.types import (
    Episode,
    FinishReason,
    Generation,
    Sample,
    SampleGroup,
    SamplingParams,
    Task,
    Turn,
    VersionRun,
)

SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "qwen3_moe": {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128},
    "deepseek_v3": {
        "num_key_value_heads": 8,
        "head_dim": 16,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "kv_lora_rank": 64,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
    },
}


class _Given:
    """Takes weights from this process."""

    version = -1

    def __init__(self, switch: Any) -> None:
        self._switch = switch

    def reset(self, *, gone: bool) -> None:
        self.version = -1


def make_model(kind: str) -> Any:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SHAPE | MODELS[kind]))).eval()
    with torch.no_grad():
        for one in model.parameters():
            if one.ndim > 1:
                one.mul_(2)
    return model


async def generate(model: Any, settings: NativeSettings, prompts: int, members: int, tokens: int) -> list[SampleGroup]:
    """Return groups of answers that the engine has drawn."""
    made = AutoModelForCausalLM.from_config(model.config).eval()
    engine = NativeEngine("engine/0", lambda: made, settings, eos=(), make_receiver=_Given)  # type: ignore[arg-type]
    await engine.switch(0, {name: tensor.detach() for name, tensor in model.state_dict().items()})
    engine._receiver.version = 0  # type: ignore[misc]
    chance = torch.Generator().manual_seed(2)
    asked = [torch.randint(1, 1024, (32,), generator=chance).tolist() for _ in range(prompts)]

    async def answer(group: int, member: int) -> Sample:
        name, progress = f"{group}/{member}", Progress()
        params = SamplingParams(max_new_tokens=tokens)
        request = Request(request_id=name, session=name, prompt=asked[group], params=params, prefix_key=group)
        await engine.generate(request, progress)
        turn = Turn(observation=asked[group], generation=progress.generation(FinishReason.LENGTH))
        episode = Episode(sample_id=name, task=Task(position=group, prompt=asked[group]), turns=(turn,))
        return Sample(sample_id=name, episode=episode, oldest=0, newest=0, actions=tokens)

    groups = []
    all_samples = await asyncio.gather(*(answer(g, m) for g in range(prompts) for m in range(members)))
    for group in range(prompts):
        samples = tuple(all_samples[group * members : (group + 1) * members])
        groups.append(SampleGroup(group_id=group, task=samples[0].episode.task, samples=samples))
    await engine.close()
    return groups


@torch.no_grad()
def record_plain_forward(model: Any, prompts: int, members: int, tokens: int) -> list[SampleGroup]:
    """Return groups of random answers, with log-probabilities and experts of a plain pass in bfloat16."""
    model.set_attn_implementation("eager")
    torch.backends.mkldnn.enabled = False  # fails in this type on processors without instructions for it
    model, groups = model.bfloat16(), []
    mixture, chance = find_mixture(model), torch.Generator().manual_seed(2)
    recorder = None if mixture is None else RoutingRecorder(mixture)
    for group in range(prompts):
        prompt, samples = torch.randint(1, 1024, (32,), generator=chance).tolist(), []
        for member in range(members):
            actions = torch.randint(1, 1024, (tokens,), generator=chance).tolist()
            line = [*prompt, *actions]
            if recorder is not None:
                recorder.store, recorder.rows = recorder.make_store(len(line)), torch.arange(len(line))
            logits = model(input_ids=torch.tensor([line]), use_cache=False).logits[0].float().log_softmax(-1)
            logps = [float(logits[31 + step, action]) for step, action in enumerate(actions)]
            routing = None if recorder is None or recorder.store is None else recorder.pack(recorder.store[:-1], 0)
            runs = (VersionRun(version=0, count=tokens),)
            made = Generation(actions=actions, logps=logps, runs=runs, finish=FinishReason.LENGTH, routing=routing)
            task = Task(position=group, prompt=prompt)
            episode = Episode(
                sample_id=f"{group}/{member}", task=task, turns=(Turn(observation=prompt, generation=made),)
            )
            samples.append(Sample(sample_id=episode.sample_id, episode=episode, oldest=0, newest=0, actions=tokens))
        groups.append(SampleGroup(group_id=group, task=task, samples=tuple(samples)))
    return groups


@torch.no_grad()
def compute_logps(policy: PolicyModel, rows: Sequence[TokenRow], device: str) -> torch.Tensor:
    found = torch.zeros(sum(len(row.actions) for row in rows))
    for pack in pack_rows(rows, budget=4096, device=device):
        found[pack.action_N.cpu()] = policy.logps(pack).logp_N.float().cpu()
    return found


def measure(kind: str, dtype: Any, device: str, prompts: int, members: int, tokens: int) -> dict[str, Any]:
    """Return the differences between engine and trainer."""
    model = make_model(kind)
    settings = None
    if device != "cpu" or dtype == "float32":
        settings = NativeSettings(slots=prompts * members, slot_tokens=32 + tokens, device=device, dtype=dtype)
    began = time.perf_counter()
    if settings is None:
        groups = record_plain_forward(model, prompts, members, tokens)
    else:
        groups = asyncio.run(generate(model, settings, prompts, members, tokens))
    generated_s = time.perf_counter() - began
    engine = torch.tensor([x for g in groups for s in g.samples for x in s.episode.turns[0].generation.logps])
    rows, result = make_token_rows(groups, 1024), {"model": kind, "dtype": dtype, "generated_s": round(generated_s, 2)}
    routed = groups[0].samples[0].episode.turns[0].generation.routing
    result["routing_bytes_per_token"] = 0 if routed is None else len(routed.data) // len(routed)
    for replay in (False, True):
        options = LocalSettings(routing_replay=replay, gradient_checkpointing=False, device=device)
        policy = PolicyModel(make_model(kind), options)
        difference = (compute_logps(policy, rows, device) - engine).abs()
        name = "replayed" if policy.replays_routing else "own"
        result[name] = {"mean": float(f"{difference.mean():.3g}"), "worst": float(f"{difference.max():.3g}")}
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    for kind in args.models:
        for dtype in ("float32", "bfloat16") if args.device == "cpu" else ("bfloat16", "float16"):
            try:
                found = measure(kind, dtype, args.device, args.prompts, args.members, args.tokens)
            except Exception as error:
                found = {"model": kind, "dtype": dtype, "failed": f"{type(error).__name__}: {error}"}
            line = json.dumps(found)
            print(line, flush=True)
            if args.out is not None:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
