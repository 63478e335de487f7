"""Linear layers with adapters: one product against what `peft` computes in parts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from headway.algorithms.advantages import AdvantageSettings
from headway.trainers.local.local_trainer import LocalTrainer
from headway.trainers.local.lora import attach_adapters, fuse_adapted_layers
from headway.trainers.local.settings import LocalSettings, LoraSettings, OptimizerSettings
from headway.weights.weight_store import WeightStore

from .factory import batch, tiny

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def adapted(dtype: torch.dtype = torch.float64) -> Any:
    model = tiny().to(dtype)
    made = attach_adapters(model, LoraSettings(rank=4, alpha=12))
    dice = torch.Generator().manual_seed(3)
    for name, one in model.named_parameters():
        if "lora_B" in name:
            one.data.copy_(torch.randn(one.shape, generator=dice) / 10)
    return made


def test_outputs_and_gradients_are_those_of_peft() -> None:
    made = adapted()
    layers = [module for module in made.modules() if "forward" in vars(module)]
    assert len(layers) == 14
    ids = torch.arange(20)[None] % 23
    found = []
    for usual in (False, True):
        if usual:
            for module in layers:
                del module.forward
        made.zero_grad()
        logits = made(ids).logits
        logits.square().mean().backward()
        grads = {name: one.grad.clone() for name, one in made.named_parameters() if one.grad is not None}
        found.append((logits.detach(), grads))
    (ours, our_grads), (theirs, their_grads) = found
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # norms compute in float32
    assert our_grads.keys() == their_grads.keys() and all("lora_" in name for name in our_grads)
    for name in our_grads:
        torch.testing.assert_close(our_grads[name], their_grads[name], rtol=1e-4, atol=1e-9)


def test_a_single_layer_is_exact_in_double_precision() -> None:
    made = adapted()
    layer = next(module for module in made.modules() if "forward" in vars(module))
    x = torch.randn(2, 5, 32, dtype=torch.float64, requires_grad=True)
    ours = layer(x)
    (grad,) = torch.autograd.grad(ours.square().sum(), x)
    del layer.forward
    theirs = layer(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, torch.autograd.grad(theirs.square().sum(), x)[0], rtol=1e-12, atol=1e-12)


def test_layers_without_their_adapters_compute_the_base() -> None:
    made, ids = adapted(), torch.arange(20)[None] % 23
    with made.disable_adapter():
        off = made(ids).logits
    torch.testing.assert_close(off, tiny().to(torch.float64)(ids).logits)
    assert not torch.allclose(off, made(ids).logits)
    assert fuse_adapted_layers(tiny()) == 0


def test_adapters_train_in_bf16_beside_masters() -> None:
    async def scenario() -> None:
        settings = LocalSettings(
            advantages=AdvantageSettings(),
            precision="bf16",
            lora=LoraSettings(rank=4),
            optimizer=OptimizerSettings(learning_rate=1e-3),
        )
        made = LocalTrainer(tiny, settings, WeightStore(wire_dtype=None))
        assert {one.dtype for one in made.learner.policy.causal.parameters()} == {torch.bfloat16}
        metrics = await made.train(batch(0))
        state = made.learner.state.optimizer.state_tensors()
        assert {tensor.dtype for name, tensor in state.items() if name.endswith("/master")} == {torch.float32}
        frozen = sum(one.numel() for one in tiny().parameters())
        trained = sum(one.numel() for one in made.learner.policy.trainable().values())
        assert metrics["tflop"] == pytest.approx(1e-12 * (4 * frozen + 6 * trained) * metrics["packed_tokens"])

    asyncio.run(scenario())
