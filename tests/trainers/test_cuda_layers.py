"""Fused layers on a GPU: every kernel against plain torch in float64, and whole models against themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from headway.algorithms.logprobs import compute_token_logps
from headway.trainers.local import layer_functions, long_attention, tree_attention
from headway.trainers.local.activation_offload import ActivationOffload
from headway.trainers.local.fused_layers import is_fused
from headway.trainers.local.policy_model import PolicyModel
from headway.trainers.local.settings import LocalSettings
from headway.trainers.local.token_batch import TokenRow
from headway.trainers.local.tree_packing import AttentionSpans, PromptTree, pack_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
GPU = torch.device("cuda")
LIMIT = 8e-3
"""Relative error that rounding to bf16 explains."""


def near(found: Tensor | None, wanted: Tensor | None) -> float:
    assert found is not None and wanted is not None
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


def compare(function: Callable[..., Any], *shapes: tuple[int, ...]) -> float:
    """The largest error of results and gradients in bf16 against those in float64."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape, device=GPU).bfloat16() for shape in shapes]
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
        outs = function(*leaves)
        outs = outs if isinstance(outs, tuple | list) else (outs,)
        generator = torch.Generator(GPU).manual_seed(1)
        loss = sum((out * torch.randn(out.shape, device=GPU, generator=generator).to(out.dtype)).sum() for out in outs)
        loss.backward()
        found.append([*outs, *(leaf.grad for leaf in leaves)])
    return max(near(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("width", [64, 896, 1536, 5120])
def test_norms(width: int) -> None:
    rows = (1000, width)
    assert compare(lambda x, w: layer_functions.add_norm(x, None, w, 1e-6)[1], rows, (width,)) < LIMIT
    assert compare(lambda x, w: layer_functions.add_norm(x, None, w, 1e-6), rows, (width,)) < LIMIT
    assert compare(lambda x, d, w: layer_functions.add_norm(x, d, w, 1e-6), rows, rows, (width,)) < LIMIT


@pytest.mark.parametrize(("heads", "kv", "size"), [(14, 2, 64), (12, 2, 128), (5, 5, 96)])
def test_rotations(heads: int, kv: int, size: int) -> None:
    angle = torch.randn(777, size, device=GPU)

    def rotated(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return layer_functions.rotate(q, k, angle.cos().bfloat16().to(q.dtype), angle.sin().bfloat16().to(q.dtype))

    def rotated_parts(x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys are parts of wider rows, as one product makes them."""
        return rotated(
            *(part.unflatten(1, (-1, size)) for part in x[:, : -2 * size].split([heads * size, kv * size], 1))
        )

    assert compare(rotated, (777, heads, size), (777, kv, size)) < LIMIT
    assert compare(rotated_parts, (777, (heads + kv + 2) * size)) < LIMIT


def test_gates_selected_rows_and_products_of_one_input() -> None:
    assert compare(layer_functions.gate, (333, 4864), (333, 4864)) < LIMIT
    index = torch.tensor([0, 1, 2, 0, 1, 3, 4, 0, 1, 5], device=GPU)
    starts = torch.tensor([0, 3, 6, 7, 8, 9, 10, 10], device=GPU, dtype=torch.int32)
    uses = index.argsort(stable=True).int()
    assert compare(lambda x: layer_functions.select_rows(x, index, starts, uses), (7, 2, 64)) < LIMIT
    layers = [torch.nn.Linear(256, width, device=GPU, dtype=torch.bfloat16) for width in (128, 64)]

    for apply in (layer_functions.apply_linears, layer_functions.apply_joined_linears):

        def products(x: Tensor, apply: Any = apply) -> list[Tensor]:
            return cast(list[Tensor], apply(x, [layer.to(x.dtype) for layer in layers]))

        assert compare(products, (300, 256)) < LIMIT


@pytest.mark.parametrize(("heads", "kv", "size"), [(14, 2, 64), (12, 2, 128)])
def test_long_sequences_by_cudnn(heads: int, kv: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_attention, "LONG_SEQUENCE_TOKENS", 100)
    trees = (
        PromptTree(start=0, prefix=33, members=(700, 505)),
        PromptTree(start=1238, prefix=50, members=(1400,)),
        PromptTree(start=2688, prefix=0, members=(300, 290)),
    )
    tokens = 2688 + 590
    spans = AttentionSpans.of_trees(trees, GPU)
    torch.manual_seed(0)
    q, k, v, weight = (torch.randn(tokens, n, size, device=GPU).bfloat16() for n in (heads, kv, kv, heads))
    assert long_attention.is_long(trees) and long_attention.is_faster(q, k)
    found = []
    for wide in (False, True):
        leaves = [x.to(torch.float32 if wide else x.dtype, copy=True).requires_grad_() for x in (q, k, v)]
        out = tree_attention.attend_spans(*leaves, spans, None, None)
        found.append([out, *torch.autograd.grad((out * weight).sum(), leaves)])
    assert max(near(one, other) for one, other in zip(*found, strict=True)) < 2e-2


@pytest.mark.parametrize("share", [1, 10**6, 10**12])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kept_probabilities(share: int, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All positions are kept, or some, or none."""
    if share == 10**6:
        share = torch.cuda.get_device_properties(GPU).total_memory // (2 * 20_001 * 30)
    monkeypatch.setattr("headway.algorithms.logprobs.KEPT_SHARE", share)
    token, weight = torch.randint(20_001, (50,), device=GPU), torch.randn(50, device=GPU)

    def logps(hidden: Tensor, head: Tensor) -> Tensor:
        if hidden.dtype == torch.float64:
            return (hidden @ head.T / 4 / temperature).log_softmax(-1).gather(1, token[:, None])[:, 0] * weight
        return compute_token_logps(hidden / 4, head, token, temperature=temperature, chunk=7, keep=True).logp_N * weight

    assert compare(logps, (50, 64), (20_001, 64)) < 1e-2


def model(kind: str = "qwen2", **options: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        kind, vocab_size=1000, num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, **shape, **options
    )
    found = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for one in found.parameters():
            one.copy_(one.bfloat16())
    return found


@pytest.mark.parametrize("length", [200, 3500])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_fused_models_are_as_near_to_float32_as_plain_ones(
    kind: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_attention, "LONG_SEQUENCE_TOKENS", 3000)
    rows, first = [], 0
    for number in range(6):
        tokens = tuple(
            (7 * step + 3 * (number % 3) * (step > 50) + step**2 // 7) % 1000 for step in range(length + number)
        )
        actions = tuple(range(60, len(tokens)))
        rows.append(TokenRow(sample_id="x", group=number // 3, tokens=tokens, actions=actions, first=first))
        first += len(actions)
    weight = torch.randn(first, generator=torch.Generator().manual_seed(1)).to(GPU)
    results: dict[Any, list[Tensor]] = {}
    for how in ("float32", "plain", "kept", "recomputed", "offloaded"):
        settings = LocalSettings(
            precision="fp32" if how == "float32" else "bf16",
            device="cuda",
            gradient_checkpointing=how in ("recomputed", "offloaded"),
            activation_offload=how == "offloaded",
            fused_layers=how not in ("float32", "plain"),
        )
        policy = PolicyModel(model(kind), settings)
        assert sum(is_fused(module) for module in policy.causal.modules()) == 3 * settings.fused_layers
        (pack,) = pack_rows(rows, budget=10**6, device="cuda")
        logps = policy.logps(pack).logp_N
        (logps * weight).sum().backward()
        results[how] = [logps.detach(), *(one.grad for one in policy.trainable().values())]  # type: ignore[misc]
    for exact, plain, *fused in zip(*results.values(), strict=True):
        for one in fused:
            assert near(one, exact) < 1.5 * near(plain, exact) + 4e-3


def test_offloaded_tensors_leave_the_device() -> None:
    settings = LocalSettings(precision="bf16", device="cuda", gradient_checkpointing=True)
    policy = PolicyModel(model(), settings)
    tokens = tuple(step % 1000 for step in range(4000))
    row = TokenRow(sample_id="x", group=0, tokens=tokens, actions=tuple(range(1, 4000)), first=0)
    (pack,) = pack_rows([row], budget=10**6, device="cuda")
    held = []
    for offload in (False, True):
        policy.activations.offload = offload
        before = torch.cuda.memory_allocated()
        logps = policy.logps(pack).logp_N
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - before)
        del logps
    assert held[1] < 0.6 * held[0]
    assert ActivationOffload(policy.causal) is not None
