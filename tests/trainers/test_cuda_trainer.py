"""The trainer on a GPU does what it does on the CPU."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.algorithms.advantages import AdvantageSettings
from headway.algorithms.logprobs import compute_token_logps
from headway.trainers.local import tree_attention
from headway.trainers.local.local_optimizer import Optimizer
from headway.trainers.local.local_trainer import LocalTrainer
from headway.trainers.local.settings import LocalSettings, OptimizerSettings
from headway.trainers.local.tree_packing import PromptTree
from headway.weights.device_memory import DeviceArena
from headway.weights.weight_store import WeightStore

from ..engines import factory as engines
from .factory import batch, tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
GPU = torch.device("cuda")


def trainer(device: str, precision: Any, **options: Any) -> LocalTrainer:
    chosen = LocalSettings(advantages=AdvantageSettings(), precision=precision, device=device, **options)
    arena = DeviceArena("cuda") if device == "cuda" else None
    return LocalTrainer(lambda: tiny(hidden=64), chosen, WeightStore(wire_dtype=None, arena=arena))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("heads", "kv", "size"), [(4, 2, 64), (6, 6, 96), (8, 1, 128)])
def test_flash_attention_over_trees(heads: int, kv: int, size: int, window: int | None) -> None:
    torch.manual_seed(0)
    trees = (
        PromptTree(start=0, prefix=33, members=(70, 5, 120)),
        PromptTree(start=228, prefix=50, members=(64,)),
        PromptTree(start=342, prefix=0, members=(20, 30)),
    )
    spans = tree_attention.AttentionSpans.of_trees(trees, GPU)
    found, wanted = [], []
    q, k, v = (torch.randn(1, n, 392, size, device=GPU, dtype=torch.bfloat16) for n in (heads, kv, kv))
    weight = torch.randn(1, 392, heads, size, device=GPU)
    for results, dtype, extra in ((found, torch.bfloat16, spans), (wanted, torch.float32, None)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out, _ = tree_attention.tree_attention(
            None, *leaves, None, headway_trees=trees, headway_spans=extra, sliding_window=window
        )
        (out.float() * weight).sum().backward()
        results += [out.detach(), *(leaf.grad for leaf in leaves)]
    for one, other in zip(found, wanted, strict=True):
        assert near(one, other) < 2e-2


def near(found: Tensor | None, wanted: Tensor | None) -> float:
    assert found is not None and wanted is not None
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_log_probabilities(dtype: torch.dtype, chunk: int, temperature: float) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(50, 64, device=GPU), torch.randn(20_001, 64, device=GPU) / 4
    token, weights = torch.randint(20_001, (50,), device=GPU), torch.randn(2, 50, device=GPU)

    def results(plain: bool) -> list[Tensor | None]:
        h, w = (x.to(dtype).to(torch.float64 if plain else dtype, copy=True).requires_grad_() for x in (hidden, head))
        if plain:
            log_p = (h @ w.T / temperature).log_softmax(-1)
            logp, entropy = log_p.gather(1, token[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
        else:
            made = compute_token_logps(h, w, token, temperature=temperature, chunk=chunk)
            logp, entropy = made.logp_N, made.entropy_N
        (logp * weights[0] + entropy * weights[1]).sum().backward()
        return [logp.detach(), entropy.detach(), h.grad, w.grad]

    limit = 1e-5 if dtype == torch.float32 else 1e-2
    torch.backends.cuda.matmul.allow_tf32 = False
    for found, wanted in zip(results(False), results(True), strict=True):
        assert near(found, wanted) < limit


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_is_that_of_the_cpu(precision: str, checkpointing: bool) -> None:
    async def scenario() -> None:
        options = {"gradient_checkpointing": checkpointing, "micro_batch_tokens": 100}
        one, other = trainer("cpu", "fp32", **options), trainer("cuda", precision, **options)
        for step in range(2):
            wanted, found = await one.train(batch(step, turns=2)), await other.train(batch(step, turns=2))
            for name in ("loss", "entropy", "grad_norm", "reward"):
                assert found[name] == pytest.approx(wanted[name], rel=3e-2, abs=3e-2), name
            assert found["packed_tokens"] == wanted["packed_tokens"]

    asyncio.run(scenario())


def test_weights_go_from_device_to_device_into_a_running_engine() -> None:
    async def scenario() -> None:
        model = engines.counting_model()
        engine = engines.make_engine(model, device="cuda", dtype="bfloat16", eos=[])
        store = WeightStore(bucket_mb=0.05, wire_dtype=torch.bfloat16, arena=DeviceArena("cuda"))
        tensors = {name: one.detach().to(GPU) for name, one in model.named_parameters()}
        for version in range(3):
            store.publish(version, tensors)
            manifest, buckets = await store.gather(version)
            await engine.receiver.begin(manifest)
            async for bucket in buckets:
                await engine.receiver.load(bucket)
            await engine.receiver.flip()
            progress = (await engines.together(engine, [engines.request(count=20)]))[0]
            assert list(progress.actions) == list(range(4, 24)) and progress.runs[0].version == version
        await engine.close()

    engines.run(scenario())


def test_moments_on_the_host_make_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.trainers.local.local_optimizer._CHUNK_ELEMENTS", 4096)

    def made(offload: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        live = {
            f"{kind}/{number}": torch.nn.Parameter(torch.randn(64, 33, device=GPU, dtype=kind))
            for kind in (torch.bfloat16, torch.float32)
            for number in range(4)
        }
        optimizer = Optimizer(live, OptimizerSettings(learning_rate=1e-3, offload=offload))
        for version in range(3):
            sum((one.float() * torch.randn(64, 33, device=GPU)).sum() for one in live.values()).backward()
            optimizer.clip_gradients("a step")
            optimizer.step(version)
            optimizer.clear_gradients()
        state = optimizer.all_tensors()
        assert {name for name, tensor in state.items() if not tensor.is_cuda} == {
            name for name in state if offload and name.endswith(("/exp_avg", "/exp_avg_sq", "/master"))
        }
        return {name: tensor.cpu() for name, tensor in state.items()}

    plain, offloaded = made(False), made(True)
    assert all(torch.equal(plain[name], offloaded[name]) for name in plain)
