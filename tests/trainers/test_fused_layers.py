"""Fused layers, offloaded activations and long sequences compute what the plain model computes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.trainers.local import fused_layers, layer_functions, policy_model, tree_attention
from headway.trainers.local.activation_offload import ActivationOffload
from headway.trainers.local.fused_layers import fuse_decoder_layers, is_fused
from headway.trainers.local.policy_model import PolicyModel, enable_recomputation
from headway.trainers.local.settings import LocalSettings, LoraSettings
from headway.trainers.local.token_batch import TokenRow
from headway.trainers.local.tree_packing import AttentionSpans, TokenPack, pack_rows

from .factory import small

OTHER_FORMS = {"gemma2": "its parts", "olmo2": "its parts", "granite": "would be", "phi3": "attention has the parts"}


def made(kind: str, **options: Any) -> Any:
    model = small(kind, **({"intermediate_size": 48} | options))
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(3) if one.ndim > 1 else one.add_(0.2 * torch.randn_like(one))
    return model


def one_pack() -> TokenPack:
    """Three members after one prompt, and one alone."""
    rows: list[TokenRow] = []
    first = 0
    for line in range(4):
        tokens = tuple((7 * step + 3 * line * (step > 8)) % 23 for step in range(21 + line))
        actions = tuple(range(9, len(tokens)))
        rows.append(TokenRow(sample_id="x", group=line // 3, tokens=tokens, actions=actions, first=first))
        first += len(actions)
    (pack,) = pack_rows(rows, budget=1000)
    return pack


def results(policy: PolicyModel, *, offload: bool = False) -> list[Tensor]:
    """Log-probabilities and all gradients."""
    with ActivationOffload(policy.causal, smallest_bytes=64) if offload else nullcontext():
        logps = policy.logps(one_pack()).logp_N
    weights = torch.randn(logps.shape, generator=torch.Generator().manual_seed(1), dtype=logps.dtype)
    (logps * weights).sum().backward()
    return [logps.detach(), *(one.grad for one in policy.trainable().values() if one.grad is not None)]


def worst(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((a - b).norm() / (b.norm() + 1e-30)) for a, b in zip(found, wanted, strict=True))


@pytest.fixture(autouse=True)
def spans_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused layer computes packs with spans, which otherwise exist on GPUs only."""
    monkeypatch.setattr(
        tree_attention,
        "make_attention_spans",
        lambda pack, dtype: AttentionSpans.of_trees(pack.trees, pack.token_L.device),
    )


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "mistral", "qwen3_moe"])
def test_fused_layers_have_the_numbers_and_gradients_of_the_model(kind: str, lora: bool) -> None:
    options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if "moe" in kind else {}
    if lora and (kind == "qwen3_moe" or not pytest.importorskip("peft")):
        pytest.skip("adapters of experts are tested elsewhere")
    adapters = LoraSettings(rank=2, targets=("q_proj", "v_proj", "up_proj")) if lora else None
    precision: Any = "fp32" if "moe" in kind else "fp64"  # experts have no float64
    settings = LocalSettings(precision=precision, gradient_checkpointing=False, lora=adapters, routing_replay=False)
    wanted = results(PolicyModel(made(kind, **options), settings))
    for recompute in (False, True):
        policy = PolicyModel(made(kind, **options), settings)
        layers = fuse_decoder_layers(policy.causal, policy.activations)
        assert layers == 2 and sum(is_fused(module) for module in policy.causal.modules()) == 2
        if recompute:
            enable_recomputation(policy.causal)
        assert worst(results(policy, offload=recompute), wanted) < (1e-4 if "moe" in kind else 1e-6), (
            "norms are in float32"
        )


@pytest.mark.parametrize("kind", OTHER_FORMS)
def test_a_layer_of_another_form_stays_as_it_is_and_one_line_says_why(
    kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    policy_model.print_once.cache_clear()  # type: ignore[attr-defined]
    model = made(kind, **({"residual_multiplier": 0.3} if kind == "granite" else {}))
    policy = PolicyModel(model, LocalSettings(gradient_checkpointing=False))
    assert fuse_decoder_layers(policy.causal, policy.activations) == 0
    assert OTHER_FORMS[kind] in capfd.readouterr().err
    assert not any(is_fused(module) for module in policy.causal.modules())


@pytest.mark.parametrize("kind", ["qwen2", "granite"])
def test_in_bfloat16_a_layer_that_magnifies_rounding_is_fused_and_a_wrong_one_is_not(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rotate_as_kernels_do(q: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.to(q.dtype) for x in rotate(q.float(), *(x.float() for x in others)))

    rotate = layer_functions.rotate
    monkeypatch.setattr(layer_functions, "rotate", rotate_as_kernels_do)
    model = made(kind, **({"residual_multiplier": 0.3} if kind == "granite" else {}))
    for module in model.modules():  # as keys of trained Qwen2.5 have: attention becomes a choice of one token
        for projection in (getattr(module, "q_proj", None), getattr(module, "k_proj", None)):
            if projection is not None and projection.bias is not None:
                torch.nn.init.normal_(projection.bias, std=16.0)
    policy = PolicyModel(model, LocalSettings(precision="bf16", gradient_checkpointing=False))
    layer = next(module for module in policy.causal.modules() if hasattr(module, "self_attn"))
    fused = fused_layers.FusedLayer(layer, policy.activations)
    backbone = policy.causal.base_model
    original, found = (fused_layers._try_layer(backbone, layer, forward) for forward in (layer.forward, fused))
    assert fused_layers._compare(found, original) > 5e-2
    assert fuse_decoder_layers(policy.causal, policy.activations) == (2 if kind == "qwen2" else 0)


def test_offloaded_activations_are_those_of_the_device_and_are_not_kept_there() -> None:
    settings = LocalSettings(precision="fp64", gradient_checkpointing=False)
    wanted = results(PolicyModel(made("llama"), settings))
    for recompute in (False, True):
        policy = PolicyModel(made("llama"), settings)
        if recompute:
            enable_recomputation(policy.causal)
        found = results(policy, offload=True)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
