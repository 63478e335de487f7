"""QLoRA: adapters over a base in 4 bits; what is published is what the 4 bits stand for."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from headway.algorithms.advantages import AdvantageSettings
from headway.config import load_config
from headway.errors import ConfigError
from headway.models.model_loading import load_model
from headway.placement.required_packages import check_packages, find_missing_packages
from headway.trainers.local.local_trainer import LocalTrainer
from headway.trainers.local.settings import LocalSettings, LoraSettings, OptimizerSettings
from headway.weights.weight_store import WeightStore

from .factory import batch, tiny

OPTIONS = {"pretrain": "tiny-sums", "rewards": {"arithmetic": {"reward_fn": "numeric"}}}


def config_with(**model_args: object) -> dict[str, object]:
    return {**OPTIONS, "actor_train": {"model_args": model_args, "data_args": {"file_name": "arithmetic"}}}


def test_weights_that_are_trained_are_not_in_four_bits() -> None:
    with pytest.raises(ConfigError, match=r"quantization.*not trained"):
        load_config(config_with(quantization="nf4"))


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="it is installed")
def test_a_missing_package_is_named_before_anything_starts() -> None:
    resolved = load_config(config_with(quantization="nf4", lora_rank=4))
    assert [one.module for one in find_missing_packages(resolved)] == ["bitsandbytes"]
    with pytest.raises(ConfigError, match="needs bitsandbytes, which is not installed"):
        check_packages(resolved)


def test_adapters_over_four_bits_train_and_are_published_as_whole_weights(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM

    tiny(hidden=64, tied=False).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    settings = LocalSettings(
        advantages=AdvantageSettings(),
        lora=LoraSettings(rank=4),
        optimizer=OptimizerSettings(learning_rate=1e-2),
        gradient_checkpointing=False,
    )
    make = partial(load_model, tmp_path / "model", torch.float32, quantized_on="cpu")

    async def scenario() -> None:
        made = LocalTrainer(make, settings, WeightStore(wire_dtype=None))
        policy, plain = made.learner.policy, tiny(hidden=64, tied=False)
        assert policy.weights().keys() == dict(plain.named_parameters()).keys()
        for step in range(2):
            await made.train(batch(step))
        plain.load_state_dict(policy.weights(), strict=False)
        ids = torch.arange(12)[None] % 23
        with torch.no_grad():
            torch.testing.assert_close(policy.causal(ids).logits, plain(ids).logits, rtol=1e-3, atol=1e-4)
        await made.save(tmp_path / "checkpoint")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").eval()
        with torch.no_grad():
            torch.testing.assert_close(loaded(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)
        other = LocalTrainer(make, replace(settings), WeightStore(wire_dtype=None))
        await other.load(tmp_path / "checkpoint")
        assert dict(await other.train(batch(2))) == dict(await made.train(batch(2)))

    asyncio.run(scenario())
