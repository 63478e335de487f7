"""Architectures of others behind the trainer: windows, and whatever is random in them while they are trained."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from headway.trainers.local import policy_model
from headway.trainers.local.policy_model import PolicyModel
from headway.trainers.local.settings import LocalSettings, LoraSettings
from headway.trainers.local.token_batch import TokenRow
from headway.trainers.local.tree_packing import pack_rows

from ..engines.families import make_family
from .factory import small

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"sliding_window": 5},
    "seed_oss": {"residual_dropout": 0.5, "attention_dropout": 0.5},
    "opt": {"dropout": 0.5, "attention_dropout": 0.5, "ffn_dim": 32, "word_embed_proj_dim": 32},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4, "router_jitter_noise": 0.5, "input_jitter_noise": 0.5},
}


def made(kind: str) -> Any:
    model = small(kind, **FAMILIES[kind])
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(4 if one.ndim > 1 else 1)
    return model


def rows_of(model: Any, length: int) -> tuple[list[TokenRow], list[float]]:
    """Two sequences with the same beginning, and what the plain model says about their actions."""
    rows: list[TokenRow] = []
    wanted: list[float] = []
    for line in range(2):
        tokens = tuple((7 * step + 3 * line * (step > 8)) % 23 for step in range(length + line))
        actions = tuple(range(9, len(tokens)))
        rows.append(TokenRow(sample_id="x", group=0, tokens=tokens, actions=actions, first=len(wanted)))
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
        wanted += [float(logits[place - 1, tokens[place]]) for place in actions]
    return rows, wanted


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_trained_is_what_the_plain_model_says_and_layers_are_checkpointed(kind: str) -> None:
    model = made(kind)
    rows, wanted = rows_of(model, 21)
    policy = PolicyModel(deepcopy(model), LocalSettings(gradient_checkpointing=True))
    again: list[None] = []
    for module in policy.causal.modules():
        if getattr(module, "gradient_checkpointing", False) and hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = _counted(module._gradient_checkpointing_func, again)
    found = policy.logps(pack_rows(rows, budget=100)[0]).logp_N
    assert found.tolist() == pytest.approx(wanted, abs=1e-4)
    assert len(again) == 2, "once a layer"
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert all(bool(one.grad.isfinite().all()) for one in policy.trainable().values() if one.grad is not None)


@pytest.mark.parametrize(
    "kind",
    ["gemma2", "gpt_oss", "bloom", "nemotron", "deepseek_v3", "qwen3_next", "lfm2", "mamba2", "cohere2", "granite"],
)
def test_caps_sinks_and_layers_with_a_memory_are_trained_as_the_plain_model_computes_them(kind: str) -> None:
    model = make_family(kind)
    if kind == "gemma2":
        model.config.final_logit_softcapping = 0.5
    if kind == "granite":
        model.config.logits_scaling = 3.0
    rows, wanted = rows_of(model, 17)
    policy = PolicyModel(deepcopy(model), LocalSettings())
    (pack,) = pack_rows(rows, budget=100)
    found = policy.logps(pack).logp_N
    assert found.tolist() == pytest.approx(wanted, abs=1e-4)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert all(bool(one.grad.isfinite().all()) for one in policy.trainable().values() if one.grad is not None)


def test_a_mixture_that_cannot_replay_the_routing_of_engines_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    policy_model.print_once.cache_clear()  # type: ignore[attr-defined]  # another test may have heard it
    policy = PolicyModel(make_family("phimoe"), LocalSettings())
    assert not policy.replays_routing
    assert (
        "PhimoeForCausalLM does not choose its experts by topk: the trainer routes by itself" in capsys.readouterr().err
    )
    assert PolicyModel(make_family("mixtral"), LocalSettings()).replays_routing and not capsys.readouterr().err


@pytest.mark.parametrize("kind", ["olmoe", "opt"])
def test_merged_adapters_are_the_model_that_is_trained_experts_included(kind: str) -> None:
    pytest.importorskip("peft")
    line = (1, 7, 3, 11, 5, 2)
    row = TokenRow(sample_id="x", group=0, tokens=line, actions=(2, 3, 4, 5), first=0)
    policy, plain = PolicyModel(made(kind), LocalSettings(lora=LoraSettings(rank=2))), made(kind)
    with torch.no_grad():
        for one in policy.trainable().values():
            one.add_(0.1)
        found = policy.logps(pack_rows([row], budget=100)[0]).logp_N.tolist()
        before = plain(input_ids=torch.tensor([line])).logits[0].log_softmax(-1)
        missing, unexpected = plain.load_state_dict(policy.weights(), strict=False)
        after = plain(input_ids=torch.tensor([line])).logits[0].log_softmax(-1)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    assert found == pytest.approx([float(after[place - 1, line[place]]) for place in row.actions], abs=1e-4)
    assert found != pytest.approx([float(before[place - 1, line[place]]) for place in row.actions], abs=1e-2)


def _counted(checkpoint: Any, calls: list[None]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return checkpoint(*args, **kwargs)

    return call
